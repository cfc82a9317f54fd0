"""NumPy arrays and scalars as a description of their dtype, a shape and plain bytes.

No array is ever pickled: the unpickler of arrays lets forged bytes become pointers. Dtypes are described as in ``.npy``
files, by a text or a list of fields. Dtypes that hold Python objects have no description.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.lib.format import descr_to_dtype

from ml_flashpoint.format.errors import InvalidArgumentError

_MAX_TEXT = 256


def describe_dtype(dtype: np.dtype[Any]) -> Any:
    """Return the description of a dtype. Raise an `InvalidArgumentError` if the dtype cannot be made again: it holds
    Python objects, or belongs to another package."""
    try:
        described = dtype.descr if dtype.names is not None else dtype.str
        if dtype.names is None and np.dtype(dtype.str).char != dtype.char:
            described = dtype.byteorder.strip("=|") + dtype.char  # "<i8" is a long, and a long long another type
        if dtype.type is not np.record and dtype_of(described) == dtype:
            return described
    except (TypeError, ValueError):
        pass
    raise InvalidArgumentError(
        "a NumPy dtype that is not made of plain bytes cannot be stored",
        argument="dtype",
        value=dtype,
        hint="convert the array, to a dtype of NumPy's own without objects in it",
    )


def dtype_of(described: Any) -> np.dtype[Any]:
    """Return the dtype of a description. Raise a `TypeError` or `ValueError` if it is none of plain bytes."""
    if type(described) not in (str, list):
        raise TypeError("no dtype")
    _check(described)
    made: np.dtype[Any] = descr_to_dtype(described)
    if made.hasobject or made.subdtype is not None:
        raise TypeError("no dtype of plain bytes")
    return made


def _check(described: Any) -> None:
    """Raise unless this is text, the sizes of a shape, or a list or tuple of such."""
    if isinstance(described, tuple) and all(type(size) is int for size in described):
        _checked_shape(described)
    elif isinstance(described, (list, tuple)):
        for each in described:
            _check(each)
    elif type(described) is not str or len(described) > _MAX_TEXT:
        raise TypeError("no dtype")


def _checked_shape(shape: Sequence[int]) -> tuple[int, ...]:
    if any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"no shape: {shape!r}")
    return tuple(shape)


def array_of(data: bytes | memoryview, described: Any, shape: Sequence[int]) -> np.ndarray[Any, Any]:
    """Return an array with memory of its own. Raise a `TypeError` or `ValueError` if the description is none, or does
    not fit the bytes."""
    dtype, sizes = dtype_of(described), _checked_shape(shape)
    expected = math.prod(sizes) * dtype.itemsize
    if len(data) != expected:
        raise ValueError(f"an array of {expected} bytes, and there are {len(data)}")
    made: np.ndarray[Any, Any]
    made = np.ndarray(sizes, dtype, buffer=bytearray(data)) if expected else np.ndarray(sizes, dtype)
    return made


def scalar_of(data: bytes | memoryview, described: Any) -> Any:
    """Return a scalar. Raises what `array_of` raises."""
    return array_of(data, described, ())[()]
