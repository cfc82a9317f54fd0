"""The copies of a manager's parts at other managers: what they have, pushing what they lack, taking in theirs.

Owns the connections to the holders and what each has acknowledged. An acknowledgement is worth as much as the
connection that it came over: a holder that died and came back answers on a new one, and is asked about every part
again, which costs one small message for each part that it has. So no holder is ever taken to have what it has lost.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from ml_flashpoint.checkpoint_object_manager.rank_store import RankStore
from ml_flashpoint.ddict.checkpoints.index import PartRef, part_kind
from ml_flashpoint.format.errors import (
    DamagedError,
    DeadlineError,
    ObjectNotFoundError,
    ProtocolError,
    ReplicationError,
)
from ml_flashpoint.format.knobs import transfer_deadline_s
from ml_flashpoint.format.manifest import Manifest, encode
from ml_flashpoint.net.channel import ConnectionLostError, TransferCancelledError
from ml_flashpoint.net.handshake import check_secret
from ml_flashpoint.net.messages import Fields
from ml_flashpoint.replication.pushing import push_to_all
from ml_flashpoint.replication.store_backend import IncomingCopy, StoreBackend
from ml_flashpoint.replication.transfer_client import Holder, PeerConnection

_log = logging.getLogger(__name__)

AskPeer: TypeAlias = Callable[[int, str, Fields], Fields]
"""``(manager, operation, fields)``: the answer of another manager. Has a deadline of its own; raises
`FlashpointError`."""

_MAX_CONNECT_S = 10.0


class Peers:
    """Where the services of other managers are. Thread-safe."""

    def __init__(self, secret: bytes, nodes: Sequence[str], ask: AskPeer) -> None:
        self.secret = check_secret(secret)
        self.nodes = nodes
        self.ask = ask

    def find(self, manager: int) -> Holder:
        """Where its service listens. Raises `FlashpointError`: it is not there."""
        node, address = self.nodes[manager], self.ask(manager, "hello", {})["transfers"]
        if address is None:
            raise ReplicationError("this manager takes no copies yet", rank=manager, node=node)
        return Holder(node, (str(address[0]), int(address[1])))


@dataclass(slots=True)
class _Link:
    """A connection to a holder, and the attempts acknowledged over it."""

    connection: PeerConnection | None = None
    has: set[str] = field(default_factory=set)

    def drop(self) -> None:
        self.has = set()
        if self.connection is not None:
            self.connection.close()
            self.connection = None


class Copies:
    """Pushes parts of one manager to its holders. `push` is for one thread at a time; the rest is thread-safe."""

    def __init__(self, store: RankStore, holders: Sequence[int], peers: Peers) -> None:
        self._store = store
        self._peers = peers
        self._links = {holder: _Link() for holder in holders}
        self._lock = threading.Lock()
        self._closed = False
        self.pushed_bytes = 0

    def push(self, parts: Sequence[PartRef], needed: Collection[PartRef], deadline: float) -> None:
        """Have every holder have every part, in this order: what others refer to comes before them.

        A part that is damaged or was dropped meanwhile is left out unless it is ``needed``: what it belongs to is lost
        or of no use, and must not keep the newest from being copied.

        Raises:
            DeadlineError: it took too long.
            FlashpointError: a holder is not there or refuses. Others may have everything.
        """
        push_to_all(list(self._links), lambda holder: self._push_to(holder, list(parts), needed, deadline))

    def _push_to(self, number: int, parts: list[PartRef], needed: Collection[PartRef], deadline: float) -> None:
        link = self._links[number]
        may_retry = link.connection is not None
        while True:
            try:
                self._connect(number, link, deadline)
                if self._push_parts(link, parts, needed, deadline):
                    return
                self._drop(link)
            except ConnectionLostError:
                # The connection may have broken while it was idle: once more on a new one.
                self._drop(link)
                if not may_retry or self._closed:
                    raise
                may_retry = False
            except TransferCancelledError as error:
                self._drop(link)
                if self._closed:
                    raise
                raise self._too_late(number) from error
            except BaseException:
                self._drop(link)
                raise

    def _connect(self, number: int, link: _Link, deadline: float) -> None:
        """Have a connection that is known to be alive."""
        if link.connection is not None:
            # It may lead to a process that is gone, and nothing may be left to push that would show it.
            link.connection.ping(cancelled=lambda: self._is_over(deadline))
            return
        holder, left = self._peers.find(number), deadline - time.monotonic()
        if left <= 0:
            raise self._too_late(number)
        connection = PeerConnection(
            holder.address,
            self._peers.secret,
            node=holder.node,
            deadline_s=transfer_deadline_s(),
            connect_timeout_s=min(_MAX_CONNECT_S, left),
        )
        with self._lock:
            link.connection = connection
            if self._closed:
                raise ReplicationError("the snapshots were closed")
        connection.connect()

    def _push_parts(self, link: _Link, parts: list[PartRef], needed: Collection[PartRef], deadline: float) -> bool:
        """Returns whether that is done; false: the connection broke over a part that was left out, so go on anew."""
        for ref in list(parts):
            if ref.attempt in link.has:
                continue
            try:
                self._push_part(link, ref.attempt, deadline)
            except (DamagedError, ObjectNotFoundError) as error:
                if ref in needed:
                    raise
                _log.warning("a part of an earlier snapshot cannot be copied: %s", error)
                parts.remove(ref)
                if isinstance(error, DamagedError):
                    return False
        return True

    def _push_part(self, link: _Link, attempt: str, deadline: float) -> None:
        part = self._store.find(attempt, self._store.rank)
        if part is None or part.manifest is None or part.doomed:
            raise ObjectNotFoundError("a part is not here any more", rank=self._store.rank, path=attempt)
        assert link.connection is not None
        record, encoded = part.manifest.objects[0], encode(part.manifest)
        # Open while it is sent, so that its arena is not reused.
        with self._store.open_object(part.version, record.name) as view:
            sent = link.connection.push(part.manifest, encoded, [view], cancelled=lambda: self._is_over(deadline))
        with self._lock:
            if self._store.find(attempt, self._store.rank) is part:
                link.has.add(attempt)
            self.pushed_bytes += record.size if sent else 0

    def _is_over(self, deadline: float) -> bool:
        return self._closed or time.monotonic() > deadline

    def _too_late(self, number: int) -> DeadlineError:
        return DeadlineError("a copy was not verified in time", node=self._peers.nodes[number])

    def _drop(self, link: _Link) -> None:
        with self._lock:
            link.drop()

    def held_by(self, attempts: Collection[str]) -> list[int]:
        """Holders that have acknowledged all of these, and have not been found gone since."""
        with self._lock:
            return [number for number, link in self._links.items() if link.has.issuperset(attempts)]

    def forget(self, attempts: Collection[str]) -> None:
        """These parts were dropped: they are not to be taken for held."""
        with self._lock:
            for link in self._links.values():
                link.has.difference_update(attempts)

    def close(self) -> None:
        """Break off a push under way and close the connections. Idempotent."""
        with self._lock:
            self._closed = True
            for link in self._links.values():
                if link.connection is not None:
                    link.connection.interrupt()


class HolderBackend(StoreBackend):
    """Takes in only copies that this manager is to hold, of ``owners``, and only such as a dictionary makes."""

    def __init__(self, store: RankStore, owners: Collection[int], managers: int) -> None:
        super().__init__(lambda: store)
        self._owners = frozenset(owners)
        self._managers = managers

    def begin_receive(self, manifest: Manifest) -> IncomingCopy | None:
        """See `TransferBackend`."""
        if manifest.rank not in self._owners or manifest.world_size != self._managers or part_kind(manifest) is None:
            raise ProtocolError("this manager holds no copies of that one, or this is no part", rank=manifest.rank)
        return super().begin_receive(manifest)
