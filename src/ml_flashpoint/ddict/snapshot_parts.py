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
from ml_flashpoint.checkpoint_object_manager.held_part import HeldPart
from ml_flashpoint.checkpoint_object_manager.rank_store import RankStore
from ml_flashpoint.ddict.entries import Entry, InlineValue, StoredValue
from ml_flashpoint.ddict.snapshot_format import SNAPSHOT, VALUE, PartRef, labels_of, object_header, plan_object
from ml_flashpoint.ddict.snapshot_index import INLINE, NOWHERE, STORED, Index, IndexEntry, Place, encode_index
from ml_flashpoint.format import knobs
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.digest import BlockDigester, digest_workers
from ml_flashpoint.format.errors import InvalidArgumentError
from ml_flashpoint.format.manifest import Manifest, ObjectRecord, object_name

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
        outside: those of them that are not in the full index.
        uses: how many of them lie in each part.
        live: how many bytes of the segment of a part they take.
        segments: bytes of the segment of each part that one of them lies in.
        full: part of the newest full index.
        full_bytes, full_segment: bytes of that index, and of the segment beside it.
        count: entries of that index.
        gone: positions in it that are no more.
    """

    known: dict[int, Known] = field(default_factory=dict)
    outside: set[int] = field(default_factory=set)
    uses: dict[PartRef, int] = field(default_factory=dict)
    live: dict[PartRef, int] = field(default_factory=dict)
    segments: dict[PartRef, int] = field(default_factory=dict)
    full: PartRef | None = None
    full_bytes: int = 0
    full_segment: int = 0
    count: int = 0
    gone: set[int] = field(default_factory=set)

    def copy(self) -> Memory:
        """One that can be changed without this one."""
        return replace(
            self,
            known=dict(self.known),
            outside=set(self.outside),
            uses=dict(self.uses),
            live=dict(self.live),
            segments=dict(self.segments),
            gone=set(self.gone),
        )

    def add(self, entry: Entry, place: Place, position: int | None = None) -> None:
        """An entry is in the snapshot."""
        self.known[id(entry)] = Known(entry, place, position)
        if position is None:
            self.outside.add(id(entry))
        part = place.part
        if part is not None:
            self.uses[part] = self.uses.get(part, 0) + 1
            if place.kind == INLINE:
                self.live[part] = self.live.get(part, 0) + place.length

    def remove(self, key: int) -> None:
        """An entry is not in it any more."""
        known = self.known.pop(key)
        if known.position is None:
            self.outside.discard(key)
        else:
            self.gone.add(known.position)
        part = known.place.part
        if part is not None:
            self.uses[part] -= 1
            if known.place.kind == INLINE:
                self.live[part] -= known.place.length
            if not self.uses[part]:
                del self.uses[part]
                self.live.pop(part, None)
                self.segments.pop(part, None)

    def become_full(self, ref: PartRef) -> None:
        """All entries are in the index of this part, in the order of `known`."""
        self.full, self.count = ref, len(self.known)
        self.outside, self.gone = set(), set()
        self.known = {
            key: Known(known.entry, known.place, position) for position, (key, known) in enumerate(self.known.items())
        }

    def without_dropped(self, kept: Collection[str]) -> Memory:
        """What is left of it when only parts of these attempts are kept."""
        dropped = {part for part in self.uses if part.attempt not in kept}
        has_full = self.full is not None and self.full.attempt in kept
        if not dropped and (has_full or self.full is None):
            return self
        memory = self.copy()
        for key in [key for key, known in self.known.items() if known.place.part in dropped]:
            memory.remove(key)
        if not has_full:
            memory.full, memory.count, memory.gone = None, 0, set()
            memory.known = {key: replace(known, position=None) for key, known in memory.known.items()}
            memory.outside = set(memory.known)
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

    def _commit(self, checkpoint_id: int, attempt: str, arena: Arena, size: int, labels: dict[str, str]) -> HeldPart:
        rank = self._store.rank
        block_size = knobs.block_bytes()
        digests = BlockDigester(arena.buffer, size, digest_workers(), block_size=block_size).finish()
        record = ObjectRecord(object_name(rank, attempt), size, arena.size, digests, block_size)
        version = CheckpointContainerId.format_version_container(checkpoint_id)
        manifest = Manifest(version, rank, self._managers, attempt, self._node, (record,), labels)
        return self._store.commit(manifest, [arena])

    def build(
        self, checkpoint_id: int, attempt: str, stamp: str, entries: Sequence[Entry], check: Callable[[], None]
    ) -> BuiltSnapshot:
        """Commit a snapshot, and before it every stored value that is no part yet.

        Takes time proportional to what changed since the last one, but for a few passes in C.

        Args:
            check: called now and then; may raise.

        Raises:
            InvalidArgumentError: an entry cannot be in an index.
            FlashpointError: the store refuses. There is no snapshot then, but values may have been committed.
        """
        own = PartRef(attempt, checkpoint_id)
        current = dict(zip(map(id, entries), entries, strict=True))
        memory = self.memory.copy()
        for key in memory.known.keys() - current.keys():
            memory.remove(key)
        known = memory.known
        fresh = [current[key] for key in current.keys() - known.keys()] if known else list(current.values())
        for entry in fresh:
            if isinstance(entry.value, StoredValue):
                check()
                self._seal_value(checkpoint_id, entry.value)
        check()
        fresh += self._take_along(memory, fresh)
        segment: list[bytes] = []
        segment_bytes = 0
        for entry in fresh:
            if isinstance(entry.value, InlineValue):
                data = entry.value.data
                memory.add(entry, Place(INLINE, own, segment_bytes, len(data)))
                segment.append(data)
                segment_bytes += len(data)
            elif isinstance(entry.value, StoredValue):
                memory.add(entry, self._stored_place(entry.value))
            else:
                memory.add(entry, NOWHERE)
        if segment:
            memory.segments[own] = segment_bytes
        index = self._plan_index(memory, own)
        encoded = encode_index(index)
        if index.base is None:
            memory.full_bytes, memory.full_segment = len(encoded), segment_bytes
        self._write(checkpoint_id, attempt, stamp, encoded, segment, segment_bytes)
        self.memory = memory
        return BuiltSnapshot(own, frozenset(memory.uses) | {own} | ({index.base} if index.base is not None else set()))

    def _seal_value(self, checkpoint_id: int, value: StoredValue) -> None:
        if self._store.find(value.value_id, self._store.rank) is None:
            labels = labels_of(VALUE, checkpoint_id, self._stamp())
            self._commit(checkpoint_id, value.value_id, value.arena, value.size, labels)

    def _stored_place(self, value: StoredValue) -> Place:
        part = self._store.find(value.value_id, self._store.rank)
        if part is None:
            raise InvalidArgumentError("a stored value is not in the store", argument="entries", value=value.value_id)
        step = CheckpointContainerId.parse_version_container(part.version)
        assert step is not None  # the store has no other versions
        return Place(STORED, PartRef(value.value_id, step), 0, value.size)

    def _take_along(self, memory: Memory, fresh: Iterable[Entry]) -> list[Entry]:
        """Take out the entries whose segments the new one is to take the place of."""
        new = sum(len(entry.value.data) for entry in fresh if isinstance(entry.value, InlineValue))
        taken: set[PartRef | None] = set()
        for part, count in sorted(memory.live.items(), key=lambda item: item[1]):
            if count and (2 * count < memory.segments[part] or count <= new):
                taken.add(part)
                new += count
        moved = [known.entry for known in memory.known.values() if known.place.part in taken] if taken else []
        for entry in moved:
            memory.remove(id(entry))
        return moved

    def _plan_index(self, memory: Memory, own: PartRef) -> Index:
        changes = len(memory.gone) + len(memory.outside)
        if changes > max(_MIN_DELTA, memory.count // 2) or not self._is_worth_keeping(memory):
            memory.become_full(own)
            base, added = None, list(memory.known.values())
        else:
            base, added = memory.full, [memory.known[key] for key in memory.outside]
        return Index(
            own.step,
            self._store.rank,
            self._managers,
            base,
            sorted(memory.gone),
            [_index_entry(known.entry, known.place) for known in added],
        )

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
        entries: in the order of `snapshot_index.resolve`.
        index_bytes, segments: bytes of the indices of both, and of the segments of these and of all parts that entries
            lie in.
    """
    full, full_ref = (index, ref) if base is None or index.base is None else (base, index.base)
    gone = set(index.removed)
    positions: list[int | None] = [at for at in range(len(full.added)) if at not in gone]
    positions += [None] * (len(entries) - len(positions))
    memory = Memory(
        full=full_ref,
        full_bytes=index_bytes[full_ref],
        full_segment=segments[full_ref],
        count=len(full.added),
        gone=gone,
    )
    for (entry, told), position in zip(entries, positions, strict=True):
        memory.add(entry, told.place, position)
    memory.segments = {part: segments[part] for part in memory.live}
    return memory


def _index_entry(entry: Entry, place: Place) -> IndexEntry:
    return IndexEntry(entry.key, entry.checkpoint_id, entry.writer, entry.persistent, entry.broadcast, place)
