"""Files under one root, written whole or not at all: what durable versions lie in.

`Files` is whatever fsspec knows: object stores, HDFS, SFTP. `Directory` is a directory of a filesystem: local, NFS,
parallel. fsspec's local filesystem has neither fsync, nor locks, nor reads into memory that is there already; and it
follows links. Calls block, and may hang: see `bounded`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ml_flashpoint.format.errors import (
    DamagedError,
    FlashpointError,
    InvalidArgumentError,
    JobInUseError,
    ObjectNotFoundError,
    SaveError,
    UnreadableError,
    UnsafePathError,
)
from ml_flashpoint.format.files import (
    as_octets,
    check_unplanted,
    close_in_children,
    open_regular,
    replace_file,
    sync_directory,
    text_of_system,
    writing,
)
from ml_flashpoint.format.names import validate_segment

if TYPE_CHECKING:
    from typing_extensions import Buffer

_Translated = Callable[[str, type[Exception]], AbstractContextManager[None]]
_log = logging.getLogger(__name__)

PIECE_BYTES: Final = 16 * 2**20
"""Most bytes that are asked for at once where a read returns new bytes."""
_POLL_S: Final = 0.05
_NO_LOCKS: Final = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
_PUBLISHED_WHEN_COMPLETE: Final = frozenset(
    ("abfs", "abfss", "adl", "az", "gcs", "gs", "hf", "oci", "ocilake", "oss", "s3", "s3a", "tos")
)
"""Protocols of object stores: a name appears there when its upload is complete, and renaming would be a copy."""


class Files:
    """Files below a URL, through fsspec. `Directory` is the same for a directory, with what fsspec lacks there.

    Names are relative, with slashes; a folder comes with the first file in it. Several threads may read, and write
    files of different names. Deadlines, retries and credentials are those of fsspec. Writing and removing raise a
    `SaveError` (`CapacityError` if there is no room), reading an `UnreadableError` for what may pass. A name that is
    empty or absolute, or has a segment that `validate_segment` refuses, is an `InvalidNameError`: no name leads out of
    the root. The first use raises an `InvalidArgumentError` if fsspec does not know this kind of URL, or lacks a
    package for it.
    """

    def __init__(self, url: str) -> None:
        self._url = url

    @cached_property
    def _filesystem(self) -> tuple[Any, str]:
        """The filesystem, and the path of the root in it."""
        try:
            from fsspec.core import url_to_fs

            filesystem, root = url_to_fs(self._url)
        except (ValueError, ImportError) as error:
            raise InvalidArgumentError(f"fsspec: {error}", argument="url", value=self._url) from error
        return filesystem, root.rstrip("/")

    @contextlib.contextmanager
    def _calling(self, translated: _Translated, name: str, *, root: bool = False) -> Iterator[tuple[Any, str]]:
        """Yield the filesystem and the path of a name in it, "" for the ``root``, with its errors translated."""
        filesystem, inner = self._filesystem
        path = inner if root and not name else f"{inner}/{_checked(name)}"
        with translated(self.path_of(name), Exception):
            yield filesystem, path

    def path_of(self, name: str) -> str:
        """Return the URL, or absolute path, of a file or folder; of the root for ""."""
        root = self._url.rstrip("/")
        return f"{root}/{_checked(name)}" if name else root

    def write(self, name: str, chunks: Iterable[Buffer]) -> int:
        """Write or replace a file from contiguous buffers; it is durable on return. Return the number of bytes.

        Readers see all of the new content or none. A writer that is killed leaves the file as it was, and may leave a
        hidden file beside it, which goes with the folder. On an object store, a list of buffers is one request, which
        replaces at once; other chunks are uploaded under the file's own name: choose one that nothing refers to yet.
        """
        with self._calling(writing, name) as (filesystem, path):
            protocols = [filesystem.protocol] if isinstance(filesystem.protocol, str) else filesystem.protocol
            uploaded = path
            if _PUBLISHED_WHEN_COMPLETE.isdisjoint(protocols):
                folder = path.rpartition("/")[0]
                filesystem.makedirs(folder, exist_ok=True)
                uploaded = f"{folder}/.{secrets.token_hex(8)}.tmp"
            elif isinstance(chunks, list):
                content = b"".join(chunks)
                filesystem.pipe_file(path, content)
                return len(content)
            try:
                written = _write_stream(filesystem, uploaded, chunks)
                if uploaded != path:
                    filesystem.mv(uploaded, path)
            except BaseException:
                with contextlib.suppress(Exception):
                    filesystem.rm_file(uploaded)
                raise
            return written

    def size(self, name: str) -> int:
        """Return the bytes of a file. Raise an `ObjectNotFoundError` if there is none."""
        with self._calling(reading, name) as (filesystem, path):
            filesystem.invalidate_cache()
            found = filesystem.info(path)
            if found.get("type") != "file":
                raise DamagedError("this is not a file", path=self.path_of(name))
            return int(found["size"])

    def read_into(self, name: str, begin: int, into: memoryview) -> None:
        """Fill a writable view from a file, from byte ``begin`` on. Raise an `ObjectNotFoundError` if there is no such
        file, a `DamagedError` if it ends before the view is full."""
        with self._calling(reading, name) as (filesystem, path):
            for done in range(0, len(into), PIECE_BYTES):
                piece = into[done : done + PIECE_BYTES]
                end = begin + done + len(piece)
                data = filesystem.cat_file(path, begin + done, end)
                if len(data) != len(piece):
                    raise DamagedError(f"the file ends before byte {end}", path=self.path_of(name))
                piece[:] = data

    def read(self, name: str, *, limit: int) -> bytes:
        """Return a small file. Raise a `DamagedError` if it has more than ``limit`` bytes."""
        size = self.size(name)
        if size > limit:
            raise DamagedError(f"the file has {size} bytes, more than {limit}", path=self.path_of(name))
        content = bytearray(size)
        self.read_into(name, 0, memoryview(content))
        return bytes(content)

    def list(self, folder: str = "") -> list[str]:
        """Return the last segments of what is directly in a folder, sorted; none if there is no such folder."""
        with contextlib.suppress(ObjectNotFoundError), self._calling(reading, folder, root=True) as (filesystem, path):
            filesystem.invalidate_cache()
            paths = {each.rstrip("/") for each in filesystem.ls(path, detail=False)}
            # Some object stores list a folder in itself.
            return sorted(each.rpartition("/")[2] for each in paths - {path})
        return []

    def remove(self, name: str) -> None:
        """Remove a file, durably, if it is there."""
        with self._calling(writing, name) as (filesystem, path), contextlib.suppress(FileNotFoundError):
            filesystem.rm_file(path)

    def remove_folder(self, folder: str) -> None:
        """Remove a folder and all in it, if it is there. Not atomic. A symbolic link is not followed."""
        with self._calling(writing, folder) as (filesystem, path), contextlib.suppress(FileNotFoundError):
            filesystem.invalidate_cache()
            filesystem.rm(path, recursive=True)

    def lock(self, name: str, timeout_s: float) -> AbstractContextManager[object] | None:
        """Take a lock on a file that no other process can have, and that ends with this process at the latest. Return
        it, held until it is left, or None where there are no locks, as here. Raise a `JobInUseError` if another process
        has it still after ``timeout_s`` seconds."""
        return None


class Directory(Files):
    """Files below a directory, which is made with the first one. Thread-safe. Symbolic links in it are damage."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._root = Path(path).absolute()
        super().__init__(str(self._root))

    def write(self, name: str, chunks: Iterable[Buffer]) -> int:
        """Write a temporary file, fsync, rename, and fsync the folder; see `Files.write`."""
        target = self._path(name)
        with writing(target):
            _make_directory(target.parent)
            return replace_file(target, chunks, fsync=True, mode=0o644)

    def size(self, name: str) -> int:
        """See `Files.size`."""
        with self._opened(name) as descriptor:
            return os.fstat(descriptor).st_size

    def read_into(self, name: str, begin: int, into: memoryview) -> None:
        """See `Files.read_into`."""
        octets, done = as_octets(into), 0
        with self._opened(name) as descriptor:
            while done < len(octets):
                count = os.preadv(descriptor, [octets[done:]], begin + done)
                if not count:
                    raise DamagedError(f"the file ends before byte {begin + len(octets)}", path=self.path_of(name))
                done += count

    def list(self, folder: str = "") -> list[str]:
        """See `Files.list`."""
        path = self._path(folder) if folder else self._root
        if folder and path.is_symlink():
            raise DamagedError("this is a symbolic link", path=path)
        with contextlib.suppress(ObjectNotFoundError), reading(path):
            return sorted(os.listdir(path))
        return []

    def remove(self, name: str) -> None:
        """See `Files.remove`."""
        self._remove(self._path(name), os.unlink)

    def remove_folder(self, folder: str) -> None:
        """See `Files.remove_folder`."""
        path = self._path(folder)
        self._remove(path, os.unlink if path.is_symlink() else shutil.rmtree)

    def _remove(self, path: Path, remove: Callable[[Path], object]) -> None:
        with writing(path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            remove(path)
            sync_directory(path.parent)

    def lock(self, name: str, timeout_s: float) -> AbstractContextManager[object] | None:
        """Take a file lock, which works between nodes where the filesystem has such; see `Files.lock`. In a forked
        child, the lock stays the parent's."""
        path = Path(self.path_of(name))
        give_up = time.monotonic() + timeout_s
        with contextlib.ExitStack() as undo:
            with writing(path):
                check_unplanted(path)
                _make_directory(path.parent)
                check_unplanted(path)  # nobody else can be there first any more
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
                # Whoever can read a file can lock it: nobody else can.
                file = undo.enter_context(open(os.open(path, flags, 0o600), "rb"))
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

    def _path(self, name: str) -> Path:
        """Return the path of a name. Raise a `DamagedError` if a link leads out of here on the way."""
        *folders, last = _checked(name).split("/")
        path = self._root
        for segment in folders:
            path = path / segment
            if path.is_symlink():
                raise DamagedError("this is a symbolic link", path=path)
        return path / last

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        path = self._path(name)
        with reading(path):
            descriptor = open_regular(path, os.O_RDONLY)
            try:
                yield descriptor
            finally:
                os.close(descriptor)


def _checked(name: str) -> str:
    for segment in name.split("/"):
        validate_segment(segment)
    return name


@contextlib.contextmanager
def reading(path: object, errors: type[Exception] = OSError) -> Iterator[None]:
    """Raise an `ObjectNotFoundError`, `DamagedError` or `UnreadableError` for these errors of a filesystem."""
    try:
        yield
    except UnsafePathError as error:
        raise DamagedError(error.message, path=str(path)) from error
    except FlashpointError:
        raise
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ObjectNotFoundError("there is no such file", path=str(path)) from error
    except errors as error:
        raise UnreadableError(f"cannot be read: {text_of_system(error)}", path=str(path)) from error


def _make_directory(directory: Path) -> None:
    """Make a directory and those above it, durably."""
    if directory.is_dir():
        return
    _make_directory(directory.parent)
    with contextlib.suppress(FileExistsError):
        directory.mkdir()
    sync_directory(directory.parent)


def _write_stream(filesystem: Any, path: str, chunks: Iterable[Buffer]) -> int:
    written = 0
    # Leaving it on an error completes the upload, of half a file: the caller removes that.
    with filesystem.open(path, "wb") as file:
        for chunk in chunks:
            view = as_octets(chunk)
            if len(view):
                file.write(view)
            written += len(view)
        file.flush()
        with contextlib.suppress(AttributeError, OSError):
            os.fsync(file.fileno())
    return written
