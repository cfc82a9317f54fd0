"""The parts of a dictionary as others see them: names, and indices of the entries that each has.

Owns the object of a snapshot, and encoding and decoding indices. Nothing here touches a store or a peer. What is
decoded is distrusted, also when its digest is right. An index is lines of JSON: first its head, then lists of entries
(`IndexEntry`), with the bytes of the key as characters. Not all in one, so that the thread that writes very many of
them can be interrupted.

An index is full, or says what has changed since a *chain* of others, of which the first is full and each of the rest
says what has changed since those before it. Small values lie in the segment behind the index that names them, one after
the other, large ones are parts of their own.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from ml_flashpoint.ddict.manager.shard import Entry, InlineValue, StoredValue, Value
from ml_flashpoint.ddict.manager.store import part_id
from ml_flashpoint.ddict.options import check_checkpoint_id
from ml_flashpoint.format.errors import DamagedError, FlashpointError
from ml_flashpoint.format.names import SaveId

_LENGTH: Final = struct.Struct("<Q")
GONE: Final = 0
INLINE: Final = 1
STORED: Final = 2
_FORMAT: Final = 5
_BEGIN: Final = b'{"format":%d,' % _FORMAT
_to_json: Final = json.JSONEncoder(separators=(",", ":")).encode
_ROWS: Final = 1000  # most in a line
_ROW_BYTES: Final = 80  # of an entry beside its key, about
LONGEST_CHAIN: Final = 8  # most indices that one is read from: after so many changes, there is a full one


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
    kind: int  # `GONE`: there is no entry of this key any more, and the rest says nothing; `INLINE` or `STORED`
    part: SaveId  # whose segment holds the value, or the part that it is
    # offset, length: in the segment; 0 and the bytes of the object for a stored value
    offset: int
    length: int

    def entry(self, value: Value) -> Entry:
        """The entry, with its value."""
        return Entry(self.key, self.checkpoint_id, self.writer, value, self.flags)

    def inline_value(self, segment: memoryview) -> InlineValue:
        """The value, from the segment that it lies in. Raises `DamagedError`: it does not."""
        if self.offset + self.length > segment.nbytes:
            raise DamagedError("a value lies outside of its segment", path=self.part.text)
        return InlineValue(bytes(segment[self.offset : self.offset + self.length]))


@dataclass(frozen=True, slots=True)
class Index:
    """The content of one index."""

    own: SaveId  # the part that it is in
    # manager, managers: whose it is, of how many
    manager: int
    managers: int
    chain: tuple[SaveId, ...]  # parts with the indices that it says the changes of; empty: it is full
    entries: Sequence[IndexEntry]


def gather(
    own: SaveId, entries: Iterable[Entry], part_of: Callable[[StoredValue], SaveId]
) -> tuple[list[IndexEntry], list[bytes]]:
    """Return what an index says of entries, without deleted keys, and the segment: small values, one after the other.
    ``own``: the part that both are in. ``part_of``: the part that a large value is."""
    told: list[IndexEntry] = []
    segment: list[bytes] = []
    offset = 0
    for entry in entries:
        value = entry.value
        if isinstance(value, InlineValue):
            place: tuple[int, SaveId, int, int] = (INLINE, own, offset, value.nbytes)
            segment.append(value.data)
            offset += value.nbytes
        elif value is not None:
            place = (STORED, part_of(value), 0, value.size)
        else:
            continue
        told.append(IndexEntry(entry.key, entry.checkpoint_id, entry.writer, entry.flags, *place))
    return told, segment


def index_bytes(entries: Iterable[Entry]) -> int:
    """Return about what entries take in an index and the segment beside it."""
    values = ((len(each.key), each.value) for each in entries)
    return sum(_ROW_BYTES + key + (its.nbytes if isinstance(its, InlineValue) else 0) for key, its in values)


def part_of(value: StoredValue) -> SaveId:
    """The part that a large value is, once it was sealed."""
    assert value.part is not None
    return value.part


def parts_of(entries: Iterable[Entry]) -> frozenset[SaveId]:
    """The parts that the large values of entries are."""
    return frozenset(part_of(entry.value) for entry in entries if isinstance(entry.value, StoredValue))


@dataclass(frozen=True, slots=True)
class BuiltSnapshot:
    """A snapshot in the store."""

    ref: SaveId  # its part
    # parts with the indices that it consists of, a full one first. Its own is not among them where nothing has changed
    chain: tuple[SaveId, ...]
    entries: frozenset[Entry]  # all of them; no two are equal
    stored: frozenset[SaveId]  # the parts that their large values are
    chain_bytes: int  # of the indices of the chain and the segments beside them, about
    live_bytes: int  # those that a full one would take

    @property
    def needs(self) -> frozenset[SaveId]:
        """The parts without which it cannot be read, itself among them."""
        return self.stored.union((self.ref, *self.chain))


NO_SNAPSHOT: Final = BuiltSnapshot(SaveId(0, -1), (), frozenset(), frozenset(), 0, 0)
"""What the first one builds on."""


def fold(indices: Iterable[Index]) -> list[IndexEntry]:
    """Return what the last of these says: a full one, and those of its chain after it."""
    found: dict[bytes, IndexEntry] = {}
    chain: list[SaveId] = []
    for index in indices:
        if list(index.chain) != chain:
            raise DamagedError("the index of a snapshot builds on others", path=index.own.text)
        for told in index.entries:
            if told.kind == GONE:
                found.pop(told.key, None)
            else:
                found[told.key] = told
        chain.append(index.own)
    return list(found.values())


def encode_index(index: Index) -> bytes:
    """The index as bytes."""
    head = {
        "format": _FORMAT,
        "checkpoint": index.own.step,
        "manager": index.manager,
        "managers": index.managers,
        "chain": index.chain,
    }
    rows = [
        (entry.key.decode("latin-1"), *entry[1:5], entry.part if entry.kind == STORED else None, *entry[6:])
        for entry in index.entries
    ]
    chunks = (rows[at : at + _ROWS] for at in range(0, len(rows), _ROWS))
    return "\n".join(map(_to_json, (head, *chunks))).encode("ascii")


def decode_index(data: memoryview, own: SaveId, manager: int, managers: int, path: str) -> Index:
    """Return what `encode_index` made `data` from. ``own``: the part that it is in."""
    try:
        if bytes(data[: len(_BEGIN)]) != _BEGIN:
            raise ValueError("it was written by another version, or is none")
        head, *chunks = map(json.loads, bytes(data).split(b"\n"))
        if (head["checkpoint"], head["manager"], head["managers"]) != (own.step, manager, managers):
            raise ValueError("it is of another part")
        chain = tuple(part_id(*each) for each in head["chain"])
        if len(chain) > LONGEST_CHAIN:
            raise ValueError("the chain is too long")
        entries = [_entry_of(row, own) for rows in chunks for row in rows]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, FlashpointError) as error:
        raise DamagedError(f"the index is not valid: {error}", path=path) from error
    return Index(own, manager, managers, chain, entries)


def _entry_of(row: Sequence[Any], own: SaveId) -> IndexEntry:
    key, checkpoint_id, writer, flags, kind, part, offset, length = row
    numbers_ok = (
        type(offset) is type(length) is type(kind) is type(flags) is int
        and offset >= 0 <= length
        and GONE <= kind <= STORED
    )
    if not (numbers_ok and type(writer) is str):
        raise ValueError("an entry that is none")
    check_checkpoint_id(checkpoint_id)
    its = part_id(*part) if kind == STORED else own
    return IndexEntry(key.encode("latin-1"), checkpoint_id, writer, flags, kind, its, offset, length)
