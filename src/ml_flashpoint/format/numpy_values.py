"""NumPy arrays and scalars as a description of their dtype, a shape and plain bytes.

No array is ever pickled: the unpickler of arrays lets forged bytes become pointers. A description has the form that
``numpy.dtype`` takes: a name, a pair of a description and a shape, or a dict of names, formats, offsets, titles,
itemsize, aligned (and ``record``). Dtypes that hold Python objects have none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ml_flashpoint.format.errors import InvalidArgumentError

_MAX_NAME = 256


def describe_dtype(dtype: np.dtype[Any]) -> Any:
    """Return the description of a dtype.

    Raises:
        InvalidArgumentError: it cannot be made again: it holds Python objects, or belongs to another package.
    """
    if np.dtype(dtype.str) is dtype and not dtype.hasobject:
        return dtype.str
    described = None if dtype.hasobject else _described(dtype)
    if described is None or not _is(described, dtype):
        raise InvalidArgumentError(
            "a NumPy dtype that is not made of plain bytes cannot be stored",
            argument="dtype",
            value=dtype,
            hint="convert the array, to a dtype of NumPy's own without objects in it",
        )
    return described


def _described(dtype: np.dtype[Any]) -> Any:
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return _described(base), shape
    if dtype.names is None or dtype.fields is None:
        # On many machines "<i8" is a long, and a long long is another type.
        return dtype.str if _is(dtype.str, dtype) else dtype.byteorder.strip("=|") + dtype.char
    fields = [dtype.fields[name] for name in dtype.names]
    return {
        "names": list(dtype.names),
        "formats": [_described(field[0]) for field in fields],
        "offsets": [field[1] for field in fields],
        "titles": [field[2] if len(field) > 2 else None for field in fields],
        "itemsize": dtype.itemsize,
        "aligned": dtype.isalignedstruct,
        "record": dtype.type is np.record,
    }


def _is(described: Any, dtype: np.dtype[Any]) -> bool:
    try:
        made = dtype_of(described)
    except (TypeError, ValueError):
        return False
    return made == dtype and (made.type, made.char) == (dtype.type, dtype.char)


def dtype_of(described: Any) -> np.dtype[Any]:
    """Return the dtype of a description.

    Raises:
        TypeError, ValueError: it is no description of a dtype of plain bytes.
    """
    made: np.dtype[Any]
    if isinstance(described, dict):
        parts: Any = {**described, "formats": [dtype_of(each) for each in described.get("formats", ())]}
        is_record = parts.pop("record", False)
        if not all(title is None or type(title) is str for title in parts.get("titles", ())):
            raise TypeError("a title that is no text")
        made = np.dtype(parts)
        made = np.dtype((np.record, made)) if is_record else made
    elif isinstance(described, tuple):
        base, shape = described
        made = np.dtype((dtype_of(base), _checked_shape(shape)))
    elif isinstance(described, str) and len(described) <= _MAX_NAME:
        made = np.dtype(described)
    else:
        raise TypeError("no dtype")
    if made.hasobject:
        raise TypeError("a dtype that holds objects")
    return made


def _checked_shape(shape: Sequence[int]) -> tuple[int, ...]:
    if any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"no shape: {shape!r}")
    return tuple(shape)


def array_of(data: bytes | memoryview, described: Any, shape: Sequence[int]) -> np.ndarray[Any, Any]:
    """Return an array with memory of its own.

    Raises:
        TypeError, ValueError: the description is none, or does not fit the bytes.
    """
    dtype, sizes = dtype_of(described), _checked_shape(shape)
    expected = math.prod(sizes) * dtype.itemsize
    if len(data) != expected:
        raise ValueError(f"an array of {expected} bytes, and there are {len(data)}")
    # NumPy takes the shape of a subarray for dimensions of the array, so these are made of the base.
    sizes = (*sizes, *dtype.shape)
    made: np.ndarray[Any, Any]
    made = np.ndarray(sizes, dtype.base, buffer=bytearray(data)) if expected else np.ndarray(sizes, dtype.base)
    return made


def scalar_of(data: bytes | memoryview, described: Any) -> Any:
    """Return a scalar. Raises what `array_of` raises."""
    return array_of(data, described, ())[()]
