"""A durable store in a directory of a filesystem: local, NFS, parallel.

Owns the files' atomic and durable replacement there, and the lock. Its calls cannot be bounded in time: the kernel
does not return from a filesystem that hangs.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ml_flashpoint.format.at_exit import close_in_children
from ml_flashpoint.format.errors import (
    CapacityError,
    DamagedError,
    JobInUseError,
    LoadError,
    ObjectNotFoundError,
    SaveError,
)
from ml_flashpoint.format.manifest import sync_directory
from ml_flashpoint.format.private_folders import check_unplanted
from ml_flashpoint.persist.store import DurableStore, as_octets, split_name

if TYPE_CHECKING:
    from typing_extensions import Buffer

_log = logging.getLogger(__name__)

_BUFFER_BYTES: Final = 2**20
_POLL_S: Final = 0.05
_NO_LOCKS: Final = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


class DirectoryStore(DurableStore):
    """Files below a directory, which is made when the first one is written. Thread-safe."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._root = Path(path).absolute()

    def path_of(self, name: str) -> str:
        """Returns the absolute path."""
        return str(self._root.joinpath(*split_name(name, allow_root=True)))

    def write(self, name: str, chunks: Iterable[Buffer]) -> int:
        """See `DurableStore.write`: a temporary file, fsync, rename, fsync of the folder."""
        target = self._path(name)
        temporary = target.with_name(f".{secrets.token_hex(8)}.tmp")
        written = 0
        with _writing(target):
            _make_directory(target.parent)
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                with open(os.open(temporary, flags, 0o644), "wb", buffering=_BUFFER_BYTES) as file:
                    for chunk in chunks:
                        written += file.write(as_octets(chunk))
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, target)
            except BaseException:
                with contextlib.suppress(OSError):
                    temporary.unlink(missing_ok=True)
                raise
            sync_directory(target.parent)
        return written

    def size(self, name: str) -> int:
        """See `DurableStore.size`."""
        with self._opened(name) as (_, size):
            return size

    def read_into(self, name: str, begin: int, into: memoryview) -> None:
        """See `DurableStore.read_into`."""
        with self._opened(name) as (descriptor, size):
            octets = as_octets(into)
            done = 0
            while done < len(octets):
                count = os.preadv(descriptor, [octets[done:]], begin + done)
                if not count:
                    raise DamagedError(
                        f"the file ends at byte {size}, before byte {begin + len(octets)}", path=self.path_of(name)
                    )
                done += count

    def list(self, folder: str = "") -> list[str]:
        """See `DurableStore.list`."""
        path = self._path(folder, allow_root=True)
        if path != self._root and path.is_symlink():
            raise DamagedError("this is a symbolic link", path=path)
        try:
            return sorted(os.listdir(path))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise LoadError(f"the folder cannot be read: {error.strerror}", path=path) from error

    def remove(self, name: str) -> None:
        """See `DurableStore.remove`."""
        path = self._path(name)
        with _writing(path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(path)
            sync_directory(path.parent)

    def remove_folder(self, folder: str) -> None:
        """See `DurableStore.remove_folder`. A symbolic link is removed, not followed."""
        path = self._path(folder)
        with _writing(path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if path.is_symlink():
                os.unlink(path)
            else:
                shutil.rmtree(path)
            sync_directory(path.parent)

    def lock(self, name: str, timeout_s: float) -> AbstractContextManager[object] | None:
        """See `DurableStore.lock`: a file lock, which works between nodes where the filesystem supports it there. In a
        forked child, it stays the parent's."""
        path = self._root.joinpath(*split_name(name))
        give_up = time.monotonic() + timeout_s
        with contextlib.ExitStack() as undo:
            with _writing(path):
                check_unplanted(path)
                _make_directory(path.parent)
                check_unplanted(path)  # nobody else can be there first any more
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
                # Whoever can read a file can lock it: nobody else can.
                file = undo.enter_context(open(os.open(path, flags, 0o600), "rb"))
                with contextlib.suppress(OSError):  # an earlier version has made it readable
                    os.fchmod(file.fileno(), 0o600)
            close_in_children(file)
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    undo.pop_all()
                    return file
                except BlockingIOError:
                    if time.monotonic() > give_up:
                        raise JobInUseError("another process has locked this", path=path) from None
                except OSError as error:
                    if error.errno not in _NO_LOCKS:
                        raise SaveError(f"the lock cannot be taken: {error.strerror}", path=path) from error
                    _log.warning("this filesystem has no locks, so two users at a time go unnoticed: %s", path)
                    return None
                time.sleep(_POLL_S)

    def _path(self, name: str, *, allow_root: bool = False) -> Path:
        """Where a name is. Raises `DamagedError`: by a symbolic link, which nobody here makes; it leads elsewhere."""
        path = self._root
        for segment in split_name(name, allow_root=allow_root):
            if path != self._root and path.is_symlink():
                raise DamagedError("this is a symbolic link", path=path)
            path = path / segment
        return path

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[tuple[int, int]]:
        """A descriptor of a regular file, and its size."""
        path = self._path(name)
        try:
            # Without O_NONBLOCK, a FIFO of this name would block the reader for good.
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode):
                    raise DamagedError("this is not a regular file", path=path)
                yield descriptor, status.st_size
            finally:
                os.close(descriptor)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ObjectNotFoundError("there is no such file", path=path) from error
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise DamagedError("this is a symbolic link", path=path) from error
            raise LoadError(f"the file cannot be read: {error.strerror}", path=path) from error


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Says what went wrong in the package's terms."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CapacityError("no room for the file", path=path) from error
        raise SaveError(f"cannot be written: {error.strerror}", path=path) from error


def _make_directory(directory: Path) -> None:
    """Makes a directory and those above it, durably."""
    if directory.is_dir():
        return
    _make_directory(directory.parent)
    with contextlib.suppress(FileExistsError):
        directory.mkdir()
    sync_directory(directory.parent)
