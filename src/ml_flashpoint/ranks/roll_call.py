"""Naming the ranks that others wait for.

Owns noticing that a collective takes long, and the roll call: a rank that has waited for a while writes so into the
store of the default process group, and whoever has waited for longer names the ranks that have not. A collective that
is not held up costs nothing there. One thread a process looks, and ends when nobody has waited for a while.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from ml_flashpoint.format.knobs import late_s

_log = logging.getLogger(__name__)

Late = Callable[[tuple[int, ...], float], None]
"""Told the ranks that have not come, and for how many seconds this rank has waited."""

_IDLE_S = 5.0
_LOOKS_A_WAIT = 16
# One rank of so many that follow each other looks, the first one that waits: a big job must not flood its store.
_RANKS_A_LOOK = 8


class Wait:
    """One rank in one collective.

    Args:
        store: of the ranks.
        key: names the collective, the same on all ranks, and no other one.
        rank, size: of the ranks.
        report: called once with those that have not come; on the thread that looks.
    """

    def __init__(self, store: Any, key: str, rank: int, size: int, report: Late) -> None:
        self._store = store
        self._key = key
        self._rank = rank
        self._size = size
        self._report = report
        self._began = time.monotonic()
        self._written = self._reported = False
        self._missing: set[int] | None = None

    def look(self) -> None:
        """Write that this rank waits, and report who does not, each when it is time."""
        waited, limit = time.monotonic() - self._began, late_s()
        if not self._written and waited > limit / 8:
            self._store.set(self._name(self._rank), "waits")
            self._written = True
        # Twice, so that nobody is named who comes just then.
        if self._missing is None and waited > limit / 2:
            self._missing = set(self._absent())
        if self._missing is not None and not self._reported and waited > limit:
            missing = tuple(rank for rank in self._absent() if rank in self._missing)
            self._reported = bool(missing)
            if missing:
                self._report(missing, waited)
            self._missing = None

    def _absent(self) -> list[int]:
        first = self._rank - self._rank % _RANKS_A_LOOK
        if any(self._waits(rank) for rank in range(first, self._rank)):
            return []
        return [rank for rank in range(self._size) if rank != self._rank and not self._waits(rank)]

    def _waits(self, rank: int) -> bool:
        return bool(self._store.check([self._name(rank)]))

    def _name(self, rank: int) -> str:
        return f"{self._key}/{rank}"

    def end(self) -> None:
        """Remove what was written."""
        if self._written:
            self._store.delete_key(self._name(self._rank))


class _Watch:
    """The waits of this process, and the thread that looks at them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._waits: set[Wait] = set()
        self._over: list[Wait] = []
        self._thread: threading.Thread | None = None

    def add(self, wait: Wait) -> None:
        with self._lock:
            self._waits.add(wait)
            if self._thread is None and not self._ended.is_set():
                thread = threading.Thread(target=self._run, name="flashpoint-roll-call", daemon=True)
                with contextlib.suppress(RuntimeError):  # no thread to be had: the next wait tries again
                    thread.start()
                    self._thread = thread

    def remove(self, wait: Wait) -> None:
        with self._lock:
            self._waits.discard(wait)
            if self._thread is not None:
                self._over.append(wait)

    def _run(self) -> None:
        busy = time.monotonic()
        while not self._ended.wait(late_s() / _LOOKS_A_WAIT):
            with self._lock:
                waits, over, self._over = list(self._waits), self._over, []
                if waits or over:
                    busy = time.monotonic()
                elif time.monotonic() > busy + _IDLE_S:
                    self._thread = None
                    return
            for act in (*(wait.end for wait in over), *(wait.look for wait in waits)):
                try:
                    act()
                except Exception as error:  # of a store that is gone, say: whoever waits learns of it
                    _log.debug("a roll call failed: %s", error)

    def end(self) -> None:
        """Join the thread: at the end of the process it must not be in a store."""
        self._ended.set()
        if (thread := self._thread) is not None:
            thread.join(1.0)


_watch = _Watch()


def _begin_anew() -> None:
    global _watch
    _watch = _Watch()  # in a forked child there is no such thread, and the lock may be held


os.register_at_fork(after_in_child=_begin_anew)
atexit.register(lambda: _watch.end())


@contextlib.contextmanager
def watched(wait: Wait) -> Iterator[None]:
    """Look after a wait while the body runs."""
    watch = _watch
    watch.add(wait)
    try:
        yield
    finally:
        watch.remove(wait)
