"""Values taken apart into tensors and the rest, and put together again; small ones as a row of bytes.

Owns what a value consists of, and the form of small ones.

Tensors and arrays never pass through pickle, also those inside other objects. What is left of a value does, by
cloudpickle; only clients unpickle, and only what other clients, which know the dictionary's secret, have written.

What comes back is what was put, with these differences: a tensor is on the CPU, contiguous, and does not require a
gradient; an array is in C order. Tensors, or arrays, that are the same view of the same memory come back as one; others
that overlap come back apart. Subclasses of tensors and arrays are pickled in their own way.

A small value is one of::

    i decimal digits                                      an integer, unless it is huge
    f a double, big-endian                                a float
    p pickle
    P     number of tensors (4), length of the pickle (4), for each its tag (T, or A for an array), its length (8) and
          that of its type (2), then all types, the pickle, and all bytes; without a pickle, it is the only one of them

Large ones are `shared_memory`'s.
"""

from __future__ import annotations

import ctypes
import io
import math
import pickle
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Literal, TypeGuard

import cloudpickle
import numpy as np
import torch

from ml_flashpoint.copy.cpu import cpu_clone, view_identity
from ml_flashpoint.copy.dtypes import STORABLE_DTYPES, dtype_name, octets_of, torch_dtype
from ml_flashpoint.ddict.manager.slots import decode_number, encode_number
from ml_flashpoint.format.dtypes import parse_true_type
from ml_flashpoint.format.errors import DamagedError, InvalidArgumentError

if TYPE_CHECKING:
    from typing_extensions import Buffer

INLINE_LIMIT: Final = 256 << 10  # values of fewer bytes than this are kept inline

Kind = Literal["tensor", "array", "bytes", "number", "plain", "pickle"]
_PLAIN: Final = frozenset((bytes, str, int, float, bool, type(None)))
_MANY: Final = struct.Struct(">II")
_PART: Final = struct.Struct(">cQH")


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """A value taken apart. Shares its memory with the value."""

    kind: Kind  # how it is put together again
    tensors: list[torch.Tensor]  # strided tensors, on any device
    # of each tensor: None, or dtype and shape of the array that it stands for, like ``<f4 2,3``
    arrays: list[str | None]
    pickled: bytes  # the rest, or a number; empty if there is none

    @property
    def inline(self) -> bool:
        """True if it is small enough to be kept in the manager's memory."""
        return len(self.pickled) + sum(tensor.nbytes for tensor in self.tensors) < INLINE_LIMIT


# ---- taking apart -----------------------------------------------------------------------------------------------


def encode(value: object) -> Encoded:
    """Take a value apart. Raises `InvalidArgumentError`: it cannot be pickled."""
    kind = type(value)
    if kind in _PLAIN:
        if kind is bytes and len(value) >= INLINE_LIMIT:  # type: ignore[arg-type]
            return Encoded("bytes", [_tensor_over(np.frombuffer(value, np.uint8))], [None], b"")  # type: ignore[call-overload]
        if kind in (int, float) and (number := encode_number(value)) is not None:  # type: ignore[arg-type]
            return Encoded("number", [], [], number)
        return Encoded("plain", [], [], pickle.dumps(value, 5))
    if _is_plain_tensor(value):
        return Encoded("tensor", [value.detach()], [None], b"")
    if _is_plain_array(value):
        tensor, described = _array_as_tensor(value)
        return Encoded("array", [tensor], [described], b"")
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(value)
    except InvalidArgumentError:
        raise
    except Exception as error:
        raise InvalidArgumentError(
            f"a value that cannot be pickled: {type(error).__name__}: {error}", argument="value", value=type(value)
        ) from error
    return Encoded("pickle", pickler.tensors, pickler.arrays, file.getvalue())


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Takes tensors and arrays out."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.tensors: list[torch.Tensor] = []
        self.arrays: list[str | None] = []
        self._found: dict[tuple[Any, ...], int] = {}
        self._alive: list[object] = []

    def persistent_id(self, obj: object) -> int | None:
        if _is_plain_tensor(obj):
            view: tuple[Any, ...] = view_identity(obj)
        elif _is_plain_array(obj):
            view = (obj.__array_interface__["data"][0], obj.dtype.str, obj.shape, obj.strides)
        else:
            return None
        key = view if obj.nbytes else (id(obj),)
        index = self._found.setdefault(key, len(self.tensors))
        if index == len(self.tensors):
            tensor, described = (obj.detach(), None) if isinstance(obj, torch.Tensor) else _array_as_tensor(obj)
            self.tensors.append(tensor)
            self.arrays.append(described)
            self._alive.append(obj)  # or its address could be another's before this is over
        return index


def _is_plain_tensor(value: object) -> TypeGuard[torch.Tensor]:
    return (
        type(value) is torch.Tensor
        and value.layout is torch.strided
        and value.device.type in ("cpu", "cuda")
        and not value.is_quantized
        and value.dtype in STORABLE_DTYPES
        and not value.is_nested
    )


def _is_plain_array(value: object) -> TypeGuard[np.ndarray[Any, Any]]:
    return type(value) is np.ndarray and _is_plain_dtype(value.dtype)


@lru_cache(maxsize=256)
def _is_plain_dtype(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "biufcSUmM" and dtype.itemsize > 0 and np.dtype(dtype.str) == dtype


def _array_as_tensor(array: np.ndarray[Any, Any]) -> tuple[torch.Tensor, str]:
    """A tensor over the array's memory, and the array's dtype and shape."""
    described = _describe(array.dtype.str, array.shape)
    if any(stride < 0 or stride % array.itemsize for stride in array.strides):
        array = array.copy(order="C")
    try:
        return _tensor_over(array), described
    except (TypeError, ValueError):  # torch has no such dtype
        # Its bytes. In C order, since only then are they those of an array of this shape.
        return _tensor_over(np.ascontiguousarray(array).reshape(-1).view(np.uint8)), described


class _Alias:
    """Memory of a read-only array as that of one that can be written to, which spares torch's warning."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array
        described = array.__array_interface__
        self.__array_interface__ = {**described, "data": (described["data"][0], False)}


def _tensor_over(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """A tensor over the array's memory, to be read only."""
    return torch.from_numpy(array if array.flags.writeable else np.asarray(_Alias(array)))


@lru_cache(maxsize=4096)
def _describe(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype} {','.join(map(str, shape))}"


@lru_cache(maxsize=4096)
def _parse_array_type(text: str) -> tuple[np.dtype[Any], tuple[int, ...], int]:
    """``(dtype, shape, bytes)`` of what `_describe` made. Raises ValueError."""
    name, _, dimensions = text.partition(" ")
    sizes = dimensions.split(",") if dimensions else []
    if len(sizes) > 64 or not all(size.isascii() and size.isdecimal() and len(size) <= 19 for size in sizes):
        raise ValueError("not the shape of an array")
    try:
        dtype = np.dtype(name)
    except TypeError as error:
        raise ValueError(str(error)) from error
    if not _is_plain_dtype(dtype):
        raise ValueError("not the dtype of an array")
    shape = tuple(map(int, sizes))
    return dtype, shape, math.prod(shape) * dtype.itemsize


# ---- putting together -------------------------------------------------------------------------------------------


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, parts: Sequence[object]) -> None:
        super().__init__(file)
        self._parts = parts

    def persistent_load(self, pid: Any) -> object:
        return self._parts[pid]


def array_at(buffer: Any, begin: int, nbytes: int, described: str, copy: bool) -> np.ndarray[Any, Any]:
    """The array whose bytes lie there: a read-only view, or a copy. Raises ValueError: there can be none."""
    dtype, shape, its_bytes = _parse_array_type(described)
    if its_bytes != nbytes:
        raise ValueError("an array of the wrong length")
    view: np.ndarray[Any, Any] = np.frombuffer(buffer, dtype, math.prod(shape), begin).reshape(shape)
    array = view.copy() if copy else view
    array.flags.writeable = copy
    return array


def tensor_at(buffer: Buffer, begin: int, nbytes: int, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor whose bytes lie there, in memory that may be written to: a view."""
    its = torch_dtype(dtype)
    if not nbytes:
        return torch.empty(shape, dtype=its, device="cpu")
    # From the buffer each, so that its storage is no larger than itself: whoever saves or sends it, saves only that.
    tensor = torch.frombuffer(buffer, dtype=its, count=nbytes // its.itemsize, offset=begin)
    return tensor if len(shape) == 1 else tensor.view(shape)


def assemble(kind: str, parts: Sequence[object], pickled: bytes) -> object:
    """The value of these parts. For clients only: it may unpickle."""
    if kind == "number":
        return decode_number(pickled)
    if kind in ("plain", "pickle"):
        return _Unpickler(io.BytesIO(pickled), parts).load()
    if kind == "bytes":
        assert isinstance(parts[0], torch.Tensor)
        return parts[0].numpy().tobytes()
    return parts[0]


# ---- small values -----------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _parse_tensor_type(text: str) -> tuple[str, tuple[int, ...], int]:
    """``(dtype, shape, bytes)`` of what `_describe` made. Raises ValueError."""
    return parse_true_type(text)


def tensor_octets(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The bytes of a tensor in C order, on the CPU; its own memory if it can be."""
    if tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg() or not tensor.is_contiguous():
        tensor = cpu_clone(tensor)
    if not tensor.numel():
        return np.empty(0, np.uint8)
    return octets_of(tensor)


def _raw(tensor: torch.Tensor) -> bytes:
    if tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)
    return tensor_octets(tensor).tobytes()


def to_inline(encoded: Encoded) -> bytes:
    """A small value in one row of bytes."""
    tensors = encoded.tensors
    if encoded.kind == "number":
        return encoded.pickled
    if not tensors:
        return b"p" + encoded.pickled
    if encoded.kind == "bytes":
        return b"p" + pickle.dumps(_raw(tensors[0]), 5)
    types = [
        (b"T", _describe(dtype_name(tensor.dtype), tensor.shape)) if array is None else (b"A", array)
        for tensor, array in zip(tensors, encoded.arrays, strict=True)
    ]
    head = [_PART.pack(tag, tensor.nbytes, len(text)) for (tag, text), tensor in zip(types, tensors, strict=True)]
    return b"".join(
        (
            b"P",
            _MANY.pack(len(tensors), len(encoded.pickled)),
            *head,
            *(text.encode() for _, text in types),
            encoded.pickled,
            *map(_raw, tensors),
        )
    )


def from_inline(data: Buffer, *, copy: bool = False) -> object:
    """The value that these bytes stand for, in memory of its own. For clients only: it may unpickle. ``copy``: give
    arrays that can be written to, as `read_object` does. Raises `DamagedError`: they are no value."""
    octets = data if type(data) is bytes else bytes(data)
    try:
        tag = octets[:1]
        if tag == b"p":
            return _Unpickler(io.BytesIO(octets[1:]), ()).load()
        if tag in (b"i", b"f"):
            return decode_number(octets)
        if tag == b"P":
            return _from_many(octets, copy)
        raise ValueError(f"there is no tag {tag!r}")
    except (ValueError, struct.error, IndexError, pickle.UnpicklingError, EOFError) as error:
        raise DamagedError(f"not an encoded value: {error}") from error


def _part(tag: bytes, text: str, raw: bytes, copy: bool) -> object:
    if tag == b"A":
        return array_at(bytearray(raw), 0, len(raw), text, copy)
    dtype, shape, nbytes = _parse_tensor_type(text)
    if tag != b"T" or nbytes != len(raw):
        raise ValueError(f"neither an array nor a tensor of {nbytes} bytes: {tag!r}")
    return tensor_at(bytearray(raw), 0, nbytes, dtype, shape)


def _from_many(octets: bytes, copy: bool) -> object:
    file = io.BytesIO(octets)
    file.seek(1)
    count, pickled_bytes = _MANY.unpack(file.read(_MANY.size))
    heads = list(_PART.iter_unpack(file.read(count * _PART.size)))
    texts = [file.read(length).decode("ascii") for _, _, length in heads]
    pickled = file.read(pickled_bytes)
    parts = [_part(tag, text, file.read(nbytes), copy) for (tag, nbytes, _), text in zip(heads, texts, strict=True)]
    if len(heads) != count or len(pickled) != pickled_bytes or file.read(1) or not (pickled or count == 1):
        raise ValueError("of the wrong length")
    return assemble("pickle" if pickled else "tensor", parts, pickled)
