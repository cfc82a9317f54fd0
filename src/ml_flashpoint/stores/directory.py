"""Files in a directory of a filesystem: local, NFS, parallel.

Owns their atomic and durable replacement there, and the lock. fsspec's local filesystem has neither fsync, nor locks,
nor reads into memory that is there already; and it follows links. Calls cannot be bounded in time: the kernel does not
return from a filesystem that hangs.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ml_flashpoint.format.errors import DamagedError, JobInUseError, ObjectNotFoundError, SaveError
from ml_flashpoint.format.files import as_octets, close_in_children, open_regular, replace_file, sync_directory, writing
from ml_flashpoint.format.private_folders import check_unplanted
from ml_flashpoint.stores.files import Files, reading, split_name

if TYPE_CHECKING:
    from typing_extensions import Buffer

_log = logging.getLogger(__name__)

_POLL_S: Final = 0.05
_NO_LOCKS: Final = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


class Directory(Files):
    """Files below a directory, which is made with the first one. Thread-safe."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._root = Path(path).absolute()

    def path_of(self, name: str) -> str:
        """Return the absolute path."""
        return str(self._root.joinpath(*split_name(name, allow_root=True)))

    def write(self, name: str, chunks: Iterable[Buffer]) -> int:
        """Write a temporary file, fsync, rename, and fsync the folder; see `Files.write`."""
        target = self._path(name)
        with writing(target):
            _make_directory(target.parent)
            return replace_file(target, chunks, fsync=True, mode=0o644)

    def size(self, name: str) -> int:
        """See `Files.size`."""
        with self._opened(name) as (_, size):
            return size

    def read_into(self, name: str, begin: int, into: memoryview) -> None:
        """See `Files.read_into`."""
        with self._opened(name) as (descriptor, size):
            if not read_fully(descriptor, into, begin):
                end = begin + into.nbytes
                raise DamagedError(f"the file ends at byte {size}, before byte {end}", path=self.path_of(name))

    def list(self, folder: str = "") -> list[str]:
        """See `Files.list`."""
        path = self._path(folder, allow_root=True)
        if path != self._root and path.is_symlink():
            raise DamagedError("this is a symbolic link", path=path)
        try:
            with reading(path):
                return sorted(os.listdir(path))
        except ObjectNotFoundError:
            return []

    def remove(self, name: str) -> None:
        """See `Files.remove`."""
        path = self._path(name)
        with writing(path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(path)
            sync_directory(path.parent)

    def remove_folder(self, folder: str) -> None:
        """See `Files.remove_folder`. A symbolic link is removed, not followed."""
        path = self._path(folder)
        with writing(path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if path.is_symlink():
                os.unlink(path)
            else:
                shutil.rmtree(path)
            sync_directory(path.parent)

    def lock(self, name: str, timeout_s: float) -> AbstractContextManager[object] | None:
        """Take a file lock, which works between nodes where the filesystem has such; see `Files.lock`. In a forked
        child, the lock stays the parent's."""
        path = self._root.joinpath(*split_name(name))
        give_up = time.monotonic() + timeout_s
        with contextlib.ExitStack() as undo:
            with writing(path):
                check_unplanted(path)
                _make_directory(path.parent)
                check_unplanted(path)  # nobody else can be there first any more
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
                # Whoever can read a file can lock it: nobody else can.
                file = undo.enter_context(open(os.open(path, flags, 0o600), "rb"))
                with contextlib.suppress(OSError):  # an earlier release has made it readable
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
        """Return the path of a name. Raise a `DamagedError` on a symbolic link: it leads out of here."""
        path = self._root
        for segment in split_name(name, allow_root=allow_root):
            if path != self._root and path.is_symlink():
                raise DamagedError("this is a symbolic link", path=path)
            path = path / segment
        return path

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[tuple[int, int]]:
        """Yield a descriptor of a regular file, and its size."""
        path = self._path(name)
        with reading(path):
            descriptor = open_regular(path, os.O_RDONLY)
            try:
                yield descriptor, os.fstat(descriptor).st_size
            finally:
                os.close(descriptor)


def read_fully(descriptor: int, into: memoryview, begin: int) -> bool:
    """Fill a buffer from byte ``begin`` of an open file on; return False if the file ends before."""
    octets = as_octets(into)
    done = 0
    while done < len(octets):
        count = os.preadv(descriptor, [octets[done:]], begin + done)
        if not count:
            return False
        done += count
    return True


def _make_directory(directory: Path) -> None:
    """Make a directory and those above it, durably."""
    if directory.is_dir():
        return
    _make_directory(directory.parent)
    with contextlib.suppress(FileExistsError):
        directory.mkdir()
    sync_directory(directory.parent)
