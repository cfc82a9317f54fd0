"""Files: read and replaced whole, closed in forked children; and the package's errors for those of a filesystem."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from ml_flashpoint.format.errors import CapacityError, FlashpointError, SaveError, UnsafePathError

if TYPE_CHECKING:
    from typing_extensions import Buffer

_BUFFER_BYTES: Final = 2**20


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


def as_octets(buffer: Buffer) -> memoryview:
    """Return a contiguous buffer as one dimension of bytes, without copying it."""
    view = memoryview(buffer)
    # A view with a zero in its shape cannot be cast.
    return view.cast("B") if view.nbytes else memoryview(bytearray())


def open_regular(path: Path, flags: int) -> int:
    """Open a regular file, made with mode 0600 if need be. Waits for nothing that lies there instead.

    Raises:
        UnsafePathError: something else lies there.
        OSError: it cannot be opened.
    """
    try:
        # Without O_NONBLOCK, a FIFO of this name would block for good.
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise
        raise UnsafePathError(f"this is no file of ours: {error.strerror}", path=path, hint="remove it") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UnsafePathError("this is no regular file", path=path, hint="remove it")
    return descriptor


def read_file(path: Path, limit: int) -> bytes:
    """Return the content of a regular file, or its first ``limit`` bytes. Raises what `open_regular` raises."""
    with open(open_regular(path, os.O_RDONLY), "rb") as file:
        # Not simply the limit: Python makes room for as much as is asked for, which takes 4 ms.
        return file.read(min(os.fstat(file.fileno()).st_size + 1, limit))


def replace_file(target: Path, chunks: Iterable[Buffer], *, fsync: bool, mode: int = 0o600) -> int:
    """Write or replace a file from contiguous buffers: it has all of the new content or none. Return the bytes.

    A writer that is killed leaves at most a hidden ``.*.tmp`` file.

    Args:
        target: path of the file, in a folder that exists.
        chunks: its content.
        fsync: True to make the file and its name durable.
        mode: of the file.
    """
    temporary = target.with_name(f".{secrets.token_hex(8)}.tmp")
    written = 0
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with open(os.open(temporary, flags, mode), "wb", buffering=_BUFFER_BYTES) as file:
            for chunk in chunks:
                written += file.write(as_octets(chunk))
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
