"""Snapshots of a manager: sealed in its store, copied to the managers that hold copies of it, and recovered.

Owns the life of snapshots: what goes into a part, when it is committed, pushed, kept and dropped. The bytes of a
snapshot are `index`'s, reading it back `recovery`'s, the copies at other managers `copies`'. Which checkpoint is
committed, and which retires, is decided by the coordinator; which entries are in a checkpoint, by the shard.

A snapshot is a part of the version ``step-<checkpoint>_ckpt`` in the manager's store, one object with an index of the
entries and the small values written since the snapshot before. Large values are parts of their own, committed the first
time that a snapshot refers to them. So a snapshot of what did not change copies no value, neither here nor to a peer.

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

from ml_flashpoint.checkpoint_object_manager.arena import Arena
from ml_flashpoint.checkpoint_object_manager.held_part import HeldPart
from ml_flashpoint.checkpoint_object_manager.rank_store import RankStore
from ml_flashpoint.copy.collection import collection_paused
from ml_flashpoint.ddict.checkpoints.copies import AskPeer, Copies
from ml_flashpoint.ddict.checkpoints.index import (
    GONE,
    LONGEST_CHAIN,
    NO_SNAPSHOT,
    STAMP_LABEL,
    BuiltSnapshot,
    Index,
    IndexEntry,
    PartRef,
    encode_index,
    gather,
    index_bytes,
    is_part,
    is_stamp,
    part_of,
    parts_of,
    plan_object,
    snapshot_ref,
)
from ml_flashpoint.ddict.checkpoints.recovery import Recoverer
from ml_flashpoint.ddict.manager.arenas import ValueArenas
from ml_flashpoint.ddict.manager.shard import Entry, StoredValue
from ml_flashpoint.ddict.persistence.persister import check_checkpoint_id
from ml_flashpoint.format.digest import BlockDigester, digest_workers
from ml_flashpoint.format.errors import (
    DeadlineError,
    FlashpointError,
    InvalidArgumentError,
    ProtocolError,
    ReplicationError,
)
from ml_flashpoint.format.knobs import block_bytes, transfer_deadline_s
from ml_flashpoint.format.manifest import Manifest, ObjectRecord, object_name
from ml_flashpoint.format.object_format import encode_header
from ml_flashpoint.net.transfer_service import TransferService
from ml_flashpoint.net.transfers import Address
from ml_flashpoint.replication.store_backend import StoreBackend

_log = logging.getLogger(__name__)

_FIRST_STAMP = "0" * 20
_SPARE_ARENAS = 8  # free arenas that are kept, at least, for what comes next


class Snapshots:
    """See the module. Thread-safe; seals come one after the other. Where a manager holds anything of another, it serves
    peers from construction on: takes in their copies, and gives them theirs back, for which they wait.

    Args:
        store: of this manager; its rank is the manager's number.
        nodes: node of every manager, by number. Their number is the world size.
        holders: of every manager, those that hold copies of it.
        ask: see `AskPeer`.
        values: of this manager, whose parts stay while they are needed, although no snapshot needs them.
        incarnation: of this manager process, letters and digits.
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
        store: RankStore,
        *,
        nodes: Sequence[str],
        holders: Sequence[Sequence[int]],
        secret: bytes,
        ask: AskPeer,
        values: ValueArenas,
        incarnation: str,
        host: str = "127.0.0.1",
    ) -> None:
        manager = store.rank
        self._store = store
        self._manager = manager
        self._incarnation = incarnation
        self._values = values
        snapshot_ref(_FIRST_STAMP, incarnation, 0)  # refuses what cannot be in a name
        self.holders = tuple(holders[manager])
        self.held = tuple(owner for owner, its in enumerate(holders) if manager in its)
        self.copies = Copies(store, nodes, self.holders, secret, ask)
        self._service: TransferService | None = None
        # Taken in this order. Network is only waited for with the first. What changes, does so with the second.
        self._sealing = threading.Lock()
        self._building = threading.Lock()
        self._snapshots: dict[int, BuiltSnapshot] = {}  # ascending; never changed, but replaced
        self._last_stamp = self._newest_stamp()
        self._closed = threading.Event()
        if self.holders or self.held:
            backend = StoreBackend(lambda: store, check=self._check_copy)
            self._service = TransferService(secret, backend, host=host, deadline_s=transfer_deadline_s())

    @property
    def address(self) -> Address | None:
        """Where peers reach it; None if it serves none."""
        return None if self._service is None else self._service.address

    def _check_copy(self, manifest: Manifest) -> None:
        """Take in only copies that this manager is to hold, and only such as a dictionary makes."""
        if manifest.rank not in self.held or manifest.world_size != len(self.copies.nodes) or not is_part(manifest):
            raise ProtocolError("this manager holds no copies of that one, or this is no part", rank=manifest.rank)

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
        own = snapshot_ref(self._next_stamp(), self._incarnation, checkpoint_id)
        chain = (*told, own) if fresh or missing or not told else told
        self._write(own, told, fresh, missing)
        built = BuiltSnapshot(own, chain, current, stored, chain_bytes, live_bytes)
        self._snapshots = {**self._snapshots, checkpoint_id: built}
        return built

    def _has_all(self, parts: Iterable[PartRef]) -> bool:
        found = [self._store.find(ref.attempt, self._manager) for ref in parts]
        return not any(part is None or part.doomed for part in found)

    def _seal_value(self, checkpoint_id: int, value: StoredValue) -> None:
        ref = PartRef(value.value_id, checkpoint_id)
        try:
            self._commit(ref, value.arena, value.size)
        finally:
            if self._store.find(ref.attempt, self._manager) is not None:
                value.part = ref  # its arena is the store's to free, also if the commit has failed after it

    def _write(self, own: PartRef, told: tuple[PartRef, ...], entries: list[Entry], missing: list[bytes]) -> None:
        listed, segment = gather(own, entries, part_of)
        listed += [IndexEntry(key, 0, "", False, False, GONE, own, 0, 0) for key in missing]
        index = encode_index(Index(own, self._manager, len(self.copies.nodes), told, listed))
        layout = plan_object(len(index), sum(map(len, segment)))
        arena = self._store.acquire(layout.size)
        try:
            arena.buffer[: layout.data_start] = encode_header(layout, arena.size)
            for key, pieces in (("index", [index]), ("segment", segment)):
                at = layout.by_key[key].begin
                for data in pieces:
                    arena.buffer[at : at + len(data)] = data
                    at += len(data)
            self._commit(own, arena, layout.size)
        except BaseException:
            self._store.release(arena)
            raise

    def _commit(self, ref: PartRef, arena: Arena, size: int) -> None:
        nodes, labels = self.copies.nodes, {STAMP_LABEL: self._next_stamp()}
        digests = BlockDigester(arena.buffer, size, digest_workers(), block_size=block_bytes()).finish()
        record = ObjectRecord(object_name(self._manager, ref.attempt), size, arena.size, digests, block_bytes())
        manifest = Manifest(
            ref.version, self._manager, len(nodes), ref.attempt, nodes[self._manager], (record,), labels
        )
        self._store.commit(manifest, [arena])

    def _push(self, deadline: float) -> None:
        snapshots = [built.needs for built in self._snapshots.values()]
        # Snapshots last, by age: what a holder has without what it refers to is of no use to anyone.
        in_order = [sorted(needs, key=lambda ref: (ref.attempt.startswith("s-"), ref.attempt)) for needs in snapshots]
        self.copies.push(list(dict.fromkeys(chain(*in_order))), snapshots[-1] if snapshots else (), deadline)

    def _next_stamp(self) -> str:
        self._last_stamp = max(time.time_ns(), self._last_stamp + 1)
        return f"{self._last_stamp:020}"

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

    def _needed(self) -> set[str]:
        return {ref.attempt for built in self._snapshots.values() for ref in built.needs}

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
            # Whatever is sealed from now on has a later stamp, and no holder will drop it for this message.
            before = self._next_stamp()
        for holder in self.holders:
            try:
                self.copies.ask(holder, "drop_copies", {"of": self._manager, "keep": keep, "before": before})
            except FlashpointError as error:
                _log.warning("a holder keeps copies that are not needed until it can be told: %s", error)

    def _sweep(self) -> list[str]:
        """Drop the parts that nothing needs; returns the attempts of the others."""
        needed = self._needed()
        mine = [part for part in self._store.held() if part.rank == self._manager]
        keep = {each.save_id for each in mine if each.save_id in needed or self._values.is_needed(each.save_id)}
        self._drop([part for part in mine if part.save_id not in keep])
        return list(keep)

    def drop_copies(self, of: int, copies: Collection[str], before: str) -> None:
        """On the holder's side: drop what this manager holds of another one, but for the ``copies`` that it still
        needs. ``before``: parts sealed later than this stamp stay: the message was written before them. Raises
        `InvalidArgumentError`: this is no message of one whose copies are here."""
        if of not in self.held or not is_stamp(before):
            raise InvalidArgumentError("nothing is held of this one, or that is no stamp", argument="of", value=of)
        dropped = [
            part
            for part in self._store.held()
            # One whose manifest cannot be read is of no use.
            if part.rank == of
            and part.save_id not in copies
            and (part.manifest is None or part.manifest.labels.get(STAMP_LABEL, "") < before)
        ]
        self._drop(dropped)

    def _drop(self, parts: Sequence[HeldPart]) -> None:
        for part in parts:
            self._store.drop(part)
        self._store.arenas.trim(max(_SPARE_ARENAS, 2 * len(parts)))

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
            self._last_stamp = max(self._last_stamp, self._newest_stamp())
        return {step: list(built.entries) for step, built in recoverer.built.items()}, recoverer.failures

    def _newest_stamp(self) -> int:
        """The latest point at which a part of this manager is known to have been sealed, in nanoseconds."""
        stamps = [
            int(part.manifest.labels[STAMP_LABEL])
            for part in self._store.held()
            if part.rank == self._manager and part.manifest is not None and is_part(part.manifest)
        ]
        return max(stamps, default=0)
