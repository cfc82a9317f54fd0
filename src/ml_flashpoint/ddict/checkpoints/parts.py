"""What a manager puts into the parts of a snapshot, and what it leaves in those of earlier ones.

Owns committing values and snapshots to the store, and which index is full. It knows no holders, and drops nothing.

A snapshot has what has changed since the one before. It is full after `index.LONGEST_CHAIN` that were not, and
when those would take more than twice what a full one does: so there is never more in their segments that is dead than
what lives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ml_flashpoint.checkpoint_object_manager.arena import Arena
from ml_flashpoint.checkpoint_object_manager.held_part import HeldPart
from ml_flashpoint.checkpoint_object_manager.rank_store import RankStore
from ml_flashpoint.ddict.checkpoints.index import (
    LONGEST_CHAIN,
    SNAPSHOT,
    VALUE,
    Index,
    PartRef,
    encode_index,
    gather,
    gone,
    index_bytes,
    labels_of,
    object_header,
    plan_object,
)
from ml_flashpoint.ddict.manager.shard import Entry, StoredValue
from ml_flashpoint.format import knobs
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.digest import BlockDigester, digest_workers
from ml_flashpoint.format.errors import InvalidArgumentError
from ml_flashpoint.format.manifest import Manifest, ObjectRecord, object_name


@dataclass(frozen=True, slots=True)
class BuiltSnapshot:
    """A snapshot in the store.

    Attributes:
        ref: its part.
        chain: parts with the indices that it consists of, a full one first. Its own is not among them where nothing has
            changed.
        entries: all of them, by identity.
        stored: of those with large values, the parts that these are.
        chain_bytes: of the indices of the chain and the segments beside them, about.
        live_bytes: those that a full one would take.
    """

    ref: PartRef
    chain: tuple[PartRef, ...]
    entries: dict[int, Entry]
    stored: dict[int, PartRef]
    chain_bytes: int
    live_bytes: int

    @property
    def needs(self) -> frozenset[PartRef]:
        """The parts without which it cannot be read, itself among them."""
        return frozenset((self.ref, *self.chain, *self.stored.values()))


class PartBuilder:
    """Commits the parts of one manager. For one thread at a time. ``stamp`` gives the next stamp."""

    def __init__(self, store: RankStore, node: str, managers: int, stamp: Callable[[], str]) -> None:
        self._store = store
        self._node = node
        self._managers = managers
        self._stamp = stamp

    def build(
        self,
        own: PartRef,
        stamp: str,
        entries: Sequence[Entry],
        before: BuiltSnapshot | None,
        check: Callable[[], None],
    ) -> BuiltSnapshot:
        """Commit a snapshot, and before it every stored value that is no part yet.

        Takes time proportional to what changed, but for a few passes in C.

        Args:
            own: its part.
            before: one whose parts are all here, to build on.
            check: called now and then; may raise.

        Raises:
            InvalidArgumentError: an entry cannot be in an index.
            FlashpointError: the store refuses. There is no snapshot then, but values may have been committed.
        """
        current = dict(zip(map(id, entries), entries, strict=True))
        known = {} if before is None else before.entries
        lost = [known[key] for key in known.keys() - current.keys()]
        fresh = [current[key] for key in current.keys() - known.keys()]
        stored = {} if before is None else dict(before.stored)
        for entry in lost:
            stored.pop(id(entry), None)
        for entry in fresh:
            if isinstance(entry.value, StoredValue):
                check()
                stored[id(entry)] = self._seal_value(own.step, entry.value)
        check()
        new_keys = {entry.key for entry in fresh}
        missing = [entry.key for entry in lost if entry.key not in new_keys]
        live_bytes = (0 if before is None else before.live_bytes) + _bytes_of(fresh) - _bytes_of(lost)
        changes = _bytes_of(fresh) + sum(map(len, missing))
        told: tuple[PartRef, ...] = ()
        if before is None or self._is_full_due(before, changes, live_bytes):
            fresh, missing, chain_bytes = list(entries), [], live_bytes
        else:
            told, chain_bytes = before.chain, before.chain_bytes + changes
        chain = (*told, own) if fresh or missing or not told else told
        listed, segment = gather(own, fresh, lambda value: self._part_of(value.value_id))
        listed += [gone(key, own) for key in missing]
        index = encode_index(Index(own, self._store.rank, self._managers, told, listed))
        self._write(own, stamp, index, segment)
        return BuiltSnapshot(own, chain, current, stored, chain_bytes, live_bytes)

    def _is_full_due(self, before: BuiltSnapshot, changes: int, live_bytes: int) -> bool:
        found = [self._store.find(ref.attempt, self._store.rank) for ref in before.chain]
        if any(part is None or part.doomed for part in found):
            return True
        is_long = len(before.chain) >= LONGEST_CHAIN and changes > 0
        return is_long or before.chain_bytes + changes >= max(1, 2 * live_bytes)

    def _seal_value(self, checkpoint_id: int, value: StoredValue) -> PartRef:
        if self._store.find(value.value_id, self._store.rank) is None:
            labels = labels_of(VALUE, checkpoint_id, self._stamp())
            self._commit(PartRef(value.value_id, checkpoint_id), value.arena, value.size, labels)
        return self._part_of(value.value_id)

    def _part_of(self, value_id: str) -> PartRef:
        part = self._store.find(value_id, self._store.rank)
        if part is None:
            raise InvalidArgumentError("a stored value is not in the store", argument="entries", value=value_id)
        step = CheckpointContainerId.parse_version_container(part.version)
        assert step is not None  # the store has no other versions
        return PartRef(value_id, step)

    def _commit(self, ref: PartRef, arena: Arena, size: int, labels: dict[str, str]) -> HeldPart:
        rank = self._store.rank
        block_size = knobs.block_bytes()
        digests = BlockDigester(arena.buffer, size, digest_workers(), block_size=block_size).finish()
        record = ObjectRecord(object_name(rank, ref.attempt), size, arena.size, digests, block_size)
        manifest = Manifest(ref.version, rank, self._managers, ref.attempt, self._node, (record,), labels)
        return self._store.commit(manifest, [arena])

    def _write(self, ref: PartRef, stamp: str, index: bytes, segment: Sequence[bytes]) -> None:
        layout = plan_object(len(index), sum(map(len, segment)))
        arena = self._store.acquire(layout.size)
        try:
            arena.buffer[: layout.data_start] = object_header(layout, arena.size)
            for key, pieces in (("index", [index]), ("segment", segment)):
                at = layout.by_key[key].begin
                for data in pieces:
                    arena.buffer[at : at + len(data)] = data
                    at += len(data)
            self._commit(ref, arena, layout.size, labels_of(SNAPSHOT, ref.step, stamp))
        except BaseException:
            self._store.release(arena)
            raise


def _bytes_of(entries: Iterable[Entry]) -> int:
    return sum(map(index_bytes, entries))
