"""Values taken apart into tensors and the rest, and put together again: a row of bytes, in a message or in a slot.

Tensors and arrays never pass through pickle, also those inside other objects. What is left of a value does, by
cloudpickle; only clients unpickle, and only what other clients, which know the secret of the dictionary, have written.
A tensor comes back on the CPU, contiguous, and without requiring a gradient; an array in C order. Those that are the
same view of the same memory come back as one. Subclasses of tensors and arrays are pickled in their own way.

A value is one of::

    i decimal digits                                      an integer, unless it is huge
    f a double, big-endian                                a float
    p pickle
    P     number of parts (4), bytes of the pickle (8), for each part its tag (T: tensor, A: array, B: bytes), its
          bytes (8) and those of its type (2), then all types, the pickle, and all parts, each at the next multiple of
          `ALIGN`; without a pickle, there is one part, which is the value

A large one is of the last kind, and lies in a slot after its header; see `store`. The lock (flock) of a view lives
exactly as long as its mapping: `mmap` keeps a duplicate of the file descriptor, which refers to the same open file, and
a lock belongs to that. So a slot is not reused while anything that shares the memory of a view is alive in this
process, or in one that was forked from it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
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
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeGuard, TypeVar

import cloudpickle
import numpy as np
import torch

from ml_flashpoint.copy import cuda
from ml_flashpoint.copy.cpu import copy_all, cpu_clone, typed_view, view_identity
from ml_flashpoint.copy.dtypes import STORABLE_DTYPES, dtype_name, octets_of, torch_dtype
from ml_flashpoint.ddict.errors import DDictError, StaleValueError
from ml_flashpoint.ddict.links import allow_many_files
from ml_flashpoint.ddict.manager.store import (
    VALUE_AT,
    check_value,
    has_token,
    in_pieces,
    inline_number,
    number_to_inline,
    slot_header,
)
from ml_flashpoint.format.dtypes import parse_true_type
from ml_flashpoint.format.errors import (
    CapacityError,
    DamagedError,
    FlashpointError,
    InvalidArgumentError,
    ObjectFormatError,
)
from ml_flashpoint.memory.slot import Slot, round_up
from ml_flashpoint.state.archive import dtype_of

if TYPE_CHECKING:
    from typing_extensions import Buffer

INLINE_LIMIT: Final = 256 << 10  # values of fewer bytes than this are kept inline
MAX_MAPPINGS: Final = 64
"""Slots that a writer keeps mapped, since a first write to a new mapping costs six times as much as later ones."""
ALIGN: Final = 64

_Result = TypeVar("_Result")

_PLAIN: Final = frozenset((bytes, str, int, float, bool, type(None)))
_MANY: Final = struct.Struct(">IQ")
_PART: Final = struct.Struct(">cQH")
_MOST_BLOBS: Final = 256
# Not reserved: a view is hardly ever written to, and need not have memory of its own set aside.
_MAP_FLAGS: Final = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000)


class PartType(NamedTuple):
    """The type of a part: its tag, and dtype and shape, like ``float32 2,3`` of a tensor and ``<f4 2,3`` of an
    array."""

    tag: bytes
    text: str


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """A value taken apart. Shares its memory with the value."""

    tensors: list[torch.Tensor]  # strided tensors, on any device
    types: list[PartType]  # of the parts that they are
    pickled: bytes  # the rest, or a number; empty if there is none
    is_number: bool = False

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
            octets = np.frombuffer(value, np.uint8)  # type: ignore[call-overload]
            return Encoded([_tensor_over(octets)], [PartType(b"B", "")], b"")
        if kind in (int, float) and (number := number_to_inline(value))[:1] != b"p":  # type: ignore[arg-type]
            return Encoded([], [], number, is_number=True)
        return Encoded([], [], pickle.dumps(value, 5))
    if (part := _part_of(value)) is not None:
        return Encoded([part[0]], [part[1]], b"")
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
    return Encoded(pickler.tensors, pickler.types, file.getvalue())


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Takes tensors and arrays out."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.tensors: list[torch.Tensor] = []
        self.types: list[PartType] = []
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
        if index == len(self.tensors) and (part := _part_of(obj)) is not None:
            self.tensors.append(part[0])
            self.types.append(part[1])
            self._alive.append(obj)  # or its address could be another's before this is over
        return index


def _part_of(value: object) -> tuple[torch.Tensor, PartType] | None:
    """Return what stands for a tensor or an array; None: it is none."""
    if _is_plain_tensor(value):
        return value.detach(), PartType(b"T", _describe(dtype_name(value.dtype), value.shape))
    if not _is_plain_array(value):
        return None
    # Its bytes, in C order: torch has not each dtype, and no strides below zero.
    octets = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    return _tensor_over(octets), PartType(b"A", _describe(value.dtype.str, value.shape))


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


class _Layout(NamedTuple):
    """The place of everything in a row of bytes: what comes before the pickle, where parts begin, and the end."""

    head: bytes
    begins: tuple[int, ...]
    size: int


def _begins(at: int, lengths: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Return where parts of these lengths begin, after so many bytes, and where the last one ends."""
    begins = []
    for length in lengths:
        begins.append(round_up(at, ALIGN))
        at = begins[-1] + length
    return tuple(begins), at


@lru_cache(maxsize=256)
def _planned(types: tuple[PartType, ...], lengths: tuple[int, ...], pickled: int) -> _Layout:
    texts = [text.encode() for _, text in types]
    parts = [_PART.pack(its.tag, *each) for its, *each in zip(types, lengths, map(len, texts), strict=True)]
    head = b"".join((b"P", _MANY.pack(len(types), pickled), *parts, *texts))
    return _Layout(head, *_begins(len(head) + pickled, lengths))


def _layout(encoded: Encoded) -> _Layout:
    return _planned(tuple(encoded.types), tuple(tensor.nbytes for tensor in encoded.tensors), len(encoded.pickled))


def to_inline(encoded: Encoded) -> bytes:
    """A small value in one row of bytes."""
    if encoded.is_number:
        return encoded.pickled
    if not encoded.tensors:
        return b"p" + encoded.pickled
    return b"".join(_pieces(encoded, _layout(encoded)))


def _pieces(encoded: Encoded, layout: _Layout) -> list[Any]:
    """Return buffers that follow one another."""
    pieces: list[Any] = [layout.head + encoded.pickled]
    at = len(pieces[0])
    for begin, tensor in zip(layout.begins, encoded.tensors, strict=True):
        pieces += [bytes(begin - at), tensor_octets(tensor).data]
        at = begin + tensor.nbytes
    return pieces


def object_size(encoded: Encoded) -> int:
    """Bytes that a slot must have to take this value."""
    return VALUE_AT + _layout(encoded).size


def write_object(encoded: Encoded, slot: torch.Tensor, value_id: str) -> int:
    """Write a value into a slot, the bytes of its header last. Return the bytes that are in use. ``slot``: the whole
    file, 1-D uint8, writable."""
    layout = _layout(encoded)
    size = VALUE_AT + layout.size
    if slot.numel() < size:
        raise CapacityError("the slot is too small", needed_bytes=size, available_bytes=slot.numel())
    octets, head = slot.numpy(), layout.head + encoded.pickled
    octets[:8] = 0
    octets[VALUE_AT : VALUE_AT + len(head)] = np.frombuffer(head, np.uint8)
    places = [
        typed_view(slot, VALUE_AT + begin, VALUE_AT + begin + tensor.nbytes, tensor.dtype, tensor.shape)
        for begin, tensor in zip(layout.begins, encoded.tensors, strict=True)
    ]
    copy_all(places, encoded.tensors)
    header = np.frombuffer(slot_header(value_id, size), np.uint8)
    octets[8:VALUE_AT] = header[8:]
    octets[:8] = header[:8]
    return size


def object_blobs(encoded: Encoded, value_id: str) -> list[memoryview]:
    """Return what `write_object` would write, as buffers that follow one another, for a client on another node. The
    first one has the header, to be written last."""
    layout = _layout(encoded)
    first, *rest = _pieces(encoded, layout)
    if len(rest) > _MOST_BLOBS:
        rest = [b"".join(rest)]
    first = slot_header(value_id, VALUE_AT + layout.size) + first
    return [memoryview(first), *(piece for its in rest if len(its) for piece in in_pieces(memoryview(its)))]


def tensor_octets(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The bytes of a tensor in C order, on the CPU; its own memory if it can be."""
    if tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg() or not tensor.is_contiguous():
        tensor = cpu_clone(tensor)
    if not tensor.numel():
        return np.empty(0, np.uint8)
    return octets_of(tensor)


# ---- putting together -------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _parse(tag: bytes, text: str) -> tuple[Any, tuple[int, ...], int]:
    """Return dtype, shape and bytes of the type of a tensor or an array. Raises ValueError or TypeError: it is none."""
    if tag == b"T":
        name, shape, nbytes = parse_true_type(text)
        return torch_dtype(name), shape, nbytes
    name, _, dimensions = text.partition(" ")
    sizes = dimensions.split(",") if dimensions else []
    if (
        tag != b"A"
        or len(sizes) > 64
        or not all(size.isascii() and size.isdecimal() and len(size) <= 19 for size in sizes)
    ):
        raise ValueError(f"not the shape of an array: {tag!r}")
    dtype = dtype_of(name)
    if not _is_plain_dtype(dtype):
        raise ValueError("not the dtype of an array")
    shape = tuple(map(int, sizes))
    return dtype, shape, math.prod(shape) * dtype.itemsize


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, parts: Sequence[object]) -> None:
        super().__init__(file)
        self._parts = parts

    def persistent_load(self, pid: Any) -> object:
        return self._parts[pid]


def _unpickled(pickled: bytes, parts: Sequence[object]) -> object:
    return _Unpickler(io.BytesIO(pickled), parts).load() if pickled else parts[0]


def _read(buffer: Buffer, begin: int, end: int, copy: bool, *, inline: bool) -> tuple[bytes, list[object]]:
    """The pickle and the parts of the value in these bytes. ``inline``: parts get memory of their own anyhow."""
    view = memoryview(buffer)
    count, pickled_bytes = _MANY.unpack_from(view, begin + 1)
    at = begin + 1 + _MANY.size
    heads = list(_PART.iter_unpack(view[at : at + count * _PART.size]))
    at += count * _PART.size
    texts = []
    for _, _, length in heads:
        texts.append(bytes(view[at : at + length]).decode("ascii"))
        at += length
    pickled = bytes(view[at : at + pickled_bytes])
    begins, last = _begins(at + pickled_bytes - begin, [nbytes for _, nbytes, _ in heads])
    if len(heads) != count or begin + last != end or view.nbytes < end or not (pickled_bytes or count == 1):
        raise ValueError("of the wrong length")
    parts: list[object] = []
    for (tag, nbytes, _), text, at in zip(heads, texts, begins, strict=True):
        raw, at = (bytearray(view[at : at + nbytes]), 0) if inline else (buffer, begin + at)
        parts.append(_part(tag, text, raw, at, nbytes, copy and not (inline and tag == b"T")))
    return pickled, parts


def _part(tag: bytes, text: str, buffer: Any, begin: int, nbytes: int, copy: bool) -> object:
    """Return the part whose bytes lie there: a view, read-only if it is an array, or a copy. Raises like `_parse`."""
    if tag == b"B":
        return bytes(memoryview(buffer)[begin : begin + nbytes])
    dtype, shape, its_bytes = _parse(tag, text)
    if its_bytes != nbytes:
        raise ValueError(f"of the wrong length: {text}")
    if tag == b"A":
        view: np.ndarray[Any, Any] = np.frombuffer(buffer, dtype, math.prod(shape), begin).reshape(shape)
        array = view.copy() if copy else view
        array.flags.writeable = copy
        return array
    if not nbytes:
        return torch.empty(shape, dtype=dtype, device="cpu")
    # From the buffer each, so that its storage is no larger than itself: whoever saves or sends it, saves only that.
    tensor = torch.frombuffer(buffer, dtype=dtype, count=nbytes // dtype.itemsize, offset=begin)
    tensor = tensor if len(shape) == 1 else tensor.view(shape)
    return cpu_clone(tensor) if copy else tensor


def from_inline(data: Buffer, *, copy: bool = False) -> object:
    """The value that these bytes stand for, in memory of its own. For clients only: it may unpickle. ``copy``: give
    arrays that can be written to. Raises `DamagedError`: they are no value; and whatever unpickling raises."""
    octets = data if type(data) is bytes else bytes(data)
    tag = octets[:1]
    if tag == b"p":
        return _Unpickler(io.BytesIO(octets[1:]), ()).load()
    try:
        if tag in (b"i", b"f"):
            return inline_number(octets)
        if tag != b"P":
            raise ValueError(f"there is no tag {tag!r}")
        pickled, parts = _read(octets, 0, len(octets), copy, inline=True)
    except (ValueError, TypeError, struct.error, IndexError) as error:
        raise DamagedError(f"not an encoded value: {error}") from error
    return _unpickled(pickled, parts)


def read_object(buffer: Buffer, value_id: str, *, copy: bool = False) -> object:
    """The value in a slot, or the bytes of it that are in use. For clients only: it may unpickle. Tensors and arrays
    are views, which keep the buffer alive, or of a copy if it is read-only; ``copy``: give them memory of their own.
    Raises `StaleValueError`: another value is here, or none; `ObjectFormatError`: it is damaged; and whatever
    unpickling raises."""
    if memoryview(buffer).readonly:
        buffer = bytearray(buffer)
    size = check_value(buffer, value_id)
    try:
        pickled, parts = _read(buffer, VALUE_AT, size, copy, inline=False)
    except (ValueError, TypeError, IndexError, struct.error) as error:
        raise ObjectFormatError(f"there is no value here: {error}") from error
    return _unpickled(pickled, parts)


# ---- slots ------------------------------------------------------------------------------------------------------


class ValueWriter:
    """A writer of values into slots that managers have allocated, over mappings that are kept. Thread-safe."""

    def __init__(self, mappings: int = MAX_MAPPINGS) -> None:
        self._most = mappings
        self._lock = threading.Lock()
        self._kept: dict[str, Slot] = {}

    @contextlib.contextmanager
    def writing(self, path: str, value_id: str) -> Iterator[Callable[[Encoded], int]]:
        """Yield a function that copies a value into the slot that was allocated to it, and returns the bytes of the
        object."""
        fd = _with_many_files(lambda: _lock_shared(path, os.O_RDWR, value_id))
        try:
            slot = self._taken(path, os.fstat(fd), value_id)
            try:
                if not has_token(slot, value_id):
                    raise StaleValueError(f"the slot is not kept for value {value_id} any more", path=path)
                yield partial(_write, slot, value_id)
            finally:
                self._keep(path, slot)
        finally:
            os.close(fd)

    def _taken(self, path: str, locked: os.stat_result, value_id: str) -> Slot:
        """Return the mapping of a slot; no other thread forgets it before it is kept again."""
        with self._lock:
            slot = self._kept.pop(path, None)
        if slot is not None and (slot.inode, slot.size) == (locked.st_ino, locked.st_size):
            return slot
        if slot is not None:
            slot.close()
        # Now and not later: memory of files that are gone is only given back with their mappings.
        self._forget(lambda path, slot: not _is_at(path, slot))
        return _with_many_files(lambda: _map(path, locked, value_id))

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
