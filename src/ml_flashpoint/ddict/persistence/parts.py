"""What a manager persists of a checkpoint, and which of it which manager reads.

Owns the items of a part, and how keys are dealt out anew when a checkpoint is restored into another number of managers.
Where parts are kept, and that they are what was written, is the persister's.

A part has a full index (`index`), an item ``inline`` with all small values one after the other, and for each
large one an item with its object, named by its value id.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ml_flashpoint.checkpoint_object_manager.rank_store import RankStore
from ml_flashpoint.ddict.checkpoints.index import (
    INLINE,
    Index,
    IndexEntry,
    PartRef,
    decode_index,
    encode_index,
    fold,
    gather,
)
from ml_flashpoint.ddict.client.keys import place
from ml_flashpoint.ddict.manager.arenas import ValueArenas, header_anew
from ml_flashpoint.ddict.manager.shard import Entry, StoredValue, Value
from ml_flashpoint.ddict.persistence.persister import PersistedCheckpoint
from ml_flashpoint.ddict.persistence.queue import PersistedRun
from ml_flashpoint.format.errors import DamagedError

if TYPE_CHECKING:
    from typing_extensions import Buffer

_INLINE = "inline"


def encode(
    checkpoint_id: int, manager: int, managers: int, entries: Sequence[Entry]
) -> tuple[bytes, list[tuple[str, Buffer]]]:
    """Index and items of a part. Buffers are those of the values, which must stay until the part is written."""
    own = PartRef(_INLINE, checkpoint_id)
    listed, segment = gather(own, entries, lambda value: PartRef(value.value_id, checkpoint_id))
    items: list[tuple[str, Buffer]] = [
        (entry.value.value_id, entry.value.arena.buffer[: entry.value.size])
        for entry in entries
        if isinstance(entry.value, StoredValue)
    ]
    return encode_index(Index(own, manager, managers, (), listed)), [(_INLINE, b"".join(segment)), *items]


@dataclass
class PartReader:
    """Reads what a manager is to have of persisted checkpoints.

    With as many managers as there were, each gets its own part. Otherwise keys are placed anew; what was written
    through `DDict.manager` goes by the number of that manager, and what `bput` wrote to all of them.
    """

    _run: PersistedRun
    _store: RankStore
    _arenas: ValueArenas
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
        """The entries of a checkpoint that this manager is to have. Raises `DamagedError`: something is not what was
        written; `FlashpointError`: it cannot be read, or there is no room."""
        own = [self._store.rank] if checkpoint.managers == self._managers else range(checkpoint.managers)
        return [entry for part in own for entry in self._read_part(checkpoint, part)]

    def _read_part(self, checkpoint: PersistedCheckpoint, part: int) -> Iterator[Entry]:
        own = PartRef(_INLINE, checkpoint.checkpoint_id)
        data = memoryview(self._run.persister.read_index(checkpoint, part))
        told = fold([decode_index(data, own, part, checkpoint.managers, f"index of part {part}")])
        if wanted := [each for each in told if self._is_for_us(each, part, checkpoint.managers)]:
            inline = memoryview(self._run.persister.read_item(checkpoint, part, _INLINE))
            for each in wanted:
                value: Value
                if each.kind == INLINE:
                    value = each.inline_value(inline)
                else:
                    value = self._read_object(checkpoint, part, each.part.attempt, each.length)
                yield each.entry(value)

    def _is_for_us(self, told: IndexEntry, part: int, before: int) -> bool:
        if before == self._managers:
            return True
        if told.broadcast:
            return part == 0
        owner = place(told.key, before)
        number = place(told.key, self._managers) if owner == part else part % self._managers
        return number == self._store.rank

    def _read_object(self, checkpoint: PersistedCheckpoint, part: int, name: str, size: int) -> StoredValue:
        reservation = self._arenas.allocate(size)
        try:
            buffer = self._store.arena_by_path(Path(reservation.path)).buffer[:size]
            read = self._run.persister.read_item(checkpoint, part, name, into=buffer)
            if len(read) != size:
                raise DamagedError(f"a persisted value has {len(read)} bytes instead of {size}")
            # It was written under another id, and in an arena of another size.
            header = header_anew(buffer, name, reservation.value_id, reservation.size)
            buffer[: len(header)] = header
            return self._arenas.adopt(reservation.value_id)
        except BaseException:
            self._arenas.abandon([reservation.value_id])
            raise
