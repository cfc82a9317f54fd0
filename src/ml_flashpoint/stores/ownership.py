"""The right to complete and remove versions in a store, which one process has at a time: a lock, or a lease.

A lease stands for the lock where files have no locks: a record that its owner writes anew every few seconds. Whoever
else wants it watches that record, and takes it over once it has not changed for several such periods; clocks are not
compared. A lease keeps two jobs apart that were given one URL. It is no defence against a job that hangs for longer
than that and then goes on: an owner checks before each removal.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Final

from ml_flashpoint.format.errors import DamagedError, FlashpointError, JobInUseError, ObjectNotFoundError
from ml_flashpoint.format.manifest import decode_record, encode_record
from ml_flashpoint.stores.files import Files

_log = logging.getLogger(__name__)

_LOCK: Final = "lock"
_LEASE: Final = "lease.json"
_KIND: Final = "mlflashpoint-lease-1"
_MOST_BYTES: Final = 65536
PERIOD_S: Final = 10.0
"""Seconds between two renewals of a lease."""
_PERIODS: Final = 4
_PERIODS_TO_WAIT: Final = 6.0
_SETTLE: Final = 0.1


class Ownership:
    """The right of one process to complete and remove versions. Not thread-safe.

    Args:
        store: the files.
        period_s: see `PERIOD_S`.

    Attributes:
        taken: True if this process has it.
        owner_may_be_dead: True if the owner that kept this process from it may be gone, and its lease will end.
    """

    def __init__(self, store: Files, *, period_s: float = PERIOD_S) -> None:
        self._store = store
        self._period_s = period_s
        self._owner = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(8)}"
        self._lock: AbstractContextManager[object] | None = None
        self._beats = 0
        self._seen: tuple[object, float] | None = None
        self._ended = threading.Event()
        self.taken = self.owner_may_be_dead = False

    def take(self) -> None:
        """Take it, if nobody has it. To be called again until that works: a lease ends in a while.

        Raises:
            JobInUseError: somebody has it, or may still have it.
            FlashpointError: the store failed.
        """
        self._lock = self._store.lock(_LOCK, 0.0)
        if self._lock is None:
            self._take_lease()
        self.taken = True

    def check(self) -> None:
        """Raise a `JobInUseError` if another process has it, or the error of a store that fails."""
        if self.taken and self._lock is None and not self._is_ours():
            self.taken = False
            self._ended.set()
            raise JobInUseError("another process has taken this over", path=self._store.path_of(_LEASE))

    def release(self) -> None:
        """Let another process have it. Safe to call twice."""
        was_taken, self.taken = self.taken, False
        self._ended.set()
        if self._lock is not None:
            lock, self._lock = self._lock, None
            lock.__exit__(None, None, None)
        elif was_taken:
            try:
                if self._is_ours():
                    self._store.remove(_LEASE)
            except FlashpointError as error:
                _log.debug("the lease cannot be given up, and ends by itself: %s", error)

    # ---- the lease ----------------------------------------------------------------------------------------

    def _take_lease(self) -> None:
        self.owner_may_be_dead = True
        path, now = self._store.path_of(_LEASE), self._read()
        if now is not None:
            if self._seen is None or self._seen[0] != now:
                self._seen = (now, time.monotonic())
            if time.monotonic() - self._seen[1] < _PERIODS * self._period_s:
                text = f"{now[0]} persists here, or did until a moment ago"
                raise JobInUseError(text, path=path, hint="give each job a URL of its own")
        self._renew()
        time.sleep(self._period_s * _SETTLE)  # of two that found nobody, the one that wrote last has it
        if not self._is_ours():
            raise JobInUseError("another process was faster", path=path)
        self._seen, self._ended = None, threading.Event()
        threading.Thread(target=self._keep, args=(self._ended,), name="flashpoint-lease", daemon=True).start()

    def _keep(self, ended: threading.Event) -> None:
        while not ended.wait(self._period_s):
            try:
                if not self._is_ours():
                    _log.error("another process persists at %s: this one does not any more", self._store.path_of(""))
                    return
                self._renew()
            except FlashpointError as error:
                _log.debug("the lease cannot be renewed just now: %s", error)

    def _renew(self) -> None:
        self._beats += 1
        self._store.write(_LEASE, [encode_record(_KIND, {"owner": self._owner, "beats": self._beats})])

    def _read(self) -> tuple[str, object] | None:
        """Return the owner of the lease and how often it was renewed; None if nobody has it."""
        try:
            content = decode_record(_KIND, self._store.read(_LEASE, limit=_MOST_BYTES))
        except (ObjectNotFoundError, DamagedError):
            return None
        return str(content.get("owner")), content.get("beats")

    def _is_ours(self) -> bool:
        found = self._read()
        return found is not None and found[0] == self._owner


@contextlib.contextmanager
def owned_files(files: Files, period_s: float, moved: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Be the owner, and yield a call that raises if that was lost. See `VersionStore.owned`.

    A lease whose owner may be dead is waited for.
    """
    ownership = Ownership(files, period_s=period_s)
    give_up = time.monotonic() + _PERIODS_TO_WAIT * period_s
    try:
        while not ownership.taken:
            try:
                ownership.take()
            except JobInUseError as error:
                if not ownership.owner_may_be_dead or time.monotonic() > give_up:
                    raise JobInUseError(
                        f"somebody persists there: {error.message}",
                        path=files.path_of(""),
                        hint="wait until that job has ended, or give another URL",
                    ) from error
                moved()
                time.sleep(period_s / 4)
        yield ownership.check
    finally:
        ownership.release()
