"""Where everything in an object lies.

Owns the values that describe a layout, and planning one. How the layout is written into the object's header
and read back is up to `format.object_format`, which also says what an object looks like. Nothing here touches a
file or a tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from json.encoder import encode_basestring_ascii
from typing import Final, Literal

from ml_flashpoint.format.dtypes import ITEMSIZES, MAX_SIZE, StoredTensor, stored_tensor
from ml_flashpoint.format.errors import InvalidArgumentError

ALIGNMENT: Final = 4096
"""The data of an object starts at a multiple of this many bytes."""

RESERVED_PREFIX: Final = "__flashpoint__."
"""Keys and metadata that start like this are the format's own."""

METADATA_KEY: Final = "__metadata__"
"""The key that safetensors itself reserves."""

DEFAULT_RESERVE: Final = 16 * 1024
"""Bytes left in a header for metadata and for byte items to come, unless asked otherwise."""

MAX_HEADER_BYTES: Final = 100_000_000
"""Longest header that safetensors reads, without the 8 bytes of its length."""

_BYTE_DTYPE: Final = "uint8"

_DIGITS = len(str(MAX_SIZE))
# Upper bounds of what each part takes in the header, without keys, names and shapes.
_ENTRY_BYTES = len('"":{"dtype":"","shape":[],"data_offsets":[,]},') + 2 * _DIGITS
_BYTES_ENTRY_BYTES = _ENTRY_BYTES + len("U8") + _DIGITS
_FILLER_BYTES = _BYTES_ENTRY_BYTES + len(RESERVED_PREFIX) + len("gap.") + _DIGITS
_MARK_BYTES = len('"":"",') + len(RESERVED_PREFIX) + len("format.")
_FRAME_BYTES = 8 + len('{"":{"format":"pt"},}') + len(METADATA_KEY) + 2 * _MARK_BYTES + _FILLER_BYTES


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor or byte item of an object.

    Attributes:
        key: its name, unique in the object.
        dtype: dtype of the tensor, by its name in `format.dtypes`; ``uint8`` for a byte item.
        shape: shape of the tensor; the number of bytes for a byte item.
        begin: offset of its first byte from the start of the file.
        end: offset after its last byte.
        kind: whether it is a tensor, or bytes that stand for something else.
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
    """Where everything in an object lies. Made by functions that see to its consistency; immutable.

    Attributes:
        entries: tensors and byte items by rising offset.
        aliases: for each further name of an entry, the key of that entry.
        data_start: offset of the data in the file, which is the length of the header with its padding.
        size: offset after the last entry; what follows in the file is unused.
        gaps: unused ranges between entries, as offsets of begin and end in the file.
    """

    entries: tuple[Entry, ...]
    aliases: Mapping[str, str]
    data_start: int
    size: int
    gaps: tuple[tuple[int, int], ...] = ()

    @cached_property
    def by_key(self) -> Mapping[str, Entry]:
        """The entries by their keys and by their aliases."""
        entries = {entry.key: entry for entry in self.entries}
        return entries | {name: entries[kept] for name, kept in self.aliases.items()}

    @cached_property
    def tensors(self) -> tuple[Entry, ...]:
        """The entries that are tensors, by rising offset; those with several names once: see :attr:`aliases`."""
        return tuple(entry for entry in self.entries if entry.kind == "tensor")

    @cached_property
    def byte_items(self) -> tuple[Entry, ...]:
        """The entries that are byte items, by rising offset."""
        return tuple(entry for entry in self.entries if entry.kind == "bytes")


def plan_layout(
    tensors: Iterable[tuple[str, str, Sequence[int]]],
    byte_items: Iterable[tuple[str, int]] = (),
    aliases: Mapping[str, str] | None = None,
    reserve: int = DEFAULT_RESERVE,
) -> Layout:
    """Return a layout without gaps.

    Tensors come by falling element size and then as given, so that each is aligned to its elements; byte
    items come after them as given. The same tensors, aliases and keys of byte items give the same
    `data_start`, whatever the lengths of the byte items.

    Args:
        tensors: key, dtype and shape of each.
        byte_items: key and length in bytes of each.
        aliases: for each further name of one of these, its key.
        reserve: bytes to leave free in the header, for metadata and for byte items that may be added later.

    Raises:
        InvalidArgumentError: A key is used twice or is reserved; a dtype is quantized; a shape or length is
            negative; an alias leads nowhere; or the header would be longer than the format allows.
    """
    stored = [(key, stored_tensor(dtype, tuple(shape))) for key, dtype, shape in tensors]
    items = list(byte_items)
    aliases = dict(aliases or {})
    offset = data_start = _data_start(stored, [key for key, _ in items], aliases, 0, reserve)
    by_itemsize: dict[int, list[tuple[str, StoredTensor]]] = {}
    for pair in stored:
        by_itemsize.setdefault(ITEMSIZES[pair[1].dtype], []).append(pair)
    entries: list[Entry] = []
    for itemsize in sorted(by_itemsize, reverse=True):
        for key, tensor in by_itemsize[itemsize]:
            end = offset + tensor.nbytes
            entries.append(Entry(key, tensor.dtype, tensor.shape, offset, end))
            offset = end
    entries += _place_byte_items(items, offset)
    return _checked_size(Layout(tuple(entries), aliases, data_start, entries[-1].end if entries else offset))


def header_space(
    tensors: Iterable[tuple[str, str, Sequence[int]]],
    byte_keys: Iterable[str] = (),
    aliases: Mapping[str, str] | None = None,
    *,
    gaps: int = 0,
    reserve: int = DEFAULT_RESERVE,
) -> int:
    """Return a `data_start` for `layout_from_entries` that leaves enough room for the header.

    Args:
        tensors: key, dtype and shape of each.
        byte_keys: keys of the byte items, whatever their lengths.
        aliases: for each further name of one of these, its key.
        gaps: number of gaps there may be between the entries.
        reserve: as for `plan_layout`.

    Raises:
        InvalidArgumentError: as for `plan_layout`.
    """
    stored = [(key, stored_tensor(dtype, tuple(shape))) for key, dtype, shape in tensors]
    return _data_start(stored, list(byte_keys), dict(aliases or {}), gaps, reserve)


def layout_from_entries(entries: Iterable[Entry], data_start: int, aliases: Mapping[str, str] | None = None) -> Layout:
    """Return the layout of entries whose places were decided elsewhere. They may leave gaps.

    Args:
        entries: in any order.
        data_start: A multiple of `ALIGNMENT`, with room for the header before it: see `header_space`.
        aliases: for each further name of an entry, its key.

    Raises:
        InvalidArgumentError: entries overlap, lie before ``data_start``, are not as long as their shapes say,
            are not aligned to their elements, or have keys or aliases that `plan_layout` would refuse.
    """
    if data_start <= 0 or data_start % ALIGNMENT:
        raise InvalidArgumentError(
            f"the data must start at a multiple of {ALIGNMENT}", argument="data_start", value=data_start
        )
    placed = sorted(entries, key=lambda entry: (entry.begin, entry.end))
    aliases = dict(aliases or {})
    _check_names([entry.key for entry in placed], aliases)
    for entry in placed:
        _check_entry(entry)
    gaps, size = find_gaps(placed, data_start)
    return _checked_size(Layout(tuple(placed), aliases, data_start, size, gaps))


def with_byte_items(layout: Layout, byte_items: Iterable[tuple[str, int]], begin: int = 0) -> Layout:
    """Return a layout with the same tensors in the same places and other byte items, after the last tensor.

    `data_start` stays, so the header may turn out too long if byte items were added: encode it before
    anything is written. Cheap if the keys of the byte items stay: nothing is computed for each tensor.

    Args:
        layout: the layout as it is.
        byte_items: key and length in bytes of each.
        begin: byte items lie at or behind this offset, too.

    Raises:
        InvalidArgumentError: A key is used twice or is reserved, a length is negative, or an alias leads
            nowhere.
    """
    items = list(byte_items)
    tensors = layout.tensors
    tensors_end = tensors[-1].end if tensors else layout.data_start
    begin = max(begin, tensors_end)
    entries = (*tensors, *_place_byte_items(items, begin))
    if [key for key, _ in items] != [entry.key for entry in layout.byte_items]:
        _check_names([entry.key for entry in entries], layout.aliases)
    gaps: tuple[tuple[int, int], ...] = ()
    if layout.gaps or begin != tensors_end or layout.entries[: len(tensors)] != tensors:
        gaps, _ = find_gaps(entries, layout.data_start)
    size = entries[-1].end if entries else layout.data_start
    return _checked_size(replace(layout, entries=entries, size=size, gaps=gaps))


def find_gaps(entries: Iterable[Entry], data_start: int) -> tuple[tuple[tuple[int, int], ...], int]:
    """Return the ranges between entries, given by rising offset, and the offset after the last entry.

    Raises:
        InvalidArgumentError: an entry begins before the one before it ends, or before ``data_start``.
    """
    gaps = []
    offset = data_start
    for entry in entries:
        if entry.begin != offset:
            if entry.begin < offset:
                raise InvalidArgumentError(
                    f"an entry must not begin before offset {offset}", argument="entry", value=entry
                )
            gaps.append((offset, entry.begin))
        offset = entry.end
    return tuple(gaps), offset


def _place_byte_items(items: Iterable[tuple[str, int]], offset: int) -> list[Entry]:
    entries = []
    for key, length in items:
        if length < 0:
            raise InvalidArgumentError("a length must not be negative", argument="byte_items", value=length)
        entries.append(Entry(key, _BYTE_DTYPE, (length,), offset, offset + length, "bytes"))
        offset += length
    return entries


def _check_entry(entry: Entry) -> None:
    stored = stored_tensor(entry.dtype, entry.shape)
    if entry.nbytes != stored.nbytes:
        raise InvalidArgumentError(
            f"an entry of {stored.nbytes} bytes must not take {entry.nbytes}", argument="entry", value=entry
        )
    if entry.begin % ITEMSIZES[entry.dtype]:
        raise InvalidArgumentError("an entry must be aligned to its elements", argument="entry", value=entry)
    if entry.kind == "bytes" and (entry.dtype != _BYTE_DTYPE or len(entry.shape) != 1):
        raise InvalidArgumentError("a byte item must be uint8 of one dimension", argument="entry", value=entry)


def _checked_size(layout: Layout) -> Layout:
    if layout.size > MAX_SIZE:
        raise InvalidArgumentError(f"an object must not exceed {MAX_SIZE} bytes", argument="size")
    return layout


def _data_start(
    stored: Sequence[tuple[str, StoredTensor]],
    byte_keys: Sequence[str],
    aliases: Mapping[str, str],
    gaps: int,
    reserve: int,
) -> int:
    if reserve < 0:
        raise InvalidArgumentError("the reserve must not be negative", argument="reserve", value=reserve)
    keys = [key for key, _ in stored]
    _check_names([*keys, *byte_keys], aliases)
    retyped = [(key, tensor.true_type) for key, tensor in stored if tensor.true_type is not None]
    length = (
        _FRAME_BYTES
        + reserve
        + sum(_ENTRY_BYTES + len(tensor.file_dtype) + len(tensor.file_shape) for _, tensor in stored)
        + _escaped_length(keys)
        + sum(_MARK_BYTES + len(true_type) for _, true_type in retyped)
        + _escaped_length([key for key, _ in retyped])
        + len(byte_keys) * (_BYTES_ENTRY_BYTES + _MARK_BYTES)
        + 2 * _escaped_length(byte_keys)
        + len(aliases) * _MARK_BYTES
        + _escaped_length([*aliases.keys(), *aliases.values()])
        + gaps * _FILLER_BYTES
    )
    data_start = -(-length // ALIGNMENT) * ALIGNMENT
    if data_start - 8 > MAX_HEADER_BYTES:
        raise InvalidArgumentError(
            f"the header would take {length} bytes, more than safetensors reads ({MAX_HEADER_BYTES})",
            argument="tensors",
            hint="use shorter keys, or several objects",
        )
    return data_start


def _escaped_length(names: Iterable[str]) -> int:
    # Escaping works on each character alone, so that of all names at once is as long as that of each.
    return len(encode_basestring_ascii("".join(names))) - 2


def _check_names(keys: Sequence[str], aliases: Mapping[str, str]) -> None:
    names = [*keys, *aliases]
    try:
        together = "".join(names)
        together.encode()
    except (TypeError, UnicodeEncodeError) as error:
        raise InvalidArgumentError(f"a key must be text: {error}", argument="keys") from None
    known = set(keys)
    if len(known) != len(keys) or not known.isdisjoint(aliases):
        raise InvalidArgumentError("a key must not be used twice", argument="keys", value=_repeated(names))
    if "__" in together:  # seldom, and much cheaper to find out than each key's beginning
        for name in names:
            if name.startswith(RESERVED_PREFIX) or name == METADATA_KEY:
                raise InvalidArgumentError("this key is reserved", argument="keys", value=name)
    for name, kept in aliases.items():
        if kept not in known:
            raise InvalidArgumentError("an alias must lead to a key", argument="aliases", value=(name, kept))


def _repeated(names: Iterable[str]) -> str | None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None
