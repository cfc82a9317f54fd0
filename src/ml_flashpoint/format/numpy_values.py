"""NumPy arrays and scalars as a description of their dtype, a shape and plain bytes.

Owns the description (JSON values, from which nothing is ever executed) and the way back. No array is ever pickled:
what unpickles arrays lets forged bytes become pointers. Dtypes that hold Python objects have no description.

::

    "<f8"                                                     a plain dtype, by its name
    ["array", DTYPE, shape]                                   a subarray
    ["fields", [[name, title, offset, DTYPE], ...], itemsize, aligned, is_record]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ml_flashpoint.format.errors import InvalidArgumentError

_BYTE_ORDER = {"=": "", "|": ""}
_MAX_NAME = 256


def describe_dtype(dtype: np.dtype[Any]) -> Any:
    """A dtype as JSON values.

    Raises:
        InvalidArgumentError: it cannot be made again: it holds Python objects, or belongs to another package.
    """
    described = None if dtype.hasobject else _described(dtype)
    if described is None:
        raise InvalidArgumentError(
            "a NumPy dtype that is not made of plain bytes cannot be stored",
            argument="dtype",
            value=dtype,
            hint="convert the array, to a dtype of NumPy's own without objects in it",
        )
    return described


def _described(dtype: np.dtype[Any]) -> Any:
    described: Any
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        described = ["array", _described(base), list(shape)]
    elif dtype.names is not None and dtype.fields is not None:
        fields = []
        for name in dtype.names:
            kind, offset, *title = dtype.fields[name]
            if title and not isinstance(title[0], str):
                return None
            fields.append([name, title[0] if title else None, offset, _described(kind)])
        described = ["fields", fields, dtype.itemsize, dtype.isalignedstruct, dtype.type is np.record]
    else:
        described = dtype.str
        if not _is(described, dtype):  # on many machines "<i8" is a long, and a long long is another type
            described = _BYTE_ORDER.get(dtype.byteorder, dtype.byteorder) + dtype.char
    return described if _is(described, dtype) else None


def _is(described: Any, dtype: np.dtype[Any]) -> bool:
    """Whether a description leads back. Dtypes of other packages call themselves plain bytes."""
    try:
        made = dtype_of(described)
    except (TypeError, ValueError):
        return False
    return made == dtype and (made.type, made.char) == (dtype.type, dtype.char)


def dtype_of(described: Any) -> np.dtype[Any]:
    """What :func:`describe_dtype` described.

    Raises:
        TypeError, ValueError: it is no description of a dtype of plain bytes.
    """
    made: np.dtype[Any]
    if isinstance(described, str):
        if len(described) > _MAX_NAME:
            raise ValueError("no dtype has such a long name")
        made = np.dtype(described)
    else:
        kind, *rest = described
        if kind == "array":
            base, shape = rest
            made = np.dtype((dtype_of(base), _checked_shape(shape)))
        elif kind == "fields":
            made = _structured(*rest)
        else:
            raise ValueError(f"no dtype: {kind!r}")
    if made.hasobject:
        raise TypeError("a dtype that holds objects")
    return made


def _structured(fields: Sequence[Any], itemsize: int, aligned: bool, is_record: bool) -> np.dtype[Any]:
    formats = [dtype_of(each) for _, _, _, each in fields]
    for (_, _, offset, _), kind in zip(fields, formats, strict=True):
        if type(offset) is not int or not 0 <= offset <= itemsize - kind.itemsize:
            raise ValueError("a field lies outside of its record")
    parts: Any = {
        "names": [str(name) for name, _, _, _ in fields],
        "formats": formats,
        "offsets": [offset for _, _, offset, _ in fields],
        "titles": [None if title is None else str(title) for _, title, _, _ in fields],
        "itemsize": itemsize,
    }
    made: np.dtype[Any] = np.dtype(parts, align=bool(aligned))
    return np.dtype((np.record, made)) if is_record else made


def _checked_shape(shape: Sequence[int]) -> tuple[int, ...]:
    if any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"no shape: {shape!r}")
    return tuple(shape)


def array_of(data: bytes | memoryview, described: Any, shape: Sequence[int]) -> np.ndarray[Any, Any]:
    """An array with memory of its own.

    Raises:
        TypeError, ValueError: the description is none, or does not fit the bytes.
    """
    dtype, sizes = dtype_of(described), _checked_shape(shape)
    expected = math.prod(sizes) * dtype.itemsize
    if len(data) != expected:
        raise ValueError(f"an array of {expected} bytes, and there are {len(data)}")
    # NumPy takes the shape of a subarray for dimensions of the array, so these are made of the base.
    base = dtype.base
    sizes = (*sizes, *dtype.shape)
    made: np.ndarray[Any, Any]
    made = np.ndarray(sizes, base, buffer=bytearray(data)) if expected else np.ndarray(sizes, base)
    return made


def scalar_of(data: bytes | memoryview, described: Any) -> Any:
    """A scalar.

    Raises:
        TypeError, ValueError: see :func:`array_of`.
    """
    return array_of(data, described, ())[()]
