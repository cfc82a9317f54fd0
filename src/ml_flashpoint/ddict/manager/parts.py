"""A manager's part of a persisted checkpoint, and how keys are dealt out anew into another number of managers.

A part has an item ``index`` (a full one, see `index`), an item ``inline`` with all small values one after the other,
and for each large value an item, by its number.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from ml_flashpoint.ddict.errors import DDictPersistError
from ml_flashpoint.ddict.manager.index import INLINE, Index, IndexEntry, decode_index, encode_index, fold, gather
from ml_flashpoint.ddict.manager.shard import BROADCAST, DIRECT, Entry, StoredValue
from ml_flashpoint.ddict.manager.store import VALUE_AT, ValueSlots, slot_header
from ml_flashpoint.ddict.options import Configuration
from ml_flashpoint.ddict.persistence import History, open_part, write_part
from ml_flashpoint.ddict.wire.keys import described, place
from ml_flashpoint.format.errors import DamagedError
from ml_flashpoint.format.names import SaveId
from ml_flashpoint.stores.version_store import StoredObject, Version

if TYPE_CHECKING:
    from typing_extensions import Buffer

_INDEX, _INLINE = "index", "inline"
_MOST_NAMED = 5  # keys, in an error
_OPEN_PARTS = 8

_SmallOf: TypeAlias = Callable[[int], memoryview]
"""The small values of a manager."""


class _Told(NamedTuple):
    """A key and its value, as a manager had them."""

    manager: int
    entry: IndexEntry


def _are_same(one: _Told, other: _Told, small_of: _SmallOf) -> bool:
    """Return True if two managers have one value. Large ones are not read for that."""
    if (one.entry.writer, one.entry.checkpoint_id) == (other.entry.writer, other.entry.checkpoint_id):
        return True
    small = [each.entry.inline_value(small_of(each.manager)) for each in (one, other) if each.entry.kind == INLINE]
    return len(small) == 2 and small[0] == small[1]


def _some_of(keys: Set[bytes]) -> str:
    return ", ".join(map(described, sorted(keys)[:_MOST_NAMED]))


@dataclass
class PersistedParts:
    """A manager's parts of persisted checkpoints, to write and to read.

    With as many managers as there were, each gets its own part. Otherwise keys are placed anew; what was written
    through `DDict.manager` goes by the number of that manager, and what `bput` wrote to all of them. Where that brings
    several values of one key to one manager, nothing is restored.
    """

    _configuration: Configuration
    _manager: int
    _slots: ValueSlots
    _read: tuple[Version, list[Entry]] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)  # of the next one only
    _begun: set[SaveId] = field(default_factory=set)

    @cached_property
    def _history(self) -> History:
        return History(self._configuration)

    def write(self, version: Version, entries: Sequence[Entry]) -> None:
        """Write this manager's part of an attempt, durably."""
        with self._lock:
            if version.save in self._begun:
                text = "the part was begun before, for a request whose answer was lost"
                raise DDictPersistError(text, manager=self._manager, checkpoint_id=version.step)
            self._begun.add(version.save)
        own, numbers = SaveId(0, version.step), itertools.count(1)
        listed, segment = gather(own, entries, lambda value: SaveId(next(numbers), version.step))
        index = encode_index(Index(own, self._manager, version.world_size, (), listed))
        large = [entry.value for entry in entries if isinstance(entry.value, StoredValue)]
        items: list[tuple[str, Buffer]] = [(_INDEX, index), (_INLINE, b"".join(segment))]
        items += [(f"{number}", value.slot.buffer[: value.size]) for number, value in enumerate(large, 1)]
        write_part(self._history.store, version, self._manager, items)

    @property
    def has_read(self) -> bool:
        """True if a checkpoint is read that nobody has taken."""
        return self._read is not None

    def prepare(self, version: Version | None) -> None:
        """Read a checkpoint, for `take`; None: let go of what was read, and nobody has taken."""
        self._read = None
        if version is not None:
            self._read = version, self.read(version)

    def take(self, version: Version) -> list[Entry]:
        """Return the entries of a checkpoint, read now if need be. Raises `FlashpointError`: see `read`."""
        found, self._read = self._read, None
        return found[1] if found is not None and found[0].save == version.save else self.read(version)

    def read(self, version: Version) -> list[Entry]:
        """Return the entries of a checkpoint that this manager is to have."""

        @lru_cache(_OPEN_PARTS)
        def part_of(manager: int) -> StoredObject:
            return open_part(self._history.store, version, manager)

        @lru_cache(2)
        def small_of(manager: int) -> memoryview:
            return part_of(manager).bytes_of(_INLINE)

        def index_of(manager: int) -> list[IndexEntry]:
            data, own = part_of(manager).bytes_of(_INDEX), SaveId(0, version.step)
            return fold([decode_index(data, own, manager, version.world_size, part_of(manager).path)])

        if version.world_size == self._configuration.managers:
            wanted = [_Told(self._manager, told) for told in index_of(self._manager)]
        else:
            wanted = self._dealt_anew(version, index_of, small_of)
        return [
            told.entry(
                told.inline_value(small_of(manager))
                if told.kind == INLINE
                else self._read_object(part_of(manager), f"{told.part.run}", told.length)
            )
            for manager, told in sorted(wanted, key=lambda each: each.manager)
        ]

    def _dealt_anew(
        self, version: Version, index_of: Callable[[int], list[IndexEntry]], small_of: _SmallOf
    ) -> list[_Told]:
        """Return what this manager is to have of all parts, which are of another number of managers."""
        before, managers = version.world_size, self._configuration.managers
        ours, everywhere, twice = dict[bytes, _Told](), dict[bytes, _Told](), set[bytes]()
        for part in range(before):
            for entry in index_of(part):
                key, told = entry.key, _Told(part, entry)
                if entry.flags & BROADCAST:
                    into = everywhere
                elif (part % managers if entry.flags & DIRECT else place(key, managers)) == self._manager:
                    into = ours
                else:
                    continue
                if not _are_same(into.setdefault(key, told), told, small_of):
                    twice.add(key)
        twice |= ours.keys() & everywhere.keys()
        if twice:
            raise DDictPersistError(
                f"cannot restore what {before} managers had into {managers}: {len(twice)} key(s) have several values "
                f"that one manager would have to hold, such as {_some_of(twice)}",
                manager=self._manager,
                checkpoint_id=version.step,
                hint=f"they were put through manager(i); make the dictionary with {before} managers",
            )
        return list({**everywhere, **ours}.values())

    def _read_object(self, part: StoredObject, name: str, size: int) -> StoredValue:
        entry = part.entry(name)
        if entry.nbytes != size:
            raise DamagedError(f"a persisted value has {entry.nbytes} bytes instead of {size}", path=part.path)
        reservation = self._slots.allocate(size)
        try:
            buffer = self._slots.room(reservation.value_id)[:size]
            part.read_into(entry.begin, buffer)
            buffer[:VALUE_AT] = slot_header(reservation.value_id, size)  # it was written under another id
            return self._slots.adopt(reservation.value_id)
        except BaseException:
            self._slots.abandon([reservation.value_id])
            raise
