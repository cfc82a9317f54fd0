"""A manager's part of a persisted checkpoint, and how keys are dealt out anew into another number of managers.

A part has an item ``index`` (see `index`), an item ``inline`` with all small values one after the other, and for each
large value an item, by its number.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple

from ml_flashpoint.ddict.errors import DDictPersistError
from ml_flashpoint.ddict.manager.index import IndexEntry, decode_index, encode_index, encode_lines, segment_of
from ml_flashpoint.ddict.manager.shard import BROADCAST, DIRECT, Entry, StoredValue, Value
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


class _Told(NamedTuple):
    """A key and its value, as a manager had them."""

    manager: int
    entry: IndexEntry


class PersistedParts:
    """A manager's parts of persisted checkpoints, to write and to read.

    With as many managers as there were, each gets its own part. Otherwise keys are placed anew; what was written
    through `DDict.manager` goes by the number of that manager, and what `bput` wrote to all of them. Where that brings
    several values of one key to one manager, nothing is restored.
    """

    def __init__(self, configuration: Configuration, manager: int, slots: ValueSlots) -> None:
        self._configuration, self._manager, self._slots = configuration, manager, slots
        self._ready: tuple[SaveId, list[Entry]] | None = None
        self._lock = threading.Lock()  # of the next one only
        self._begun: set[SaveId] = set()

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
        step, numbers = version.step, itertools.count(1)
        lines = encode_lines(entries, lambda value: SaveId(next(numbers), step))
        index = encode_index(SaveId(0, step), self._manager, version.world_size, lines)
        large = [entry.value for entry in entries if isinstance(entry.value, StoredValue)]
        items: list[tuple[str, Buffer]] = [(_INDEX, index), (_INLINE, b"".join(segment_of(entries)))]
        items += [(f"{number}", value.slot.buffer[: value.size]) for number, value in enumerate(large, 1)]
        write_part(self._history.store, version, self._manager, items)

    def prepare(self, version: Version | None) -> None:
        """Read a checkpoint, for `take`; None: let go of what was read, and nobody has taken."""
        self._ready = None
        if version is not None:
            self._ready = version.save, self.read(version)

    def take(self, version: Version) -> list[Entry]:
        """Return the entries of a checkpoint, read now if need be. Raises `FlashpointError`: see `read`."""
        found, self._ready = self._ready, None
        return found[1] if found is not None and found[0] == version.save else self.read(version)

    def read(self, version: Version) -> list[Entry]:
        """Return the entries of a checkpoint that this manager is to have."""
        part_of = lru_cache(_OPEN_PARTS)(partial(open_part, self._history.store, version))
        small_of = lru_cache(2)(lambda manager: part_of(manager).bytes_of(_INLINE))

        def told_by(manager: int) -> Iterator[_Told]:
            part, own = part_of(manager), SaveId(0, version.step)
            index = decode_index(part.bytes_of(_INDEX), own, manager, version.world_size, part.path)
            return (_Told(manager, entry) for entry in index)

        def value_of(manager: int, entry: IndexEntry) -> Value:
            if entry.part is None:
                return entry.inline_value(small_of(manager))
            return self._read_object(part_of(manager), f"{entry.part.run}", entry.length)

        if version.world_size == self._configuration.managers:
            wanted = list(told_by(self._manager))
        else:
            everything = itertools.chain.from_iterable(map(told_by, range(version.world_size)))
            wanted = self._dealt_anew(version, everything, value_of)
        return [told.entry.entry(value_of(*told)) for told in sorted(wanted, key=lambda each: each.manager)]

    def _dealt_anew(
        self, version: Version, everything: Iterator[_Told], value_of: Callable[[int, IndexEntry], Value]
    ) -> list[_Told]:
        """Return what this manager is to have of all parts, which are of another number of managers."""
        before, managers = version.world_size, self._configuration.managers
        ours, everywhere, twice = dict[bytes, _Told](), dict[bytes, _Told](), set[bytes]()
        for told in everything:
            key, flags = told.entry.key, told.entry.flags
            if not flags & BROADCAST:
                to = told.manager % managers if flags & DIRECT else place(key, managers)
                if to != self._manager:
                    continue
            other = (everywhere if flags & BROADCAST else ours).setdefault(key, told)
            is_written_once = (other.entry.writer, other.entry.checkpoint_id) == (
                told.entry.writer,
                told.entry.checkpoint_id,
            )
            are_small = other.entry.part is None and told.entry.part is None  # large ones are not read for that
            if not (is_written_once or (are_small and value_of(*other) == value_of(*told))):
                twice.add(key)
        twice |= ours.keys() & everywhere.keys()
        if twice:
            some = ", ".join(map(described, sorted(twice)[:_MOST_NAMED]))
            raise DDictPersistError(
                f"cannot restore what {before} managers had into {managers}: {len(twice)} key(s) have several values "
                f"that one manager would have to hold, such as {some}",
                manager=self._manager,
                checkpoint_id=version.step,
                hint=f"they were put through manager(i); make the dictionary with {before} managers",
            )
        return [*everywhere.values(), *ours.values()]

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
