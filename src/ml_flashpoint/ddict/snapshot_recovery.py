"""Reading snapshots back: from the own store, and what is missing or damaged there from the holders.

Owns the verification of every byte that a recovered snapshot consists of, and which snapshots were abandoned. Keeping
and copying them from then on is `snapshots`'.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from ml_flashpoint.checkpoint_object_manager.held_part import HeldPart
from ml_flashpoint.checkpoint_object_manager.rank_store import RankStore
from ml_flashpoint.ddict.entries import Entry, InlineValue, StoredValue, Value
from ml_flashpoint.ddict.snapshot_copies import Peers
from ml_flashpoint.ddict.snapshot_format import SNAPSHOT, VALUE, PartRef, SnapshotRecord, part_kind, split_object
from ml_flashpoint.ddict.snapshot_index import (
    DELETED,
    INLINE,
    Index,
    IndexEntry,
    Place,
    decode_index,
    needed_parts,
    resolve,
)
from ml_flashpoint.ddict.snapshot_parts import BuiltSnapshot, Memory, memory_of
from ml_flashpoint.format.digest import digest_workers, verify_blocks
from ml_flashpoint.format.errors import (
    DamagedError,
    FlashpointError,
    ManifestError,
    ObjectNotFoundError,
    ReplicationError,
)
from ml_flashpoint.format.knobs import transfer_deadline_s
from ml_flashpoint.format.manifest import Manifest, ObjectRecord, decode
from ml_flashpoint.net.channel import TransferCancelledError
from ml_flashpoint.replication.transfer_client import Holder, PeerConnection, fetch_object_from_holders

_log = logging.getLogger(__name__)

_CONNECT_S = 10.0


@dataclass(frozen=True, slots=True)
class RecoveredSnapshot:
    """A snapshot of which every byte was verified and is in the own store.

    Attributes:
        checkpoint_id: of the snapshot.
        entries: as they were sealed, in no particular order. Those that several snapshots share are the same objects.
    """

    checkpoint_id: int
    entries: list[Entry]


@dataclass(slots=True)
class Recovery:
    """What could be recovered.

    Attributes:
        snapshots: newest first.
        built: of each, its parts, by checkpoint.
        memory: what the next snapshot can leave out.
        failures: checkpoint (None: a holder could not be asked) and why.
    """

    snapshots: list[RecoveredSnapshot] = field(default_factory=list)
    built: dict[int, BuiltSnapshot] = field(default_factory=dict)
    memory: Memory = field(default_factory=Memory)
    failures: list[tuple[int | None, FlashpointError]] = field(default_factory=list)


# ---- what is here -----------------------------------------------------------------------------------------


def snapshots_here(store: RankStore, rank: int) -> list[SnapshotRecord]:
    """The snapshots of a manager whose own parts are in a store, in the order in which they were sealed."""
    found = []
    for part in store.held():
        if part.rank == rank and part.manifest is not None and part_kind(part.manifest) == SNAPSHOT:
            found.append(SnapshotRecord(part.manifest.step, part.save_id))
    return sorted(found, key=lambda record: record.attempt)


def complete_snapshots(store: RankStore, rank: int, managers: int) -> list[SnapshotRecord]:
    """Those of `snapshots_here` of which every part is in the store, newest first. Contents are not verified."""
    complete = []
    reader = _IndexReader(store, rank, managers, lambda ref: _held(store, rank, ref))
    for record in reversed(snapshots_here(store, rank)):
        try:
            index, _, told = reader.read(record)
            for ref in needed_parts(record.ref, index.base, told):
                _held(store, rank, ref)
        except FlashpointError as error:
            _log.warning("manager %d: a snapshot is not complete here: %s", rank, error)
            continue
        complete.append(record)
    return complete


def not_abandoned(records: Iterable[SnapshotRecord]) -> list[SnapshotRecord]:
    """The snapshots that later ones have not replaced, newest first.

    Checkpoints are sealed in ascending order. One with a lower or the same number that was sealed later therefore means
    that what was above it had been rolled back.
    """
    left: list[SnapshotRecord] = []
    for record in sorted(set(records), key=lambda record: record.attempt, reverse=True):
        if not left or record.checkpoint_id < left[-1].checkpoint_id:
            left.append(record)
    return left


def _held(store: RankStore, rank: int, ref: PartRef) -> HeldPart:
    part = store.find(ref.attempt, rank)
    if part is None or part.doomed or part.version != ref.version:
        raise ObjectNotFoundError("a part of a snapshot is not here", step=ref.step, rank=rank, path=ref.attempt)
    if part.manifest is None or part_kind(part.manifest) is None:
        raise DamagedError("the manifest of a part is damaged", step=ref.step, rank=rank, path=ref.attempt)
    return part


# ---- reading ----------------------------------------------------------------------------------------------

_Opened = Callable[[PartRef], HeldPart]


class _IndexReader:
    """Reads indices, each once.

    Args:
        store: where their parts are.
        rank, managers: whose they are, of how many.
        opened: gives a part of the store, with a manifest that is right.
    """

    def __init__(self, store: RankStore, rank: int, managers: int, opened: _Opened) -> None:
        self._store = store
        self._whose = (rank, managers)
        self._opened = opened
        self._read: dict[PartRef, Index] = {}
        self.sizes: dict[PartRef, int] = {}
        """Bytes of each index that was read."""
        self.segments: dict[PartRef, memoryview] = {}
        """The segments that were split off."""

    def read(self, record: SnapshotRecord) -> tuple[Index, Index | None, list[IndexEntry]]:
        """The index of a snapshot, that of its base, and the entries.

        Raises:
            FlashpointError: a part is missing or damaged.
        """
        index = self._index(record.ref)
        base = None if index.base is None else self._index(index.base)
        return index, base, resolve(index, base, record.attempt)

    def _index(self, ref: PartRef) -> Index:
        index = self._read.get(ref)
        if index is None:
            data, path = self._split(ref)
            index = decode_index(data, path)
            if (index.checkpoint_id, index.manager, index.managers) != (ref.step, *self._whose):
                raise DamagedError("the index is of another snapshot", path=path)
            self._read[ref] = index
            self.sizes[ref] = data.nbytes
        return index

    def _split(self, ref: PartRef) -> tuple[memoryview, str]:
        part = self._opened(ref)
        path = str(self._store.base / part.version / part.names[0])
        data, self.segments[ref] = split_object(_used(part), _record(part).file_size, path)
        return data, path

    def segment(self, ref: PartRef) -> memoryview:
        """The segment of a snapshot.

        Raises:
            FlashpointError: the part is missing or damaged, or is no snapshot.
        """
        if ref not in self.segments:
            self._split(ref)
        return self.segments[ref]


def _record(part: HeldPart) -> ObjectRecord:
    assert part.manifest is not None  # parts without are not opened
    return part.manifest.objects[0]


def _used(part: HeldPart) -> memoryview:
    return part.arenas[0].buffer[: _record(part).size]


class Recoverer:
    """Recovers the snapshots of one manager. For one thread; its store must not change meanwhile.

    Args:
        store: of this manager.
        holders: managers that hold copies of it, in order of preference.
        peers: how they are reached.
        cancelled: once true, what is under way is broken off.
    """

    def __init__(self, store: RankStore, holders: Sequence[int], peers: Peers, cancelled: Callable[[], bool]) -> None:
        self._store = store
        self._rank = store.rank
        self._managers = len(peers.nodes)
        self._holders = list(holders)
        self._peers = peers
        self._cancelled = cancelled
        self._connections: dict[int, PeerConnection] = {}
        self._verified: dict[PartRef, HeldPart | FlashpointError] = {}
        self._reader = _IndexReader(store, store.rank, self._managers, self._part)
        self._values: dict[str, StoredValue] = {}
        self._entries: dict[IndexEntry, Entry] = {}

    def recover(self, records: Iterable[SnapshotRecord]) -> Recovery:
        """Every snapshot of these that can be had whole.

        Raises:
            TransferCancelledError: `cancelled` returned true.
        """
        recovery = Recovery()
        try:
            for record in not_abandoned(records):
                try:
                    self._recover_one(record, recovery)
                except TransferCancelledError:
                    raise
                except FlashpointError as error:
                    _log.warning("manager %d: checkpoint %d is lost: %s", self._rank, record.checkpoint_id, error)
                    recovery.failures.append((record.checkpoint_id, error))
        finally:
            for connection in self._connections.values():
                connection.close()
            for segment in self._reader.segments.values():
                segment.release()
        return recovery

    def _recover_one(self, record: SnapshotRecord, recovery: Recovery) -> None:
        ref = record.ref
        index, base, told = self._reader.read(record)
        needs = needed_parts(ref, index.base, told)
        for need in sorted(needs):
            self._part(need)
        entries = [self._entry(entry) for entry in told]
        if not recovery.snapshots:
            segments = {part: segment.nbytes for part, segment in self._reader.segments.items()}
            pairs = list(zip(entries, told, strict=True))
            recovery.memory = memory_of(ref, index, base, pairs, self._reader.sizes, segments)
        recovery.snapshots.append(RecoveredSnapshot(record.checkpoint_id, entries))
        recovery.built[record.checkpoint_id] = BuiltSnapshot(ref, needs)

    def _entry(self, told: IndexEntry) -> Entry:
        entry = self._entries.get(told)
        if entry is None:
            key, checkpoint_id, writer, persistent, broadcast, place = told
            entry = Entry(key, checkpoint_id, writer, self._value(place), persistent, broadcast)
            self._entries[told] = entry
        return entry

    def _value(self, place: Place) -> Value | None:
        if place.kind == DELETED or place.part is None:
            return None
        if place.kind == INLINE:
            segment = self._reader.segment(place.part)
            if place.offset + place.length > segment.nbytes:
                raise DamagedError("a value lies outside of its segment", rank=self._rank, path=place.part.attempt)
            return InlineValue(bytes(segment[place.offset : place.offset + place.length]))
        part = self._part(place.part)
        assert part.manifest is not None  # it was verified
        if part_kind(part.manifest) != VALUE or place.length != _record(part).size:
            raise DamagedError("this part is not the value", rank=self._rank, path=place.part.attempt)
        # The same object for all, since users compare them by identity.
        return self._values.setdefault(
            place.part.attempt, StoredValue(place.part.attempt, part.arenas[0], place.length)
        )

    # ---- parts --------------------------------------------------------------------------------------------

    def _part(self, ref: PartRef) -> HeldPart:
        """A part of this manager, verified; fetched if need be."""
        found = self._verified.get(ref)
        if found is None:
            try:
                found = self._own(ref) or self._fetch(ref)
            except TransferCancelledError:
                raise
            except FlashpointError as error:
                found = error
            self._verified[ref] = found
        if isinstance(found, FlashpointError):
            raise found
        return found

    def _own(self, ref: PartRef) -> HeldPart | None:
        try:
            part = _held(self._store, self._rank, ref)
            record = _record(part)
            path = self._store.base / part.version / record.name
            verify_blocks(_used(part), record.digests, record.block_size, path=path, workers=digest_workers())
        except ObjectNotFoundError:
            return None
        except DamagedError as error:
            _log.warning("manager %d: asking holders, because a part here is damaged: %s", self._rank, error)
            return None
        return part

    def _fetch(self, ref: PartRef) -> HeldPart:
        if not self._holders:
            raise ObjectNotFoundError("lost, and nobody holds a copy", step=ref.step, rank=self._rank, path=ref.attempt)
        failures: list[FlashpointError] = []
        for holder in list(self._holders):
            try:
                return self._fetch_from(holder, ref)
            except TransferCancelledError:
                raise
            except FlashpointError as error:
                failures.append(error)
                self._disconnect(holder)
        kinds = {type(error) for error in failures}
        kind = kinds.pop() if len(kinds) == 1 else ReplicationError
        causes = "; ".join(dict.fromkeys(error.message for error in failures))
        raise kind(f"no holder could give a part: {causes}", step=ref.step, rank=self._rank, path=ref.attempt)

    def _fetch_from(self, holder: int, ref: PartRef) -> HeldPart:
        connection = self._connections.get(holder)
        if connection is None:
            connection = self._connections[holder] = self._peers.connect(holder, _CONNECT_S)
        manifest = decode(connection.read_manifest(ref.version, self._rank, ref.attempt))
        if (
            (manifest.version, manifest.rank, manifest.save_id) != (ref.version, self._rank, ref.attempt)
            or manifest.world_size != self._managers
            or part_kind(manifest) is None
        ):
            raise ManifestError("a holder gave the manifest of another part", node=self._peers.nodes[holder])
        record = manifest.objects[0]
        arena = self._store.acquire(record.file_size, exact=True)
        try:
            with arena.buffer[: record.size] as into:
                self._fill(holder, connection, manifest, into)
            return self._store.commit(manifest, [arena])
        except BaseException:
            self._store.release(arena)
            raise

    def _fill(self, holder: int, connection: PeerConnection, manifest: Manifest, into: memoryview) -> None:
        record = manifest.objects[0]
        try:
            connection.fetch_object(manifest.version, record, into, rank=self._rank, cancelled=self._cancelled)
        except TransferCancelledError:
            raise
        except FlashpointError as error:
            _log.warning("fetching %s again, from any holder: %s", record.name, error)
            self._disconnect(holder)
            fetch_object_from_holders(
                list(self._reachable()),
                self._peers.secret,
                manifest.version,
                record,
                into,
                rank=self._rank,
                deadline_s=transfer_deadline_s(),
                cancelled=self._cancelled,
            )

    def _reachable(self) -> Iterable[Holder]:
        for holder in self._holders:
            try:
                yield Holder(self._peers.nodes[holder], self._peers.address(holder))
            except FlashpointError as error:
                _log.warning("%s", error)

    def _disconnect(self, holder: int) -> None:
        connection = self._connections.pop(holder, None)
        if connection is not None:
            connection.close()


def newest_stamp(store: RankStore, records: Collection[SnapshotRecord]) -> int:
    """The latest point at which a part of this manager is known to have been sealed, in nanoseconds."""
    stamps = [int(record.attempt.split("-")[1]) for record in records]
    for part in store.held():
        if part.rank == store.rank and part.manifest is not None and part_kind(part.manifest) is not None:
            stamps.append(int(part.manifest.labels["stamp"]))
    return max(stamps, default=0)
