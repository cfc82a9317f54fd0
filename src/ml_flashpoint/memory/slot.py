"""A slot: a tmpfs file that stays mapped, and that *is* the object of the part that it holds.

A slot is reserved, faulted in and, where this process uses CUDA, page-locked once, when it is made. Later saves pay for
their copy alone. Readers hold a shared ``flock`` on the file, which is the same file under its name as an object. The
owner tries for an exclusive one before it reuses the slot.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import errno
import fcntl
import logging
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ml_flashpoint.copy.cuda import PageLock
from ml_flashpoint.format import knobs
from ml_flashpoint.format.digest import digest_blocks
from ml_flashpoint.format.errors import CapacityError, DamagedError, SaveError
from ml_flashpoint.format.files import open_own
from ml_flashpoint.format.manifest import ObjectRecord
from ml_flashpoint.format.names import SaveId
from ml_flashpoint.format.object_format import Layout, encode_header
from ml_flashpoint.memory.capacity import available_bytes

if TYPE_CHECKING:  # managers of dictionaries map slots without torch
    import torch

_log = logging.getLogger(__name__)

PAGE = mmap.PAGESIZE
TEMPORARY = ".tmp"
"""Suffix of files that are not what their names will say yet."""

_MADV_POPULATE_WRITE = 23
_STEP = 64 << 20  # bytes that are reserved or faulted in at once: the kernel locks the process's mappings meanwhile
_PUNCH_HOLE, _KEEP_SIZE = 0x02, 0x01
_libc = ctypes.CDLL(None, use_errno=True)  # its calls release the GIL; those of `mmap` do not
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def round_up(size: int, unit: int) -> int:
    """Return the smallest multiple of ``unit`` that is at least ``size``."""
    return -(-size // unit) * unit


class State(enum.Enum):
    """State of a slot in the process that owns it."""

    EMPTY = "empty"  # also: bytes that nobody needs
    WRITING = "writing"  # being filled, or waiting for the commit
    COMMITTED = "committed"


class _Mapping(mmap.mmap):
    """A mapping that ends unlocked: else CUDA would go on to use whatever is mapped at its address by then."""

    pages: PageLock | None = None

    def __del__(self) -> None:
        if self.pages is not None:
            self.pages.release()


class Slot:
    """A mapped file of `size` bytes. Not thread-safe; made by `make` or `open`.

    Attributes:
        path: its own name. It has the name of an object besides while it holds one.
        buffer: all bytes, writable. Assigning to a slice holds the GIL; ``copy_`` of `tensor` does not.
        is_prepared: True once all pages are faulted in. Until then the first copy pays for that.
        state, save: what it holds: a part of ``save`` unless it is `State.EMPTY`. Set by the pool.
        readers: number of threads of this process that read it.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        status = os.fstat(descriptor)
        self.size, self.inode = status.st_size, status.st_ino
        self.is_prepared = False
        self.state = State.EMPTY
        self.save: SaveId | None = None
        self.readers = 0
        self._descriptor = descriptor
        self._mapping = _Mapping(descriptor, self.size)
        self._tensor: torch.Tensor | None = None
        self.buffer = memoryview(self._mapping)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        self._pages = self._mapping.pages = PageLock(self.address, self.size)

    @classmethod
    def make(
        cls, path: Path, size: int, *, go_on: Callable[[int], bool] = lambda left: True, prepare: bool = True
    ) -> Slot:
        """Make a file of ``size`` bytes, rounded up to pages, and fault it in. It appears at ``path`` whole.

        Args:
            path: in a folder that exists; nothing is there.
            size: at least 1.
            go_on: called with the bytes that are still to be reserved, before each step; False ends it: other processes
                take memory, too.
            prepare: False where another process writes to the slot.

        Raises:
            SaveError, CapacityError: the system refuses, or there is no room. Nothing is left behind.
        """
        size = round_up(size, PAGE)
        temporary = path.with_name(f"{path.name}{TEMPORARY}")
        try:
            descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            own = temporary  # not yet ``path``: a later job may have a slot there, if this process was stopped
            try:
                for begin in range(0, size, _STEP):
                    if not go_on(size - begin):
                        raise no_room("a slot", size, path)
                    # Before any store: one to a page that a full tmpfs has not reserved is a SIGBUS.
                    os.posix_fallocate(descriptor, begin, min(_STEP, size - begin))
                os.rename(temporary, path)
                own = path
                slot = cls(path, descriptor)
            except BaseException:
                os.close(descriptor)
                own.unlink(missing_ok=True)
                raise
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
                raise no_room("a slot", size, path) from error
            hint = "look at the limits of this process (ulimit -n, ulimit -v)"
            raise SaveError(f"cannot make a slot: {error.strerror}", path=path, hint=hint) from error
        if prepare:
            slot.prepare()
        return slot

    @classmethod
    def open(cls, path: Path) -> Slot:
        """Map a slot that another process has made. Raise a `DamagedError` if the file is no whole number of pages, an
        `UnsafePathError` if it is somebody else's or no regular file, an `OSError` if it cannot be opened or mapped."""
        descriptor = open_own(path, os.O_RDWR)
        try:
            size = os.fstat(descriptor).st_size
            if size == 0 or size % PAGE:
                raise DamagedError(f"a slot must be a positive number of pages, not {size} bytes", path=path)
            return cls(path, descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    def prepare(self) -> None:
        """Fault all pages in, without the GIL, and page-lock them if this process uses CUDA. Content is not changed.

        For one thread at a time; others may use the slot meanwhile, or remove it.
        """
        mapping = self._mapping  # stays until this returns
        for begin in range(0, 0 if self.is_prepared else self.size, _STEP):
            if _libc.madvise(self.address + begin, min(_STEP, self.size - begin), _MADV_POPULATE_WRITE) != 0:
                # Linux before 5.14: the first copy faults the pages in.
                _log.debug("cannot fault in %s: %s", self.path, os.strerror(ctypes.get_errno()))
                break
        while self._pages.extend():
            pass
        self.is_prepared = True
        del mapping

    @property
    def is_due(self) -> bool:
        """True if `prepare` has something to do: also for slots that were made before this process used CUDA."""
        return not self.is_prepared or self._pages.is_due

    @property
    def is_pinned(self) -> bool:
        """True if devices can copy into all of it directly."""
        return self._pages.is_whole

    @property
    def tensor(self) -> torch.Tensor:
        """All bytes as one dimension of ``uint8`` on the CPU."""
        import torch

        if self._tensor is None:
            with torch.inference_mode(False):  # others write to it later
                self._tensor = torch.frombuffer(self._mapping, dtype=torch.uint8)
        return self._tensor

    def view(self, begin: int, end: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """Return bytes ``begin:end`` of the file as a contiguous tensor, without a copy.

        Its storage begins at ``begin``: torch takes a tensor with a storage offset for one with memory of its own.
        """
        import torch

        with torch.inference_mode(False):
            if begin == end:
                return torch.empty(tuple(shape), dtype=dtype, device="cpu")
            piece = torch.frombuffer(self._mapping, dtype=torch.uint8, count=end - begin, offset=begin)
            return piece.view(dtype).view(tuple(shape))

    def seal(self, layout: Layout, byte_items: Sequence[bytes] = ()) -> ObjectRecord:
        """Write the header and the byte items (the content of ``layout.byte_items``) of an object whose tensors are in
        place. Return its record. Raise a `CapacityError` if they do not fit."""
        if layout.size > self.size:
            text = "the object does not fit into its slot"
            raise CapacityError(text, needed_bytes=layout.size, available_bytes=self.size, path=self.path)
        header = encode_header(layout, self.size)
        for entry, data in zip(layout.byte_items, byte_items, strict=True):
            self.buffer[entry.begin : entry.end] = data
        self.buffer[: layout.data_start] = header
        block_size = knobs.block_bytes()
        with self.buffer[: layout.size] as view:
            digests = digest_blocks(view, block_size=block_size)
        return ObjectRecord(layout.size, self.size, digests, block_size)

    def lock(self) -> bool:
        """Keep readers out, until `unlock`. Return False if one has the slot locked."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self) -> None:
        """Let readers in. Closing is not enough: a forked child may share the descriptor."""
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def remove(self) -> None:
        """Delete the file of a slot that nobody reads, and free its memory, also where a forked child still maps it.
        Slow: 0.16 s a GiB."""
        self._pages.release()
        going = self.path.with_name(f"{self.path.name}{TEMPORARY}")
        with contextlib.ExitStack() as last:  # the unlink is last: the room is not lost to sight meanwhile
            with contextlib.suppress(FileNotFoundError):  # else a file of that name is a later job's
                os.rename(self.path, going)
                last.callback(going.unlink, missing_ok=True)
            if _libc.fallocate(self._descriptor, _PUNCH_HOLE | _KEEP_SIZE, 0, self.size) != 0:
                _log.debug("cannot free the pages of %s: %s", self.path, os.strerror(ctypes.get_errno()))
        self.close()

    def close(self) -> None:
        """Unmap the file, which stays. Views that still exist keep it mapped until they die. Safe to call twice."""
        if self._descriptor >= 0:
            self._pages.release()
            os.close(self._descriptor)
            self._descriptor, self._tensor = -1, None
            self.buffer.release()
            del self._mapping


def no_room(what: str, size: int, path: Path, available: int | None = None) -> CapacityError:
    """Return the error of memory that cannot be had."""
    return CapacityError(
        f"no room for {what}",
        needed_bytes=size,
        available_bytes=available_bytes(path) if available is None else max(available, 0),
        path=path,
        hint="enlarge the tmpfs (mount -o remount,size=...) or the container, free memory, or lower keep",
    )
