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
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Final, Literal

from ml_flashpoint.format.dtypes import (
    BY_FILE_DTYPE,
    BYTES,
    FILE_DTYPES,
    ITEMSIZES,
    MAX_SIZE,
    checked_tensor,
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
_FORMAT: Final = "1"
_MARKS: Final = "__flashpoint__"
_RESERVED: Final = "__flashpoint__."
_GAP: Final = _RESERVED + "gap."
_TAIL: Final = _RESERVED + "tail"
_LENGTH: Final = struct.Struct("<Q")
_OUTSIDE_TEXT: Final = b"[]{}:,0123456789 \t\r\n"
_NOT_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))

_Description = tuple[int, int, str, tuple[int, ...]]  # offsets of begin and end, dtype, shape


# ---- layout ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor or byte item of an object.

    Attributes:
        key: its name, unique in the object.
        dtype: dtype of the tensor, by its name in `format.dtypes`; ``uint8`` for a byte item.
        shape: shape of the tensor; the number of bytes for a byte item.
        begin: offset of its first byte from the start of the file.
        end: offset after its last byte.
        kind: ``bytes`` for a byte item.
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
    """

    tensors: tuple[Entry, ...]
    byte_items: tuple[Entry, ...]
    aliases: Mapping[str, str]
    data_start: int
    size: int
    gaps: tuple[tuple[int, int], ...] = ()

    @cached_property
    def by_key(self) -> Mapping[str, Entry]:
        """The entries by their keys and by their aliases."""
        entries = {entry.key: entry for entry in (*self.tensors, *self.byte_items)}
        return entries | {name: entries[kept] for name, kept in self.aliases.items()}

    @cached_property
    def tensor_texts(self) -> tuple[str, str]:
        """The tensors, and their aliases and true dtypes, as text in a header."""
        described = {each.key: _described(FILE_DTYPES.get(each.dtype), each, self.data_start) for each in self.tensors}
        dtypes = {
            each.key: f"{each.dtype} {','.join(map(str, each.shape))}"
            for each in self.tensors
            if each.dtype not in FILE_DTYPES
        }
        return _members(described), _members({"aliases": dict(self.aliases), "dtypes": dtypes})


def _described(file_dtype: str | None, entry: Entry, data_start: int) -> dict[str, object]:
    shape = [entry.nbytes] if file_dtype is None else entry.shape
    offsets = [entry.begin - data_start, entry.end - data_start]
    return {"dtype": file_dtype or BYTES, "shape": shape, "data_offsets": offsets}


def _members(content: Mapping[str, object]) -> str:
    """Return the members of a JSON object as text, without its braces."""
    return json.dumps(content, separators=(",", ":"))[1:-1]


def plan_layout(
    tensors: Iterable[tuple[str, str, Sequence[int]]],
    byte_items: Iterable[tuple[str, int]] = (),
    aliases: Mapping[str, str] | None = None,
    reserve: int = _DEFAULT_RESERVE,
) -> Layout:
    """Return a layout without gaps.

    Tensors come by falling element size and then as given; byte items come after them as given. The same tensors,
    aliases and keys of byte items give the same `data_start`, whatever the lengths of the byte items.

    Args:
        tensors: key, dtype and shape of each.
        byte_items: key and length in bytes of each.
        aliases: for each further name of one of these, its key.
        reserve: bytes to leave free in the header, for metadata and for byte items that may be added later.

    Raises:
        InvalidArgumentError: A key is used twice or is reserved; a dtype is quantized; a shape is that of no
            tensor; an alias leads nowhere; or the header would be longer than the format allows.
    """
    given = [(key, dtype, *checked_tensor(dtype, tuple(shape))) for key, dtype, shape in tensors]
    items = list(byte_items)
    entries: list[Entry] = []
    offset = 0
    for key, dtype, shape, nbytes in sorted(given, key=lambda each: -ITEMSIZES[each[1]]):
        entries.append(Entry(key, dtype, shape, offset, offset + nbytes))
        offset += nbytes
    # As long as the header can get: whatever the lengths of the byte items, and with a tail.
    longest = tuple(Entry(key, "uint8", (0,), MAX_SIZE, 2 * MAX_SIZE, "bytes") for key, _ in items)
    relative = Layout(tuple(entries), longest, dict(aliases or {}), 0, MAX_SIZE)
    _check_names(relative)
    length = _LENGTH.size + len(_header_text(relative, 2 * MAX_SIZE, {})) + _RESERVE_A_TENSOR * len(entries) + reserve
    start = -(-length // ALIGNMENT) * ALIGNMENT
    if start - _LENGTH.size > MAX_HEADER_BYTES:
        raise InvalidArgumentError(
            f"the header would take {length} bytes, more than safetensors reads ({MAX_HEADER_BYTES})",
            argument="tensors",
            hint="use shorter keys, or several objects",
        )
    placed = tuple(Entry(each.key, each.dtype, each.shape, each.begin + start, each.end + start) for each in entries)
    end = start + offset
    behind = _place_byte_items(items, end)
    layout = Layout(placed, behind, relative.aliases, start, _checked_size(behind[-1].end if behind else end))
    return _with_texts_of(relative, layout)


def layout_from_entries(entries: Iterable[Entry], data_start: int, aliases: Mapping[str, str] | None = None) -> Layout:
    """Return the layout of tensors whose places were decided elsewhere. They may leave gaps.

    Args:
        entries: of tensors, each as long as its dtype and shape say, in any order.
        data_start: a multiple of `ALIGNMENT`, with room for the header before it.
        aliases: for each further name of an entry, its key.

    Raises:
        InvalidArgumentError: entries overlap, lie before ``data_start`` or are not aligned to their elements, or have
            keys or aliases that `plan_layout` would refuse.
    """
    placed = tuple(sorted(entries, key=lambda entry: (entry.begin, entry.end)))
    for entry in placed:
        if entry.begin % ITEMSIZES[entry.dtype]:
            raise InvalidArgumentError("an entry must be aligned to its elements", argument="entry", value=entry)
    gaps, size = _gaps(placed, data_start)
    layout = Layout(placed, (), dict(aliases or {}), data_start, _checked_size(size), gaps)
    _check_names(layout)
    return layout


def with_byte_items(layout: Layout, byte_items: Iterable[tuple[str, int]], begin: int = 0) -> Layout:
    """Return a layout with the same tensors in the same places and other byte items, after the last tensor.

    `data_start` stays, so the header may turn out too long if byte items were added: encode it before
    anything is written. Cheap if the keys of the byte items stay: nothing is computed for each tensor.

    Args:
        layout: the layout as it is.
        byte_items: key and length in bytes of each.
        begin: byte items lie at or behind this offset, too.

    Raises:
        InvalidArgumentError: a key is used twice or is reserved, or an alias leads nowhere.
    """
    end = layout.tensors[-1].end if layout.tensors else layout.data_start
    behind = _place_byte_items(byte_items, max(begin, end))
    # A gap between tensors was there before, and may be there behind them.
    gaps = tuple(gap for gap in layout.gaps if gap[1] <= end)
    if behind and behind[0].begin != end:
        gaps += ((end, behind[0].begin),)
    changed = replace(layout, byte_items=behind, size=_checked_size(behind[-1].end if behind else end), gaps=gaps)
    if [entry.key for entry in behind] != [entry.key for entry in layout.byte_items]:
        _check_names(changed)
    return _with_texts_of(layout, changed)


def _with_texts_of(layout: Layout, other: Layout) -> Layout:
    """Return the other layout, of the same tensors: their texts are not made again."""
    other.__dict__["tensor_texts"] = layout.tensor_texts
    return other


def _gaps(entries: Iterable[Entry], data_start: int) -> tuple[tuple[tuple[int, int], ...], int]:
    """Return the ranges between entries, given by rising offset, and the offset after the last entry."""
    gaps = []
    offset = data_start
    for entry in entries:
        if entry.begin < offset:
            raise InvalidArgumentError(f"an entry must not begin before offset {offset}", argument="entry", value=entry)
        if entry.begin > offset:
            gaps.append((offset, entry.begin))
        offset = entry.end
    return tuple(gaps), offset


def _place_byte_items(items: Iterable[tuple[str, int]], offset: int) -> tuple[Entry, ...]:
    entries = []
    for key, length in items:
        entries.append(Entry(key, "uint8", (length,), offset, offset + length, "bytes"))
        offset += length
    return tuple(entries)


def _checked_size(size: int) -> int:
    if size > MAX_SIZE:
        raise InvalidArgumentError(f"an object must not exceed {MAX_SIZE} bytes", argument="size")
    return size


def _check_names(layout: Layout) -> None:
    keys = [entry.key for entry in (*layout.tensors, *layout.byte_items)]
    names, known = [*keys, *layout.aliases], set(keys)
    try:
        together = "".join(names)
        together.encode()
    except (TypeError, UnicodeEncodeError) as error:
        raise InvalidArgumentError(f"a key must be text: {error}", argument="keys") from None
    if len(known | layout.aliases.keys()) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidArgumentError("a key must not be used twice", argument="keys", value=twice)
    if "__" in together:  # seldom, and much cheaper to find out than each key's beginning
        for name in filter(_is_reserved, names):
            raise InvalidArgumentError("this key is reserved", argument="keys", value=name)
    if not known.issuperset(layout.aliases.values()):
        raise InvalidArgumentError("an alias must lead to a key", argument="aliases", value=layout.aliases)


def _is_reserved(name: str) -> bool:
    return name.startswith(_RESERVED) or name == METADATA_KEY


# ---- writing a header -----------------------------------------------------------------------------------------------


def encode_header(layout: Layout, file_size: int, metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the first `layout.data_start` bytes of the file of an object.

    Args:
        layout: the places of its entries.
        file_size: bytes of the whole file; what lies after `layout.size` is marked as unused.
        metadata: text about the object, under any keys but ``__flashpoint__``. ``format: pt`` is added unless there
            is a `format`.

    Raises:
        CapacityError: the header does not fit.
    """
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
    tensors, marks = layout.tensor_texts
    keys = _members({"format": _FORMAT, "bytes": [entry.key for entry in layout.byte_items]})
    # Some tools only open files that name the framework that their tensors are from.
    about = {"format": "pt", **metadata, _MARKS: f"{{{keys},{marks}}}"}
    unused = [(f"{_GAP}{index}", begin, end) for index, (begin, end) in enumerate(layout.gaps)]
    if layout.size < file_size:
        unused.append((_TAIL, layout.size, file_size))
    octets = [*layout.byte_items, *(Entry(key, "uint8", (), begin, end) for key, begin, end in unused)]
    described = {entry.key: _described(None, entry, layout.data_start) for entry in octets}
    return f"{{{','.join(filter(None, [_members({METADATA_KEY: about}), tensors, _members(described)]))}}}"


# ---- reading a header -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ParsedHeader:
    """The content of an object's header.

    Attributes:
        layout: the places of its entries. Those of an object from elsewhere need not be aligned.
        metadata: text about the object.
    """

    layout: Layout
    metadata: Mapping[str, str]


def header_length(prefix: Buffer, file_size: int, path: str | os.PathLike[str] | None = None) -> int:
    """Return how many bytes of a file `parse_header` needs, from its first 8 bytes.

    Raises:
        ObjectFormatError: no valid file of this size starts like this.
    """
    with memoryview(prefix) as view, view.cast("B") as octets:
        if len(octets) < _LENGTH.size or file_size < _LENGTH.size:
            raise ObjectFormatError("the file is too short for the length of a header", path=path)
        (length,) = _LENGTH.unpack_from(octets)
    if length > MAX_HEADER_BYTES:
        raise ObjectFormatError(f"a header must not exceed {MAX_HEADER_BYTES} bytes", path=path)
    if _LENGTH.size + length > file_size:
        raise ObjectFormatError(f"a header of {length} bytes does not fit into the file", path=path)
    return _LENGTH.size + int(length)


def parse_header(buf: Buffer, file_size: int | None, path: str | os.PathLike[str] | None = None) -> ParsedHeader:
    """Return the content of an object's header, after checking that it is a valid safetensors file.

    Accepts every such file of dtypes that this package writes, whoever wrote it. Trusts nothing: entries must lie in
    the file, cover its data without overlap, and be as long as their dtypes and shapes say.

    Args:
        buf: the file, or as much of its start as `header_length` says.
        file_size: bytes of the whole file; None if it is gone, and its tail is as long as the header says.
        path: where it is from, for errors.

    Raises:
        ObjectFormatError: it is not a valid file, or has a dtype that is not known.
    """
    data_start = header_length(buf, MAX_SIZE if file_size is None else file_size, path)
    with memoryview(buf) as view, view.cast("B") as octets:
        header = bytes(octets[_LENGTH.size : data_start])
    if _LENGTH.size + len(header) != data_start:
        raise ObjectFormatError("the header is truncated", path=path)
    try:
        return _parse(header, data_start, file_size)
    except (ValueError, TypeError, RecursionError, MemoryError) as error:
        raise ObjectFormatError(f"the header is not valid: {error}", path=path) from error


@dataclass(frozen=True)
class _Marks:
    """The text under ``__flashpoint__``, checked."""

    aliases: Mapping[str, str]
    dtypes: Mapping[str, str]
    bytes: Sequence[str]


# From here on, ValueError or TypeError for whatever is not valid.


def _parse(header: bytes, data_start: int, file_size: int | None) -> ParsedHeader:
    content = _load_json(header)
    metadata = content.pop(METADATA_KEY, {})
    if not isinstance(metadata, dict):
        raise ValueError(f"{METADATA_KEY} must map text to text")
    "".join((*content, *metadata, *metadata.values())).encode()  # half a surrogate pair is no text
    text = metadata.pop(_MARKS, None)
    marks = _Marks({}, {}, ()) if text is None else _parse_marks(text)
    entries = _parse_entries(content, marks, data_start, file_size)
    if not {entry.key for entry in entries}.issuperset((*marks.bytes, *marks.dtypes, *marks.aliases.values())):
        raise ValueError("a key is marked, but is not an entry")
    if not marks.aliases.keys().isdisjoint(content) or any(map(_is_reserved, marks.aliases)):
        raise ValueError("an alias is an entry, or reserved")
    gaps, size = _gaps(entries, data_start)
    tensors = tuple(entry for entry in entries if entry.kind == "tensor")
    byte_items = tuple(entry for entry in entries if entry.kind == "bytes")
    return ParsedHeader(Layout(tensors, byte_items, marks.aliases, data_start, size, gaps), metadata)


def _parse_marks(text: str) -> _Marks:
    found = _load_json(text.encode())
    if found.pop("format", None) != _FORMAT:
        raise ValueError(f"the object does not have format version {_FORMAT}")
    marks = _Marks(**found)
    if not (isinstance(marks.aliases, dict) and isinstance(marks.dtypes, dict) and isinstance(marks.bytes, list)):
        raise ValueError(f"{_MARKS} has members of other types")
    texts = (*marks.aliases, *marks.aliases.values(), *marks.dtypes, *marks.dtypes.values(), *marks.bytes)
    "".join(texts).encode()
    if not marks.dtypes.keys().isdisjoint(marks.bytes):
        raise ValueError("a byte item has a dtype")
    return marks


def _load_json(header: bytes) -> dict[str, Any]:
    if not header.startswith(b"{"):
        raise ValueError("it does not start with {")
    pieces = header.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
    outside = b"".join(pieces[::2])
    # No signs, fractions, exponents, true, false or null: every value is text, a list, an object or a natural
    # number, which spares later checks of types.
    if outside.translate(None, _OUTSIDE_TEXT):
        raise ValueError("it holds something that is neither text nor a natural number")
    # The JSON parser recurses, and the process may allow more recursion than its stack has room for. Brackets
    # of a header are gone after this many times of taking away innermost pairs.
    brackets = outside.translate(None, _NOT_BRACKETS)
    for _ in range(3):
        brackets = brackets.replace(b"[]", b"").replace(b"{}", b"")
    if brackets:
        raise ValueError("its brackets are unbalanced or too deep")
    content = json.loads(header.decode(), object_pairs_hook=_json_object)
    if not isinstance(content, dict):
        raise ValueError("it describes an entry instead of holding some")
    return content


def _json_object(pairs: list[tuple[str, Any]]) -> dict[str, Any] | _Description:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a name occurs twice")
    # At once, since all lists of a big header together would keep the garbage collector busy.
    if len(members) == 3:
        dtype, shape, offsets = members.get("dtype"), members.get("shape"), members.get("data_offsets")
        if type(dtype) is str and type(shape) is list and type(offsets) is list and len(offsets) == 2:
            return offsets[0], offsets[1], dtype, tuple(shape)
    return members


def _parse_entries(content: Mapping[str, Any], marks: _Marks, data_start: int, file_size: int | None) -> list[Entry]:
    for key, description in content.items():
        if type(description) is not tuple:
            raise ValueError(f"{key!a} is not described by exactly dtype, shape and data_offsets")
    entries: list[Entry] = []
    byte_keys = set(marks.bytes)
    offset = 0
    for key, (begin, end, file_dtype, file_shape) in _by_offset(content):
        if begin != offset or end < begin:
            raise ValueError(f"{key!a} takes bytes {begin} to {end}, but byte {offset} is next")
        offset = end
        dtype, shape, nbytes = _parse_type(file_dtype, file_shape)
        if end - begin != nbytes:
            raise ValueError(f"{key!a} has {nbytes} bytes, but takes {end - begin}")
        is_reserved, is_bytes = key.startswith(_RESERVED), key in byte_keys
        if (is_reserved or is_bytes or key in marks.dtypes) and (file_dtype != BYTES or len(shape) != 1):
            raise ValueError(f"{key!a} must be plain bytes")
        if is_reserved:
            if not (key == _TAIL or key.startswith(_GAP)):
                raise ValueError(f"{key!a} is reserved")
            continue
        if key in marks.dtypes:
            dtype, shape = _parse_true_type(key, marks.dtypes[key], nbytes)
        entries.append(
            Entry(key, dtype, shape, data_start + begin, data_start + end, "bytes" if is_bytes else "tensor")
        )
    if file_size is not None and data_start + offset != file_size:
        raise ValueError(f"the entries cover {offset} of {file_size - data_start} bytes")
    return entries


def _by_offset(content: Mapping[str, _Description]) -> Iterable[tuple[str, _Description]]:
    # Entries without bytes share their offset with others and come first, in the order given.
    places = [description[:2] for description in content.values()]
    return content.items() if places == sorted(places) else sorted(content.items(), key=lambda item: item[1][:2])


@lru_cache(maxsize=2**15)
def _parse_type(file_dtype: str, file_shape: tuple[int, ...]) -> tuple[str, tuple[int, ...], int]:
    dtype = BY_FILE_DTYPE.get(file_dtype)
    nbytes = None if dtype is None else tensor_nbytes(dtype, file_shape)
    if dtype is None or nbytes is None:
        raise ValueError(f"there is no tensor of dtype {file_dtype[:20]!a} and such a shape")
    return dtype, file_shape, nbytes


def _parse_true_type(key: str, text: str, nbytes: int) -> tuple[str, tuple[int, ...]]:
    found = parse_true_type(text)
    if found is None or tensor_nbytes(*found) != nbytes:
        raise ValueError(f"there is no tensor {text[:80]!a} of {nbytes} bytes, as {key!a} should be")
    return found
