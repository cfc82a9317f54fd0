"""Snapshots of a manager: sealed in its store, copied to the managers that hold copies of it, and recovered.

Owns the life of snapshots: what goes into a part, when it is committed, pushed, kept and dropped. The bytes of a
snapshot are `index`'s, reading it back `recovery`'s, the copies at other managers `copies`'. Which checkpoint is
committed, and which retires, is decided by the coordinator; which entries are in a checkpoint, by the shard.

A snapshot is a part of the version ``step-<checkpoint>_ckpt`` in the manager's store, one object with an index of the
entries and the small values written since the snapshot before. Large values are parts of their own, committed the first
time that a snapshot refers to them. So a snapshot of what did not change copies no value, neither here nor to a peer.
The number of a part is taken from the clock, and is higher than that of every part of the manager before it.

It is full after `index.LONGEST_CHAIN` that were not, and when those would take more than twice what a full one does: so
there is never more in their segments that is dead than what lives.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain

from ml_flashpoint.copy.collection import collection_paused
from ml_flashpoint.ddict.manager.copies import AskPeer, Copies, CopyBackend
from ml_flashpoint.ddict.manager.index import (
    GONE,
    LONGEST_CHAIN,
    NO_SNAPSHOT,
    BuiltSnapshot,
    Index,
    IndexEntry,
    encode_index,
    gather,
    index_bytes,
    part_of,
    parts_of,
    plan_object,
)
from ml_flashpoint.ddict.manager.part_ref import PartRef
from ml_flashpoint.ddict.manager.recovery import Recoverer
from ml_flashpoint.ddict.manager.shard import Entry, StoredValue
from ml_flashpoint.ddict.manager.slots import ValueSlots
from ml_flashpoint.ddict.manager.store import PartStore
from ml_flashpoint.ddict.options import check_checkpoint_id, next_number
from ml_flashpoint.ddict.wire.requests import DropCopies
from ml_flashpoint.format.digest import BlockDigester
from ml_flashpoint.format.errors import (
    DeadlineError,
    FlashpointError,
    InvalidArgumentError,
    ReplicationError,
)
from ml_flashpoint.format.knobs import block_bytes, transfer_deadline_s
from ml_flashpoint.format.manifest import Manifest, ObjectRecord, object_name
from ml_flashpoint.format.save_id import SaveId
from ml_flashpoint.memory.slot import Slot
from ml_flashpoint.net.transfers import Address, TransferService

_log = logging.getLogger(__name__)


class Snapshots:
    """See the module. Thread-safe; seals come one after the other. Where a manager holds anything of another, it serves
    peers from construction on: takes in their copies, and gives them theirs back, for which they wait.

    Args:
        store: of this manager.
        nodes: node of every manager, by number. Their number is the world size.
        holders: of every manager, those that hold copies of it.
        ask: see `AskPeer`.
        values: of this manager, whose parts stay while they are needed, although no snapshot needs them.
        host: address to serve peers on, and the one told to them.

    Attributes:
        holders: managers that are to have copies of all this.
        held: managers that this one holds copies of.
        copies: what the holders have.

    Raises:
        InvalidArgumentError: an argument is out of range.
        ReplicationError: it cannot listen.
    """

    def __init__(
        self,
        store: PartStore,
        *,
        nodes: Sequence[str],
        holders: Sequence[Sequence[int]],
        secret: bytes,
        ask: AskPeer,
        values: ValueSlots,
        host: str = "127.0.0.1",
    ) -> None:
        manager = store.number
        self._store = store
        self._manager = manager
        self._values = values
        self.holders = tuple(holders[manager])
        self.held = tuple(owner for owner, its in enumerate(holders) if manager in its)
        self.copies = Copies(store, nodes, self.holders, secret, ask)
        self._service: TransferService | None = None
        # Taken in this order. Network is only waited for with the first. What changes, does so with the second.
        self._sealing = threading.Lock()
        self._building = threading.Lock()
        self._snapshots: dict[int, BuiltSnapshot] = {}  # ascending; never changed, but replaced
        self._newest = self._newest_number()
        self._closed = threading.Event()
        if self.holders or self.held:
            self._service = TransferService(
                secret, CopyBackend(store, self.held, len(nodes)), host=host, deadline_s=transfer_deadline_s()
            )

    @property
    def address(self) -> Address | None:
        """Where peers reach it; None if it serves none."""
        return None if self._service is None else self._service.address

    def close(self) -> None:
        """Break off what is under way and stop serving. Idempotent. The store and its parts stay."""
        self._closed.set()
        self.copies.close()
        if self._service is not None:
            self._service.close()

    # ---- sealing ------------------------------------------------------------------------------------------

    def seal(self, checkpoint_id: int, entries: Sequence[Entry], deadline_s: float) -> PartRef:
        """Have a verified snapshot of this checkpoint, with the entries of all keys that there are, here and at every
        holder; returns its part.

        What is there already is not written or sent again, so that calling it again after an error is cheap, as long
        as the entries are the same objects. Sealing a checkpoint again with other entries replaces its snapshot. Copies
        of earlier snapshots that a holder has lost are pushed first. Raises `DeadlineError`: not all holders had it in
        time; `CapacityError`: no room, here or at a holder; `FlashpointError`: a holder is not there or refuses.
        """
        check_checkpoint_id(checkpoint_id)
        deadline = time.monotonic() + deadline_s
        with self._turn(deadline):
            with self._building, collection_paused():
                built = self._build(checkpoint_id, entries, deadline)
            self._push(deadline)
        return built.ref

    @contextlib.contextmanager
    def _turn(self, deadline: float) -> Iterator[None]:
        """Wait until no other seal is under way."""
        if not self._sealing.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise DeadlineError("another seal is still under way", rank=self._manager)
        try:
            yield
        finally:
            self._sealing.release()

    def _build(self, checkpoint_id: int, entries: Sequence[Entry], deadline: float) -> BuiltSnapshot:
        """Commit a snapshot, and before it every large value that is no part yet. Takes time proportional to what
        changed, but for a few passes in C. If the store refuses, there is no snapshot, but values may be parts."""
        newest = max(self._snapshots, default=-1)
        before = self._snapshots.get(newest, NO_SNAPSHOT)
        if checkpoint_id < newest:
            raise InvalidArgumentError(
                f"checkpoint {newest} is sealed already",
                argument="checkpoint_id",
                value=checkpoint_id,
                hint="seal in ascending order, or call forget_after() first",
            )
        current = frozenset(entries)
        if checkpoint_id == newest and before.entries == current:
            return before

        def check() -> None:
            if self._closed.is_set():
                raise ReplicationError("the snapshots were closed", rank=self._manager)
            if time.monotonic() > deadline:
                raise DeadlineError("not sealed in time", step=checkpoint_id, rank=self._manager)

        lost, fresh = list(before.entries - current), list(current - before.entries)
        for entry in fresh:
            if isinstance(entry.value, StoredValue) and entry.value.part is None:
                check()
                self._seal_value(checkpoint_id, entry.value)
        check()
        new_keys = {entry.key for entry in fresh}
        missing = [entry.key for entry in lost if entry.key not in new_keys]
        stored = (before.stored - parts_of(lost)) | parts_of(fresh)
        changes = index_bytes(fresh) + sum(map(len, missing))
        live_bytes = before.live_bytes + index_bytes(fresh) - index_bytes(lost)
        told, chain_bytes = before.chain, before.chain_bytes + changes
        is_long = len(told) >= LONGEST_CHAIN and changes > 0
        if is_long or chain_bytes >= max(1, 2 * live_bytes) or not self._has_all(told):
            told, fresh, missing, chain_bytes = (), list(entries), [], live_bytes
        own = self._next_ref(checkpoint_id)
        chain = (*told, own) if fresh or missing or not told else told
        self._write(own, told, fresh, missing)
        built = BuiltSnapshot(own, chain, current, stored, chain_bytes, live_bytes)
        self._snapshots = {**self._snapshots, checkpoint_id: built}
        return built

    def _has_all(self, parts: Iterable[PartRef]) -> bool:
        return all(self._store.find(ref.save, self._manager) is not None for ref in parts)

    def _seal_value(self, checkpoint_id: int, value: StoredValue) -> None:
        ref, block = self._next_ref(checkpoint_id), block_bytes()
        digests = BlockDigester(value.slot.buffer, value.size, block_size=block).finish()
        name = object_name(self._manager, ref.name)
        self._commit(ref, value.slot, ObjectRecord(name, value.size, value.slot.size, digests, block))
        value.part = ref  # its slot is the store's to free

    def _write(self, own: PartRef, told: tuple[PartRef, ...], entries: list[Entry], missing: list[bytes]) -> None:
        listed, segment = gather(own, entries, part_of)
        listed += [IndexEntry(key, 0, "", 0, GONE, own, 0, 0) for key in missing]
        index = encode_index(Index(own, self._manager, len(self.copies.nodes), told, listed))
        layout = plan_object(len(index), sum(map(len, segment)))
        slot = self._store.take(layout.size)
        try:
            name = object_name(self._manager, own.name)
            self._commit(own, slot, slot.seal(name, layout, (index, b"".join(segment))))
        except BaseException:
            self._store.free(slot)
            raise

    def _commit(self, ref: PartRef, slot: Slot, record: ObjectRecord) -> None:
        nodes, manager = self.copies.nodes, self._manager
        manifest = Manifest(ref.save.version, manager, len(nodes), ref.name, nodes[manager], (record,))
        self._store.commit(slot, manifest)

    def _push(self, deadline: float) -> None:
        snapshots = [built.needs for built in self._snapshots.values()]
        # By age: what a holder has without what it refers to, which was sealed before it, is of no use to anyone.
        parts = sorted(set(chain(*snapshots)), key=lambda ref: ref.save)
        self.copies.push(parts, snapshots[-1] if snapshots else (), deadline)

    def _next_number(self) -> int:
        self._newest = next_number(self._newest)
        return self._newest

    def _next_ref(self, checkpoint_id: int) -> PartRef:
        return PartRef(SaveId(self._next_number(), checkpoint_id).text, checkpoint_id)

    def replicate(self, deadline_s: float) -> None:
        """Push whatever a holder lacks of the snapshots here, oldest first: after a holder came back without them.
        Raises `FlashpointError`: as :meth:`seal`."""
        deadline = time.monotonic() + deadline_s
        with self._turn(deadline):
            self._push(deadline)

    def sealed(self) -> dict[int, PartRef]:
        """The snapshots in this store, by checkpoint. Not only those whose copies are verified."""
        return {checkpoint_id: built.ref for checkpoint_id, built in self._snapshots.items()}

    def copied_to(self) -> list[int]:
        """Those of `holders` that are known to have verified copies of every snapshot here."""
        return self.copies.held_by(self._needed())

    def _needed(self) -> set[PartRef]:
        return {ref for built in self._snapshots.values() for ref in built.needs}

    # ---- retention ----------------------------------------------------------------------------------------

    def retain(self, checkpoint_ids: Collection[int]) -> None:
        """Drop the snapshots older than the newest of these, except these, and what only those needed; here and at
        the holders. Snapshots above the newest stay: they are on their way to being committed.

        A holder that cannot be told now is told the next time.
        """
        wanted = set(checkpoint_ids)
        newest = max(wanted, default=0)
        self._drop_snapshots(lambda checkpoint_id: checkpoint_id < newest and checkpoint_id not in wanted)

    def forget_after(self, checkpoint_id: int) -> None:
        """Drop the snapshots above this checkpoint, which were rolled back, here and at the holders.

        A holder that cannot be told now is told the next time.
        """
        self._drop_snapshots(lambda other: other > checkpoint_id)

    def _drop_snapshots(self, is_dropped: Callable[[int], bool]) -> None:
        with self._building:
            self._snapshots = {each: built for each, built in self._snapshots.items() if not is_dropped(each)}
            keep = self._sweep()
            before = self._next_number()  # no holder will drop for this message what is sealed from now on
        for holder in self.holders:
            try:
                self.copies.ask(holder, DropCopies(self._manager, tuple(keep), before))
            except FlashpointError as error:
                _log.warning("a holder keeps copies that are not needed until it can be told: %s", error)

    def _sweep(self) -> list[str]:
        """Drop the parts that nothing needs; returns the names of the others."""
        needed = {ref.save for ref in self._needed() | self._values.needed_parts()}
        mine = self._store.parts_of(self._manager)
        self._store.drop([part for part in mine if part.save not in needed])
        return [part.save.text for part in mine if part.save in needed]

    def drop_copies(self, of: int, copies: Collection[str], before: int) -> None:
        """On the holder's side: drop what this manager holds of another one, but for the ``copies`` that it still
        needs. ``before``: parts with this number or a higher one stay: they were sealed after the message was written.
        Raises `InvalidArgumentError`: nothing is held of that one."""
        if of not in self.held:
            raise InvalidArgumentError("nothing is held of this one", argument="of", value=of)
        held, kept = self._store.parts_of(of), set(copies)
        self._store.drop([part for part in held if part.save.text not in kept and part.save.run < before])

    # ---- recovery -----------------------------------------------------------------------------------------

    def recover(self, snapshots: Iterable[PartRef]) -> tuple[dict[int, list[Entry]], dict[int, FlashpointError]]:
        """Have these snapshots of this manager again, before anything is sealed.

        Parts in the own store are verified; missing and damaged ones are fetched from the holders. Whatever else is in
        the store is dropped with the next :meth:`retain`, here and at the holders.

        Returns:
            Entries of each snapshot that could be had whole, by checkpoint, and why others could not.
        """
        with self._building:
            recoverer = Recoverer(self._store, self._values, self.copies, self._closed.is_set)
            with collection_paused():
                recoverer.recover(snapshots)
            self._snapshots = dict(sorted({**self._snapshots, **recoverer.built}.items()))
            self._newest = max(self._newest, self._newest_number())
        return {step: list(built.entries) for step, built in recoverer.built.items()}, recoverer.failures

    def _newest_number(self) -> int:
        """The highest number that a part of this manager is known to have."""
        return max((part.save.run for part in self._store.parts_of(self._manager)), default=0)
