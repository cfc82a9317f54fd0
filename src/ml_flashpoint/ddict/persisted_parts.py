"""What a manager persists of a checkpoint, and which of it which manager reads.

Owns the index and the items of a part, and how keys are dealt out anew when a checkpoint is restored into another
number of managers. Where parts are kept, and that they are what was written, is the persister's.

A part has an index in JSON, an item ``inline`` with all small values one after the other, and for each large one an
item with its object, named by its value id.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ml_flashpoint.ddict.checkpoint_persister import CheckpointPersister, PersistedCheckpoint
from ml_flashpoint.ddict.entries import Entry, InlineValue, StoredValue
from ml_flashpoint.ddict.keys import place
from ml_flashpoint.format.errors import DamagedError

if TYPE_CHECKING:
    from typing_extensions import Buffer

_FORMAT = 1
_INLINE = "inline"
_PERSISTENT, _BROADCAST = 1, 2


class Room(Protocol):
    """Where an object is read to; see `room.Room`."""

    buffer: memoryview

    def keep(self, value_id: str) -> StoredValue:
        """The value, now that the object is there."""

    def give_up(self) -> None:
        """Let go of it."""


def encode(entries: Sequence[Entry]) -> tuple[bytes, list[tuple[str, Buffer]]]:
    """Index and items of a part. Buffers are those of the values, which must stay until the part is written."""
    listed: list[list[Any]] = []
    inline: list[bytes] = []
    items: list[tuple[str, Buffer]] = []
    offset = 0
    for entry in entries:
        flags = entry.persistent * _PERSISTENT + entry.broadcast * _BROADCAST
        where: list[Any]
        if isinstance(entry.value, InlineValue):
            where = [offset, entry.value.nbytes]
            inline.append(entry.value.data)
            offset += entry.value.nbytes
        elif entry.value is not None:
            where = [entry.value.value_id, entry.value.size]
            items.append((entry.value.value_id, entry.value.arena.buffer[: entry.value.size]))
        else:
            continue
        listed.append([base64.b64encode(entry.key).decode(), entry.checkpoint_id, entry.writer, flags, *where])
    index = json.dumps({"format": _FORMAT, "entries": listed}, separators=(",", ":")).encode()
    return index, [(_INLINE, b"".join(inline)), *items]


def read(
    persister: CheckpointPersister,
    checkpoint: PersistedCheckpoint,
    number: int,
    managers: int,
    room_for: Callable[[int], Room],
    release: Callable[[StoredValue], None],
) -> list[Entry]:
    """The entries of a checkpoint that manager ``number`` of ``managers`` is to have.

    With as many managers as there were, each gets its own part. Otherwise keys are placed anew; what was written
    through `DDict.manager` goes by the number of that manager, and what `bput` wrote to all of them.

    Raises:
        DamagedError: something is not what was written.
        FlashpointError: it cannot be read, or there is no room.
    """
    same = checkpoint.managers == managers
    entries: list[Entry] = []
    try:
        for part in [number] if same else range(checkpoint.managers):
            listed = [
                each
                for each in _parse(persister.read_index(checkpoint, part))
                if same or _is_for(each, part, checkpoint.managers, number, managers)
            ]
            if not listed:
                continue
            inline = memoryview(persister.read_item(checkpoint, part, _INLINE))
            for key, checkpoint_id, writer, flags, where, size in listed:
                value: InlineValue | StoredValue
                if isinstance(where, int):
                    if where + size > len(inline):
                        raise DamagedError("the index of a persisted part points outside of it")
                    value = InlineValue(bytes(inline[where : where + size]))
                else:
                    value = _read_object(persister, checkpoint, part, where, size, room_for)
                entries.append(
                    Entry(key, checkpoint_id, writer, value, bool(flags & _PERSISTENT), bool(flags & _BROADCAST))
                )
    except BaseException:
        for entry in entries:
            if isinstance(entry.value, StoredValue):
                release(entry.value)
        raise
    return entries


def _read_object(
    persister: CheckpointPersister,
    checkpoint: PersistedCheckpoint,
    part: int,
    name: str,
    size: int,
    room_for: Callable[[int], Room],
) -> StoredValue:
    room = room_for(size)
    try:
        read = persister.read_item(checkpoint, part, name, into=room.buffer)
        if len(read) != size:
            raise DamagedError(f"a persisted value has {len(read)} bytes instead of {size}")
        return room.keep(name)
    except BaseException:
        room.give_up()
        raise


def _is_for(listed: tuple[Any, ...], part: int, before: int, number: int, managers: int) -> bool:
    key, _, _, flags, _, _ = listed
    if flags & _BROADCAST:
        return part == 0
    owner = place(key, before)
    return (place(key, managers) if owner == part else part % managers) == number


def _parse(index: bytes) -> Iterator[tuple[bytes, int, str, int, int | str, int]]:
    try:
        content = json.loads(index)
        if content["format"] != _FORMAT:
            raise DamagedError(f"the index of a persisted part has another format, {content['format']!a}")
        for key, checkpoint_id, writer, flags, where, size in content["entries"]:
            if not (
                type(checkpoint_id) is type(flags) is type(size) is int
                and min(checkpoint_id, flags, size) >= 0
                and isinstance(writer, str)
                and (isinstance(where, str) or (type(where) is int and where >= 0))
            ):
                raise DamagedError("the index of a persisted part has an entry that is none")
            yield base64.b64decode(key, validate=True), checkpoint_id, writer, flags, where, size
    except (ValueError, TypeError, KeyError, RecursionError, binascii.Error) as error:
        raise DamagedError(f"the index of a persisted part cannot be read: {error}") from error
