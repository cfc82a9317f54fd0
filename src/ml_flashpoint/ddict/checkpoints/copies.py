"""The copies of a manager's parts at other managers: what they have, and pushing what they lack.

Owns the connections to the holders and what each has acknowledged. An acknowledgement is worth as much as the
connection that it came over: a holder that died and came back answers on a new one, and is asked about every part
again, which costs one small message for each part that it has. So no holder is ever taken to have what it has lost.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TypeAlias

from ml_flashpoint.ddict.checkpoints.index import PartRef
from ml_flashpoint.ddict.manager.store import HeldPart, PartStore
from ml_flashpoint.format.errors import (
    DamagedError,
    DeadlineError,
    ObjectNotFoundError,
    ReplicationError,
)
from ml_flashpoint.format.knobs import transfer_deadline_s
from ml_flashpoint.format.manifest import Manifest, encode, parse_object_name
from ml_flashpoint.format.save_id import SaveId
from ml_flashpoint.net.channel import TransferCancelledError
from ml_flashpoint.net.handshake import check_secret
from ml_flashpoint.net.messages import Fields
from ml_flashpoint.net.pushing import HolderLink, push_to_all
from ml_flashpoint.net.transfer_client import Holder, PeerConnection

_log = logging.getLogger(__name__)

AskPeer: TypeAlias = Callable[[int, str, Fields], Fields]
"""``(manager, operation, fields)``: the answer of another manager. Has a deadline of its own; raises
`FlashpointError`."""

_MAX_CONNECT_S = 10.0


class Copies:
    """The holders of one manager's parts: where they are, and what they have. `push` is for one thread at a time; the
    rest is thread-safe. ``nodes``: of all managers. ``holders``: numbers of managers, in order of preference."""

    def __init__(
        self, store: PartStore, nodes: Sequence[str], holders: Sequence[int], secret: bytes, ask: AskPeer
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
        link.acknowledged.intersection_update(ref.name for ref in parts)  # others are not asked for again

        def is_over() -> bool:
            return self._closed or time.monotonic() > deadline

        def push_all(peer: PeerConnection) -> bool:
            """Whether that is done; false: the connection broke over a part that is left out now, so go on anew."""
            # It may lead to a process that is gone, and nothing may be left to push that would show it.
            peer.ping(cancelled=is_over)
            for ref in list(parts):
                try:
                    if ref.name not in link.acknowledged:
                        self._push_part(peer, ref, is_over)
                        link.acknowledged.add(ref.name)
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

    def _push_part(self, peer: PeerConnection, ref: PartRef, is_over: Callable[[], bool]) -> None:
        with self._store.reading(ref.save, self._store.number) as part:
            if peer.push(part.manifest, encode(part.manifest), [part.data], cancelled=is_over):
                self.pushed_bytes += part.record.size

    def held_by(self, parts: Collection[PartRef]) -> list[int]:
        """Holders that have acknowledged all of these, and have not been found gone since."""
        names = [ref.name for ref in parts]
        return [number for number, link in self._links.items() if link.acknowledged.issuperset(names)]

    def close(self) -> None:
        """Break off a push under way and close the connections. Idempotent."""
        self._closed = True
        for link in self._links.values():
            link.close()


class IncomingCopy:
    """A slot that is being filled with a part from elsewhere: an `IncomingPart`. Raises `CapacityError`: no room."""

    def __init__(self, store: PartStore, manifest: Manifest) -> None:
        record = manifest.objects[0]
        self._store, self._manifest = store, manifest
        self._slot = store.take(record.file_size, exact=True)
        self.buffers = (self._slot.buffer[: record.size],)

    def commit(self) -> None:
        """The bytes are verified: commit the part."""
        self._store.commit(self._slot, self._manifest)

    def abort(self) -> None:
        """Free the slot."""
        self._store.free(self._slot)


class CopyBackend:
    """Serves the parts of a store, and takes in copies: a `TransferBackend`. Thread-safe. ``check``: raises
    `FlashpointError` for a part that no copy is taken of."""

    def __init__(self, store: PartStore, check: Callable[[Manifest], None]) -> None:
        self._store = store
        self._check = check

    @contextlib.contextmanager
    def open_object(self, version: str, name: str) -> Iterator[memoryview]:
        """See `TransferBackend`."""
        rank, save_id = parse_object_name(name) or (0, "")
        with self._reading(version, rank, save_id) as part:
            yield part.data

    def read_manifest(self, version: str, rank: int, save_id: str) -> bytes:
        """See `TransferBackend`."""
        with self._reading(version, rank, save_id) as part:
            return encode(part.manifest)

    def _reading(self, version: str, rank: int, save_id: str) -> AbstractContextManager[HeldPart]:
        save = SaveId.parse(version, save_id)
        if save is None:
            raise ObjectNotFoundError("this is the name of no part", rank=rank, path=f"{version}/{save_id}")
        return self._store.reading(save, rank)

    def begin_receive(self, manifest: Manifest) -> IncomingCopy | None:
        """See `TransferBackend`."""
        self._check(manifest)
        save = SaveId.of(manifest)
        held = None if save is None else self._store.find(save, manifest.rank)
        return None if held is not None and held.manifest == manifest else IncomingCopy(self._store, manifest)
