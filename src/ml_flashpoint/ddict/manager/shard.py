"""The rules of one manager's share of a dictionary: which value a key has at which checkpoint.

Owns the history of each key, the working set, rollback and what a snapshot holds. Pure: it knows neither processes
nor bytes, decides nothing about when a checkpoint is committed or retired, and is guarded by its manager's lock.

A key's history is a list of entries by checkpoint, then by arrival. A read at id n sees the last entry at or below n.
Two handles that write a key at the same id both keep their entry, so that a rollback of the later one brings the
earlier back. What is final is never rolled back: at or below the oldest id of the working set, the last write is all
that is kept.
"""

from __future__ import annotations

import dataclasses
import random
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, TypeAlias

from ml_flashpoint.ddict.errors import retired
from ml_flashpoint.memory.slot import Slot

if TYPE_CHECKING:
    from ml_flashpoint.format.names import SaveId

Value: TypeAlias = "InlineValue | StoredValue"
ENTRY_BYTES = 400  # what Python needs for a key and its entry, about
PERSISTENT, BROADCAST, DIRECT = 1, 2, 4  # flags of an entry: written by `pput`, by `bput`, through `DDict.manager`
_MOST_WRITERS = 16  # whose writes to one key are kept, so that those of killed ones can be dropped
_id_of = attrgetter("checkpoint_id")
_last_of = itemgetter(-1)
_what = attrgetter("checkpoint_id", "writer", "value", "flags")


@dataclass(frozen=True, slots=True)
class InlineValue:
    """A small value, encoded (`values.to_inline`)."""

    data: bytes

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return len(self.data)


@dataclass(eq=False)  # not frozen with slots, which have no room for weak references before Python 3.11
class StoredValue:
    """A large value: one object in one slot, which is used again once nothing refers to this."""

    value_id: str  # unique in the dictionary
    slot: Slot
    size: int  # bytes of the object; the slot may be larger
    unused: deque[Slot] | None = None  # where the slot goes then, unless it is that of a part, and goes with that
    part: SaveId | None = None

    def __del__(self) -> None:
        if self.part is None and self.unused is not None:
            self.unused.append(self.slot)  # in any thread, which may have any lock: nothing but this can be done here

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return self.slot.size


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """A state of a key."""

    key: bytes  # encoded (`keys.encode_key`)
    checkpoint_id: int  # id at which it was written
    writer: str  # id of the handle that wrote it
    value: Value | None  # none: deleted
    flags: int = 0
    # Its alone, so that handles can tell whether it is the one that they read. Not kept by snapshots, nor counted: a
    # manager that is started anew must not give out a number of the one before it again.
    sequence: int = field(default_factory=lambda: 1 + random.getrandbits(60))

    @property
    def persistent(self) -> bool:
        """True if the key does not have to be written again in each checkpoint."""
        return bool(self.flags & PERSISTENT)

    @property
    def broadcast(self) -> bool:
        """True if every manager has such an entry."""
        return bool(self.flags & BROADCAST)

    def is_written_at(self, checkpoint_id: int) -> bool:
        """Return True if it was written at this checkpoint, or does not have to be."""
        return self.checkpoint_id == checkpoint_id or self.persistent


class Shard:
    """See the module. Not thread-safe. ``is_final``: whether what is written at the first checkpoint is final at once,
    like all that has retired."""

    def __init__(self, *, is_final: bool = True) -> None:
        self.used_bytes = 0  # of the values of all entries, and about what Python needs for those
        self._first_final = self.final = 0 if is_final else -1
        self._history: dict[bytes, list[Entry]] = {}
        # Keys with entries at an id: collapsing and rolling back look at no others.
        self._touched: dict[int, set[bytes]] = {}
        # The entries of the last cut, with its id, and keys that may have another one at a later cut.
        self._cut: tuple[int, dict[bytes, Entry]] | None = None
        self._changed: set[bytes] = set()
        self.oldest = 0  # oldest checkpoint that can be read and written
        self.committed = -1
        """Newest checkpoint that there is a snapshot of; below it, only those of `kept` can be read and written."""
        self.kept: frozenset[int] = frozenset()

    # ---- reading ------------------------------------------------------------------------------------------

    def find(self, key: bytes, checkpoint_id: int, *, written: bool = False) -> Entry | None:
        """Return the entry that a read at ``checkpoint_id`` sees; None if there is no such key."""
        self.check_readable(checkpoint_id)
        entry = self._visible(key, checkpoint_id)
        if entry is None or entry.value is None or (written and not entry.is_written_at(checkpoint_id)):
            return None
        return entry

    def is_written(self, key: bytes, checkpoint_id: int) -> bool:
        """Return True if the key was written, or deleted, at ``checkpoint_id`` itself, or does not have to be."""
        entry = self._visible(key, checkpoint_id)
        return entry is not None and entry.is_written_at(checkpoint_id)

    def entries(self, checkpoint_id: int) -> Iterator[Entry]:
        """Entries of all keys that there are at ``checkpoint_id``."""
        self.check_readable(checkpoint_id)
        for history in self._history.values():
            entry = _seen_from(history, checkpoint_id)
            if entry is not None and entry.value is not None:
                yield entry

    def newest(self) -> list[Entry]:
        """Return the newest entry of each key, deletions included. Takes 20 ns a key."""
        return list(map(_last_of, self._history.values()))

    def cut(self, checkpoint_id: int) -> list[Entry]:
        """Return the entries of all keys that there are at ``checkpoint_id``."""
        self.check_readable(checkpoint_id)
        if self._cut is None or checkpoint_id < self._cut[0]:
            found = {entry.key: entry for entry in self.entries(checkpoint_id)}
        else:
            found = self._cut[1]
            for key in self._changed:
                entry = self.find(key, checkpoint_id)
                if entry is not None:
                    found[key] = entry
                else:
                    found.pop(key, None)
        self._cut = checkpoint_id, found
        self._changed = set().union(*(keys for each, keys in self._touched.items() if each > checkpoint_id))
        return list(found.values())

    def __len__(self) -> int:
        """Number of keys with any history."""
        return len(self._history)

    def _visible(self, key: bytes, checkpoint_id: int) -> Entry | None:
        history = self._history.get(key)
        return None if history is None else _seen_from(history, checkpoint_id)

    def check_readable(self, checkpoint_id: int) -> None:
        """Raise if a checkpoint can be neither read nor written."""
        if checkpoint_id < self.oldest or (checkpoint_id < self.committed and checkpoint_id not in self.kept):
            raise retired(checkpoint_id, self.oldest, self.committed, self.kept)

    # ---- writing ------------------------------------------------------------------------------------------

    def replaced_bytes(self, key: bytes, checkpoint_id: int, writer: str) -> int:
        """Return the bytes that a put would let go of."""
        its = self._history.get(key, ())
        if checkpoint_id <= self.final:
            return sum(_bytes_of(entry) for entry in its if entry.checkpoint_id <= self.final)
        return sum(_bytes_of(entry) for entry in its if (entry.checkpoint_id, entry.writer) == (checkpoint_id, writer))

    def put(self, entry: Entry) -> None:
        """Add an entry, in place of what its writer wrote there before; a value of None deletes the key."""
        self.check_readable(entry.checkpoint_id)
        history = self._history.setdefault(entry.key, [])
        place = bisect_right(history, entry.checkpoint_id, key=_id_of)
        history.insert(place, entry)
        if self._cut is not None:
            self._changed.add(entry.key)
        self.used_bytes += _bytes_of(entry)
        first = place
        final = entry.checkpoint_id <= self.final
        while first and history[first - 1].checkpoint_id == entry.checkpoint_id:
            first -= 1
            if final or history[first].writer == entry.writer:
                self._release(history.pop(first))
        if not final and entry.checkpoint_id <= self.oldest and place - first >= _MOST_WRITERS:
            self._release(history.pop(first))
        if final:
            self._collapse(entry.key)
        else:
            self._touched.setdefault(entry.checkpoint_id, set()).add(entry.key)

    def rollback(self, writer: str | None, to: int) -> None:
        """Discard what ``writer``, or with None anybody, wrote above checkpoint ``to``. What is final stays."""
        for checkpoint_id in [each for each in self._touched if each > to]:
            for key in list(self._touched[checkpoint_id]):
                history = self._history.get(key, [])
                there = [entry for entry in history if entry.checkpoint_id == checkpoint_id]
                gone = [entry for entry in there if writer in (None, entry.writer)]
                if self._cut is not None:
                    self._changed.add(key)
                for entry in gone:
                    history.remove(entry)
                    self._release(entry)
                if len(gone) == len(there):
                    self._touched[checkpoint_id].discard(key)
                if not history:
                    self._history.pop(key, None)
            if not self._touched[checkpoint_id]:
                del self._touched[checkpoint_id]

    # ---- checkpoints --------------------------------------------------------------------------------------

    def retire(self, oldest: int) -> None:
        """Let checkpoints below ``oldest`` leave the working set: of what they hold, only what is seen from there
        stays."""
        if oldest <= self.oldest:
            return
        self.final = self.oldest = oldest
        for checkpoint_id in [each for each in self._touched if each <= oldest]:
            for key in self._touched.pop(checkpoint_id):
                self._collapse(key)

    def _collapse(self, key: bytes) -> None:
        """Keep only the last of the entries that are final, and none if that is a deletion."""
        history = self._history.get(key)
        if history is None:
            return
        place = bisect_right(history, self.final, key=_id_of)
        keep = place - 1 if place and history[place - 1].value is not None else place
        for entry in history[:keep]:
            self._release(entry)
        del history[:keep]
        if not history:
            del self._history[key]

    def missing_after(self, checkpoint_id: int) -> bytes | None:
        """Return a key of ``checkpoint_id`` that must be, and was not yet, written again at a later one; None: there is
        none. Keys written with `pput`, and deleted ones, need not."""
        for key, history in self._history.items():
            if history[-1].checkpoint_id > checkpoint_id:
                continue
            if history[-1].value is not None and not history[-1].persistent:
                return key
        return None

    def load(self, snapshots: Iterable[tuple[int, Sequence[Entry]]]) -> None:
        """Replace everything by what snapshots hold, with the oldest of them as the oldest checkpoint."""
        self._history.clear()
        self._touched.clear()
        self._cut = None
        ordered = sorted(snapshots, key=lambda snapshot: snapshot[0])
        self.oldest = ordered[0][0] if ordered else 0
        self.final = self.oldest if ordered else self._first_final
        present: dict[bytes, Entry] = {}
        for checkpoint_id, entries in ordered:
            now = {entry.key: entry for entry in entries}
            for key in present.keys() - now.keys():
                self._add(Entry(key, checkpoint_id, "", None))
            for key, entry in now.items():
                earlier = present.get(key)
                # What was written anew at the same id, or recovered apart from the other, is the same twice.
                if earlier is not entry and (earlier is None or _what(earlier) != _what(entry)):
                    self._add(entry)
            present = now
        self.used_bytes = sum(_bytes_of(entry) for history in self._history.values() for entry in history)

    def _add(self, entry: Entry) -> None:
        history = self._history.setdefault(entry.key, [])
        # A write that came late, at an id that had a snapshot already, counts from where it was first seen.
        at = max(entry.checkpoint_id, history[-1].checkpoint_id) if history else entry.checkpoint_id
        if at != entry.checkpoint_id:
            entry = dataclasses.replace(entry, checkpoint_id=at)
        history.append(entry)
        if entry.checkpoint_id > self.final:
            self._touched.setdefault(entry.checkpoint_id, set()).add(entry.key)

    def _release(self, entry: Entry) -> None:
        self.used_bytes -= _bytes_of(entry)


def _seen_from(history: list[Entry], checkpoint_id: int) -> Entry | None:
    if history[-1].checkpoint_id <= checkpoint_id:  # nearly always
        return history[-1]
    place = bisect_right(history, checkpoint_id, key=_id_of)
    return history[place - 1] if place else None


def _bytes_of(entry: Entry) -> int:
    return ENTRY_BYTES + len(entry.key) + (0 if entry.value is None else entry.value.nbytes)
