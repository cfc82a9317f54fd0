"""Indices: the entries of all keys of a manager at one cut, as bytes.

An index is lines of JSON: its head, then lists of entries (`IndexEntry`), with the bytes of each key as characters. Not
all in one line, so that the thread that writes very many of them can be interrupted, and that lines of entries that did
not change need not be written again. Small values lie in a segment, one after the other, in the order of their entries;
large ones are parts, or items, of their own. What is decoded is distrusted, also when its digest is right.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

from ml_flashpoint.ddict.manager.shard import Entry, InlineValue, StoredValue, Value
from ml_flashpoint.ddict.manager.store import part_id
from ml_flashpoint.ddict.options import check_checkpoint_id
from ml_flashpoint.format.errors import DamagedError, FlashpointError
from ml_flashpoint.format.names import SaveId

_LENGTH: Final = struct.Struct("<Q")
_FORMAT: Final = 7
_ROWS: Final = 1000  # most in a line
_to_json: Final = json.JSONEncoder(separators=(",", ":")).encode


def join_object(index: bytes, segment: Sequence[bytes]) -> bytes:
    """Return the object of a snapshot: the length of its index (8, little-endian), that, and small values."""
    return b"".join((_LENGTH.pack(len(index)), index, *segment))


def split_object(data: memoryview, path: str) -> tuple[memoryview, memoryview]:
    """Return index and segment of the object of a snapshot; views."""
    end = _LENGTH.size + (_LENGTH.unpack_from(data)[0] if data.nbytes >= _LENGTH.size else data.nbytes)
    if end > data.nbytes:
        raise DamagedError("a snapshot without its index", path=path)
    return data[_LENGTH.size : end], data[end:]


class IndexEntry(NamedTuple):
    """An entry of an index; see `shard.Entry`."""

    key: bytes
    checkpoint_id: int
    writer: str
    flags: int
    part: SaveId | None  # that the value is; None: the value lies in the segment
    offset: int  # in the segment
    length: int  # of the value, in bytes

    def entry(self, value: Value) -> Entry:
        """The entry, with its value."""
        return Entry(self.key, self.checkpoint_id, self.writer, value, self.flags)

    def inline_value(self, segment: memoryview) -> InlineValue:
        """The value, from the segment that it lies in. Raises `DamagedError`: it does not."""
        if self.offset + self.length > segment.nbytes:
            raise DamagedError("a value lies outside of its segment")
        return InlineValue(bytes(segment[self.offset : self.offset + self.length]))


def _head(own: SaveId, manager: int, managers: int) -> str:
    return _to_json({"format": _FORMAT, "checkpoint": own.step, "manager": manager, "managers": managers})


def encode_lines(
    entries: Sequence[Entry],
    part_of: Callable[[StoredValue], SaveId],
    before: Sequence[Entry] = (),
    known: Sequence[bytes] = (),
) -> list[bytes]:
    """Return the lines of an index but for its head. ``part_of``: the part that a large value is. ``known``: those of
    the entries ``before``; lines of the same entries are taken from there."""
    lines = []
    for number, at in enumerate(range(0, len(entries), _ROWS)):
        some = entries[at : at + _ROWS]
        if number < len(known) and some == before[at : at + _ROWS]:
            lines.append(known[number])
        else:
            lines.append(_to_json([_row(entry, part_of) for entry in some]).encode("ascii"))
    return lines


def _row(entry: Entry, part_of: Callable[[StoredValue], SaveId]) -> tuple[Any, ...]:
    value, head = entry.value, (entry.key.decode("latin-1"), entry.checkpoint_id, entry.writer, entry.flags)
    assert value is not None
    return (*head, None, value.nbytes) if isinstance(value, InlineValue) else (*head, part_of(value), value.size)


def encode_index(own: SaveId, manager: int, managers: int, lines: Sequence[bytes]) -> bytes:
    """Return an index. ``own``: the part that it is in, of one manager of so many."""
    return b"\n".join((_head(own, manager, managers).encode("ascii"), *lines))


def segment_of(entries: Iterable[Entry]) -> list[bytes]:
    """Return the small values of entries."""
    return [entry.value.data for entry in entries if isinstance(entry.value, InlineValue)]


def decode_index(data: memoryview, own: SaveId, manager: int, managers: int, path: str) -> list[IndexEntry]:
    """Return what `encode_index` was given. Raises `DamagedError`: it made no such data."""
    entries: list[IndexEntry] = []
    offset = 0
    try:
        head, *chunks = bytes(data).split(b"\n")
        if head != _head(own, manager, managers).encode("ascii"):
            raise ValueError("it is of another part, or was written by another version")
        for chunk in chunks:
            for row in json.loads(chunk):
                entries.append(entry := _entry_of(row, offset))
                offset += 0 if entry.part is not None else entry.length
    except (ValueError, TypeError, AttributeError, RecursionError, FlashpointError) as error:
        raise DamagedError(f"the index is not valid: {error}", path=path) from error
    return entries


def _entry_of(row: Sequence[Any], offset: int) -> IndexEntry:
    key, checkpoint_id, writer, flags, part, length = row
    if not (type(flags) is type(length) is int and length >= 0 and type(writer) is str):
        raise ValueError("an entry that is none")
    check_checkpoint_id(checkpoint_id)
    its = None if part is None else part_id(*part)
    return IndexEntry(key.encode("latin-1"), checkpoint_id, writer, flags, its, offset, length)
