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
from ml_flashpoint.net.channel import Cancelled, ConnectionLostError, TransferCancelledError
from ml_flashpoint.net.handshake import check_secret
from ml_flashpoint.replication.pushing import push_to_all
from ml_flashpoint.replication.store_backend import IncomingCopy, StoreBackend
from ml_flashpoint.replication.transfer_client import PeerConnection
from ml_flashpoint.replication.transfer_protocol import Address

_log = logging.getLogger(__name__)

PeerAddress = Callable[[int], "Address | None"]
"""``(manager) -> (host, port)``: where its `Snapshots.address` is now; None: it is not there."""

_MAX_CONNECT_S = 10.0


class Peers:
    """Makes connections to the services of other managers. Thread-safe."""

    def __init__(self, secret: bytes, nodes: Sequence[str], address: PeerAddress) -> None:
        self.secret = check_secret(secret)
        self.nodes = nodes
        self._address = address

    def address(self, manager: int) -> Address:
        """Where its service listens. Raises `ReplicationError`: it is not there."""
        address = self._address(manager)
        if address is None:
            raise ReplicationError("this manager is not there at the moment", rank=manager, node=self.nodes[manager])
        return address

    def connect(self, manager: int, within_s: float) -> PeerConnection:
        """A connection that is authenticated and answers. Raises `FlashpointError`: there is none to be had."""
        connection = PeerConnection(
            self.address(manager),
            self.secret,
            node=self.nodes[manager],
            deadline_s=transfer_deadline_s(),
            connect_timeout_s=max(0.01, min(_MAX_CONNECT_S, within_s)),
        )
        try:
            connection.connect()
        except BaseException:
            connection.close()
            raise
        return connection


@dataclass(slots=True)
class _Holder:
    """A connection, and the attempts acknowledged over it."""

    connection: PeerConnection | None = None
    has: set[str] = field(default_factory=set)

    def disconnect(self) -> None:
        self.has = set()
        if self.connection is not None:
            self.connection.close()
            self.connection = None


class _LeftOutError(Exception):
    """A damaged part of an earlier snapshot was left out: go on, on a new connection."""


class Copies:
    """Pushes parts of one manager to its holders. `push` is for one thread at a time; the rest is thread-safe."""

    def __init__(self, store: RankStore, holders: Sequence[int], peers: Peers) -> None:
        self._store = store
        self._peers = peers
        self._holders = {holder: _Holder() for holder in holders}
        self._lock = threading.Lock()
        self._closed = False
        self.pushed_bytes = 0

    def push(self, groups: Sequence[Collection[PartRef]], deadline: float) -> None:
        """Have every holder have every part, group by group.

        A part of a group other than the last that is damaged or was dropped meanwhile is left out: what it belongs to
        is lost or of no use, and must not keep the newest from being copied.

        Args:
            groups: parts, those that others refer to first; each group is useful without the later ones.

        Raises:
            DeadlineError: it took too long.
            FlashpointError: a holder is not there or refuses. Others may have everything.
        """
        push_to_all(list(self._holders), lambda holder: self._push_to(holder, groups, deadline))

    def _push_to(self, number: int, groups: Sequence[Collection[PartRef]], deadline: float) -> None:
        holder = self._holders[number]
        left_out: set[str] = set()
        may_retry = holder.connection is not None

        def cancelled() -> bool:
            return self._closed or time.monotonic() > deadline

        while True:
            try:
                self._connect(number, holder, deadline, cancelled)
                for group in groups:
                    self._push_group(holder, group, left_out, cancelled, tolerant=group is not groups[-1])
                return
            except _LeftOutError:
                self._disconnect(holder)
            except ConnectionLostError:
                # The connection may have broken while it was idle: once more on a new one.
                self._disconnect(holder)
                if not may_retry or self._closed:
                    raise
                may_retry = False
            except TransferCancelledError as error:
                self._disconnect(holder)
                if self._closed:
                    raise
                raise DeadlineError("a copy was not verified in time", node=self._peers.nodes[number]) from error
            except BaseException:
                self._disconnect(holder)
                raise

    def _connect(self, number: int, holder: _Holder, deadline: float, cancelled: Cancelled) -> None:
        """Have a connection that is known to be alive."""
        if holder.connection is not None:
            # It may lead to a process that is gone, and nothing may be left to push that would show it.
            holder.connection.ping(cancelled=cancelled)
            return
        within_s = deadline - time.monotonic()
        if within_s <= 0:
            raise DeadlineError("a copy was not verified in time", node=self._peers.nodes[number])
        connection = self._peers.connect(number, within_s)
        with self._lock:
            holder.connection = connection
            closed = self._closed
        if closed:
            raise ReplicationError("the snapshots were closed")

    def _push_group(
        self, holder: _Holder, group: Collection[PartRef], left_out: set[str], cancelled: Cancelled, *, tolerant: bool
    ) -> None:
        missing = [ref for ref in group if ref.attempt not in holder.has and ref.attempt not in left_out]
        # Snapshots last, by age: what a holder has without what it refers to is of no use to anyone.
        for ref in sorted(missing, key=lambda ref: (ref.attempt.startswith("s-"), ref.attempt)):
            try:
                self._push_part(holder, ref.attempt, cancelled)
            except (DamagedError, ObjectNotFoundError) as error:
                if not tolerant:
                    raise
                _log.warning("a part of an earlier snapshot cannot be copied: %s", error)
                left_out.add(ref.attempt)
                if isinstance(error, DamagedError):
                    raise _LeftOutError from error  # the connection broke over it

    def _push_part(self, holder: _Holder, attempt: str, cancelled: Cancelled) -> None:
        part = self._store.find(attempt, self._store.rank)
        if part is None or part.manifest is None or part.doomed:
            raise ObjectNotFoundError("a part is not here any more", rank=self._store.rank, path=attempt)
        connection = holder.connection
        assert connection is not None
        record = part.manifest.objects[0]
        # Open while it is sent, so that its arena is not reused.
        with self._store.open_object(part.version, record.name) as view:
            sent = connection.push(part.manifest, encode(part.manifest), [view], cancelled=cancelled)
        with self._lock:
            if self._store.find(attempt, self._store.rank) is part:
                holder.has.add(attempt)
            self.pushed_bytes += record.size if sent else 0

    def _disconnect(self, holder: _Holder) -> None:
        with self._lock:
            holder.disconnect()

    def held_by(self, attempts: Collection[str]) -> list[int]:
        """Holders that have acknowledged all of these, and have not been found gone since."""
        with self._lock:
            return [number for number, holder in self._holders.items() if holder.has.issuperset(attempts)]

    def forget(self, attempts: Collection[str]) -> None:
        """These parts were dropped: they are not to be taken for held."""
        with self._lock:
            for holder in self._holders.values():
                holder.has.difference_update(attempts)

    def close(self) -> None:
        """Break off a push under way and close the connections. Idempotent."""
        with self._lock:
            self._closed = True
            for holder in self._holders.values():
                if holder.connection is not None:
                    holder.connection.interrupt()


class HolderBackend(StoreBackend):
    """Takes in only copies that this manager is to hold, of ``owners``, and only such as a dictionary makes."""

    def __init__(self, store: RankStore, owners: Collection[int], managers: int) -> None:
        super().__init__(lambda: store)
        self._owners = frozenset(owners)
        self._managers = managers

    def begin_receive(self, manifest: Manifest) -> IncomingCopy | None:
        """See `TransferBackend`."""
        if manifest.rank not in self._owners or manifest.world_size != self._managers:
            raise ProtocolError("this manager holds no copies of that one", rank=manifest.rank)
        if part_kind(manifest) is None:
            raise ProtocolError("this is no part of a dictionary", rank=manifest.rank)
        return super().begin_receive(manifest)
