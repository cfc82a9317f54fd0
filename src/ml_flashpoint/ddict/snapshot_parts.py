"""What a manager puts into the parts of a snapshot, and what it leaves in those of earlier ones.

Owns committing values and snapshots to the store, which small values are written anew, and how an index builds on a
full one. It knows no holders, and drops nothing.

Small values stay in the segments that they were written to. Segments that hold no more live bytes than what is to be
written are taken along into the new one, and so are those less than half alive: there are never more of them than
the logarithm of the bytes, nor more dead bytes than live ones, and nothing is taken along where nothing is new.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ml_flashpoint.checkpoint_object_manager.arena import Arena
from ml_flashpoint.checkpoint_object_manager.rank_store import HeldPart, RankStore
from ml_flashpoint.core.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.core.digest import BlockDigester
from ml_flashpoint.core.errors import InvalidArgumentError
from ml_flashpoint.core.manifest import Manifest, ObjectRecord, object_name
from ml_flashpoint.core.object_writer import digest_workers
from ml_flashpoint.ddict.entries import Entry, InlineValue, StoredValue
from ml_flashpoint.ddict.snapshot_format import (
    INLINE,
    NOWHERE,
    SNAPSHOT,
    STORED,
    VALUE,
    Index,
    IndexEntry,
    PartRef,
    Place,
    encode_index,
    labels_of,
    object_header,
    plan_object,
)

_MIN_DELTA = 32
"""Changes that a full index may lack however few entries it has."""

_MIN_DEAD_BYTES = 16 << 10
"""Bytes of dead values that a part may hold for the sake of its full index, however short that is."""


@dataclass(frozen=True, slots=True)
class Known:
    """What the newest snapshot says of an entry.

    Attributes:
        entry: kept, so that its identity is nobody else's.
        place: of its value.
        position: in the full index that the next one may build on; None: it is not in it, or elsewhere.
    """

    entry: Entry
    place: Place
    position: int | None


@dataclass(slots=True)
class Memory:
    """What the next snapshot can leave out: entries by identity, as the newest snapshot has them.

    Attributes:
        known: by ``id`` of the entry.
        full: part of the newest full index.
        full_bytes, full_segment: bytes of that index, and of the segment beside it.
        count: entries of that index.
        gone: positions in it that are no more.
        segments: bytes of the segment of each part that one of the entries lies in.
    """

    known: dict[int, Known] = field(default_factory=dict)
    full: PartRef | None = None
    full_bytes: int = 0
    full_segment: int = 0
    count: int = 0
    gone: set[int] = field(default_factory=set)
    segments: dict[PartRef, int] = field(default_factory=dict)

    def without_dropped(self, kept: Collection[str]) -> Memory:
        """What is left of it when only parts of these attempts are kept."""
        full = self.full if self.full is not None and self.full.attempt in kept else None
        memory = replace(self, known={}, full=full, gone=set(self.gone))
        memory.segments = {part: size for part, size in self.segments.items() if part.attempt in kept}
        for key, known in self.known.items():
            part = known.place.part
            if part is None or part.attempt in kept:
                memory.known[key] = known if full is not None else replace(known, position=None)
            elif known.position is not None:
                memory.gone.add(known.position)
        return memory


@dataclass(frozen=True, slots=True)
class BuiltSnapshot:
    """A snapshot in the store.

    Attributes:
        ref: its part.
        needs: the parts without which it cannot be read, itself among them.
    """

    ref: PartRef
    needs: frozenset[PartRef]


class PartBuilder:
    """Commits the parts of one manager. For one thread at a time.

    Args:
        store: of this manager.
        node: of this manager.
        managers: how many there are.
        stamp: gives the next stamp: see `snapshot_format.format_stamp`.
    """

    def __init__(self, store: RankStore, node: str, managers: int, stamp: Callable[[], str]) -> None:
        self._store = store
        self._node = node
        self._managers = managers
        self._stamp = stamp
        self.memory = Memory()
        """What the next snapshot builds on; whoever drops parts, or recovers some, replaces it."""

    # ---- values -------------------------------------------------------------------------------------------

    def seal_values(self, checkpoint_id: int, entries: Iterable[Entry], check: Callable[[], None]) -> None:
        """Commit each stored value that is no part yet.

        Args:
            check: called before each; may raise.

        Raises:
            FlashpointError: the store refuses.
        """
        for entry in entries:
            value = entry.value
            if isinstance(value, StoredValue) and self._store.find(value.value_id, self._store.rank) is None:
                check()
                labels = labels_of(VALUE, checkpoint_id, self._stamp())
                self._commit(checkpoint_id, value.value_id, value.arena, value.size, labels)

    def _commit(self, checkpoint_id: int, attempt: str, arena: Arena, size: int, labels: dict[str, str]) -> HeldPart:
        rank = self._store.rank
        digests = BlockDigester(arena.buffer, size, digest_workers()).finish()
        record = ObjectRecord(object_name(rank, attempt), size, arena.size, digests)
        version = CheckpointContainerId.format_version_container(checkpoint_id)
        manifest = Manifest(version, rank, self._managers, attempt, self._node, (record,), labels)
        return self._store.commit(manifest, [arena])

    # ---- snapshots ----------------------------------------------------------------------------------------

    def build(self, checkpoint_id: int, attempt: str, stamp: str, entries: Sequence[Entry]) -> BuiltSnapshot:
        """Commit a snapshot of entries whose stored values are parts already.

        Raises:
            InvalidArgumentError: an entry cannot be in an index, or the store has a stored value of it no longer.
            FlashpointError: the store refuses. Nothing has changed then.
        """
        current = {id(entry): entry for entry in entries}
        old = self.memory
        own = PartRef(attempt, checkpoint_id)
        taken = self._taken_along(current)
        segment: list[bytes] = []
        segment_bytes = 0
        places: dict[int, Place] = {}
        for key, entry in current.items():
            known = old.known.get(key)
            if known is not None and known.place.part not in taken:
                places[key] = known.place
            elif isinstance(entry.value, InlineValue):
                data = entry.value.data
                places[key] = Place(INLINE, own, segment_bytes, len(data))
                segment.append(data)
                segment_bytes += len(data)
            elif entry.value is None:
                places[key] = NOWHERE
            else:
                places[key] = self._stored_place(entry.value)
        memory, index = self._plan_index(checkpoint_id, own, current, places)
        if segment_bytes:
            memory.segments[own] = segment_bytes
        encoded = encode_index(index)
        if memory.full == own:
            memory.full_bytes, memory.full_segment = len(encoded), segment_bytes
        self._write(checkpoint_id, attempt, stamp, encoded, segment, segment_bytes)
        self.memory = memory
        parts = frozenset(place.part for place in places.values() if place.part is not None)
        return BuiltSnapshot(own, parts | {own} | ({index.base} if index.base is not None else set()))

    def _stored_place(self, value: StoredValue) -> Place:
        part = self._store.find(value.value_id, self._store.rank)
        if part is None:
            raise InvalidArgumentError("a stored value is not in the store", argument="entries", value=value.value_id)
        step = CheckpointContainerId.parse_version_container(part.version)
        assert step is not None  # the store has no other versions
        return Place(STORED, PartRef(value.value_id, step), 0, value.size)

    def _taken_along(self, current: dict[int, Entry]) -> set[PartRef | None]:
        """The parts whose segments the new one is to take the place of."""
        live = dict.fromkeys(self.memory.segments, 0)
        new = 0
        for key, entry in current.items():
            known = self.memory.known.get(key)
            if known is None:
                if isinstance(entry.value, InlineValue):
                    new += len(entry.value.data)
            elif known.place.kind == INLINE and known.place.part is not None:
                live[known.place.part] += known.place.length
        taken: set[PartRef | None] = set()
        for part, count in sorted(live.items(), key=lambda item: item[1]):
            if count and (2 * count < self.memory.segments[part] or count <= new):
                taken.add(part)
                new += count
        return taken

    def _plan_index(
        self, checkpoint_id: int, own: PartRef, current: dict[int, Entry], places: dict[int, Place]
    ) -> tuple[Memory, Index]:
        """The index of these entries, and what is known once it is written."""
        old = self.memory
        memory = replace(old, known={}, gone=set(old.gone))
        memory.segments = {
            part: old.segments[part]
            for part in {place.part for place in places.values() if place.kind == INLINE}
            if part is not None and part in old.segments
        }
        positions = {}
        for key, known in old.known.items():
            if known.position is not None:
                if places.get(key) is known.place:
                    positions[key] = known.position
                else:
                    memory.gone.add(known.position)
        changes = len(memory.gone) + len(current) - len(positions)
        if changes > max(_MIN_DELTA, old.count // 2) or not self._is_worth_keeping(memory):
            memory.full, memory.count, memory.gone = own, len(current), set()
            positions = {}
        is_full = memory.full == own
        added = [key for key in current if key not in positions]
        if is_full:
            positions = {key: at for at, key in enumerate(added)}
        for key, entry in current.items():
            one = old.known.get(key)
            place, position = places[key], positions.get(key)
            if one is None or one.position != position or one.place is not place:
                one = Known(entry, place, position)
            memory.known[key] = one
        index = Index(
            checkpoint_id,
            self._store.rank,
            self._managers,
            None if is_full else memory.full,
            sorted(memory.gone),
            [_index_entry(current[key], places[key]) for key in added],
        )
        return memory, index

    def _is_worth_keeping(self, memory: Memory) -> bool:
        """Whether there is a full index to build on, and its part is not kept for too many dead bytes."""
        if memory.full is None:
            return False
        part = self._store.find(memory.full.attempt, self._store.rank)
        return (
            part is not None
            and not part.doomed
            and (memory.full in memory.segments or memory.full_segment <= max(_MIN_DEAD_BYTES, memory.full_bytes // 2))
        )

    def _write(
        self,
        checkpoint_id: int,
        attempt: str,
        stamp: str,
        index: bytes,
        segment: Sequence[bytes],
        segment_bytes: int,
    ) -> None:
        layout = plan_object(len(index), segment_bytes)
        arena = self._store.acquire(layout.size)
        try:
            buffer = arena.buffer
            buffer[: layout.data_start] = object_header(layout, arena.size)
            at = layout.by_key["index"].begin
            buffer[at : at + len(index)] = index
            at = layout.by_key["segment"].begin
            for data in segment:
                buffer[at : at + len(data)] = data
                at += len(data)
            self._commit(checkpoint_id, attempt, arena, layout.size, labels_of(SNAPSHOT, checkpoint_id, stamp))
        except BaseException:
            self._store.release(arena)
            raise


def memory_of(
    ref: PartRef,
    index: Index,
    base: Index | None,
    entries: Sequence[tuple[Entry, IndexEntry]],
    index_bytes: Mapping[PartRef, int],
    segments: Mapping[PartRef, int],
) -> Memory:
    """What the next snapshot can leave out after one that was read back.

    Args:
        ref: its part.
        index, base: of it.
        entries: in the order of `snapshot_format.resolve`.
        index_bytes, segments: bytes of the indices of both, and of the segments of these and of all parts that entries
            lie in.
    """
    full, full_ref = (index, ref) if base is None or index.base is None else (base, index.base)
    gone = set(index.removed)
    positions: list[int | None] = [at for at in range(len(full.added)) if at not in gone]
    positions += [None] * (len(entries) - len(positions))
    known = {
        id(entry): Known(entry, told.place, position)
        for (entry, told), position in zip(entries, positions, strict=True)
    }
    used = {told.place.part for _, told in entries if told.place.kind == INLINE}
    return Memory(
        known,
        full_ref,
        index_bytes[full_ref],
        segments[full_ref],
        len(full.added),
        gone,
        {part: size for part, size in segments.items() if part in used},
    )


def _index_entry(entry: Entry, place: Place) -> IndexEntry:
    return IndexEntry(entry.key, entry.checkpoint_id, entry.writer, entry.persistent, entry.broadcast, place)
