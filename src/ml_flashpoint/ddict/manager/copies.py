"""The copies of a manager's parts at other managers: what they have, pushing what they lack, and taking copies in.

Owns the connections to the holders and what each has acknowledged. An acknowledgement is worth as much as the
connection that it came over: a holder that died and came back answers on a new one, and is asked about every part
again, which costs one small message for each part that it has. So no holder is ever taken to have what it has lost.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from ml_flashpoint.ddict.manager.part_ref import PartRef, is_part
from ml_flashpoint.ddict.manager.store import PartStore
from ml_flashpoint.ddict.wire.requests import Hello, Request
from ml_flashpoint.format.errors import (
    DamagedError,
    DeadlineError,
    ObjectNotFoundError,
    ProtocolError,
    ReplicationError,
)
from ml_flashpoint.format.knobs import transfer_deadline_s
from ml_flashpoint.format.manifest import Manifest, encode
from ml_flashpoint.format.save_id import SaveId
from ml_flashpoint.net.channel import ConnectionLostError, TransferCancelledError
from ml_flashpoint.net.handshake import check_secret
from ml_flashpoint.net.messages import Fields
from ml_flashpoint.net.transfers import Address, PartName, PeerConnection, push_to_all

_log = logging.getLogger(__name__)

AskPeer: TypeAlias = Callable[[int, Request], Fields]
"""``(manager, request)``: the answer of another manager. Has a deadline of its own; raises `FlashpointError`."""

_MAX_CONNECT_S = 10.0


class Holder(NamedTuple):
    """A manager that has copies, or is to have them: its node, and where its service listens."""

    node: str
    address: Address


@dataclass
class _Link:
    """The way to a holder, and the names of the parts that it has acknowledged on its last connection."""

    peer: PeerConnection
    connections: int = 0
    acknowledged: set[str] = field(default_factory=set)


class Copies:
    """The holders of one manager's parts: where they are, and what they have. `push` is for one thread at a time; the
    rest is thread-safe. ``nodes``: of all managers. ``holders``: numbers of managers, in order of preference."""

    def __init__(
        self, store: PartStore, nodes: Sequence[str], holders: Sequence[int], secret: bytes, ask: AskPeer
    ) -> None:
        self.nodes = nodes
        self.holders = holders
        self.ask = ask
        self.pushed_bytes = 0
        self._secret = check_secret(secret)
        self._store = store
        self._links: dict[int, _Link] = {}
        self._closed = False

    def find(self, manager: int) -> Holder:
        """Where the service of a manager listens. Raises `FlashpointError`: it is not there."""
        node, address = self.nodes[manager], self.ask(manager, Hello())["transfers"]
        if address is None:
            raise ReplicationError("this manager takes no copies yet", rank=manager, node=node)
        return Holder(node, (str(address[0]), int(address[1])))

    def connect(self, holder: Holder, within_s: float = _MAX_CONNECT_S) -> PeerConnection:
        """Return a connection to a service."""
        timeout_s = min(_MAX_CONNECT_S, max(within_s, 0.001))
        deadline_s = transfer_deadline_s()
        return PeerConnection(
            holder.address, self._secret, node=holder.node, deadline_s=deadline_s, connect_timeout_s=timeout_s
        )

    def push(self, parts: Sequence[PartRef], needed: Collection[PartRef], deadline: float) -> None:
        """Have every holder have every part, in this order: what others refer to comes before them.

        A part that is damaged or was dropped meanwhile is left out unless it is ``needed``: what it belongs to is lost
        or of no use, and must not keep the newest from being copied. Raises `DeadlineError`: it took too long;
        `FlashpointError`: a holder is not there or refuses; others may have everything.
        """
        push_to_all(self.holders, lambda holder: self._push_to(holder, list(parts), needed, deadline))

    def _push_to(self, number: int, parts: list[PartRef], needed: Collection[PartRef], deadline: float) -> None:
        def is_over() -> bool:
            return self._closed or time.monotonic() > deadline

        was_there = number in self._links
        while True:
            try:
                if number not in self._links:
                    self._links[number] = _Link(self.connect(self.find(number), deadline - time.monotonic()))
                return self._push_over(self._links[number], parts, needed, is_over)
            except BaseException as error:
                self._drop(number)
                if isinstance(error, TransferCancelledError) and not self._closed:
                    raise DeadlineError("a copy was not verified in time", node=self.nodes[number]) from error
                if not (was_there and isinstance(error, ConnectionLostError)):
                    raise
                was_there = False  # it may have come back elsewhere

    def _push_over(
        self, link: _Link, parts: list[PartRef], needed: Collection[PartRef], is_over: Callable[[], bool]
    ) -> None:
        link.acknowledged.intersection_update(ref.name for ref in parts)  # others are not asked for again
        while True:
            # It may lead to a process that is gone, and nothing may be left to push that would show it.
            link.peer.ping(cancelled=is_over)
            if link.connections != link.peer.connections:  # there may be another process behind it
                link.connections, link.acknowledged = link.peer.connections, set()
            lacking = [ref for ref in parts if ref.name not in link.acknowledged]
            if not lacking:
                return
            for ref in lacking:
                try:
                    with self._store.reading(ref.save, self._store.number) as part:
                        if link.peer.push(part.manifest, part.data, cancelled=is_over):
                            self.pushed_bytes += part.record.size
                    link.acknowledged.add(ref.name)
                except (DamagedError, ObjectNotFoundError) as error:
                    if ref in needed:
                        raise
                    _log.warning("a part of an earlier snapshot cannot be copied: %s", error)
                    parts.remove(ref)

    def _drop(self, number: int) -> None:
        if (link := self._links.pop(number, None)) is not None:
            link.peer.close()

    def held_by(self, parts: Collection[PartRef]) -> list[int]:
        """Holders that have acknowledged all of these, and have not been found gone since."""
        names = {ref.name for ref in parts}
        return [number for number, link in list(self._links.items()) if link.acknowledged >= names]

    def close(self) -> None:
        """Break off a push under way and close the connections. Idempotent."""
        self._closed = True
        for link in list(self._links.values()):
            link.peer.close()


class CopyBackend:
    """A `TransferBackend` that serves the parts of a store, and takes copies in. Thread-safe.

    Args:
        store: of this manager.
        held: managers whose copies are taken in.
        managers: number of all managers.
    """

    def __init__(self, store: PartStore, held: Collection[int], managers: int) -> None:
        self._store = store
        self._held = held
        self._managers = managers

    @contextlib.contextmanager
    def open_part(self, part: PartName) -> Iterator[memoryview]:
        """See `TransferBackend`."""
        with self._store.reading(*part) as found:
            yield found.data

    def read_manifest(self, part: PartName) -> bytes:
        """See `TransferBackend`."""
        with self._store.reading(*part) as found:
            return encode(found.manifest)

    @contextlib.contextmanager
    def receive(self, manifest: Manifest, rider: Fields) -> Iterator[memoryview | None]:
        """See `TransferBackend`."""
        rank, save = manifest.rank, SaveId.of(manifest)
        if save is None or rank not in self._held or manifest.world_size != self._managers or not is_part(manifest):
            raise ProtocolError("this manager holds no copies of that one, or this is no part", rank=rank)
        held = self._store.find(save, rank)
        if held is not None and held.manifest == manifest:
            yield None
            return
        with self._store.receiving(manifest) as buffer:
            yield buffer
