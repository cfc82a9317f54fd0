"""What a durable store is: files under one root, written whole or not at all.

Owns the interface and what a name may be. Implementations are beside it, in `directory_store` and
`fsspec_store`. What the files mean is up to others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final

from ml_flashpoint.format.checkpoint_id_types import validate_segment
from ml_flashpoint.format.errors import DamagedError, InvalidNameError

if TYPE_CHECKING:
    from typing_extensions import Buffer

PIECE_BYTES: Final = 16 * 2**20
"""Most bytes that a store whose reads return new bytes asks for at once."""


def split_name(name: str, *, allow_root: bool = False) -> tuple[str, ...]:
    """Returns the segments of a name, which cannot lead out of the store. With ``allow_root``, "" is that of the root.

    Raises:
        InvalidNameError: it is empty, absolute, or has a segment that `validate_segment` refuses.
    """
    if not isinstance(name, str):
        raise InvalidNameError(f"a name must be a string, not {type(name).__name__}")
    if name == "" and allow_root:
        return ()
    return tuple(map(validate_segment, name.split("/")))


def as_octets(buffer: Buffer) -> memoryview:
    """Returns a buffer as one dimension of bytes, without copying it.

    Raises:
        TypeError: it is not contiguous.
    """
    view = memoryview(buffer)
    # A view with a zero in its shape cannot be cast.
    return view.cast("B") if view.nbytes else memoryview(bytearray())


class DurableStore(ABC):
    """Files under one root. Names are relative, with slashes; folders come with the first file in them.

    Calls block. Reads may come from several threads at a time, and so may writes of different names.
    """

    @abstractmethod
    def path_of(self, name: str) -> str:
        """Returns what the user would call the file or folder of a name."""

    @abstractmethod
    def write(self, name: str, chunks: Iterable[Buffer]) -> int:
        """Writes a file, replacing one that is there; it is durable on return.

        Readers see all of the new content or none of it, and a writer that is killed leaves the file as it was.
        What it leaves behind besides has another name in the same folder, and is `remove_folder`'s.

        Args:
            name: of the file.
            chunks: contiguous buffers, written one after the other without being copied together.

        Returns:
            The number of bytes.

        Raises:
            CapacityError: there is no room.
            SaveError: it cannot be written for another reason.
        """

    @abstractmethod
    def size(self, name: str) -> int:
        """Returns the bytes of a file.

        Raises:
            ObjectNotFoundError: there is no such file.
            LoadError: the store cannot be read.
        """

    @abstractmethod
    def read_into(self, name: str, begin: int, into: memoryview) -> None:
        """Fills a writable view of bytes from a file, from offset `begin` on.

        Raises:
            ObjectNotFoundError: there is no such file.
            DamagedError: it ends before the view is full.
            LoadError: the store cannot be read.
        """

    @abstractmethod
    def list(self, folder: str = "") -> list[str]:
        """Returns the last segments of what is directly in a folder, sorted; none if it is not there.

        Raises:
            LoadError: the store cannot be read.
        """

    @abstractmethod
    def remove(self, name: str) -> None:
        """Removes a file, durably; one that is not there is no error.

        Raises:
            SaveError: it cannot be removed.
        """

    @abstractmethod
    def remove_folder(self, folder: str) -> None:
        """Removes a folder and all in it; one that is not there is no error. Not atomic.

        Raises:
            SaveError: it cannot be removed.
        """

    def read(self, name: str, *, limit: int) -> bytes:
        """Returns a small file, of ``limit`` bytes at most.

        Raises:
            ObjectNotFoundError: there is no such file.
            DamagedError: it is larger than `limit`, or was cut short meanwhile.
            LoadError: the store cannot be read.
        """
        size = self.size(name)
        if size > limit:
            raise DamagedError(f"the file has {size} bytes, more than {limit}", path=self.path_of(name))
        content = bytearray(size)
        self.read_into(name, 0, memoryview(content))
        return bytes(content)

    def lock(self, name: str, timeout_s: float) -> AbstractContextManager[object] | None:
        """Takes a lock that no other process can have, and that ends with this process at the latest.

        Args:
            name: of a file that stands for it.
            timeout_s: how long to wait for another owner to let go.

        Returns:
            What has the lock until it is left, or let go of; it need not be entered. None: this store knows no locks.

        Raises:
            JobInUseError: another one still has it.
        """
        return None
