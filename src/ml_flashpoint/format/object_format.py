"""The form of one object: a safetensors file that is planned first and filled in place.

Owns the header, in both directions; `format.object_layout` plans what it says (its names are importable from
here). Reading, writing and mapping files, and moving tensors, is up to others.

An object is a valid safetensors file, so that any tool opens it, with these habits:

* The data starts at a multiple of 4096; the header is padded with spaces, which leaves it room to grow.
* Tensors come by falling element size, so that each is aligned although the format allows no gaps.
* Items that are not tensors are U8 tensors of one dimension, marked by `__flashpoint__.bytes.<key>` in
  `__metadata__`. A tensor of a dtype that not every safetensors release reads is stored likewise, and
  `__flashpoint__.dtype.<key>` says what it is, for example `complex128 2,3`.
* Tensors that share their memory are stored once: `__flashpoint__.alias.<key>` names the key that was kept.
* Room that is not used, inside and at the end, is covered by U8 tensors called `__flashpoint__.gap.<i>` and
  `__flashpoint__.tail`.
"""

from __future__ import annotations

import itertools
import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from json.encoder import encode_basestring_ascii
from typing import TYPE_CHECKING, Any, Final, Literal

from ml_flashpoint.format.dtypes import (
    BYTES,
    MAX_SIZE,
    parse_file_type,
    parse_true_type,
    stored_tensor,
    tensor_nbytes,
)
from ml_flashpoint.format.errors import CapacityError, InvalidArgumentError, ObjectFormatError
from ml_flashpoint.format.object_layout import (
    ALIGNMENT,
    DEFAULT_RESERVE,
    MAX_HEADER_BYTES,
    METADATA_KEY,
    RESERVED_PREFIX,
    Entry,
    Layout,
    find_gaps,
    header_space,
    layout_from_entries,
    plan_layout,
    with_byte_items,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "ALIGNMENT",
    "DEFAULT_RESERVE",
    "MAX_HEADER_BYTES",
    "RESERVED_PREFIX",
    "Entry",
    "HeaderTemplate",
    "Layout",
    "ParsedHeader",
    "encode_header",
    "header_length",
    "header_space",
    "layout_from_entries",
    "parse_header",
    "plan_layout",
    "with_byte_items",
]

_FORMAT_VERSION: Final = "1"
_FORMAT: Final = RESERVED_PREFIX + "format"
_ALIAS: Final = RESERVED_PREFIX + "alias."
_BYTES_MARK: Final = RESERVED_PREFIX + "bytes."
_DTYPE: Final = RESERVED_PREFIX + "dtype."
_GAP: Final = RESERVED_PREFIX + "gap."
_TAIL: Final = RESERVED_PREFIX + "tail"
_LENGTH: Final = struct.Struct("<Q")
_OUTSIDE_TEXT: Final = b"[]{}:,0123456789 \t\r\n"
_NOT_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))

_Description = tuple[int, int, str, tuple[int, ...]]  # offsets of begin and end, dtype, shape


class HeaderTemplate:
    """Encodes headers of layouts that mostly have the same tensors, redoing only what changed.

    Gives what `encode_header` gives, in time proportional to the byte items and the metadata as long as the
    entries before the first byte item and `data_start` are those of the layout encoded before. Not
    thread-safe.
    """

    def __init__(self) -> None:
        self._data_start = 0
        self._entries: tuple[Entry, ...] = ()
        self._text = ""
        self._marks = ""

    def encode(self, layout: Layout, file_size: int, metadata: Mapping[str, str] | None = None) -> bytes:
        """Return the header of an object; see `encode_header`."""
        if not layout.size <= file_size <= MAX_SIZE:
            raise InvalidArgumentError(
                f"the file must have from {layout.size} to {MAX_SIZE} bytes",
                argument="file_size",
                value=file_size,
            )
        count = len(self._entries)
        rest = layout.entries[count:]
        # Where entries are the same objects as before, and they mostly are, they are not looked at.
        if (
            layout.data_start != self._data_start
            or layout.entries[:count] != self._entries
            or (rest and rest[0].kind == "tensor")
        ):
            rest = self._renew(layout)
        fillers = [(f"{_GAP}{index}", begin, end) for index, (begin, end) in enumerate(layout.gaps)]
        if layout.size < file_size:
            fillers.append((_TAIL, layout.size, file_size))
        start = layout.data_start
        parts = [
            f'"{METADATA_KEY}":{{{self._metadata_text(rest, layout.aliases, metadata or {})}}}',
            self._text,
            *_entry_texts(rest, start),
            *(_bytes_text(key, begin - start, end - start) for key, begin, end in fillers),
        ]
        content = f"{{{','.join(filter(None, parts))}}}".encode("ascii")
        needed = _LENGTH.size + len(content)
        if needed > start:
            raise CapacityError(
                "the header does not fit before the data",
                needed_bytes=needed,
                available_bytes=start,
                hint="plan the layout anew, with a larger reserve",
            )
        return (_LENGTH.pack(start - _LENGTH.size) + content).ljust(start, b" ")

    def _renew(self, layout: Layout) -> tuple[Entry, ...]:
        entries = tuple(itertools.takewhile(lambda entry: entry.kind == "tensor", layout.entries))
        self._data_start = layout.data_start
        self._entries = entries
        self._text = ",".join(_entry_texts(entries, layout.data_start))
        self._marks = ",".join(_entry_marks(entries))
        return layout.entries[len(entries) :]

    def _metadata_text(self, rest: Iterable[Entry], aliases: Mapping[str, str], metadata: Mapping[str, str]) -> str:
        for item in metadata.items():
            if not all(_is_text(text) for text in item) or item[0].startswith(RESERVED_PREFIX):
                raise InvalidArgumentError(
                    f"metadata must be text, with keys that do not start with {RESERVED_PREFIX}",
                    argument="metadata",
                    value=item,
                )
        # Some tools only open files that name the framework that their tensors are from.
        plain = {"format": "pt", **metadata, _FORMAT: _FORMAT_VERSION}
        marks = [
            *(_mark_text(key, value) for key, value in plain.items()),
            *(_mark_text(_ALIAS + name, kept) for name, kept in aliases.items()),
            self._marks,
            *_entry_marks(rest),
        ]
        return ",".join(filter(None, marks))


def encode_header(layout: Layout, file_size: int, metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the first `layout.data_start` bytes of the file of an object.

    Args:
        layout: where its entries lie.
        file_size: bytes of the whole file; what lies after `layout.size` is marked as unused.
        metadata: anything to say about the object. ``format: pt`` is added unless there is a `format`.

    Raises:
        CapacityError: the header does not fit.
        InvalidArgumentError: the file is too small, or the metadata is not text or uses a reserved key.
    """
    return HeaderTemplate().encode(layout, file_size, metadata)


@dataclass(frozen=True)
class ParsedHeader:
    """What the header of an object says.

    Attributes:
        layout: where its entries lie. Those of an object from elsewhere need not be aligned.
        metadata: what was said about the object.
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
    """Return what the header of an object says, after checking that it is a valid safetensors file.

    Accepts every such file, not only those of this package. Trusts nothing: entries must lie in the file,
    cover its data without overlap, and be as long as their dtypes and shapes say.

    Args:
        buf: the file, or as much of its start as `header_length` says.
        file_size: bytes of the whole file. None if that is gone, and this is the part of it that was in use: then its
            tail is as long as the header says.
        path: where it is from; only used in what is raised.

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
    """What `__metadata__` says: of each entry, and of the object."""

    aliases: dict[str, str]
    byte_keys: set[str]
    true_types: dict[str, str]
    plain: dict[str, str]


def _parse(header: bytes, data_start: int, file_size: int | None) -> ParsedHeader:
    # Raises ValueError or TypeError for whatever is not valid.
    content = _load_json(header)
    marks = _parse_metadata(content.pop(METADATA_KEY, {}))
    entries = _parse_entries(content, marks, data_start, file_size)
    keys = {entry.key for entry in entries}
    for key in itertools.chain(marks.byte_keys, marks.true_types, marks.aliases.values()):
        if key not in keys:
            raise ValueError(f"{key!a} is marked, but is not an entry")
    if not marks.aliases.keys().isdisjoint(content):
        raise ValueError("a key is both an entry and an alias")
    gaps, size = find_gaps(entries, data_start)
    return ParsedHeader(Layout(tuple(entries), marks.aliases, data_start, size, gaps), marks.plain)


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
    "".join(content).encode()  # half a surrogate pair is no text
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


def _parse_metadata(metadata: object) -> _Marks:
    if not isinstance(metadata, dict) or not all(map(_is_text, metadata.values())):
        raise ValueError(f"{METADATA_KEY} must map text to text")
    "".join(metadata).encode()
    marks = _Marks({}, set(), {}, {})
    version = metadata.get(_FORMAT)
    for key, value in metadata.items():
        if not key.startswith(RESERVED_PREFIX):
            marks.plain[key] = value
        elif version != _FORMAT_VERSION:
            raise ValueError(f"the object has format version {version!a}, not {_FORMAT_VERSION}")
        elif key.startswith(_ALIAS):
            marks.aliases[key[len(_ALIAS) :]] = value
        elif key.startswith(_BYTES_MARK):
            marks.byte_keys.add(key[len(_BYTES_MARK) :])
        elif key.startswith(_DTYPE):
            marks.true_types[key[len(_DTYPE) :]] = value
        elif key != _FORMAT:
            raise ValueError(f"unknown metadata {key!a}")
    for name in itertools.chain(marks.aliases, marks.byte_keys, marks.true_types):
        if name.startswith(RESERVED_PREFIX) or name == METADATA_KEY:
            raise ValueError(f"{name!a} is reserved")
    if not marks.byte_keys.isdisjoint(marks.true_types):
        raise ValueError("a byte item has a dtype")
    return marks


def _parse_entries(content: Mapping[str, Any], marks: _Marks, data_start: int, file_size: int | None) -> list[Entry]:
    for key, description in content.items():
        if type(description) is not tuple:
            raise ValueError(f"{key!a} is not described by exactly dtype, shape and data_offsets")
    entries: list[Entry] = []
    marked = marks.byte_keys | marks.true_types.keys()
    offset = 0
    for key, (begin, end, file_dtype, file_shape) in _by_offset(content):
        if begin != offset or end < begin:
            raise ValueError(f"{key!a} takes bytes {begin} to {end}, but byte {offset} is next")
        offset = end
        dtype, shape, nbytes = _parse_type(file_dtype, file_shape)
        if end - begin != nbytes:
            raise ValueError(f"{key!a} has {nbytes} bytes, but takes {end - begin}")
        kind: Literal["tensor", "bytes"] = "tensor"
        if key in marked:
            if file_dtype != BYTES or len(shape) != 1:
                raise ValueError(f"{key!a} is marked, but is not plain bytes")
            if key in marks.byte_keys:
                kind = "bytes"
            else:
                dtype, shape = _parse_true_type(key, marks.true_types[key], nbytes)
        elif key.startswith(RESERVED_PREFIX):
            if file_dtype != BYTES or not (key == _TAIL or key.startswith(_GAP)):
                raise ValueError(f"{key!a} is reserved")
            continue
        entries.append(Entry(key, dtype, shape, data_start + begin, data_start + end, kind))
    if file_size is not None and data_start + offset != file_size:
        raise ValueError(f"the entries cover {offset} of {file_size - data_start} bytes")
    return entries


def _by_offset(content: Mapping[str, _Description]) -> Iterable[tuple[str, _Description]]:
    # Entries without bytes share their offset with others and come first, in the order given.
    begins = [description[0] for description in content.values()]
    ends = [description[1] for description in content.values()]
    if begins == sorted(begins) and ends == sorted(ends):
        return content.items()
    return sorted(content.items(), key=lambda item: item[1][:2])


@lru_cache(maxsize=2**15)
def _parse_type(file_dtype: str, file_shape: tuple[int, ...]) -> tuple[str, tuple[int, ...], int]:
    found = parse_file_type(file_dtype, file_shape)
    nbytes = tensor_nbytes(*found) if found is not None else None
    if found is None or nbytes is None:
        raise ValueError(f"there is no tensor of dtype {file_dtype[:20]!a} and such a shape")
    return (*found, nbytes)


def _parse_true_type(key: str, text: str, nbytes: int) -> tuple[str, tuple[int, ...]]:
    found = parse_true_type(text)
    if found is None or tensor_nbytes(*found) != nbytes:
        raise ValueError(f"there is no tensor {text[:80]!a} of {nbytes} bytes, as {key!a} should be")
    return found


def _is_text(value: object) -> bool:
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _entry_texts(entries: Iterable[Entry], data_start: int) -> Iterator[str]:
    for entry in entries:
        begin, end = entry.begin - data_start, entry.end - data_start
        if entry.kind == "bytes":
            # Not by stored_tensor, whose cache is no place for ever changing lengths.
            yield _bytes_text(entry.key, begin, end)
        else:
            stored = stored_tensor(entry.dtype, entry.shape)
            yield (
                f'{encode_basestring_ascii(entry.key)}:{{"dtype":"{stored.file_dtype}",'
                f'"shape":[{stored.file_shape}],"data_offsets":[{begin},{end}]}}'
            )


def _bytes_text(key: str, begin: int, end: int) -> str:
    name = encode_basestring_ascii(key)
    return f'{name}:{{"dtype":"{BYTES}","shape":[{end - begin}],"data_offsets":[{begin},{end}]}}'


def _entry_marks(entries: Iterable[Entry]) -> Iterator[str]:
    for entry in entries:
        if entry.kind == "bytes":
            yield _mark_text(_BYTES_MARK + entry.key, "")
        else:
            true_type = stored_tensor(entry.dtype, entry.shape).true_type
            if true_type is not None:
                yield _mark_text(_DTYPE + entry.key, true_type)


def _mark_text(key: str, value: str) -> str:
    return f"{encode_basestring_ascii(key)}:{encode_basestring_ascii(value)}"
