"""Files under one root, written whole or not at all: the interface of what durable versions lie in.

Owns what a name may be, and the package's errors for those of a filesystem. Implementations are `directory` and `url`.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final, cast

from ml_flashpoint.format.checkpoint_id_types import validate_segment
from ml_flashpoint.format.errors import (
    DamagedError,
    FlashpointError,
    InvalidNameError,
    ObjectNotFoundError,
    UnreadableError,
    UnsafePathError,
)
from ml_flashpoint.format.files import text_of_system

if TYPE_CHECKING:
    from typing_extensions import Buffer

PIECE_BYTES: Final = 16 * 2**20
"""Most bytes that are asked for at once where a read returns new bytes."""


def split_name(name: str, *, allow_root: bool = False) -> tuple[str, ...]:
    """Return the segments of a name, which cannot lead out of the root. With ``allow_root``, "" names the root.

    Raises:
        InvalidNameError: the name is empty, absolute, or has a segment that `validate_segment` refuses.
    """
    if not isinstance(name, str):
        raise InvalidNameError(f"a name must be a string, not {type(name).__name__}")
    if name == "" and allow_root:
        return ()
    return tuple(map(validate_segment, name.split("/")))


class Files(ABC):
    """Files under one root. Names are relative, with slashes; a folder comes with the first file in it.

    Calls block. Several threads may read, and write files of different names. Writing and removing raise a `SaveError`
    (`CapacityError` if there is no room), reading an `UnreadableError` for what may pass.
    """

    @abstractmethod
    def path_of(self, name: str) -> str:
        """Return the path or URL of a file or folder."""

    @abstractmethod
    def write(self, name: str, chunks: Iterable[Buffer]) -> int:
        """Write or replace a file from contiguous buffers; it is durable on return. Return the number of bytes.

        Readers see all of the new content or none. A writer that is killed leaves the file as it was, and may leave a
        hidden file beside it, which goes with the folder.
        """

    @abstractmethod
    def size(self, name: str) -> int:
        """Return the bytes of a file. Raise an `ObjectNotFoundError` if there is none."""

    @abstractmethod
    def read_into(self, name: str, begin: int, into: memoryview) -> None:
        """Fill a writable view of bytes from a file, from byte ``begin`` on.

        Raises:
            ObjectNotFoundError: there is no such file.
            DamagedError: the file ends before the view is full.
        """

    @abstractmethod
    def list(self, folder: str = "") -> list[str]:
        """Return the last segments of what is directly in a folder, sorted; none if there is no such folder."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file, durably, if it is there."""

    @abstractmethod
    def remove_folder(self, folder: str) -> None:
        """Remove a folder and all in it, if it is there. Not atomic."""

    def read(self, name: str, *, limit: int) -> bytes:
        """Return a small file. Raise a `DamagedError` if it has more than ``limit`` bytes."""
        size = self.size(name)
        if size > limit:
            raise DamagedError(f"the file has {size} bytes, more than {limit}", path=self.path_of(name))
        content = bytearray(size)
        self.read_into(name, 0, memoryview(content))
        return bytes(content)

    def lock(self, name: str, timeout_s: float) -> AbstractContextManager[object] | None:
        """Take a lock on a file that no other process can have, and that ends with this process at the latest.

        Returns:
            The lock, held until it is left; it need not be entered. None: there are no locks here.

        Raises:
            JobInUseError: another process has it still after ``timeout_s`` seconds.
        """
        return None


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


def watched_files(files: Files, moved: Callable[[], None]) -> Files:
    """Return the same files, with ``moved`` called after each call and for each piece that is written. It may raise."""
    return cast("Files", _Watched(files, moved))


class _Watched:
    def __init__(self, files: Files, moved: Callable[[], None]) -> None:
        self._files, self._moved = files, moved

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._files, name)

        def call(*args: Any, **options: Any) -> Any:
            result = method(*args, **options)
            self._moved()
            return result

        return call

    def write(self, name: str, chunks: Iterable[Buffer]) -> int:
        def told() -> Iterator[Buffer]:
            for chunk in chunks:
                yield chunk
                self._moved()

        written = self._files.write(name, told())
        self._moved()
        return written
