"""How tensors of each dtype of torch are stored in objects.

Owns which dtypes go into a safetensors file under its own dtype names, and which are stored as plain bytes
with their true dtype and shape beside them. Where the bytes lie is up to `core.object_layout`.

Written natively is what every safetensors release since 0.4.2 reads. Later releases know more dtypes; those
are read, but not written, so that an object opens with any release in the field.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch

from ml_flashpoint.core.errors import InvalidArgumentError

BYTES: Final = "U8"
"""Name in a file of the dtype of plain bytes."""

PACKED_PAIRS: Final = "F4"
"""The one name in a file that counts two elements for each element that torch counts."""

MAX_DIMENSIONS: Final = 1024
"""Most dimensions of a stored tensor; torch's own operators give up long before."""

MAX_SIZE: Final = 2**63 - 1
"""Largest tensor, and largest file, in bytes."""

_BY_NAME: Final = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
# A quantized tensor is more than its bytes: they mean nothing without its scales and zero points.
_QUANTIZED: Final = frozenset(dtype for name, dtype in _BY_NAME.items() if name.startswith(("qint", "quint")))


def _existing(names: dict[str, str]) -> dict[str, torch.dtype]:
    # Not every supported torch has every dtype.
    return {name: _BY_NAME[attribute] for name, attribute in names.items() if attribute in _BY_NAME}


_WRITTEN: Final = _existing(
    {
        "F64": "float64",
        "F32": "float32",
        "F16": "float16",
        "BF16": "bfloat16",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E5M2": "float8_e5m2",
        "I64": "int64",
        "I32": "int32",
        "I16": "int16",
        "I8": "int8",
        "U64": "uint64",
        "U32": "uint32",
        "U16": "uint16",
        BYTES: "uint8",
        "BOOL": "bool",
    }
)
_READ: Final = _WRITTEN | _existing(
    {
        "C64": "complex64",
        "F8_E4M3FNUZ": "float8_e4m3fnuz",
        "F8_E5M2FNUZ": "float8_e5m2fnuz",
        "F8_E8M0": "float8_e8m0fnu",
        PACKED_PAIRS: "float4_e2m1fn_x2",
    }
)
_WRITTEN_NAMES: Final = {dtype: name for name, dtype in _WRITTEN.items()}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """How tensors of one dtype and shape are stored.

    Attributes:
        dtype: Dtype of the tensor.
        shape: Shape of the tensor.
        nbytes: Bytes that it takes.
        file_dtype: Name of the dtype that the file says it has.
        file_shape: Dimensions that the file says it has, separated by commas.
        true_type: Dtype and shape of the tensor as text, if the file calls it plain bytes.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    file_dtype: str
    file_shape: str
    true_type: str | None


def is_storable(dtype: torch.dtype) -> bool:
    """Whether tensors of a dtype can be stored by their bytes alone: all dtypes but the quantized ones."""
    return isinstance(dtype, torch.dtype) and dtype not in _QUANTIZED


# States have few distinct shapes, and asking again must be cheap: it is done for every tensor.
@lru_cache(maxsize=2**15)
def stored_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> StoredTensor:
    """Returns how tensors of a dtype and shape are stored.

    Raises:
        InvalidArgumentError: The dtype is not storable, or the shape is not that of a tensor.
    """
    if not is_storable(dtype):
        raise InvalidArgumentError(
            "a tensor of this dtype cannot be stored by its bytes",
            argument="dtype",
            value=dtype,
            hint="store what it is made of: its integers, scales and zero points",
        )
    try:
        dimensions = tuple(map(operator.index, shape))
    except TypeError:
        raise InvalidArgumentError("a shape must be integers", argument="shape", value=shape) from None
    nbytes = tensor_nbytes(dtype, dimensions)
    if nbytes is None:
        raise InvalidArgumentError("this is not the shape of a tensor", argument="shape", value=shape)
    text = ",".join(map(str, dimensions))
    name = _WRITTEN_NAMES.get(dtype)
    if name is not None:
        return StoredTensor(dtype, dimensions, nbytes, name, text, None)
    true_type = f"{str(dtype).removeprefix('torch.')} {text}"
    return StoredTensor(dtype, dimensions, nbytes, BYTES, str(nbytes), true_type)


def tensor_nbytes(dtype: torch.dtype, shape: Sequence[int]) -> int | None:
    """Returns the bytes of a tensor, or `None` if no tensor can have this shape."""
    if len(shape) > MAX_DIMENSIONS or any(not 0 <= size <= MAX_SIZE for size in shape):
        return None
    nbytes = math.prod(shape) * dtype.itemsize
    return nbytes if nbytes <= MAX_SIZE else None


def parse_file_type(name: str, file_shape: tuple[int, ...]) -> tuple[torch.dtype, tuple[int, ...]] | None:
    """Returns dtype and shape in torch of what a safetensors file says, or `None` if this torch has none."""
    dtype = _READ.get(name)
    if dtype is None:
        return None
    if name == PACKED_PAIRS:
        if not file_shape or file_shape[-1] % 2:
            return None
        file_shape = (*file_shape[:-1], file_shape[-1] // 2)
    return dtype, file_shape


def parse_true_type(text: str) -> tuple[torch.dtype, tuple[int, ...]] | None:
    """Returns dtype and shape of a `StoredTensor.true_type`, or `None` if this torch has no such tensor."""
    name, _, dimensions = text.partition(" ")
    dtype = _BY_NAME.get(name)
    sizes = dimensions.split(",") if dimensions else []
    if dtype is None or not is_storable(dtype) or len(sizes) > MAX_DIMENSIONS:
        return None
    # The shape must be spelled as it is written: int() would also take signs, blanks and underscores.
    if not all(size.isascii() and size.isdecimal() and len(size) <= 19 for size in sizes):
        return None
    return dtype, tuple(map(int, sizes))
