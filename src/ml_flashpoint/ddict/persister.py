"""The places that a dictionary can persist its checkpoints in. Which checkpoints, and how, is `persistence`'s."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ml_flashpoint.ddict.errors import DDictPersistError
from ml_flashpoint.format.arguments import checked_integer
from ml_flashpoint.format.errors import InvalidArgumentError, InvalidNameError
from ml_flashpoint.format.files import check_unplanted
from ml_flashpoint.format.names import MAX_WORLD_SIZE, validate_segment

if TYPE_CHECKING:
    from ml_flashpoint.stores.files import Files

_UNNAMED: Final = "unnamed"
_DFUSE: Final = ("fuse.daos", "fuse.dfuse")  # types of mounts that dfuse makes


class CheckpointPersister(ABC):
    """A place for the persisted checkpoints of one dictionary.

    To use a storage of your own, derive a class from this one, return the storage from `open_store`, and give the class
    to ``DDict(persister_class=...)``. Each manager's process makes one, and the process that makes the dictionary.
    Constructing one must be cheap and touch no storage.

    Args:
        persist_path: the path that the user gave to the dictionary. Its meaning is the class's choice.
        name: name of the dictionary: one segment of a path, not beginning with a dot. "": ``unnamed``.
        managers: number of its managers.

    Attributes:
        home: name of the folder of this dictionary.

    Raises:
        InvalidArgumentError: an argument cannot be used.
    """

    def __init__(self, persist_path: str = "", *, name: str = "", managers: int = 1) -> None:
        self.persist_path, self.name = persist_path, name
        self.managers = checked_integer("managers", managers, 1, MAX_WORLD_SIZE)
        try:
            self.home = validate_segment(name or _UNNAMED)
        except InvalidNameError as error:
            raise InvalidArgumentError(f"{error.message}, to be persisted", argument="name", value=name) from error
        if name.startswith("."):
            raise InvalidArgumentError("a name must not begin with a dot", argument="name", value=name)

    @classmethod
    def resolve_path(cls, persist_path: str) -> str:
        """Return the path that all managers are given; called once, in the process that makes the dictionary."""
        return persist_path

    @abstractmethod
    def open_store(self) -> Files:
        """Return the files of this dictionary, and of no other; called when they are first needed."""


class NullCheckpointPersister(CheckpointPersister):
    """No place: nothing is persisted. Never made."""


NULLCheckpointPersister = NullCheckpointPersister
"""Dragon's name of the same."""


class PosixCheckpointPersister(CheckpointPersister):
    """A directory, which all nodes must see under the same path; made when needed. "": the current one."""

    @classmethod
    def resolve_path(cls, persist_path: str) -> str:
        """Return the absolute path."""
        return os.path.abspath(os.path.expanduser(persist_path))

    def open_store(self) -> Files:
        """Return the directory. Raise an `UnsafePathError` if somebody else has planted something on the way."""
        from ml_flashpoint.stores.files import Directory

        path = Path(self.resolve_path(self.persist_path), self.home)
        check_unplanted(path)
        return Directory(path)


class FsspecCheckpointPersister(CheckpointPersister):
    """Any URL that fsspec can write to, such as ``s3://bucket/folder``, or a path of this machine.

    There are no locks behind a URL: two live dictionaries of one name and URL are not noticed. Their files do not mix,
    but what comes after them sees the checkpoints of only one of them.
    """

    @classmethod
    def resolve_path(cls, persist_path: str) -> str:
        """Return the URL, or the absolute path."""
        from ml_flashpoint.stores.location import is_url

        return persist_path if is_url(persist_path) else os.path.abspath(persist_path)

    def open_store(self) -> Files:
        """Return the URL. Raise an `UnsafePathError` if it is a path, and somebody else has planted something there."""
        from ml_flashpoint.stores.files import Files

        path = f"{self.resolve_path(self.persist_path).rstrip('/')}/{self.home}"
        if os.path.isabs(path):
            check_unplanted(Path(path))
        return Files(path)


class DAOSCheckpointPersister(PosixCheckpointPersister):
    """A directory of a DAOS container of type ``POSIX`` that is mounted with dfuse, on all nodes under the same path.
    Raises `DDictPersistError` for another directory."""

    def __init__(self, persist_path: str = "", *, name: str = "", managers: int = 1) -> None:
        import psutil

        super().__init__(persist_path, name=name, managers=managers)
        path = os.path.realpath(self.resolve_path(persist_path))
        above = [each for each in psutil.disk_partitions(all=True) if Path(path).is_relative_to(each.mountpoint)]
        mount = max(above, key=lambda each: len(each.mountpoint), default=None)
        if mount is None or mount.fstype not in _DFUSE:
            raise DDictPersistError(
                f"DAOSCheckpointPersister needs a dfuse mount, and {path} is on {mount.fstype if mount else 'none'}",
                hint=f"mount a container: dfuse {path} POOL CONTAINER; without DAOS, use PosixCheckpointPersister",
            )
