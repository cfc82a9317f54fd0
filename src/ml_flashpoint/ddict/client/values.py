"""Values taken apart into tensors and the rest, and put together again: small ones as a row of bytes, large ones in
slots.

Tensors and arrays never pass through pickle, also those inside other objects. What is left of a value does, by
cloudpickle; only clients unpickle, and only what other clients, which know the secret of the dictionary, have written.

What comes back is what was put, with these differences: a tensor is on the CPU, contiguous, and does not require a
gradient; an array is in C order. Tensors, or arrays, that are the same view of the same memory come back as one; others
that overlap come back apart. Subclasses of tensors and arrays are pickled in their own way.

A small value is one of::

    i decimal digits                                      an integer, unless it is huge
    f a double, big-endian                                a float
    p pickle
    P     number of tensors (4), length of the pickle (4), for each its tag (T, or A for an array), its length (8) and
          that of its type (2), then all types, the pickle, and all bytes; without a pickle, it is the only one of them

A large one is a valid object of `format.object_format`: tensors ``t0``, ``t1`` and so on, and byte items ``pickle`` and
``arrays`` (which of the tensors are arrays). Its header is written last, and the 8 bytes of its length at the very end,
so that a header which can be read means that all of it is there.

The lock (flock) of a view lives exactly as long as its mapping: `mmap` keeps a duplicate of the file descriptor, which
refers to the same open file, and a lock belongs to that. So a slot is not reused while a tensor or array that was got
from it, or anything that shares its memory, is alive in this process, or in one that was forked from it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import io
import itertools
import json
import math
import mmap
import os
import pickle
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeGuard, TypeVar

import cloudpickle
import numpy as np
import torch

from ml_flashpoint.copy import cuda
from ml_flashpoint.copy.cpu import copy_all, cpu_clone, typed_view, view_identity
from ml_flashpoint.copy.dtypes import STORABLE_DTYPES, dtype_name, octets_of, torch_dtype
from ml_flashpoint.ddict.errors import DDictError, StaleValueError
from ml_flashpoint.ddict.links import allow_many_files
from ml_flashpoint.ddict.manager.store import check_header, decode_number, encode_number, has_token, in_pieces
from ml_flashpoint.format.dtypes import ITEMSIZES, parse_true_type, tensor_nbytes
from ml_flashpoint.format.errors import (
    CapacityError,
    DamagedError,
    FlashpointError,
    InvalidArgumentError,
    ObjectFormatError,
)
from ml_flashpoint.format.object_format import Entry, Layout, encode_header, plan_layout
from ml_flashpoint.memory.slot import Slot

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
    found = parse_true_type(text)
    nbytes = None if found is None else tensor_nbytes(*found)
    if found is None or nbytes is None:
        raise ValueError("there is no such tensor")
    return *found, nbytes


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
    """The value that these bytes stand for, in memory of its own. For clients only: it may unpickle."""
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


MAX_MAPPINGS: Final = 64
"""Slots that a writer keeps mapped, since a first write to a new mapping costs six times as much as later ones."""

_Result = TypeVar("_Result")

# Not reserved: a view is hardly ever written to, and need not have memory of its own set aside.
_MAP_FLAGS: Final = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000)

_PICKLE_ITEM: Final = "pickle"
_ARRAYS_ITEM: Final = "arrays"
_KINDS: Final = frozenset(("tensor", "array", "bytes", "number", "plain", "pickle"))
_SINGLE: Final = frozenset(("tensor", "array", "bytes"))
# In the header: the value's id and kind.
_HEADER_RESERVE: Final = 512


@lru_cache(maxsize=64)
def _tensor_layout(types: tuple[tuple[str, tuple[int, ...]], ...], items: tuple[tuple[str, int], ...]) -> Layout:
    tensors = [(f"t{index}", dtype, shape) for index, (dtype, shape) in enumerate(types)]
    return plan_layout(tensors, items, reserve=_HEADER_RESERVE)


def _layout(encoded: Encoded) -> tuple[Layout, dict[str, bytes]]:
    items = {}
    if encoded.pickled:
        items[_PICKLE_ITEM] = encoded.pickled
    if any(described is not None for described in encoded.arrays):
        items[_ARRAYS_ITEM] = json.dumps(encoded.arrays, separators=(",", ":")).encode()
    signature = tuple((dtype_name(tensor.dtype), tuple(tensor.shape)) for tensor in encoded.tensors)
    return _tensor_layout(signature, tuple((key, len(data)) for key, data in items.items())), items


def object_size(encoded: Encoded) -> int:
    """Bytes that a slot must have to take this value."""
    return _layout(encoded)[0].size


def write_object(encoded: Encoded, slot: torch.Tensor, value_id: str) -> int:
    """Write a value into a slot, its header last. ``slot``: the whole file, 1-D uint8, writable."""
    layout, items = _layout(encoded)
    if slot.numel() < layout.size:
        raise CapacityError("the slot is too small", needed_bytes=layout.size, available_bytes=slot.numel())
    header = encode_header(layout, slot.numel(), {"value": value_id, "kind": encoded.kind})
    octets = slot.numpy()
    octets[:8] = 0
    if layout.tensors:
        copy_all(_places(slot, layout.tensors), [encoded.tensors[int(entry.key[1:])] for entry in layout.tensors])
    for entry in layout.byte_items:
        octets[entry.begin : entry.end] = np.frombuffer(items[entry.key], np.uint8)
    octets[8 : len(header)] = np.frombuffer(header, np.uint8)[8:]
    octets[:8] = np.frombuffer(header, np.uint8)[:8]
    return layout.size


def _places(slot: torch.Tensor, entries: Sequence[Entry]) -> list[torch.Tensor]:
    """The tensors to copy to. Those of one dtype that lie side by side are cut in one call: there may be thousands."""
    places: list[torch.Tensor] = []
    for dtype, run in itertools.groupby(entries, lambda entry: entry.dtype):
        group = list(run)
        whole = typed_view(slot, group[0].begin, group[-1].end, torch_dtype(dtype), (-1,))
        cut = whole.split_with_sizes([entry.nbytes // ITEMSIZES[dtype] for entry in group])
        places += [
            piece if len(entry.shape) == 1 else piece.view(entry.shape) for piece, entry in zip(cut, group, strict=True)
        ]
    return places


def object_blobs(encoded: Encoded, file_size: int, value_id: str) -> list[memoryview]:
    """Return what `write_object` would write, as buffers that follow one another, for a client on another node."""
    layout, items = _layout(encoded)
    header = encode_header(layout, file_size, {"value": value_id, "kind": encoded.kind})
    tensors = [tensor_octets(encoded.tensors[int(entry.key[1:])]) for entry in layout.tensors]
    rest = tensors + [np.frombuffer(items[entry.key], np.uint8) for entry in layout.byte_items]
    if len(rest) > 256:
        rest = [np.concatenate(rest)]
    return [memoryview(header), *(piece for octets in rest for piece in in_pieces(octets.data))]


def read_object(buffer: Buffer, value_id: str, *, copy: bool = False, file_size: int | None = None) -> object:
    """The value in an object. For clients only: it may unpickle."""
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
            if (described := arrays[index]) is not None:
                parts[index] = array_at(buffer, entry.begin, entry.nbytes, described, copy)
                continue
            tensor = tensor_at(buffer, entry.begin, entry.nbytes, entry.dtype, entry.shape)
            parts[index] = cpu_clone(tensor) if copy else tensor
    except (ValueError, TypeError, IndexError, RecursionError) as error:
        raise ObjectFormatError(f"the object holds no value: {error}") from error
    return assemble(kind, parts, items.get(_PICKLE_ITEM, b""))


class ValueWriter:
    """A writer of values into slots that managers have allocated, over mappings that are kept. Thread-safe."""

    def __init__(self, mappings: int = MAX_MAPPINGS) -> None:
        self._most = mappings
        self._lock = threading.Lock()
        self._kept: dict[str, Slot] = {}

    @contextlib.contextmanager
    def writing(self, path: str, value_id: str) -> Iterator[Callable[[Encoded], int]]:
        """A function that copies a value into the slot that was allocated to it, and returns the bytes of the
        object."""
        with self._lock:  # taken out while in use, so that no other thread forgets it meanwhile
            slot = self._kept.pop(path, None)
        is_good = False
        try:
            fd = _with_many_files(lambda: _lock_shared(path, os.O_RDWR, value_id))
            try:
                stat = os.fstat(fd)
                if slot is not None and (slot.inode != stat.st_ino or slot.size != stat.st_size):
                    slot.close()
                    slot = None
                if slot is None:
                    # Now and not later: memory of files that are gone is only given back with their mappings.
                    self._forget(lambda path, slot: not _is_at(path, slot))
                    slot = _with_many_files(lambda: _map(path, stat, value_id))
                if not has_token(slot, value_id):
                    raise StaleValueError(f"the slot is not kept for value {value_id} any more", path=path)
                is_good = True
                yield partial(_write, slot, value_id)
            finally:
                os.close(fd)
        finally:
            if slot is not None:
                self._keep(path, slot) if is_good else slot.close()

    def _keep(self, path: str, slot: Slot) -> None:
        with self._lock:
            before = self._kept.pop(path, None)
            self._kept[path] = slot
            surplus = list(self._kept)[: -self._most]
        if before is not None:
            before.close()
        self._forget(lambda other, _: other in surplus)

    def _forget(self, is_over: Callable[[str, Slot], bool]) -> None:
        with self._lock:
            over = [self._kept.pop(path) for path, slot in list(self._kept.items()) if is_over(path, slot)]
        for slot in over:
            slot.close()

    def close(self) -> None:
        """Forget all mappings. It can be used again."""
        self._forget(lambda path, slot: True)


def _write(slot: Slot, value_id: str, encoded: Encoded) -> int:
    size = write_object(encoded, slot.tensor, value_id)
    if cuda.are_on_devices(encoded.tensors) and not slot.is_prepared:
        slot.is_prepared = True  # or the next write would begin it again
        threading.Thread(target=slot.prepare, name="ddict-prepare", daemon=True).start()
    return size


def read_value(path: str, value_id: str, *, copy: bool = False) -> object:
    """The value in a slot of this machine. It may unpickle."""
    mapping = _with_many_files(lambda: _map_private(path, value_id))
    try:
        return read_object(mapping, value_id, copy=copy)
    except FlashpointError as error:
        error.path = path
        raise


def _map_private(path: str, value_id: str) -> mmap.mmap:
    fd = _lock_shared(path, os.O_RDONLY, value_id)
    try:
        size = os.fstat(fd).st_size
        if not size:
            raise StaleValueError(f"there is no value here, {value_id} was expected", path=path)
        return mmap.mmap(fd, size, flags=_MAP_FLAGS, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(fd)


def _with_many_files(function: Callable[[], _Result], *, again: bool = True) -> _Result:
    try:
        return function()
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        if again:
            allow_many_files()
            return _with_many_files(function, again=False)
        raise DDictError(
            "too many files are open",
            hint="let go of tensors and arrays that were got, get them with copy=True, or raise `ulimit -n`",
        ) from error


def _lock_shared(path: str, flags: int, value_id: str) -> int:
    try:
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise StaleValueError(f"the slot of value {value_id} is gone", path=path) from None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise StaleValueError(f"the slot of value {value_id} is being reused", path=path) from None
    except BaseException:
        os.close(fd)
        raise
    return fd


def _is_at(path: str, slot: Slot) -> bool:
    try:
        return os.stat(path).st_ino == slot.inode
    except FileNotFoundError:
        return False


def _map(path: str, locked: os.stat_result, value_id: str) -> Slot:
    try:
        slot = Slot.open(Path(path))
    except FileNotFoundError:
        raise StaleValueError(f"the slot of value {value_id} is gone", path=path) from None
    if slot.inode != locked.st_ino:
        slot.close()
        raise StaleValueError(f"the slot of value {value_id} was replaced", path=path)
    return slot
