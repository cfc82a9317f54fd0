"""The index of a snapshot: which entries it has, and where their values lie.

Owns encoding and decoding. Nothing here touches a store or a peer. What is decoded is distrusted, also when its digest
is right::

    magic (8), length of the head (4, little endian), head (JSON)
    positions of entries of the base index that are not in this one (4 each, ascending)
    one record an entry (40 bytes, see `_RECORD`)
    the keys of these entries, one after the other

An index may have a *base*: a full index, one without a base, in an earlier snapshot. The entries are then those of the
base, less the positions named, and the own ones. Values lie where the records say: in the segment of this or of
an earlier snapshot, or in a part of their own.
"""

from __future__ import annotations

import itertools
import json
import struct
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from ml_flashpoint.ddict.snapshot_format import PartRef
from ml_flashpoint.format.checkpoint_id_types import MAX_STEP
from ml_flashpoint.format.errors import DamagedError, InvalidArgumentError
from ml_flashpoint.format.manifest import MAX_WORLD_SIZE, object_name

DELETED: Final = 0
INLINE: Final = 1
STORED: Final = 2

_MAGIC: Final = b"MLFDDSN1"
_PREFIX: Final = struct.Struct("<8sI")
# Length of the key, flags, kind of the value, writer, part, checkpoint, offset and length of the value.
_RECORD: Final = struct.Struct("<IBBxxIIQQQ")
_PERSISTENT: Final = 1
_BROADCAST: Final = 2
_HEAD_FIELDS: Final = frozenset(
    ("checkpoint", "manager", "managers", "base", "parts", "writers", "removed", "added", "keys")
)
_MAX_HEAD_BYTES: Final = 2**30
_MAX_WRITER_CHARACTERS: Final = 1024


class Place(NamedTuple):
    """Where a value lies.

    Attributes:
        kind: `DELETED` (and then nothing else), `INLINE` or `STORED`.
        part: whose segment holds it, or the part that it is.
        offset, length: in the segment; 0 and the bytes of the object for a stored value.
    """

    kind: int
    part: PartRef | None
    offset: int
    length: int


NOWHERE: Final = Place(DELETED, None, 0, 0)


class IndexEntry(NamedTuple):
    """An entry of an index; see `entries.Entry`."""

    key: bytes
    checkpoint_id: int
    writer: str
    persistent: bool
    broadcast: bool
    place: Place


@dataclass(frozen=True, slots=True)
class Index:
    """What an index says, without its base.

    Attributes:
        checkpoint_id: of the snapshot.
        manager, managers: whose it is, of how many.
        base: the part whose index this one builds on; None: it is full.
        removed: positions in the base's entries that are not in this one, ascending.
        added: own entries.
    """

    checkpoint_id: int
    manager: int
    managers: int
    base: PartRef | None
    removed: Sequence[int]
    added: Sequence[IndexEntry]


def encode_index(index: Index) -> bytes:
    """The index as bytes.

    Raises:
        InvalidArgumentError: it is too large: a key of 4 GiB, or more entries than 4 bytes count.
    """
    parts: dict[PartRef | None, int] = {}
    writers: dict[str, int] = {}
    records = bytearray()
    pack = _RECORD.pack
    try:
        for entry in index.added:
            kind, part, offset, length = entry.place
            records += pack(
                len(entry.key),
                (_PERSISTENT if entry.persistent else 0) | (_BROADCAST if entry.broadcast else 0),
                kind,
                writers.setdefault(entry.writer, len(writers)),
                0 if part is None else parts.setdefault(part, len(parts)),
                entry.checkpoint_id,
                offset,
                length,
            )
        removed = _words(index.removed)
    except (struct.error, OverflowError) as error:
        raise InvalidArgumentError(f"this cannot be in an index: {error}", argument="entries") from error
    keys = b"".join([entry.key for entry in index.added])
    head = {
        "checkpoint": index.checkpoint_id,
        "manager": index.manager,
        "managers": index.managers,
        "base": index.base,
        "parts": list(parts),
        "writers": list(writers),
        "removed": len(index.removed),
        "added": len(index.added),
        "keys": len(keys),
    }
    text = json.dumps(head, separators=(",", ":")).encode("ascii")
    if len(text) > _MAX_HEAD_BYTES:
        raise InvalidArgumentError(
            f"the head of an index must not exceed {_MAX_HEAD_BYTES} bytes", argument="entries", value=len(text)
        )
    return b"".join((_PREFIX.pack(_MAGIC, len(text)), text, removed, records, keys))


def decode_index(data: memoryview, path: str) -> Index:
    """What `encode_index` made `data` from.

    Args:
        data: the index.
        path: for errors.

    Raises:
        DamagedError: it is no index.
    """
    try:
        return _decode(data)
    except (ValueError, TypeError, KeyError, IndexError, struct.error, RecursionError, MemoryError) as error:
        raise DamagedError(f"the index of the snapshot is not valid: {error}", path=path) from error


def _decode(data: memoryview) -> Index:
    magic, length = _PREFIX.unpack_from(data)
    if magic != _MAGIC:
        raise ValueError("no magic")
    begin = _PREFIX.size + length
    if length > _MAX_HEAD_BYTES or begin > data.nbytes:
        raise ValueError("the head is too long")
    head = json.loads(bytes(data[_PREFIX.size : begin]).decode("ascii"))
    if not isinstance(head, dict) or head.keys() != _HEAD_FIELDS:
        raise ValueError("the head has other fields")
    checkpoint_id, managers = _natural(head, "checkpoint", MAX_STEP), _natural(head, "managers", MAX_WORLD_SIZE)
    manager = _natural(head, "manager", managers - 1)
    base = None if head["base"] is None else _ref(head["base"])
    parts = [_ref(item) for item in _list(head, "parts")]
    writers = _list(head, "writers")
    if not all(isinstance(writer, str) and len(writer) <= _MAX_WRITER_CHARACTERS for writer in writers):
        raise ValueError("a writer is no text")
    removed_count, count = _natural(head, "removed", 2**32), _natural(head, "added", 2**32)
    records_at = begin + 4 * removed_count
    keys_at = records_at + _RECORD.size * count
    if keys_at + _natural(head, "keys", MAX_STEP) != data.nbytes:
        raise ValueError(f"{data.nbytes} bytes are not what the head says")
    removed = _from_words(data[begin:records_at])
    if any(one >= other for one, other in itertools.pairwise(removed)) or (removed and base is None):
        raise ValueError("the removed entries are not in order")
    added = _decode_entries(data[records_at:keys_at], bytes(data[keys_at:]), parts, writers)
    return Index(checkpoint_id, manager, managers, base, removed, added)


def _decode_entries(
    records: memoryview, keys: bytes, parts: Sequence[PartRef], writers: Sequence[str]
) -> list[IndexEntry]:
    entries = []
    at = 0
    for key_length, flags, kind, writer, part, checkpoint_id, offset, length in _RECORD.iter_unpack(records):
        if flags > _PERSISTENT | _BROADCAST or checkpoint_id > MAX_STEP:
            raise ValueError("an entry with unknown flags, or of no checkpoint")
        if kind == DELETED:
            place = NOWHERE
        elif kind in (INLINE, STORED):
            place = Place(kind, parts[part], offset, length)
        else:
            raise ValueError(f"a value of unknown kind {kind}")
        end = at + key_length
        entries.append(
            IndexEntry(
                keys[at:end],
                checkpoint_id,
                writers[writer],
                bool(flags & _PERSISTENT),
                bool(flags & _BROADCAST),
                place,
            )
        )
        at = end
    if at != len(keys):
        raise ValueError("the keys are not as long as the entries say")
    return entries


def resolve(index: Index, base: Index | None, path: str) -> list[IndexEntry]:
    """The entries of an index: those of its base that are left, in their order, and then its own.

    Raises:
        DamagedError: this is not its base, or not a full index.
    """
    if index.base is None:
        return list(index.added)
    if base is None or base.base is not None:
        raise DamagedError("the snapshot builds on one that is not full", path=path)
    if index.removed and index.removed[-1] >= len(base.added):
        raise DamagedError("the snapshot builds on entries that there are not", path=path)
    removed = set(index.removed)
    return [entry for at, entry in enumerate(base.added) if at not in removed] + list(index.added)


def needed_parts(own: PartRef, base: PartRef | None, entries: Iterable[IndexEntry]) -> frozenset[PartRef]:
    """The parts without which a snapshot cannot be read, itself among them."""
    parts = {entry.place.part for entry in entries}
    parts |= {own, base}
    return frozenset(part for part in parts if part is not None)


def _words(numbers: Sequence[int]) -> bytes:
    words = array("I", numbers)
    if words.itemsize != 4 or sys.byteorder != "little":
        return b"".join(number.to_bytes(4, "little") for number in numbers)
    return words.tobytes()


def _from_words(data: memoryview) -> Sequence[int]:
    words = array("I")
    if words.itemsize != 4 or sys.byteorder != "little":
        return [int.from_bytes(data[at : at + 4], "little") for at in range(0, data.nbytes, 4)]
    words.frombytes(data)
    return words


def _natural(head: Mapping[str, Any], name: str, highest: int) -> int:
    value = head[name]
    if type(value) is not int or not 0 <= value <= highest:
        raise ValueError(f"{name} must be an integer from 0 to {highest}")
    return value


def _list(head: Mapping[str, Any], name: str) -> list[Any]:
    value = head[name]
    if not isinstance(value, list):
        raise ValueError(f"{name} must be a list")
    return value


def _ref(item: object) -> PartRef:
    match item:
        case [str(attempt), int(step)] if type(step) is int and 0 <= step <= MAX_STEP:
            object_name(0, attempt)  # refuses what cannot be part of a file's name
            return PartRef(attempt, step)
    raise ValueError("a part must be an attempt and a step")
