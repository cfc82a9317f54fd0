"""The client's side of large values: arenas mapped for writing, and views of values.

Owns mappings and the shared locks (flock) that go with them; see `arenas` for what the locks are good for.

A view's lock lives exactly as long as its mapping: `mmap` keeps a duplicate of the file descriptor, which refers to the
same open file, and a lock belongs to that. So an arena is not reused while a tensor or array that was got from it, or
anything that shares its memory, is alive in this process, or in one that was forked from it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

from ml_flashpoint.checkpoint_object_manager.arena import Arena
from ml_flashpoint.ddict.client.codec import Encoded
from ml_flashpoint.ddict.client.objects import read_object, write_object
from ml_flashpoint.ddict.errors import DDictError, StaleValueError
from ml_flashpoint.ddict.manager.arenas import allow_many_files, has_token
from ml_flashpoint.format.errors import FlashpointError
from ml_flashpoint.staging import cuda

MAX_MAPPINGS: Final = 64
"""Arenas that a writer keeps mapped, since a first write to a new mapping costs six times as much as later ones."""

_Result = TypeVar("_Result")

# Not reserved: a view is hardly ever written to, and need not have memory of its own set aside.
_MAP_FLAGS: Final = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000)


@dataclass(eq=False)
class Slot:
    """Room for one value, locked."""

    value_id: str
    _arena: Arena = field(repr=False)

    def write(self, encoded: Encoded) -> int:
        """Copy the value in. Returns the bytes of the object.

        Raises:
            CapacityError, InvalidArgumentError: it does not fit.
        """
        size = write_object(encoded, self._arena.tensor, self.value_id)
        if cuda.are_on_devices(encoded.tensors):
            self._arena.lock_in_background()
        return size


class ValueWriter:
    """Writes values into arenas that managers have allocated, over mappings that are kept. Thread-safe."""

    def __init__(self, mappings: int = MAX_MAPPINGS) -> None:
        self._most = mappings
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Arena] = OrderedDict()
        _live_writers.add(self)

    def _begin_anew(self) -> None:
        # In a forked child: the lock may be held by a thread that does not exist here.
        self._lock = threading.Lock()
        self._kept = OrderedDict()

    @contextlib.contextmanager
    def writing(self, path: str, value_id: str) -> Iterator[Slot]:
        """The arena that was allocated to a value, locked until the end of the block, which is for when the manager
        has acknowledged the value.

        Raises:
            StaleValueError: the arena is gone, or not kept for this value any more.
        """
        arena = self._take(path)
        locked = False
        try:
            fd = _with_many_files(lambda: _lock_shared(path, os.O_RDWR, value_id))
            try:
                stat = os.fstat(fd)
                if arena is not None and (arena.inode != stat.st_ino or arena.size != stat.st_size):
                    arena.close()
                    arena = None
                if arena is None:
                    self._forget_removed()
                    arena = _with_many_files(lambda: _map(path, stat, value_id))
                if not has_token(arena, value_id):
                    raise StaleValueError(f"the arena is not kept for value {value_id} any more", path=path)
                locked = True
                yield Slot(value_id, arena)
            finally:
                os.close(fd)
        finally:
            if arena is not None:
                self._keep(path, arena) if locked else arena.close()

    def _take(self, path: str) -> Arena | None:
        # Taken out while in use, so that no other thread forgets it meanwhile.
        with self._lock:
            return self._kept.pop(path, None)

    def _keep(self, path: str, arena: Arena) -> None:
        with self._lock:
            forgotten = [] if (other := self._kept.pop(path, None)) is None else [other]
            self._kept[path] = arena
            while len(self._kept) > self._most:
                forgotten.append(self._kept.popitem(last=False)[1])
        for old in forgotten:
            old.close()

    def _forget_removed(self) -> None:
        # Now and not later: memory of files that are gone is only given back with their mappings.
        with self._lock:
            removed = [path for path, arena in self._kept.items() if not _is_at(path, arena)]
            forgotten = [self._kept.pop(path) for path in removed]
        for old in forgotten:
            old.close()

    def close(self) -> None:
        """Forget all mappings. It can be used again."""
        with self._lock:
            kept, self._kept = list(self._kept.values()), OrderedDict()
        for arena in kept:
            arena.close()


_live_writers: weakref.WeakSet[ValueWriter] = weakref.WeakSet()


def _begin_anew() -> None:
    for writer in list(_live_writers):
        writer._begin_anew()


os.register_at_fork(after_in_child=_begin_anew)


def read_value(path: str, value_id: str, *, copy: bool = False) -> object:
    """The value in an arena of this machine. It may unpickle.

    Each view has a file open. When they are too many for the soft limit of this process, it is raised to the hard one.

    Args:
        copy: give tensors and arrays memory of their own. Without, they are views: arrays are read-only, and what is
            written to a tensor stays in this process.

    Raises:
        StaleValueError: it is not there any more: ask the manager again.
        ObjectFormatError: it is damaged.
        DDictError: too many files are open.
    """
    mapping = _with_many_files(lambda: _map_private(path, value_id))
    try:
        return read_object(mapping, value_id, copy=copy)
    except FlashpointError as error:
        error.path = path
        raise


def _map_private(path: str, value_id: str) -> mmap.mmap:
    fd = _lock_shared(path, os.O_RDONLY, value_id)
    try:
        size = os.fstat(fd).st_size
        if not size:
            raise StaleValueError(f"there is no value here, {value_id} was expected", path=path)
        return mmap.mmap(fd, size, flags=_MAP_FLAGS, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(fd)


def _with_many_files(function: Callable[[], _Result]) -> _Result:
    for last in (False, True):
        try:
            return function()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            if last:
                raise DDictError(
                    "too many files are open",
                    hint="let go of tensors and arrays that were got, get them with copy=True, or raise `ulimit -n`",
                ) from error
            allow_many_files()
    raise AssertionError("unreachable")


def _lock_shared(path: str, flags: int, value_id: str) -> int:
    try:
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise StaleValueError(f"the arena of value {value_id} is gone", path=path) from None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise StaleValueError(f"the arena of value {value_id} is being reused", path=path) from None
    except BaseException:
        os.close(fd)
        raise
    return fd


def _is_at(path: str, arena: Arena) -> bool:
    try:
        return os.stat(path).st_ino == arena.inode
    except FileNotFoundError:
        return False


def _map(path: str, locked: os.stat_result, value_id: str) -> Arena:
    try:
        arena = Arena.open(Path(path))
    except FileNotFoundError:
        raise StaleValueError(f"the arena of value {value_id} is gone", path=path) from None
    if arena.inode != locked.st_ino:
        arena.close()
        raise StaleValueError(f"the arena of value {value_id} was replaced", path=path)
    return arena
