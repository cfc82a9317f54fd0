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

import io
import math
import pickle
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Literal

import cloudpickle
import numpy as np
import torch

from ml_flashpoint.ddict.manager.arenas import decode_number, encode_number
from ml_flashpoint.format.dtypes import parse_true_type, tensor_nbytes
from ml_flashpoint.format.errors import DamagedError, InvalidArgumentError
from ml_flashpoint.staging.copy import cpu_clone
from ml_flashpoint.staging.torch_dtypes import STORABLE_DTYPES, bytes_of, dtype_name, torch_dtype

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
    nbytes: int  # bytes of all that

    @property
    def inline(self) -> bool:
        """Whether it is small enough to be kept in the manager's memory."""
        return self.nbytes < INLINE_LIMIT


# ---- taking apart -----------------------------------------------------------------------------------------------


def encode(value: object) -> Encoded:
    """Take a value apart. Raises `InvalidArgumentError`: it cannot be pickled."""
    kind = type(value)
    if kind in _PLAIN:
        if kind is bytes and len(value) >= INLINE_LIMIT:  # type: ignore[arg-type]
            array = np.frombuffer(value, np.uint8)  # type: ignore[call-overload]
            return Encoded("bytes", [_tensor_over(array)], [None], b"", array.nbytes)
        if kind in (int, float) and (number := encode_number(value)) is not None:  # type: ignore[arg-type]
            return Encoded("number", [], [], number, len(number))
        pickled = pickle.dumps(value, 5)
        return Encoded("plain", [], [], pickled, len(pickled))
    if kind is torch.Tensor and _is_plain_tensor(value):  # type: ignore[arg-type]
        return Encoded("tensor", [value.detach()], [None], b"", value.nbytes)  # type: ignore[attr-defined]
    if kind is np.ndarray and _is_plain_dtype(value.dtype):  # type: ignore[attr-defined]
        tensor, described = _array_as_tensor(value)  # type: ignore[arg-type]
        return Encoded("array", [tensor], [described], b"", tensor.nbytes)
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
    pickled = file.getvalue()
    return Encoded(
        "pickle",
        pickler.tensors,
        pickler.arrays,
        pickled,
        len(pickled) + sum(tensor.nbytes for tensor in pickler.tensors),
    )


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Takes tensors and arrays out."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.tensors: list[torch.Tensor] = []
        self.arrays: list[str | None] = []
        self._found: dict[tuple[Any, ...], int] = {}
        self._alive: list[object] = []

    def persistent_id(self, obj: object) -> int | None:
        kind = type(obj)
        if kind is torch.Tensor:
            assert isinstance(obj, torch.Tensor)
            if not _is_plain_tensor(obj):
                return None
            tensor = obj.detach()
            view = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj())
            return self._take(obj, tensor, None, (*view, tensor.is_neg()) if tensor.nbytes else (id(obj),))
        if kind is np.ndarray:
            assert isinstance(obj, np.ndarray)
            if not _is_plain_dtype(obj.dtype):
                return None
            place = (obj.__array_interface__["data"][0], obj.dtype.str, obj.shape, obj.strides)
            key = place if obj.nbytes else (id(obj),)
            if (known := self._found.get(key)) is not None:
                return known
            tensor, described = _array_as_tensor(obj)
            return self._take(obj, tensor, described, key)
        return None

    def _take(self, obj: object, tensor: torch.Tensor, described: str | None, key: tuple[Any, ...]) -> int:
        index = self._found.setdefault(key, len(self.tensors))
        if index == len(self.tensors):
            self.tensors.append(tensor)
            self.arrays.append(described)
            self._alive.append(obj)  # or its address could be another's before this is over
        return index


def _is_plain_tensor(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and not tensor.is_quantized
        and tensor.dtype in STORABLE_DTYPES
        and not tensor.is_nested
    )


@lru_cache(maxsize=256)
def _is_plain_dtype(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "biufcSUmM" and dtype.itemsize > 0 and np.dtype(dtype.str) == dtype


@lru_cache(maxsize=256)
def _is_known_to_torch(dtype: np.dtype[Any]) -> bool:
    try:
        torch.from_numpy(np.empty(0, dtype))
    except (TypeError, ValueError):
        return False
    return True


def _array_as_tensor(array: np.ndarray[Any, Any]) -> tuple[torch.Tensor, str]:
    """A tensor over the array's memory, and the array's dtype and shape."""
    described = _describe(array.dtype, array.shape)
    if not _is_known_to_torch(array.dtype):
        # Its bytes. In C order, since only then are they those of an array of this shape.
        octets = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return _tensor_over(octets), described
    if any(stride < 0 or stride % array.itemsize for stride in array.strides):
        array = array.copy(order="C")
    return _tensor_over(array), described


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
def _describe(dtype: np.dtype[Any], shape: tuple[int, ...]) -> str:
    return f"{dtype.str} {','.join(map(str, shape))}"


@lru_cache(maxsize=4096)
def parse_array_type(text: str) -> tuple[np.dtype[Any], tuple[int, ...], int]:
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
def _torch_type(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    return f"{dtype_name(dtype)} {','.join(map(str, shape))}".encode()


@lru_cache(maxsize=4096)
def _parse_torch_type(text: bytes) -> tuple[torch.dtype, tuple[int, ...], int]:
    """``(dtype, shape, bytes)`` of what `_torch_type` made. Raises ValueError."""
    found = parse_true_type(text.decode("ascii"))
    nbytes = None if found is None else tensor_nbytes(*found)
    if found is None or nbytes is None:
        raise ValueError("there is no such tensor")
    return torch_dtype(found[0]), found[1], nbytes


@lru_cache(maxsize=64)
def _has_numpy_dtype(dtype: torch.dtype) -> bool:
    try:
        torch.empty(0, dtype=dtype).numpy()
    except (TypeError, RuntimeError):
        return False
    return True


def tensor_octets(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The bytes of a tensor in C order, on the CPU; its own memory if it can be."""
    if tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg() or not tensor.is_contiguous():
        tensor = cpu_clone(tensor)
    if not tensor.numel():
        return np.empty(0, np.uint8)
    return bytes_of(tensor).numpy()


def _raw(tensor: torch.Tensor) -> bytes:
    if tensor.device.type == "cpu" and _has_numpy_dtype(tensor.dtype) and not (tensor.is_conj() or tensor.is_neg()):
        return tensor.numpy().tobytes()
    return tensor_octets(tensor).tobytes()


def _type_of(encoded: Encoded, index: int) -> tuple[bytes, bytes]:
    described = encoded.arrays[index]
    tensor = encoded.tensors[index]
    return (b"T", _torch_type(tensor.dtype, tensor.shape)) if described is None else (b"A", described.encode())


def to_inline(encoded: Encoded) -> bytes:
    """A small value in one row of bytes."""
    tensors = encoded.tensors
    if encoded.kind == "number":
        return encoded.pickled
    if not tensors:
        return b"p" + encoded.pickled
    if encoded.kind == "bytes":
        return b"p" + pickle.dumps(_raw(tensors[0]), 5)
    types = [_type_of(encoded, index) for index in range(len(tensors))]
    head = [_PART.pack(tag, tensor.nbytes, len(text)) for (tag, text), tensor in zip(types, tensors, strict=True)]
    return b"".join(
        (
            b"P",
            _MANY.pack(len(tensors), len(encoded.pickled)),
            *head,
            *(text for _, text in types),
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


def _part(tag: bytes, text: bytes, raw: bytes, copy: bool) -> object:
    if tag == b"T":
        dtype, shape, nbytes = _parse_torch_type(text)
        if len(raw) != nbytes:
            raise ValueError("a tensor of the wrong length")
        if not nbytes:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(bytearray(raw), dtype=dtype).view(shape)
    if tag != b"A":
        raise ValueError(f"there is no tag {tag!r}")
    array_dtype, shape, nbytes = parse_array_type(text.decode("ascii"))
    if len(raw) != nbytes:
        raise ValueError("an array of the wrong length")
    array = np.frombuffer(bytearray(raw) if copy else raw, array_dtype).reshape(shape)
    array.flags.writeable = copy
    return array


def _from_many(octets: bytes, copy: bool) -> object:
    count, pickled_bytes = _MANY.unpack_from(octets, 1)
    at = 1 + _MANY.size
    if count * _PART.size > len(octets):
        raise ValueError("truncated")
    heads = [_PART.unpack_from(octets, at + index * _PART.size) for index in range(count)]
    at += count * _PART.size
    texts = []
    for _, _, length in heads:
        texts.append(octets[at : at + length])
        at += length
    pickled = octets[at : at + pickled_bytes]
    at += pickled_bytes
    parts = []
    for (tag, nbytes, _), text in zip(heads, texts, strict=True):
        parts.append(_part(tag, text, octets[at : at + nbytes], copy))
        at += nbytes
    if at != len(octets) or not (pickled or count == 1):
        raise ValueError("of the wrong length")
    return assemble("pickle" if pickled else "tensor", parts, pickled)
