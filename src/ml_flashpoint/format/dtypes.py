"""Dtypes of tensors, and their form in objects. They have torch's names, such as ``float32``.

A dtype that every safetensors release since 0.4.2 reads is named in the file; any other is stored as plain bytes, with
its true dtype and shape beside them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from ml_flashpoint.format.errors import InvalidArgumentError

BYTES: Final = "U8"
"""Name in a file of the dtype of plain bytes."""

MAX_SIZE: Final = 2**63 - 1
"""Largest tensor, and largest file, in bytes."""

_MAX_DIMENSIONS: Final = 1024  # torch's own operators give up long before

BY_FILE_DTYPE: Final = {
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
"""The dtypes that files name, by their names in files."""
FILE_DTYPES: Final = {dtype: name for name, dtype in BY_FILE_DTYPE.items()}

_BY_ITEMSIZE: Final = {
    1: "bool int8 uint8 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2 "
    "bits8 bits1x8 bits2x4 bits4x2 int1 int2 int3 int4 int5 int6 int7 uint1 uint2 uint3 uint4 uint5 uint6 uint7",
    2: "int16 uint16 float16 bfloat16 bits16",
    4: "int32 uint32 float32 complex32",
    8: "int64 uint64 float64 complex64",
    16: "complex128",
}
ITEMSIZES: Final = {dtype: size for size, dtypes in _BY_ITEMSIZE.items() for dtype in dtypes.split()}
"""Bytes of an element of each dtype that can be stored by its bytes alone. All of torch's but the quantized ones,
whose bytes mean nothing without scales and zero points."""


def tensor_nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Return the bytes of a tensor. Raise an `InvalidArgumentError` if no tensor can have this shape."""
    if len(shape) <= _MAX_DIMENSIONS and all(0 <= size <= MAX_SIZE for size in shape):
        nbytes = math.prod(shape) * ITEMSIZES[dtype]
        if nbytes <= MAX_SIZE:
            return nbytes
    raise InvalidArgumentError("this is not the shape of a tensor", argument="shape", value=shape)


def parse_true_type(text: str) -> tuple[str, tuple[int, ...], int]:
    """Return dtype, shape and bytes of a text such as ``complex64 2,3``. Raise a `ValueError` if it names no tensor."""
    dtype, _, dimensions = text.partition(" ")
    sizes = dimensions.split(",") if dimensions else []
    # int() would also take signs, blanks and underscores.
    is_right = all(size.isascii() and size.isdecimal() and len(size) <= 19 for size in sizes[: _MAX_DIMENSIONS + 1])
    if not is_right or dtype not in ITEMSIZES or len(sizes) > _MAX_DIMENSIONS:
        raise ValueError(f"there is no tensor {text[:80]!a}")
    shape = tuple(map(int, sizes))
    return dtype, shape, tensor_nbytes(dtype, shape)
