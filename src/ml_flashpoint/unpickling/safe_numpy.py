"""NumPy arrays, scalars and dtypes from what they pickle to, none of which NumPy itself is asked to unpickle.

``numpy.dtype.__setstate__`` and ``numpy.ndarray.__setstate__`` believe what they are told: a forged item size or flag
turns bytes into pointers. So both are taken apart here and made again by constructors that check: a dtype from its
string and its fields, an array from a dtype, a shape and as many bytes as both say.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, Final

import numpy as np

_PLAIN = re.compile("([biufcSUVmMO])[0-9]{0,18}")
_UNIT = re.compile("[A-Za-z\u03bc]{1,8}")
_ENDIAN = ("<", ">", "|", "=")
_ALIGNED: Final = 0x80


class Shell:
    """An array or a dtype of which only the first half was read. The machine puts the value in its place.

    Attributes:
        finish: makes the value of the second half.
        memo: where the machine remembers it.
    """

    __slots__ = ("finish", "memo")

    def __init__(self, finish: Callable[[Any], Any]) -> None:
        self.finish = finish
        self.memo: list[int] = []


def dtype_shell(name: Any, align: Any = False, copy: Any = True) -> Shell:
    """Half a dtype, as ``numpy.dtype(name, align, copy)`` begins it."""
    if type(name) is not str or not _PLAIN.fullmatch(name):
        raise ValueError(f"no plain dtype: {name!r}")
    return Shell(lambda state: _dtype(name, state))


def array_shell(kind: Any, shape: Any, typecode: Any) -> Shell:
    """Half an array, as ``_reconstruct(numpy.ndarray, (0,), b"b")`` begins it."""
    if kind is not np.ndarray:
        raise ValueError(f"no plain array: {kind!r}")
    return Shell(_array)


def scalar(dtype: Any, data: Any) -> Any:
    """A NumPy scalar from its dtype and its bytes."""
    if _without_objects(dtype).itemsize == 0 and data == b"":  # which NumPy would make one of
        return dtype.type() if dtype.kind in "SU" else dtype.type(data)
    return _filled((), dtype, data)[()]


def _array(state: Any) -> Any:
    _, shape, dtype, fortran, data = state
    if type(shape) is not tuple or any(type(n) is not int or n < 0 for n in shape) or len(shape) > 32:
        raise ValueError(f"no shape: {shape!r}")
    if dtype is not _OBJECT:
        return _filled(shape, _without_objects(dtype), data, order="F" if fortran is True else "C")
    if type(data) is not list or len(data) != math.prod(shape):
        raise ValueError("an array has not as many objects as its shape says")
    flat = np.empty(len(data), object)
    for place, value in enumerate(data):
        if isinstance(value, Shell):
            raise ValueError("an array holds itself")
        flat[place] = value
    return flat.reshape(shape)


def _filled(shape: tuple[int, ...], dtype: Any, data: Any, *, order: Any = "C") -> Any:
    if type(data) is not bytes or len(data) != math.prod(shape) * dtype.itemsize:
        raise ValueError("an array has not as many bytes as its dtype and shape say")
    return np.ndarray(shape, dtype, data, order=order).copy(order)


def _without_objects(dtype: Any) -> Any:
    if not isinstance(dtype, np.dtype) or dtype.hasobject:
        raise ValueError(f"no dtype of plain values: {dtype!r}")
    return dtype


_OBJECT: Final = np.dtype(object)


def _dtype(name: str, state: Any) -> Any:
    """The dtype that ``numpy.dtype(name).__setstate__(state)`` should make, from constructors that check."""
    _, endian, sub, names, fields, size, _, flags, *more = state
    if endian not in _ENDIAN:
        raise ValueError(f"no byte order: {endian!r}")
    kind = name[0]
    if kind == "O":
        return _OBJECT
    if sub is not None:
        base, shape = sub
        made = np.dtype((_without_objects(base), tuple(map(int, shape))))
    elif names is not None:
        formats, offsets = zip(*(fields[each] for each in names), strict=True) if names else ((), ())
        description = {"names": list(names), "formats": [_without_objects(each) for each in formats]}
        description |= {"offsets": list(offsets), "itemsize": size}
        made = np.dtype(description, align=bool(flags & _ALIGNED))  # type: ignore[call-overload]
    elif kind in "mM":
        unit, number, _, _ = more[0][1]
        unit = unit.decode("utf-8") if isinstance(unit, bytes) else unit
        if not _UNIT.fullmatch(unit) or type(number) is not int:
            raise ValueError(f"no unit of time: {unit!r}")
        made = np.dtype(f"{endian}{kind}8" + ("" if unit == "generic" else f"[{number}{unit}]"))
    else:
        made = np.dtype(f"{endian}{name}")
    if size not in (-1, made.itemsize) or made.hasobject:
        raise ValueError(f"a dtype {name!r} that has not the size it says")
    return made
