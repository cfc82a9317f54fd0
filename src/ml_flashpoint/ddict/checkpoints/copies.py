"""The copies of a manager's parts at other managers: what they have, and pushing what they lack.

Owns the connections to the holders and what each has acknowledged. An acknowledgement is worth as much as the
connection that it came over: a holder that died and came back answers on a new one, and is asked about every part
again, which costs one small message for each part that it has. So no holder is ever taken to have what it has lost.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from ml_flashpoint.checkpoint_object_manager.rank_store import RankStore
from ml_flashpoint.ddict.checkpoints.index import PartRef
from ml_flashpoint.format.errors import (
    DamagedError,
    DeadlineError,
    ObjectNotFoundError,
    ReplicationError,
)
from ml_flashpoint.format.knobs import transfer_deadline_s
from ml_flashpoint.net.channel import ConnectionLostError, TransferCancelledError
from ml_flashpoint.net.handshake import check_secret
from ml_flashpoint.net.messages import Fields
from ml_flashpoint.net.peer import PeerConnection, push_to_all
from ml_flashpoint.net.transfers import Address

_log = logging.getLogger(__name__)

AskPeer: TypeAlias = Callable[[int, str, Fields], Fields]
"""``(manager, operation, fields)``: the answer of another manager. Has a deadline of its own; raises
`FlashpointError`."""

_MAX_CONNECT_S = 10.0
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Holder:
    """A manager that should have copies, and where its transfer service listens."""

    node: str
    address: Address


class HolderLink:
    """The connection to one holder, which stays until something goes wrong on it. For one thread at a time, but `close`
    may be called by any.

    Attributes:
        acknowledged: for its user: what the holder has said that it has, over this connection. On a new one there may
            be another process, which does not have it.
    """

    def __init__(self) -> None:
        self.acknowledged: set[str] = set()
        self._connection: PeerConnection | None = None
        self._closed = False

    def use(self, connect: Callable[[], PeerConnection], push: Callable[[PeerConnection], _Result]) -> _Result:
        """What ``push`` returns, given a connection: a new one if there is none. One that was there may have broken
        while it was idle: then ``push`` is called once more.

        Raises:
            FlashpointError: what either of them failed with.
        """
        was_there = self._connection is not None
        while True:
            try:
                if self._connection is None:
                    self._connection = connect()
                if self._closed:  # looked at after the connection is there, and `close` looks after it has said so
                    raise ReplicationError("this end was closed")
                return push(self._connection)
            except BaseException as error:
                self.drop()
                if not (was_there and isinstance(error, ConnectionLostError)):
                    raise
                was_there = False

    def drop(self) -> None:
        """Have a new connection the next time."""
        self.acknowledged = set()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def close(self) -> None:
        """Break off what is under way. Of no use from then on."""
        self._closed = True
        connection = self._connection
        if connection is not None:
            connection.close()


class Copies:
    """The holders of one manager's parts: where they are, and what they have. `push` is for one thread at a time; the
    rest is thread-safe. ``nodes``: of all managers. ``holders``: numbers of managers, in order of preference."""

    def __init__(
        self, store: RankStore, nodes: Sequence[str], holders: Sequence[int], secret: bytes, ask: AskPeer
    ) -> None:
        self.nodes = nodes
        self.holders = holders
        self.secret = check_secret(secret)
        self.ask = ask
        self.pushed_bytes = 0
        self._store = store
        self._links = {holder: HolderLink() for holder in holders}
        self._closed = False

    def find(self, manager: int) -> Holder:
        """Where the service of a manager listens. Raises `FlashpointError`: it is not there."""
        node, address = self.nodes[manager], self.ask(manager, "hello", {})["transfers"]
        if address is None:
            raise ReplicationError("this manager takes no copies yet", rank=manager, node=node)
        return Holder(node, (str(address[0]), int(address[1])))

    def push(self, parts: Sequence[PartRef], needed: Collection[PartRef], deadline: float) -> None:
        """Have every holder have every part, in this order: what others refer to comes before them.

        A part that is damaged or was dropped meanwhile is left out unless it is ``needed``: what it belongs to is lost
        or of no use, and must not keep the newest from being copied. Raises `DeadlineError`: it took too long;
        `FlashpointError`: a holder is not there or refuses; others may have everything.
        """
        push_to_all(list(self._links), lambda holder: self._push_to(holder, list(parts), needed, deadline))

    def _push_to(self, number: int, parts: list[PartRef], needed: Collection[PartRef], deadline: float) -> None:
        link = self._links[number]
        link.acknowledged.intersection_update(ref.attempt for ref in parts)  # others are not asked for again

        def is_over() -> bool:
            return self._closed or time.monotonic() > deadline

        def push_all(peer: PeerConnection) -> bool:
            """Whether that is done; false: the connection broke over a part that is left out now, so go on anew."""
            # It may lead to a process that is gone, and nothing may be left to push that would show it.
            peer.ping(cancelled=is_over)
            for ref in list(parts):
                try:
                    if ref.attempt not in link.acknowledged:
                        self._push_part(peer, ref.attempt, is_over)
                        link.acknowledged.add(ref.attempt)
                except (DamagedError, ObjectNotFoundError) as error:
                    if ref in needed:
                        raise
                    _log.warning("a part of an earlier snapshot cannot be copied: %s", error)
                    parts.remove(ref)
                    if isinstance(error, DamagedError):
                        return False
            return True

        try:
            while not link.use(lambda: self._connect(number, deadline), push_all):
                link.drop()
        except TransferCancelledError as error:
            if self._closed:
                raise
            raise DeadlineError("a copy was not verified in time", node=self.nodes[number]) from error

    def _connect(self, number: int, deadline: float) -> PeerConnection:
        holder, left = self.find(number), deadline - time.monotonic()
        return PeerConnection(
            holder.address,
            self.secret,
            node=holder.node,
            deadline_s=transfer_deadline_s(),
            connect_timeout_s=min(_MAX_CONNECT_S, max(left, 0.001)),
        )

    def _push_part(self, peer: PeerConnection, attempt: str, is_over: Callable[[], bool]) -> None:
        part = self._store.find(attempt, self._store.rank)
        if part is None or part.manifest is None or part.doomed:
            raise ObjectNotFoundError("a part is not here any more", rank=self._store.rank, path=attempt)
        record = part.manifest.objects[0]
        # Open while it is sent, so that its arena is not reused.
        with self._store.open_object(part.version, record.name) as view:
            if peer.push(part.manifest, view, cancelled=is_over):
                self.pushed_bytes += record.size

    def held_by(self, attempts: Collection[str]) -> list[int]:
        """Holders that have acknowledged all of these, and have not been found gone since."""
        return [number for number, link in self._links.items() if link.acknowledged.issuperset(attempts)]

    def close(self) -> None:
        """Break off a push under way and close the connections. Idempotent."""
        self._closed = True
        for link in self._links.values():
            link.close()
