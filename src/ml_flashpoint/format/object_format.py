"""The form of one object: a safetensors file that is planned first and filled in place.

An object is a valid safetensors file, so that any tool opens it, with these habits:

* The data starts at a multiple of 4096; the header is padded with spaces, which leaves it room to grow.
* Tensors come by falling element size, so that each is aligned although the format allows no gaps.
* A byte item, for example pickled state, is a U8 tensor of one dimension. A tensor of a dtype that not every
  safetensors release reads is stored likewise.
* Unused room, inside and at the end, is covered by U8 tensors called ``__flashpoint__.gap.<i>`` and
  ``__flashpoint__.tail``.
* The key ``__flashpoint__`` of ``__metadata__`` is a JSON object with ``format``; ``bytes``, the keys of byte items;
  ``dtypes``, true dtypes and shapes by key, for example ``complex128 2,3``; and ``aliases``: for each further name of a
  tensor that shares its memory, the key that was kept.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from ml_flashpoint.format.dtypes import (
    BY_FILE_DTYPE,
    BYTES,
    FILE_DTYPES,
    ITEMSIZES,
    MAX_SIZE,
    parse_true_type,
    tensor_nbytes,
)
from ml_flashpoint.format.errors import CapacityError, InvalidArgumentError, ObjectFormatError

if TYPE_CHECKING:
    from typing_extensions import Buffer

ALIGNMENT: Final = 4096
"""The data of an object starts at a multiple of this many bytes."""

METADATA_KEY: Final = "__metadata__"
"""The key that safetensors itself reserves."""

MAX_HEADER_BYTES: Final = 100_000_000
"""Longest header that safetensors reads, without the 8 bytes of its length."""

_DEFAULT_RESERVE: Final = 16 * 1024
_RESERVE_A_TENSOR: Final = 24  # the names that tensors get in the end may be longer than those that they are staged by
_FORMAT: Final = "2"
_MARKS: Final = "__flashpoint__"
_RESERVED: Final = "__flashpoint__."
_GAP: Final = _RESERVED + "gap."
_TAIL: Final = _RESERVED + "tail"
_NO_MARKS: Final = f'{{"format":"{_FORMAT}","bytes":[],"aliases":{{}},"dtypes":{{}}}}'
_LENGTH: Final = struct.Struct("<Q")
_OUTSIDE_TEXT: Final = b"[]{}:,0123456789 \t\r\n"
_NOT_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))


# ---- layout ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor or byte item of an object.

    Attributes:
        key: its name, unique in the object.
        dtype: dtype of the tensor, by its name in `format.dtypes`; ``uint8`` for a byte item.
        shape: shape of the tensor; the number of bytes for a byte item.
        begin, end: offsets of its first byte, and after its last one, from the start of the file.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    kind: Literal["tensor", "bytes"] = "tensor"

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return self.end - self.begin


@dataclass(frozen=True)
class Layout:
    """The places of all that is in an object. Made by the functions below, which keep it consistent.

    Attributes:
        tensors: the entries that are tensors, by rising offset; those with several names once.
        byte_items: the entries that are byte items, by rising offset.
        aliases: for each further name of an entry, the key of that entry.
        data_start: offset of the data in the file, which is the length of the header with its padding.
        size: offset after the last entry; the rest of the file is unused.
        gaps: unused ranges between entries, as offsets of begin and end in the file.
        texts: the tensors, and their aliases and true dtypes, as text in a header; None until they are needed. They
            stay while byte items change.
    """

    tensors: tuple[Entry, ...]
    byte_items: tuple[Entry, ...]
    aliases: Mapping[str, str]
    data_start: int
    size: int
    gaps: tuple[tuple[int, int], ...] = ()
    texts: tuple[str, str] | None = field(default=None, compare=False, repr=False)

    @cached_property
    def by_key(self) -> Mapping[str, Entry]:
        """The entries by their keys and by their aliases."""
        entries = {entry.key: entry for entry in (*self.tensors, *self.byte_items)}
        return entries | {name: entries[kept] for name, kept in self.aliases.items()}


def plan_layout(
    tensors: Iterable[tuple[str, str, Sequence[int]]],
    byte_items: Iterable[tuple[str, int]] = (),
    aliases: Mapping[str, str] | None = None,
    reserve: int = _DEFAULT_RESERVE,
) -> Layout:
    """Return a layout without gaps.

    The same tensors, aliases and keys of byte items give the same `data_start`, whatever the lengths of the byte items.

    Args:
        tensors: key, dtype and shape of each.
        byte_items: key and length in bytes of each.
        aliases: for each further name of one of these, its key.
        reserve: bytes to leave free in the header, for metadata and for byte items that may be added later.

    Raises:
        InvalidArgumentError: a key is used twice or is reserved, or the header or the object would be too long.
    """
    items = list(byte_items)
    places: list[Entry] = []
    size = 0
    for key, dtype, shape in sorted(tensors, key=lambda each: -ITEMSIZES[each[1]]):
        nbytes = tensor_nbytes(dtype, shape)
        places.append(Entry(key, dtype, tuple(shape), size, size + nbytes))
        size += nbytes
    # As long as the header can get: whatever the lengths of the byte items, and with a tail.
    longest = tuple(Entry(key, "uint8", (0,), MAX_SIZE, 2 * MAX_SIZE, "bytes") for key, _ in items)
    layout = Layout(tuple(places), longest, dict(aliases or {}), 0, MAX_SIZE)
    layout = replace(layout, texts=_texts(layout))
    length = _LENGTH.size + len(_header_text(layout, 2 * MAX_SIZE, {})) + _RESERVE_A_TENSOR * len(places) + reserve
    start = -(-length // ALIGNMENT) * ALIGNMENT
    if start - _LENGTH.size > MAX_HEADER_BYTES:
        raise InvalidArgumentError(
            f"the header would take {length} bytes, more than safetensors reads ({MAX_HEADER_BYTES})",
            argument="tensors",
            hint="use shorter keys, or several objects",
        )
    placed = tuple(Entry(each.key, each.dtype, each.shape, each.begin + start, each.end + start) for each in places)
    return with_byte_items(replace(layout, tensors=placed, data_start=start), items)


def layout_from_entries(entries: Iterable[Entry], data_start: int, aliases: Mapping[str, str] | None = None) -> Layout:
    """Return the layout of tensors, in any order, that have their places behind ``data_start``, without overlaps. Raise
    an `InvalidArgumentError` if one is not aligned to its elements."""
    placed = tuple(sorted(entries, key=attrgetter("begin", "end")))
    for entry in placed:
        if entry.begin % ITEMSIZES[entry.dtype]:
            raise InvalidArgumentError("an entry must be aligned to its elements", argument="entry", value=entry)
    layout = Layout(placed, (), dict(aliases or {}), data_start, data_start, _gaps(placed, data_start))
    return with_byte_items(replace(layout, texts=_texts(layout)), ())


def with_byte_items(layout: Layout, byte_items: Iterable[tuple[str, int]], begin: int = 0) -> Layout:
    """Return a layout with the same tensors in the same places and other byte items, by key and length in bytes, after
    the last tensor and at or behind ``begin``.

    `data_start` stays, so the header may turn out too long if byte items were added: encode it before anything is
    written. Cheap: tensors are not described anew.
    """
    size = end = layout.tensors[-1].end if layout.tensors else layout.data_start
    placed: list[Entry] = []
    for key, length in byte_items:
        size = max(size, begin)
        placed.append(Entry(key, "uint8", (length,), size, size + length, "bytes"))
        size += length
    if size > MAX_SIZE:
        raise InvalidArgumentError(f"an object must not exceed {MAX_SIZE} bytes", argument="size")
    gaps = tuple(gap for gap in layout.gaps if gap[1] <= end) + _gaps(placed[:1], end)
    changed = replace(layout, byte_items=tuple(placed), size=size, gaps=gaps)
    _check_names(changed)
    return changed


def _gaps(entries: Iterable[Entry], begin: int) -> tuple[tuple[int, int], ...]:
    """Return the ranges before and between entries, given by rising offset."""
    gaps = []
    for entry in entries:
        if begin < entry.begin:
            gaps.append((begin, entry.begin))
        begin = entry.end
    return tuple(gaps)


def _check_names(layout: Layout) -> None:
    names = [entry.key for entry in (*layout.tensors, *layout.byte_items)] + list(layout.aliases)
    known = set(names)
    try:
        together = "\0".join(["", *names])
        together.encode()
    except (TypeError, UnicodeEncodeError) as error:
        raise InvalidArgumentError(f"a key must be text: {error}", argument="keys") from None
    if len(known) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidArgumentError("a key must not be used twice", argument="keys", value=twice)
    if METADATA_KEY in known or f"\0{_RESERVED}" in together:
        text = f"keys must not be {METADATA_KEY}, or begin with {_RESERVED}: these are reserved"
        raise InvalidArgumentError(text, argument="keys")


# ---- writing a header -----------------------------------------------------------------------------------------------


def encode_header(layout: Layout, file_size: int, metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the first `layout.data_start` bytes of the file of an object; what lies after `layout.size` is marked as
    unused. Raise a `CapacityError` if they are too few. ``metadata`` may have any keys but ``__flashpoint__``."""
    content = _header_text(layout, file_size, metadata or {}).encode("ascii")
    start = layout.data_start
    if _LENGTH.size + len(content) > start:
        raise CapacityError(
            "the header does not fit before the data",
            needed_bytes=_LENGTH.size + len(content),
            available_bytes=start,
            hint="plan the layout anew, with a larger reserve",
        )
    return (_LENGTH.pack(start - _LENGTH.size) + content).ljust(start, b" ")


def _header_text(layout: Layout, file_size: int, metadata: Mapping[str, str]) -> str:
    tensors, marks = layout.texts or _texts(layout)
    keys = _members({"format": _FORMAT, "bytes": [entry.key for entry in layout.byte_items]})
    # Some tools only open files that name the framework that their tensors are from.
    about = {"format": "pt", **metadata, _MARKS: f"{{{keys},{marks}}}"}
    places = {entry.key: (entry.begin, entry.end) for entry in layout.byte_items}
    places |= {f"{_GAP}{index}": gap for index, gap in enumerate(layout.gaps)}
    if layout.size < file_size:
        places[_TAIL] = (layout.size, file_size)
    start, described = layout.data_start, {}
    for key, (begin, end) in places.items():
        described[key] = {"dtype": BYTES, "shape": [end - begin], "data_offsets": [begin - start, end - start]}
    return f"{{{','.join(filter(None, [_members({METADATA_KEY: about}), tensors, _members(described)]))}}}"


def _texts(layout: Layout) -> tuple[str, str]:
    """Return `Layout.texts`."""
    described, dtypes = {}, {}
    for entry in layout.tensors:
        dtype, shape, begin = FILE_DTYPES.get(entry.dtype), entry.shape, entry.begin - layout.data_start
        if dtype is None:
            dtypes[entry.key] = f"{entry.dtype} {','.join(map(str, shape))}"
            dtype, shape = BYTES, (entry.end - entry.begin,)
        described[entry.key] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, entry.end - layout.data_start]}
    return _members(described), _members({"aliases": dict(layout.aliases), "dtypes": dtypes})


def _members(content: Mapping[str, object]) -> str:
    """Return the members of a JSON object as text, without its braces."""
    return json.dumps(content, separators=(",", ":"))[1:-1]


# ---- reading a header -----------------------------------------------------------------------------------------------


class ParsedHeader(NamedTuple):
    """The content of an object's header. Entries of an object from elsewhere need not be aligned."""

    layout: Layout
    metadata: Mapping[str, str]


def header_length(prefix: Buffer, file_size: int, path: str | os.PathLike[str] | None = None) -> int:
    """Return how many bytes of a file `parse_header` needs, from its first 8. Raise an `ObjectFormatError` like it."""
    with memoryview(prefix) as view, view.cast("B") as octets:
        if len(octets) < _LENGTH.size or file_size < _LENGTH.size:
            raise ObjectFormatError("the file is too short for the length of a header", path=path)
        length = int(_LENGTH.unpack_from(octets)[0])
    if length > MAX_HEADER_BYTES:
        raise ObjectFormatError(f"a header must not exceed {MAX_HEADER_BYTES} bytes", path=path)
    if _LENGTH.size + length > file_size:
        raise ObjectFormatError(f"a header of {length} bytes does not fit into the file", path=path)
    return _LENGTH.size + length


def parse_header(buf: Buffer, file_size: int | None, path: str | os.PathLike[str] | None = None) -> ParsedHeader:
    """Return the content of an object's header. Raise an `ObjectFormatError` if the file is not a valid safetensors
    file, or has a dtype that is not known.

    Accepts every such file of dtypes that this package writes, whoever wrote it. Trusts nothing: entries must lie in
    the file, cover its data without overlap, and be as long as their dtypes and shapes say.

    Args:
        buf: the file, or as much of its start as `header_length` says.
        file_size: bytes of the whole file; None if it is gone, and its tail is as long as the header says.
    """
    data_start = header_length(buf, MAX_SIZE if file_size is None else file_size, path)
    with memoryview(buf) as view, view.cast("B") as octets:
        header = bytes(octets[_LENGTH.size : data_start])
    if _LENGTH.size + len(header) != data_start:
        raise ObjectFormatError("the header is truncated", path=path)
    try:
        return _parse(header, data_start, file_size, path)
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError, MemoryError) as error:
        raise ObjectFormatError(f"the header is not valid: {error}", path=path) from error


# From here on, ValueError, TypeError, AttributeError or KeyError for whatever is not valid.


def _parse(header: bytes, data_start: int, file_size: int | None, path: str | os.PathLike[str] | None) -> ParsedHeader:
    content = _load_json(header)
    metadata = content.pop(METADATA_KEY, {})
    _check_texts(content, metadata, metadata.values())
    marks = _load_json(metadata.pop(_MARKS, _NO_MARKS).encode())
    if (found := marks.pop("format")) != _FORMAT:
        raise ObjectFormatError(
            f"the object has format {found!a:.40}, and this ml_flashpoint reads format {_FORMAT!a}",
            path=path,
            hint="load it with the ml_flashpoint that saved it",
        )
    listed, dtypes, aliases = marks.pop("bytes"), marks.pop("dtypes"), marks.pop("aliases")
    _check_texts(marks, listed, dtypes, dtypes.values(), aliases, aliases.values())
    if marks or type(listed) is not list or not dtypes.keys().isdisjoint(listed):
        raise ValueError(f"{_MARKS} says too much")
    entries, end = _parse_entries(content, frozenset(listed), dtypes, data_start)
    if file_size is not None and end != file_size:
        raise ValueError(f"the entries cover {end} of {file_size} bytes")
    if not {entry.key for entry in entries}.issuperset((*listed, *dtypes, *aliases.values())):
        raise ValueError("a key is marked, but is not an entry")
    if not aliases.keys().isdisjoint((METADATA_KEY, *content)) or any(key.startswith(_RESERVED) for key in aliases):
        raise ValueError("an alias is an entry, or reserved")
    tensors = tuple(entry for entry in entries if entry.kind == "tensor")
    byte_items = tuple(entry for entry in entries if entry.kind == "bytes")
    size = entries[-1].end if entries else data_start
    return ParsedHeader(Layout(tensors, byte_items, aliases, data_start, size, _gaps(entries, data_start)), metadata)


def _check_texts(*texts: Iterable[str]) -> None:
    "".join(chain(*texts)).encode()  # half a surrogate pair is no text


def _load_json(header: bytes) -> dict[str, Any]:
    pieces = header.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
    outside = b"".join(pieces[::2])
    # No signs, fractions, exponents, true, false or null: every value is text, a list, an object or a natural
    # number, which spares later checks of types.
    if not header.startswith(b"{") or outside.translate(None, _OUTSIDE_TEXT):
        raise ValueError("it holds something that is neither text nor a natural number")
    # The JSON parser recurses, and the process may allow more recursion than its stack has room for. Brackets
    # of a header are gone after this many times of taking away innermost pairs.
    brackets = outside.translate(None, _NOT_BRACKETS)
    for _ in range(3):
        brackets = brackets.replace(b"[]", b"").replace(b"{}", b"")
    if brackets:
        raise ValueError("its brackets are unbalanced or too deep")
    content: dict[str, Any] = json.loads(header.decode(), object_pairs_hook=_json_object)
    return content


def _json_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a name occurs twice")
    return members


def _parse_entries(
    content: Mapping[str, Any], byte_keys: frozenset[str], dtypes: Mapping[str, str], data_start: int
) -> tuple[list[Entry], int]:
    """Return the entries that are not reserved, and the offset after the last one of all."""
    entries: list[Entry] = []
    offset = 0
    # Entries without bytes share their offset with others and come first, in the order given.
    for key, described in sorted(content.items(), key=lambda item: item[1]["data_offsets"]):
        file_dtype, sizes, (begin, end) = described["dtype"], described["shape"], described["data_offsets"]
        if begin != offset or len(described) != 3 or type(sizes) is not list:
            raise ValueError(f"{key!a} takes bytes {begin} to {end}, but byte {offset} is next")
        dtype, shape = BY_FILE_DTYPE[file_dtype], tuple(sizes)
        nbytes = tensor_nbytes(dtype, shape)
        if end - begin != nbytes:
            raise ValueError(f"{key!a} has {nbytes} bytes, but takes {end - begin}")
        offset = end
        is_reserved = key.startswith(_RESERVED)
        if is_reserved or key in byte_keys or key in dtypes:
            if file_dtype != BYTES or len(shape) != 1:
                raise ValueError(f"{key!a} must be plain bytes")
            if is_reserved and not (key == _TAIL or key.startswith(_GAP)):
                raise ValueError(f"{key!a} is reserved")
            if key in dtypes:
                dtype, shape, true_nbytes = parse_true_type(dtypes[key])
                if true_nbytes != nbytes:
                    raise ValueError(f"{key!a} has {nbytes} bytes, and not {true_nbytes}")
        if not is_reserved:
            kind: Literal["tensor", "bytes"] = "bytes" if key in byte_keys else "tensor"
            entries.append(Entry(key, dtype, shape, data_start + begin, data_start + end, kind))
    return entries, data_start + offset
