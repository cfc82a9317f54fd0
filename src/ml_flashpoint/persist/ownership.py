"""Who alone may complete and remove versions in a store.

Owns the lock, and what stands for it where a store has none: a lease, that is, a record that its owner writes anew
every few seconds. Whoever else wants it watches that record, and takes it over once it has not changed for several such
periods; clocks are not compared. It keeps two jobs apart that were given one URL, and is no defence against one that
hangs for longer than that and then goes on: before it matters, an owner looks whether it still is one.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from contextlib import AbstractContextManager
from typing import Final

from ml_flashpoint.format.errors import DamagedError, FlashpointError, JobInUseError, ObjectNotFoundError
from ml_flashpoint.persist.records import decode_record, encode_record
from ml_flashpoint.persist.store import DurableStore

_log = logging.getLogger(__name__)

_LOCK: Final = "lock"
_LEASE: Final = "lease.json"
_KIND: Final = "mlflashpoint-lease-1"
_MOST_BYTES: Final = 65536
PERIOD_S: Final = 10.0
"""Seconds between two renewals of a lease."""
_PERIODS: Final = 4
_SETTLE: Final = 0.1


class Ownership:
    """What one process has, or wants, of a store. Not thread-safe.

    Args:
        store: where.
        period_s: see `PERIOD_S`.

    Attributes:
        taken: whether it is this process's, as far as known.
        owner_may_be_dead: whether whoever kept this process from it may be gone, and will have to let go in a while.
    """

    def __init__(self, store: DurableStore, *, period_s: float = PERIOD_S) -> None:
        self._store = store
        self._period_s = period_s
        self._owner = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(8)}"
        self._lock: AbstractContextManager[object] | None = None
        self._leased = False
        self._beats = 0
        self._seen: tuple[object, float] | None = None
        self._ended = threading.Event()
        self.taken = self.owner_may_be_dead = False

    def take(self) -> None:
        """Take it, if nobody has it; to be called again and again where somebody does, or did when it ended.

        Raises:
            JobInUseError: somebody has it, or may still have it.
            FlashpointError: the store failed.
        """
        self._lock = self._store.lock(_LOCK, 0.0)
        if self._lock is None:
            self._take_lease()
        self.taken = True

    def check(self) -> None:
        """Check that it is still there, where it could have been lost.

        Raises:
            JobInUseError: it was lost. It may be taken again.
            FlashpointError: the store failed.
        """
        if self._leased and not self._is_ours():
            self._lose()
            raise JobInUseError("another process has taken this over", path=self._store.path_of(_LEASE))

    def release(self) -> None:
        """Give it up. Idempotent."""
        self.taken = False
        self._ended.set()
        if self._lock is not None:
            lock, self._lock = self._lock, None
            lock.__exit__(None, None, None)
        if self._leased:
            self._leased = False
            try:
                if self._is_ours():
                    self._store.remove(_LEASE)
            except FlashpointError as error:
                _log.debug("the lease cannot be given up, and ends by itself: %s", error)

    # ---- the lease ----------------------------------------------------------------------------------------

    def _take_lease(self) -> None:
        self.owner_may_be_dead = True
        if (now := self._read()) is not None:
            if self._seen is None or self._seen[0] != now:
                self._seen = (now, time.monotonic())
            if time.monotonic() - self._seen[1] < _PERIODS * self._period_s:
                raise JobInUseError(
                    f"{now[0]} persists here, or did until a moment ago",
                    path=self._store.path_of(_LEASE),
                    hint="give each job a URL of its own",
                )
        self._renew()
        time.sleep(self._period_s * _SETTLE)  # of two that found nobody, the one that wrote last has it
        if not self._is_ours():
            raise JobInUseError("another process was faster", path=self._store.path_of(_LEASE))
        self._leased, self._seen, self._ended = True, None, threading.Event()
        threading.Thread(target=self._keep, args=(self._ended,), name="flashpoint-lease", daemon=True).start()

    def _lose(self) -> None:
        self.taken = self._leased = False
        self._ended.set()

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
        content = {"owner": self._owner, "beats": self._beats}
        self._store.write(_LEASE, [encode_record(_KIND, content)])

    def _read(self) -> tuple[str, object] | None:
        """Who has the lease, and how often it was renewed; None: nobody."""
        try:
            content = decode_record(_KIND, self._store.read(_LEASE, limit=_MOST_BYTES))
        except (ObjectNotFoundError, DamagedError):
            return None
        return str(content.get("owner")), content.get("beats")

    def _is_ours(self) -> bool:
        found = self._read()
        return found is not None and found[0] == self._owner
