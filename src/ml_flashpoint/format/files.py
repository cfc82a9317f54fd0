"""Files: read and replaced whole, in folders that only this job's user may write to, and closed in forked children.

A base container often lies where everybody may write (``/dev/shm``, ``/tmp``), so whoever is there first could have
planted it, or a symbolic link in its place. Nothing of that kind is followed:

* The folder itself belongs to this user, and nobody else may write to it.
* On the way there, every folder and symbolic link belongs to this user or to root. A folder that everybody may write to
  is sticky, so that nobody can replace its content.

Root is not kept out, and inside a user namespace neither are owners whom it cannot name.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import secrets
import stat
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from ml_flashpoint.format.errors import (
    CapacityError,
    FlashpointError,
    SaveError,
    UnreadableError,
    UnsafePathError,
    is_shortage,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

_BUFFER_BYTES: Final = 2**20
_MAX_LINKS: Final = 40
_TRIES: Final = 8
_MODE: Final = 0o700
_REFUSALS: Final = (errno.ELOOP, errno.ENOTDIR, errno.EACCES, errno.EPERM)
"""Errors of the system where something else than a folder lies, or somebody else decides."""


class _Closable(Protocol):
    def close(self) -> None: ...


_opened: weakref.WeakSet[_Closable] = weakref.WeakSet()


def close_in_children(opened: _Closable) -> None:
    """Close a socket, a pipe or a locked file in forked children, which would keep it in use after this process."""
    _opened.add(opened)


def _close_inherited() -> None:
    for opened in list(_opened):
        with contextlib.suppress(OSError):
            opened.close()
    _opened.clear()


os.register_at_fork(after_in_child=_close_inherited)


# ---- content --------------------------------------------------------------------------------------------------------


def as_octets(buffer: Buffer) -> memoryview:
    """Return a contiguous buffer as one dimension of bytes, without copying it."""
    view = memoryview(buffer)
    # A view with a zero in its shape cannot be cast.
    return view.cast("B") if view.nbytes else memoryview(bytearray())


def open_regular(path: Path, flags: int) -> int:
    """Open a regular file, made with mode 0600 if need be. Raise an `UnsafePathError` if something else lies there,
    without waiting for it, and an `OSError` if it cannot be opened."""
    try:
        # Without O_NONBLOCK, a FIFO of this name would block for good.
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise
        raise UnsafePathError(
            f"this is not a file of this package: {error.strerror}", path=path, hint="remove it"
        ) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UnsafePathError("this is not a regular file", path=path, hint="remove it")
    return descriptor


def read_file(path: Path, limit: int) -> bytes:
    """Return the content of a regular file, or its first ``limit`` bytes. Raises what `open_regular` raises."""
    with open(open_regular(path, os.O_RDONLY), "rb") as file:
        # Not simply the limit: Python makes room for as much as is asked for, which takes 4 ms.
        return file.read(min(os.fstat(file.fileno()).st_size + 1, limit))


def replace_file(target: Path, chunks: Iterable[Buffer], *, fsync: bool, mode: int = 0o600) -> int:
    """Write or replace a file from contiguous buffers: it has all of the new content or none. Return the bytes.

    The folder exists. A writer that is killed leaves at most a hidden ``.*.tmp`` file. With ``fsync``, the file and its
    name are durable.
    """
    temporary = target.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with open(os.open(temporary, flags, mode), "wb", buffering=_BUFFER_BYTES) as file:
            written = sum(map(file.write, chunks))
            file.flush()
            if fsync:
                os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    if fsync:
        sync_directory(target.parent)
    return written


def sync_directory(directory: Path) -> None:
    """Have what was created, renamed or removed in a directory survive a loss of power."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # some network filesystems do not know this
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def writing(path: object, errors: type[Exception] = OSError) -> Iterator[None]:
    """Raise a `CapacityError` or `SaveError` for these errors of a filesystem."""
    try:
        yield
    except FlashpointError:
        raise
    except errors as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CapacityError("no room for the file", path=str(path)) from error
        raise SaveError(f"cannot be written: {text_of_system(error)}", path=str(path)) from error


def text_of_system(error: Exception) -> str:
    """Return the text of an error of the system, or of a filesystem's client."""
    text = error.strerror if isinstance(error, OSError) else None
    return text or f"{type(error).__name__}: {error}"


# ---- files and folders of this user ---------------------------------------------------------------------------------


def check_folder(folder: Path, *, mend: bool = False) -> None:
    """Check that a folder is this user's, and that nobody else may write to it; with ``mend``, give it mode 0700 first.
    Raise an `UnsafePathError` if it is not, or is a link or no folder, and an `OSError` if it cannot be opened."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        raise UnsafePathError(
            f"this cannot be used as a folder: {error.strerror}", path=folder, hint="remove it, or take another folder"
        ) from error
    _own(descriptor, folder)
    try:
        mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
        if mend and mode & 0o077:
            os.fchmod(descriptor, _MODE)
    finally:
        os.close(descriptor)
    if not mend and mode & 0o022:
        raise UnsafePathError(
            f"others may write to this folder (mode {mode:04o})",
            path=folder,
            hint="look at its content, then chmod 700 it, or take another folder",
        )


def open_own(path: Path, flags: int) -> int:
    """Open a regular file of this user; see `open_regular`. One of somebody else is an `UnsafePathError`, too."""
    return _own(open_regular(path, flags), path)


def _own(descriptor: int, path: Path) -> int:
    owner = os.fstat(descriptor).st_uid
    if owner != os.geteuid():
        os.close(descriptor)
        raise UnsafePathError(
            f"it belongs to user {owner}, and this process runs as {os.geteuid()}",
            path=path,
            hint="take another folder, or have it removed, or chown it to this user if you know who made it",
        )
    return descriptor


def is_at(descriptor: int, path: Path) -> bool:
    """Return True if an open file is still the one of this name."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def make_tree(base: Path, folder: Path) -> None:
    """Make a base container and a folder below it, and the folders on the way, each with mode 0700; check all of them.

    Raise an `UnsafePathError` if others could have planted one, or may write to one, a `FlashpointError` if the base
    container cannot be made, an `OSError` for another folder.
    """
    below = [folder, *folder.parents][: len(folder.relative_to(base).parts)]
    for tries_left in reversed(range(_TRIES)):
        try:
            _make_base(base)
            for each in reversed(below):
                make_private(each)
            return
        except FileNotFoundError:  # who used it last may be removing it
            if not tries_left:
                raise


def _make_base(base: Path) -> None:
    try:
        if not os.path.isdir(base):  # one look along the way is enough
            real = check_way(base.parent) / base.name
            for folder in (*reversed(real.parents), real):
                if not os.path.lexists(folder):
                    with contextlib.suppress(FileExistsError):
                        folder.mkdir(mode=_MODE)
        check_folder(check_way(base))
    except FileNotFoundError:
        raise
    except OSError as error:
        kind = UnreadableError if is_shortage(error) else FlashpointError
        raise kind(
            f"the base container cannot be made: {error.strerror}",
            path=base,
            hint="take a folder that this user may write to, such as /dev/shm/<user>/<job>",
        ) from error


def make_private(folder: Path) -> None:
    """Make a folder with mode 0700 in a private one, or give it that mode. Raises what `check_folder` raises."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=_MODE)
    check_folder(folder, mend=True)


def check_way(folder: Path) -> Path:
    """Return the real path of a folder that need not exist. Raise an `UnsafePathError` if others could change that."""
    return _walk(folder, functools.partial(_check_step, trusted={0, os.geteuid(), _overflow_uid()}))


def check_unplanted(folder: Path) -> Path:
    """Return the real path of durable storage that need not exist. Raise an `UnsafePathError` if somebody may have
    planted a step of it.

    Storage is often in a folder of somebody else's, who is trusted then. A step in a folder that everybody may write to
    must belong to this user, to root, or to the owner of that folder: the kernel's rule for links in ``/tmp``.
    """
    return _walk(folder, _check_unplanted)


def _walk(folder: Path, check: Callable[[Path, os.stat_result], None]) -> Path:
    left = list(reversed(Path(os.path.abspath(folder)).parts[1:]))
    reached, links = Path("/"), 0
    while left:
        name = left.pop()
        path = reached.parent if name == ".." else reached / name
        try:
            status = path.lstat()
        except FileNotFoundError:
            return path.joinpath(*reversed(left))
        except OSError as error:
            kind = UnreadableError if is_shortage(error) else UnsafePathError
            raise kind(f"it cannot be looked at: {error.strerror}", path=path) from error
        check(path, status)
        if not stat.S_ISLNK(status.st_mode):
            reached = path
            continue
        links += 1
        if links > _MAX_LINKS:
            raise UnsafePathError("too many symbolic links", path=folder)
        target = Path(os.readlink(path))
        reached = Path("/") if target.is_absolute() else reached
        left += reversed([part for part in target.parts if part != "/"])
    return reached


def _check_step(path: Path, status: os.stat_result, *, trusted: set[int]) -> None:
    kind = "symbolic link" if stat.S_ISLNK(status.st_mode) else "folder"
    if status.st_uid not in trusted:
        raise UnsafePathError(
            f"this {kind} belongs to user {status.st_uid}, who could lead this job (user {os.geteuid()}) elsewhere",
            path=path,
            hint="take a base container in a folder of your own, such as /dev/shm/<user>/<job>",
        )
    if kind == "folder" and status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        raise UnsafePathError(
            f"everybody may replace what is in this folder (mode {stat.S_IMODE(status.st_mode):04o})",
            path=path,
            hint="chmod o-w it, or chmod +t it, or take a base container elsewhere",
        )


def _check_unplanted(path: Path, status: os.stat_result) -> None:
    around = os.stat(path.parent)
    if around.st_mode & stat.S_IWOTH and status.st_uid not in (0, os.geteuid(), _overflow_uid(), around.st_uid):
        raise UnsafePathError(
            f"everybody may write to the parent folder, and user {status.st_uid} has put it there",
            path=path,
            hint="take another name, or a folder in one of your own",
        )


def _overflow_uid() -> int:
    """Return the owner of files of users that this user namespace has no number for; root, where it has all numbers."""
    try:
        is_mapped = Path("/proc/self/uid_map").read_text().split() != ["0", "0", "4294967295"]
        return int(Path("/proc/sys/kernel/overflowuid").read_text()) if is_mapped else 0
    except (OSError, ValueError):
        return 0
