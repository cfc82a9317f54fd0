"""`CheckpointObjectManager`: the one place of a process that says where checkpoint bytes live.

Owns which base containers this process uses and the store of each. The stores themselves (arenas, parts) are
`rank_store`'s. Stores are shared by all managers of a process, since the files have one owner, and end with the last.
"""

from __future__ import annotations

import os
import threading
import weakref
from pathlib import Path

from ml_flashpoint.checkpoint_object_manager.rank_store import RankStore
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.errors import DeadlineError, InvalidArgumentError
from ml_flashpoint.format.knobs import lock_deadline_s
from ml_flashpoint.format.private_folders import check_way
from ml_flashpoint.ranks.rank_group import job_of_this_process

_stores: dict[tuple[str, int], RankStore] = {}
_stores_lock = threading.Lock()
_users: weakref.WeakKeyDictionary[RankStore, weakref.WeakSet[CheckpointObjectManager]] = weakref.WeakKeyDictionary()


class CheckpointObjectManager:
    """Opens the base container of a job on this node. Thread-safe.

    One manager serves one base container: the first that it is asked to open.
    """

    def __init__(self) -> None:
        self._opened = threading.Condition()
        self._store: RankStore | None = None
        self._name: str | None = None

    def open(self, base: str | os.PathLike[str], rank: int) -> RankStore:
        """The store of ``rank`` in ``base``, made on first use.

        Raises:
            InvalidArgumentError: this manager serves another base container already.
            JobInUseError: another job has it open, or another live process this rank's part of it.
        """
        path = self.resolved(base)
        with self._opened:
            if self._store is None or self._store.closed:
                self._store, self._name = _shared_store(path, rank, self), str(base)
                self._opened.notify_all()
            elif self._store.base != path:
                raise InvalidArgumentError(
                    f"one CheckpointObjectManager serves one base container, {self._store.base} here",
                    argument="base",
                    value=str(path),
                    hint="use one base container a job, or a second manager",
                )
            return self._store

    def opened(self, base: str | os.PathLike[str], rank: int) -> RankStore | None:
        """Return the store of ``rank`` in ``base`` if any manager of this process has it open."""
        key = str(self.resolved(base)), rank
        with _stores_lock:
            store = _stores.get(key)
        return None if store is None or store.closed else store

    def resolved(self, base: str | os.PathLike[str]) -> Path:
        """As :func:`resolved_base`, without a look along the way if the store that is open was opened by this name:
        since then, nobody but this user and root could have led it elsewhere."""
        with self._opened:
            if self._store is not None and not self._store.closed and str(base) == self._name:
                return self._store.base
        return resolved_base(base)

    @property
    def store(self) -> RankStore | None:
        """The store opened last, if any."""
        return self._store

    def wait_for_store(self, deadline_s: float) -> RankStore:
        """The store, once this process has opened its base container.

        Raises:
            DeadlineError: it did not within ``deadline_s`` seconds.
        """
        with self._opened:
            if not self._opened.wait_for(lambda: self._store is not None, deadline_s):
                raise DeadlineError(f"no base container was opened within {deadline_s} s")
            assert self._store is not None
            return self._store

    def close(self) -> None:
        """Unmap and unlock, if no other manager uses the store. The checkpoint stays on the filesystem."""
        with self._opened, _stores_lock:
            store, self._store = self._store, None
            if store is None:
                return
            users = _users.get(store, weakref.WeakSet())
            users.discard(self)
            if not users:
                _stores.pop((str(store.base), store.rank), None)
                store.close()


def resolved_base(base: str | os.PathLike[str]) -> Path:
    """The one path of a base container, whatever symbolic links it was given by.

    Raises:
        UnsafePathError: somebody else could lead it elsewhere.
    """
    return check_way(Path(str(CheckpointContainerId(base))))


def _shared_store(base: Path, rank: int, user: CheckpointObjectManager) -> RankStore:
    with _stores_lock:
        key = (str(base), rank)
        if key not in _stores or _stores[key].closed:
            _stores[key] = RankStore(base, rank, lock_deadline_s=lock_deadline_s(), job=job_of_this_process())
        _users.setdefault(_stores[key], weakref.WeakSet()).add(user)
        return _stores[key]


def _forget_stores() -> None:
    # A forked child (a data loader's worker) shares the mappings but owns none of the files.
    global _stores_lock
    _stores_lock = threading.Lock()
    _stores.clear()


os.register_at_fork(after_in_child=_forget_stores)
