"""One arena: a file that stays mapped and faulted in, and that *is* a checkpoint object.

Owns the life of a single mapping: creation (pages reserved before they are touched, so that a full
filesystem is an error and never a SIGBUS), growth, prefaulting, page-locking for CUDA. It does not know what
is stored in it; which arena serves which object is the pool's business.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ml_flashpoint.copy.pinned import PageLock, works_on_devices
from ml_flashpoint.format.errors import CapacityError, DamagedError, SaveError
from ml_flashpoint.format.private_folders import open_own
from ml_flashpoint.memory.capacity import free_memory, is_memory

if TYPE_CHECKING:  # imported by the first that asks for a tensor: managers of dictionaries do not
    import torch

_log = logging.getLogger(__name__)

PAGE = mmap.PAGESIZE
_MADV_POPULATE_WRITE = 23
# Populating in slices keeps the mmap lock available to other threads of the process in between.
_POPULATE_SLICE = 64 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_KEEP_SIZE_PUNCH_HOLE = 0x01 | 0x02


def round_up(size: int, unit: int = PAGE) -> int:
    """The smallest multiple of ``unit`` that is at least ``size``."""
    return -(-size // unit) * unit


class _Mapping(mmap.mmap):
    """A mapping, and what of it is page-locked. It ends with the last view of it, and must not end locked: CUDA would
    go on to read and write the pages that were there, whatever else is mapped at the address by then."""

    page_lock: PageLock | None = None

    def __del__(self) -> None:
        if self.page_lock is not None:
            self.page_lock.release()


class Arena:
    """A mapped file of :attr:`size` bytes.

    ``tensor`` is a 1-D ``uint8`` tensor over the whole mapping and ``buffer`` a writable memoryview of the same
    bytes; both stay valid until :meth:`close`, also while the arena grows (a grown arena maps the file anew,
    and views of the earlier mapping keep that mapping alive). Not thread-safe: one owner at a time.
    """

    def __init__(self, path: Path, fd: int, size: int) -> None:
        self.path = path
        self.views: tuple[object, int, tuple[Any, ...]] | None = None
        """Cache of whoever fills the arena: (layout, address, views of this mapping)."""
        self.exact = False
        """Whether it was last taken for an object that has just its size: a copy."""
        self.make_room: Callable[[], bool] | None = None
        """Asked to free memory where growing finds none; whether it has."""
        self._fd = fd
        self._prefault: threading.Thread | None = None
        self._is_wanted = False
        self._map(size)

    @classmethod
    def create(cls, path: Path, size: int) -> Arena:
        """Make a new file of ``size`` bytes (rounded up to pages) with its pages reserved.

        Raises:
            CapacityError: the filesystem cannot hold it; nothing is left behind.
            SaveError: the system refuses for another reason; nothing is left behind.
            FileExistsError: there is such a file.
        """
        size = max(PAGE, round_up(size))
        with _typed_errors(path):
            fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                _reserve(fd, 0, size, path)
                return cls(path, fd, size)
            except BaseException:
                os.close(fd)
                path.unlink(missing_ok=True)
                raise

    @classmethod
    def open(cls, path: Path) -> Arena:
        """Map an existing arena file for reading and writing.

        Raises:
            UnsafePathError: it is somebody else's, or no regular file.
            DamagedError: the file is empty or not a whole number of pages, so no arena of ours.
        """
        fd = open_own(path, os.O_RDWR)
        try:
            size = os.fstat(fd).st_size
            if size == 0 or size % PAGE:
                raise DamagedError(f"an arena file must be a positive number of pages, not {size} bytes", path=path)
            return cls(path, fd, size)
        except BaseException:
            os.close(fd)
            raise

    def _map(self, size: int) -> None:
        self._mmap = _Mapping(self._fd, size)
        self.size = size
        self._tensor: torch.Tensor | None = None
        self.buffer = memoryview(self._mmap)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._mmap))
        self._page_lock = self._mmap.page_lock = PageLock(self.address, size)

    @property
    def tensor(self) -> torch.Tensor:
        """The whole mapping."""
        import torch

        if self._tensor is None:
            with torch.inference_mode(False):  # it stays, and others write to it later
                self._tensor = torch.frombuffer(self._mmap, dtype=torch.uint8)
        return self._tensor

    @property
    def mapping(self) -> mmap.mmap:
        """What the tensors lie in."""
        return self._mmap

    @property
    def inode(self) -> int:
        """Inode of the file: how a version's link is matched to its arena."""
        return os.fstat(self._fd).st_ino

    def grow(self, size: int) -> None:
        """Make the arena at least ``size`` bytes; what it held stays where it was.

        Raises:
            CapacityError: no room; the arena is as before.
            SaveError: the system refuses for another reason; the arena is as before.
        """
        size = round_up(size)
        if size <= self.size:
            return
        self.join_prefault()
        with _typed_errors(self.path):
            while True:
                try:
                    _reserve(self._fd, self.size, size - self.size, self.path)
                    break
                except CapacityError:
                    if self.make_room is None or not self.make_room():
                        raise
            self._page_lock.release()
            try:
                self._map(size)
            except OSError:
                os.ftruncate(self._fd, self.size)
                raise

    def refresh(self) -> None:
        """Map what another process appended to the file."""
        size = os.fstat(self._fd).st_size
        if size > self.size:
            self.join_prefault()
            self._page_lock.release()
            self._map(size)

    def view(self, begin: int, end: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """Bytes ``begin:end`` as a contiguous tensor; no copy. ``begin`` must be aligned to the dtype's size.

        Its storage begins where it does. A DTensor around a tensor with a storage offset looks to torch as if it
        had memory of its own, which it then tries to pickle.
        """
        import torch

        with torch.inference_mode(False):  # as `tensor`
            if begin == end:
                return torch.empty(tuple(shape), dtype=dtype, device="cpu")
            piece = torch.frombuffer(self._mmap, dtype=torch.uint8, count=end - begin, offset=begin)
            return piece.view(dtype).view(tuple(shape))

    def prefault(self, begin: int = 0, end: int | None = None) -> None:
        """Fault pages in, off the GIL, so that no later copy pays for it. Content is not changed."""
        end = self.size if end is None else min(end, self.size)
        address = self.address
        for at in range(begin, end, _POPULATE_SLICE):
            if self._is_wanted and works_on_devices():
                return  # several threads fault the rest in, as they copy what comes from the device
            length = min(_POPULATE_SLICE, end - at)
            if _libc.madvise(address + at, length, _MADV_POPULATE_WRITE) != 0:
                # Linux before 5.14 has no populate: pages are then faulted in by the first copy.
                _log.debug("cannot prefault %s: %s", self.path, os.strerror(ctypes.get_errno()))
                return

    def prefault_in_background(self) -> None:
        """Start :meth:`prefault` on a daemon thread, and then page-lock the mapping where devices are copied from.
        Where there can be no thread, the first copy faults pages in."""
        self._begin(self.prefault, self._lock_pages)

    def lock_in_background(self) -> None:
        """Page-lock what is not, on a daemon thread: the next copies from a device are then direct ones."""
        if self._page_lock.is_due:
            self.join_prefault()
            self._begin(self._lock_pages)

    def _begin(self, *work: Callable[[], object]) -> None:
        def run() -> None:
            for each in work:
                each()

        thread = threading.Thread(target=run, name="flashpoint-prefault", daemon=True)
        self._is_wanted = False
        with contextlib.suppress(RuntimeError):
            thread.start()
            self._prefault = thread

    def _lock_pages(self) -> None:
        while not self._is_wanted and self._page_lock.extend():
            pass

    @property
    def is_page_locked(self) -> bool:
        """Whether devices can copy into all of it directly."""
        return self._page_lock.is_whole

    def join_prefault(self) -> None:
        """Wait for a background prefault; it is bounded by the arena's size. Page-locking ends with the slice at hand,
        and where devices are copied from, so does the other: a copy need not wait for the rest."""
        if self._prefault is not None:
            self._is_wanted = True
            self._prefault.join()
            self._prefault = None

    def close(self) -> None:
        """Give the mapping back; views that still exist keep their pages mapped until they die."""
        self.join_prefault()
        self._page_lock.release()
        self.views = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._tensor = None
        self.buffer.release()
        del self._mmap

    def free_pages(self) -> None:
        """Give the memory of an arena without a name back, also where forked children of this process map it: those of
        a data loader do, without ever looking at it, for as long as they live. Where others have opened the file, who
        may be reading it, nothing happens: a page that goes under a reader is a SIGBUS where there is no room left.
        """
        self.join_prefault()
        self._page_lock.release()
        with contextlib.suppress(OSError):
            if os.fstat(self._fd).st_nlink:
                return
            # A lease is granted only if nobody else has opened the file. A forked child has not: it shares ours.
            fcntl.fcntl(self._fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(self._fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
            if _libc.fallocate(self._fd, _KEEP_SIZE_PUNCH_HOLE, 0, self.size) != 0:
                _log.debug("cannot free the pages of %s: %s", self.path, os.strerror(ctypes.get_errno()))

    def unlink(self) -> None:
        """Remove the arena's own name. Slow for large files (pages are freed): never on the save path."""
        self.path.unlink(missing_ok=True)

    def __repr__(self) -> str:
        return f"Arena({str(self.path)!r}, size={self.size})"


@contextlib.contextmanager
def _typed_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        hint = "the next save is not affected; look at the limits of this process (ulimit -n, ulimit -v)"
        raise SaveError(f"cannot make an arena: {error.strerror}", path=path, hint=hint) from error


def _reserve(fd: int, begin: int, length: int, path: Path) -> None:
    """Allocate file pages now: a store to an unreserved tmpfs page of a full filesystem would be SIGBUS. Where they are
    memory, there must be as much: the kernel does not refuse beyond the limit of a container, it kills."""
    if is_memory(fd) and (left := free_memory()) < length:
        hint = "free memory, enlarge the container, save less, or use fewer copies"
        raise _no_room(length, left, path, f"{hint}; the next save is tried as usual")
    try:
        os.posix_fallocate(fd, begin, length)
    except OSError as error:
        if begin:  # a partial extension must not leave a file larger than its mapping is known to be
            os.ftruncate(fd, begin)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM):
            raise
        stats = os.statvfs(path.parent)
        hint = "enlarge the tmpfs (mount -o remount,size=...), save less, or use fewer copies"
        raise _no_room(length, stats.f_bavail * stats.f_frsize, path, hint) from error


def _no_room(length: int, available: int, path: Path, hint: str) -> CapacityError:
    text = f"cannot reserve {length} bytes for a checkpoint arena"
    return CapacityError(text, needed_bytes=length, available_bytes=available, path=path, hint=hint)
