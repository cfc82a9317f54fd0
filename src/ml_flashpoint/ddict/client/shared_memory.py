"""The client's side of large values: their form, slots mapped for writing, and views of values.

Owns the form of an object, in both directions, the mappings, and the shared locks (flock) that go with them; see
`slots` for what the locks are good for.

A value is a valid object of `format.object_format`: tensors ``t0``, ``t1`` and so on, and byte items ``pickle`` and
``arrays`` (which of the tensors are arrays). Its header is written last, and the 8 bytes of its length at the very
end, so that a header which can be read means that all of it is there.

A view's lock lives exactly as long as its mapping: `mmap` keeps a duplicate of the file descriptor, which refers to the
same open file, and a lock belongs to that. So a slot is not reused while a tensor or array that was got from it, or
anything that shares its memory, is alive in this process, or in one that was forked from it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np
import torch

from ml_flashpoint.copy import cuda
from ml_flashpoint.copy.cpu import copy_all, cpu_clone, typed_view
from ml_flashpoint.copy.dtypes import dtype_name, torch_dtype
from ml_flashpoint.ddict.client.codec import Encoded, array_at, assemble, tensor_at, tensor_octets
from ml_flashpoint.ddict.errors import DDictError, StaleValueError
from ml_flashpoint.ddict.links import allow_many_files
from ml_flashpoint.ddict.manager.slots import check_header, has_token, in_pieces
from ml_flashpoint.format.dtypes import ITEMSIZES
from ml_flashpoint.format.errors import CapacityError, FlashpointError, ObjectFormatError
from ml_flashpoint.format.object_format import Entry, Layout, encode_header, plan_layout
from ml_flashpoint.memory.slot import Slot

if TYPE_CHECKING:
    from typing_extensions import Buffer

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
    """Write a value into a slot, its header last. ``slot``: the whole file, 1-D uint8, writable. Returns the bytes
    of the object; the rest of the file is unused. Raises `CapacityError`: the slot is smaller than `object_size`."""
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
    """Return what `write_object` would write, as buffers that follow one another, for a client on another node.

    The first one is the header, to be written last; see `slots.ValueSlots.fill`.
    """
    layout, items = _layout(encoded)
    header = encode_header(layout, file_size, {"value": value_id, "kind": encoded.kind})
    tensors = [tensor_octets(encoded.tensors[int(entry.key[1:])]) for entry in layout.tensors]
    rest = tensors + [np.frombuffer(items[entry.key], np.uint8) for entry in layout.byte_items]
    if len(rest) > 256:
        rest = [np.concatenate(rest)]
    return [memoryview(header), *(piece for octets in rest for piece in in_pieces(octets.data))]


def read_object(buffer: Buffer, value_id: str, *, copy: bool = False, file_size: int | None = None) -> object:
    """The value in an object. For clients only: it may unpickle. ``buffer``: the file, or the part of it that is in
    use, and ``file_size`` bytes of that; tensors and arrays are views of it, which keep it alive, or of a copy if it is
    read-only. ``copy``: give them memory of their own; without, arrays are read-only. Raises `StaleValueError`: it
    holds another value, or none; `ObjectFormatError`: it is damaged."""
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
        """A function that copies a value into the slot that was allocated to it, and returns the bytes of the object.
        The slot is locked until the end of the block, which is for when the manager has acknowledged the value. Raises
        `StaleValueError`: the slot is gone, or not kept for this value any more."""
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
    """The value in a slot of this machine. It may unpickle. ``copy``: see `read_object`; what is written to a view
    stays in this process, and each has a file open. When they are too many for the soft limit of this process, it is
    raised to the hard one. Raises `StaleValueError`: it is not there any more: ask the manager again;
    `ObjectFormatError`: it is damaged; `DDictError`: too many files are open."""
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
