"""The lock by which one live process at a time has the arenas of a rank.

Owns taking it: within a deadline, since an earlier process may be dying, and once a process. It ends with its
descriptor, which is the store's to close.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
import weakref
from pathlib import Path
from typing import Protocol

from ml_flashpoint.checkpoint_object_manager.reserve import keep_reserve
from ml_flashpoint.format.errors import JobInUseError
from ml_flashpoint.format.private_folders import is_at, make_tree, open_own

LOCK = "lock"
"""Name of its file, beside the arenas."""
_PAUSE_S = 0.05


class Locked(Protocol):
    """What takes the lock of its directory."""

    base: Path
    rank: int
    directory: Path

    @property
    def closed(self) -> bool:
        """Whether it has let go."""
        ...


_open_here: weakref.WeakValueDictionary[tuple[int, int], Locked] = weakref.WeakValueDictionary()
"""The stores of this process by device and inode of their directory: one directory may have several paths."""


def take_lock(store: Locked, deadline_s: float) -> int:
    """Lock a rank's directory, which is made if need be. Returns the descriptor that holds the lock.

    Raises:
        JobInUseError: another live process, or another store of this one, has it.
        UnsafePathError: others could have planted the base container, or may write to it.
    """
    # POSIX record locks: released by the kernel on SIGKILL and, unlike flock, not shared with forked children.
    path = store.directory / LOCK
    give_up = time.monotonic() + deadline_s
    while True:
        try:
            make_tree(store.base, store.directory)
            keep_reserve(store.directory)
            _register(store)
            fd = open_own(path, os.O_RDWR | os.O_CREAT)
        except FileNotFoundError:  # `flashpoint rm` removes it just now
            if time.monotonic() > give_up:
                raise
            time.sleep(_PAUSE_S)
            continue
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.pread(fd, 32, 0).decode(errors="replace").strip()
            os.close(fd)
            if time.monotonic() > give_up:
                raise JobInUseError(
                    f"another live process (pid {owner or 'unknown'}) uses the arenas of this rank",
                    rank=store.rank,
                    path=store.directory,
                    hint="stop that process, or give each job a base container of its own",
                ) from None
            time.sleep(_PAUSE_S)
            continue
        if is_at(fd, path):
            break
        os.close(fd)  # it was removed, with the directory, before it was locked
    with contextlib.suppress(OSError):  # for others to see: a full filesystem can be loaded from without it
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
    return fd


def _register(store: Locked) -> None:
    # Before the lock's file is opened: a process's locks do not keep each other out, and closing one of several
    # descriptors of a file lets go of the lock.
    found = os.stat(store.directory)
    other = _open_here.get((found.st_dev, found.st_ino))
    if other is not None and other is not store and not other.closed:
        text = "this process uses the arenas of this rank already"
        raise JobInUseError(text, rank=store.rank, path=store.directory)
    _open_here[(found.st_dev, found.st_ino)] = store


os.register_at_fork(after_in_child=_open_here.clear)  # a child owns none of the files
