"""The persisters that a dictionary can be given: in a directory, behind a URL, on a dfuse mount of DAOS, or none.

Owns the classes' names and what their paths mean. The interface is `persister`'s, how checkpoints
lie in a store `stored`', and the files are `stores`'.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import psutil

from ml_flashpoint.ddict.errors import DDictPersistError
from ml_flashpoint.ddict.persistence.stored import StoredCheckpointPersister
from ml_flashpoint.ddict.persister import (
    CheckpointPersister,
    NullCheckpointPersister,
    PersistedCheckpoint,
    new_run_id,
)
from ml_flashpoint.format.private_folders import check_unplanted
from ml_flashpoint.stores.files import Directory, Files, UrlFiles
from ml_flashpoint.stores.location import is_url

__all__ = [
    "CheckpointPersister",
    "DAOSCheckpointPersister",
    "FsspecCheckpointPersister",
    "NULLCheckpointPersister",
    "NullCheckpointPersister",
    "PersistedCheckpoint",
    "PosixCheckpointPersister",
    "StoredCheckpointPersister",
    "new_run_id",
]

_DFUSE: Final = ("fuse.daos", "fuse.dfuse")
"""Types of mounts that dfuse makes."""


NULLCheckpointPersister = NullCheckpointPersister
"""The same, as Dragon calls it."""


class PosixCheckpointPersister(StoredCheckpointPersister):
    """Persists into a directory, which all nodes must see under the same path: a parallel filesystem, NFS.

    Args:
        persist_path: the directory; made when needed. "": the current one.
        name: see `StoredCheckpointPersister`, as for `managers`.
    """

    @classmethod
    def resolve_path(cls, persist_path: str) -> str:
        """Returns the absolute path."""
        return os.path.abspath(os.path.expanduser(persist_path))

    def open_store(self) -> Files:
        """Returns the directory as a store.

        Raises:
            UnsafePathError: somebody else has planted something on the way.
        """
        path = self.resolve_path(self.persist_path)
        check_unplanted(Path(path, self.home))
        return Directory(path)


class FsspecCheckpointPersister(StoredCheckpointPersister):
    """Persists behind any URL that fsspec can write to, such as ``s3://bucket/folder``; credentials are fsspec's.

    There are no locks behind a URL: two live dictionaries of one name and URL are not noticed. Their checkpoints do not
    mix, since each has a run of its own, but what comes after them sees those of only one of them.

    Args:
        persist_path: the URL. What is no URL is a path of this machine.
        name: see `StoredCheckpointPersister`, as for `managers`.
    """

    @classmethod
    def resolve_path(cls, persist_path: str) -> str:
        """Returns the URL, with an absolute path if it is one of this machine."""
        return persist_path if is_url(persist_path) else os.path.abspath(persist_path)

    def open_store(self) -> Files:
        """Returns the URL as a store.

        Raises:
            UnsafePathError: it is a path, and somebody else has planted something on the way.
        """
        path = self.resolve_path(self.persist_path)
        if os.path.isabs(path):
            check_unplanted(Path(path, self.home))
        return UrlFiles(path)


class DAOSCheckpointPersister(PosixCheckpointPersister):
    """Persists into a DAOS container of type ``POSIX`` that is mounted with dfuse, on all nodes under the same path.

    Args:
        persist_path: a directory below the mount; made when needed.
        name: see `StoredCheckpointPersister`, as for `managers`.

    Raises:
        DDictPersistError: `persist_path` is not on a dfuse mount.
    """

    def __init__(self, persist_path: str = "", *, name: str = "", managers: int = 1) -> None:
        super().__init__(persist_path, name=name, managers=managers)
        path = os.path.realpath(self.resolve_path(persist_path))
        above = [each for each in psutil.disk_partitions(all=True) if Path(path).is_relative_to(each.mountpoint)]
        mount = max(above, key=lambda each: len(each.mountpoint), default=None)
        if mount is None or mount.fstype not in _DFUSE:
            raise DDictPersistError(
                f"DAOSCheckpointPersister needs a dfuse mount, and {path} is on {mount.fstype if mount else 'none'}",
                hint=f"mount a container: dfuse {path} POOL CONTAINER; without DAOS, use PosixCheckpointPersister",
            )
