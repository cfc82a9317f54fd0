"""Indices: the entries of all keys of a manager at one cut, as bytes.

An index is lines of JSON: its head, then lists of entries (`IndexEntry`), with the bytes of each key as characters. Not
all in one line, so that the thread that writes very many of them can be interrupted. Small values lie in a segment, one
after the other; large ones are parts, or items, of their own. What is decoded is distrusted, also when its digest is
right.
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
_FORMAT: Final = 6
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


def encode_index(
    own: SaveId, manager: int, managers: int, entries: Iterable[Entry], part_of: Callable[[StoredValue], SaveId]
) -> tuple[bytes, list[bytes]]:
    """Return the index of entries, and its segment. ``own``: the part that both are in, of one manager of so many.
    ``part_of``: the part that a large value is."""
    rows: list[tuple[Any, ...]] = []
    segment: list[bytes] = []
    offset = 0
    for entry in entries:
        value, head = entry.value, (entry.key.decode("latin-1"), entry.checkpoint_id, entry.writer, entry.flags)
        if isinstance(value, InlineValue):
            rows.append((*head, None, offset, value.nbytes))
            segment.append(value.data)
            offset += value.nbytes
        elif value is not None:
            rows.append((*head, part_of(value), 0, value.size))
    chunks = (_to_json(rows[at : at + _ROWS]) for at in range(0, len(rows), _ROWS))
    return "\n".join((_head(own, manager, managers), *chunks)).encode("ascii"), segment


def decode_index(data: memoryview, own: SaveId, manager: int, managers: int, path: str) -> list[IndexEntry]:
    """Return what `encode_index` was given. Raises `DamagedError`: it made no such data."""
    try:
        head, *chunks = bytes(data).split(b"\n")
        if head != _head(own, manager, managers).encode("ascii"):
            raise ValueError("it is of another part, or was written by another version")
        return [_entry_of(row) for chunk in chunks for row in json.loads(chunk)]
    except (ValueError, TypeError, AttributeError, RecursionError, FlashpointError) as error:
        raise DamagedError(f"the index is not valid: {error}", path=path) from error


def _entry_of(row: Sequence[Any]) -> IndexEntry:
    key, checkpoint_id, writer, flags, part, offset, length = row
    are_numbers = type(flags) is type(offset) is type(length) is int and offset >= 0 <= length
    if not (are_numbers and type(writer) is str):
        raise ValueError("an entry that is none")
    check_checkpoint_id(checkpoint_id)
    its = None if part is None else part_id(*part)
    return IndexEntry(key.encode("latin-1"), checkpoint_id, writer, flags, its, offset, length)
