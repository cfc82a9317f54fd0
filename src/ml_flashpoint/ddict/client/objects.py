"""Large values as objects in arenas.

Owns the form of such an object, in both directions. Where arenas come from and who locks them is up to `arenas`
and `shared_memory`.

It is a valid object of `format.object_format`: tensors ``t0``, ``t1`` and so on, and byte items ``pickle`` and
``arrays`` (which of the tensors are arrays). Its header is written last, and the 8 bytes of its length at the very
end, so that a header which can be read means that all of it is there.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from ml_flashpoint.ddict.client.codec import Encoded, assemble, parse_array_type, tensor_octets
from ml_flashpoint.ddict.manager.arenas import check_header
from ml_flashpoint.format.dtypes import ITEMSIZES
from ml_flashpoint.format.errors import ObjectFormatError
from ml_flashpoint.format.object_format import Entry, Layout, encode_header, plan_layout
from ml_flashpoint.staging.copy import copy_all, cpu_clone, typed_view
from ml_flashpoint.staging.torch_dtypes import dtype_name, torch_dtype

if TYPE_CHECKING:
    from typing_extensions import Buffer

_PICKLE_ITEM: Final = "pickle"
_ARRAYS_ITEM: Final = "arrays"
_KINDS: Final = frozenset(("tensor", "array", "bytes", "number", "plain", "pickle"))
_SINGLE: Final = frozenset(("tensor", "array", "bytes"))
# In the header: the value's id and kind.
_HEADER_RESERVE: Final = 512

_Signature = tuple[tuple[str, tuple[int, ...]], ...]


@lru_cache(maxsize=64)
def _tensor_layout(signature: _Signature, items: tuple[tuple[str, int], ...]) -> Layout:
    return plan_layout(
        [(f"t{index}", dtype, shape) for index, (dtype, shape) in enumerate(signature)], items, reserve=_HEADER_RESERVE
    )


def _layout(encoded: Encoded) -> tuple[Layout, dict[str, bytes]]:
    items = {}
    if encoded.pickled:
        items[_PICKLE_ITEM] = encoded.pickled
    if any(described is not None for described in encoded.arrays):
        items[_ARRAYS_ITEM] = json.dumps(encoded.arrays, separators=(",", ":")).encode()
    signature = tuple((dtype_name(tensor.dtype), tuple(tensor.shape)) for tensor in encoded.tensors)
    return _tensor_layout(signature, tuple((key, len(data)) for key, data in items.items())), items


def _metadata(encoded: Encoded, value_id: str) -> dict[str, str]:
    return {"value": value_id, "kind": encoded.kind}


def object_size(encoded: Encoded) -> int:
    """Bytes that an arena must have to take this value."""
    return _layout(encoded)[0].size


def write_object(encoded: Encoded, arena: torch.Tensor, value_id: str) -> int:
    """Write a value into an arena, its header last.

    Args:
        arena: the whole file, 1-D uint8, writable.

    Returns:
        The bytes of the object; the rest of the file is unused.

    Raises:
        CapacityError, InvalidArgumentError: the arena is smaller than `object_size`.
    """
    layout, items = _layout(encoded)
    header = encode_header(layout, arena.numel(), _metadata(encoded, value_id))
    octets = arena.numpy()
    octets[:8] = 0
    if layout.tensors:
        copy_all(_places(arena, layout.tensors), [encoded.tensors[int(entry.key[1:])] for entry in layout.tensors])
    for entry in layout.byte_items:
        octets[entry.begin : entry.end] = np.frombuffer(items[entry.key], np.uint8)
    octets[8 : len(header)] = np.frombuffer(header, np.uint8)[8:]
    octets[:8] = np.frombuffer(header, np.uint8)[:8]
    return layout.size


def _places(arena: torch.Tensor, entries: Sequence[Entry]) -> list[torch.Tensor]:
    """The tensors to copy to. Those of one dtype that lie side by side are cut in one call: there may be thousands."""
    places: list[torch.Tensor] = []
    for dtype, run in itertools.groupby(entries, lambda entry: entry.dtype):
        group = list(run)
        whole = typed_view(arena, group[0].begin, group[-1].end, torch_dtype(dtype), (-1,))
        cut = whole.split_with_sizes([entry.nbytes // ITEMSIZES[dtype] for entry in group])
        places += [
            piece if len(entry.shape) == 1 else piece.view(entry.shape) for piece, entry in zip(cut, group, strict=True)
        ]
    return places


def object_blobs(encoded: Encoded, file_size: int, value_id: str) -> list[memoryview]:
    """What `write_object` would write, as buffers that follow one another, for a client on another node.

    The first one is the header, to be written last; see `value_arenas.ValueArenas.fill`.
    """
    layout, items = _layout(encoded)
    header = encode_header(layout, file_size, _metadata(encoded, value_id))
    tensors = [tensor_octets(encoded.tensors[int(entry.key[1:])]) for entry in layout.tensors]
    rest = tensors + [np.frombuffer(items[entry.key], np.uint8) for entry in layout.byte_items]
    if len(rest) > 256:
        rest = [np.concatenate(rest)]
    return [memoryview(header), *(octets.data for octets in rest)]


def read_object(buffer: Buffer, value_id: str, *, copy: bool = False, file_size: int | None = None) -> object:
    """The value in an object. For clients only: it may unpickle.

    Args:
        buffer: the file, or the part of it that is in use. Tensors and arrays are views of it, which keep it alive;
            if it is read-only, of a copy.
        copy: give tensors and arrays memory of their own; without, arrays are read-only.
        file_size: bytes of the file, if `buffer` is only the part in use.

    Raises:
        StaleValueError: it holds another value, or none.
        ObjectFormatError: it is damaged.
    """
    view = memoryview(buffer)
    if view.readonly:
        buffer = bytearray(buffer)
        view = memoryview(buffer)
    layout, kind = check_header(buffer, value_id, file_size)
    items = {entry.key: bytes(view[entry.begin : entry.end]) for entry in layout.byte_items}
    try:
        arrays = json.loads(items[_ARRAYS_ITEM]) if _ARRAYS_ITEM in items else [None] * len(layout.tensors)
        if type(arrays) is not list or not all(each is None or type(each) is str for each in arrays):
            raise ValueError("not a list of types of arrays")
        if kind not in _KINDS or len(arrays) != len(layout.tensors) or (kind in _SINGLE and len(arrays) != 1):
            raise ValueError("not what a value consists of")
        parts: list[object] = [None] * len(arrays)
        for entry in layout.tensors:
            index = int(entry.key[1:])
            parts[index] = _view(buffer, entry, arrays[index], copy)
    except (ValueError, TypeError, IndexError, RecursionError) as error:
        raise ObjectFormatError(f"the object holds no value: {error}") from error
    return assemble(kind, parts, items.get(_PICKLE_ITEM, b""))


def _view(buffer: Any, entry: Entry, described: str | None, copy: bool) -> object:
    begin, shape, nbytes, dtype = entry.begin, entry.shape, entry.nbytes, torch_dtype(entry.dtype)
    if described is not None:
        array_dtype, array_shape, array_bytes = parse_array_type(described)
        if array_bytes != nbytes:
            raise ValueError("an array of the wrong length")
        count = math.prod(array_shape)
        array = np.frombuffer(buffer, array_dtype, count, begin).reshape(array_shape)
        if copy:
            return array.copy()
        array.flags.writeable = False
        return array
    if not nbytes:
        return torch.empty(shape, dtype=dtype)
    # From the buffer each, so that its storage is no larger than itself: whoever saves or sends it, saves only that.
    tensor = torch.frombuffer(buffer, dtype=dtype, count=nbytes // dtype.itemsize, offset=begin)
    if len(shape) != 1:
        tensor = tensor.view(shape)
    return cpu_clone(tensor) if copy else tensor
