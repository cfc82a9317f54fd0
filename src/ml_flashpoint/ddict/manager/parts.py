"""What a manager persists of a checkpoint, and which of it which manager reads.

Owns the items of a part, and how keys are dealt out anew when a checkpoint is restored into another number of managers.
Where parts are kept, and that they are what was written, is the persister's.

A part has a full index (`index`), an item ``inline`` with all small values one after the other, and for each
large one an item with its object, named by its value id.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from ml_flashpoint.ddict.errors import DDictPersistError
from ml_flashpoint.ddict.manager.index import INLINE, Index, IndexEntry, decode_index, encode_index, fold, gather
from ml_flashpoint.ddict.manager.part_ref import PartRef
from ml_flashpoint.ddict.manager.shard import BROADCAST, DIRECT, Entry, StoredValue
from ml_flashpoint.ddict.manager.slots import ValueSlots, header_anew
from ml_flashpoint.ddict.persistence.queue import PersistedRun
from ml_flashpoint.ddict.persister import PersistedCheckpoint
from ml_flashpoint.ddict.wire.keys import described, place
from ml_flashpoint.format.errors import DamagedError

if TYPE_CHECKING:
    from typing_extensions import Buffer

_INLINE = "inline"
_MOST_NAMED = 5  # keys, in an error


def encode(
    checkpoint_id: int, manager: int, managers: int, entries: Sequence[Entry]
) -> tuple[bytes, list[tuple[str, Buffer]]]:
    """Index and items of a part. Buffers are those of the values, which must stay until the part is written."""
    own = PartRef(_INLINE, checkpoint_id)
    listed, segment = gather(own, entries, lambda value: PartRef(value.value_id, checkpoint_id))
    items: list[tuple[str, Buffer]] = [
        (entry.value.value_id, entry.value.slot.buffer[: entry.value.size])
        for entry in entries
        if isinstance(entry.value, StoredValue)
    ]
    return encode_index(Index(own, manager, managers, (), listed)), [(_INLINE, b"".join(segment)), *items]


class _Told(NamedTuple):
    """A key and its value, as a manager had them."""

    manager: int
    entry: IndexEntry


_SmallOf: TypeAlias = Callable[[int], memoryview]
"""The small values of a manager."""


def _are_same(one: _Told, other: _Told, small_of: _SmallOf) -> bool:
    """Whether what two managers have is one value. Large ones are not read for that."""
    if (one.entry.writer, one.entry.checkpoint_id) == (other.entry.writer, other.entry.checkpoint_id):
        return True
    small = [each.entry.inline_value(small_of(each.manager)) for each in (one, other) if each.entry.kind == INLINE]
    return len(small) == 2 and small[0] == small[1]


def _some_of(keys: Set[bytes]) -> list[bytes]:
    return sorted(keys)[:_MOST_NAMED]


@dataclass
class PartReader:
    """Reads what a manager is to have of persisted checkpoints.

    With as many managers as there were, each gets its own part. Otherwise keys are placed anew; what was written
    through `DDict.manager` goes by the number of that manager, and what `bput` wrote to all of them. Where that brings
    several values of one key to one manager, nothing is restored.
    """

    _run: PersistedRun
    _manager: int
    _slots: ValueSlots
    _managers: int
    _read: tuple[PersistedCheckpoint, list[Entry]] | None = None

    @property
    def has_read(self) -> bool:
        """Whether a checkpoint is read that nobody has taken."""
        return self._read is not None

    def prepare(self, checkpoint: PersistedCheckpoint) -> None:
        """Read a checkpoint, for `take`. Raises `FlashpointError`: see `read`."""
        self.abort()
        self._read = checkpoint, self.read(checkpoint)

    def take(self, checkpoint: PersistedCheckpoint) -> list[Entry]:
        """The entries of a checkpoint, read now if they were not before. Raises `FlashpointError`: see `read`."""
        found, self._read = self._read, None
        return found[1] if found is not None and found[0] == checkpoint else self.read(checkpoint)

    def abort(self) -> None:
        """Let go of what was read, and nobody has taken."""
        self._read = None

    def read(self, checkpoint: PersistedCheckpoint) -> list[Entry]:
        """The entries of a checkpoint that this manager is to have.

        Raises:
            DDictPersistError: Several values of one key would come to one manager.
            DamagedError: Something is not what was written.
            FlashpointError: It cannot be read, or there is no room.
        """

        @lru_cache(2)
        def small_of(part: int) -> memoryview:
            return memoryview(self._run.persister.read_item(checkpoint, part, _INLINE))

        if checkpoint.managers == self._managers:
            wanted = [_Told(self._manager, told) for told in self._index(checkpoint, self._manager)]
        else:
            wanted = self._dealt_anew(checkpoint, small_of)
        return [
            told.entry(
                told.inline_value(small_of(part))
                if told.kind == INLINE
                else self._read_object(checkpoint, part, told.part.name, told.length)
            )
            for part, told in sorted(wanted, key=lambda each: each.manager)
        ]

    def _index(self, checkpoint: PersistedCheckpoint, part: int) -> list[IndexEntry]:
        own = PartRef(_INLINE, checkpoint.checkpoint_id)
        data = memoryview(self._run.persister.read_index(checkpoint, part))
        return fold([decode_index(data, own, part, checkpoint.managers, f"index of part {part}")])

    def _dealt_anew(self, checkpoint: PersistedCheckpoint, small_of: _SmallOf) -> list[_Told]:
        """What this manager is to have of all parts, which are of another number of managers."""
        before, ours, everywhere, twice = checkpoint.managers, dict[bytes, _Told](), dict[bytes, _Told](), set[bytes]()
        for part in range(before):
            for entry in self._index(checkpoint, part):
                key, told, direct = entry.key, _Told(part, entry), bool(entry.flags & DIRECT)
                if entry.flags & BROADCAST:
                    if not _are_same(everywhere.setdefault(key, told), told, small_of):
                        twice.add(key)
                    continue
                goes_to = part % self._managers if direct else place(key, self._managers)
                if goes_to == self._manager and not _are_same(ours.setdefault(key, told), told, small_of):
                    twice.add(key)
        twice |= ours.keys() & everywhere.keys()
        if twice:
            raise DDictPersistError(
                f"cannot restore what {before} managers had into {self._managers}: {len(twice)} key(s) have several "
                f"values that one manager would have to hold, such as {', '.join(map(described, _some_of(twice)))}",
                manager=self._manager,
                checkpoint_id=checkpoint.checkpoint_id,
                hint=f"they were put through manager(i); make the dictionary with {before} managers",
            )
        return list({**everywhere, **ours}.values())

    def _read_object(self, checkpoint: PersistedCheckpoint, part: int, name: str, size: int) -> StoredValue:
        reservation = self._slots.allocate(size)
        try:
            buffer = self._slots.room(reservation.value_id)[:size]
            read = self._run.persister.read_item(checkpoint, part, name, into=buffer)
            if len(read) != size:
                raise DamagedError(f"a persisted value has {len(read)} bytes instead of {size}")
            # It was written under another id, and in a slot of another size.
            header = header_anew(buffer, name, reservation.value_id, reservation.size)
            buffer[: len(header)] = header
            return self._slots.adopt(reservation.value_id)
        except BaseException:
            self._slots.abandon([reservation.value_id])
            raise
