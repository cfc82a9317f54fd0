"""SIGTERM: time for the save in flight to be sealed, then whatever would have happened anyway.

Owns the handler, its chaining and its removal. What there is to wait for is the façade's to say.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

_log = logging.getLogger(__name__)


class TerminationGuard:
    """Calls ``seal`` when SIGTERM comes, then the handler that was there before, or the default action.

    Install it in the main thread; elsewhere it does nothing, as only the main thread may set handlers. A second
    SIGTERM while ``seal`` runs is not held up.

    Args:
        seal: waits, for a bounded time, until nothing is under way. Called in the main thread, between any two
            instructions of the program except inside :meth:`deferred`.
    """

    def __init__(self, seal: Callable[[], None]) -> None:
        self._seal = seal
        self._earlier: Callable[[int, FrameType | None], object] | int | None = None
        self._installed = False
        self._closed = False
        self._sealing = False
        self._busy = False
        self._pending: tuple[int, FrameType | None] | None = None

    def install(self) -> None:
        """Take SIGTERM over, if this is the main thread and the present handler can be chained to."""
        if threading.current_thread() is not threading.main_thread():
            _log.info("not in the main thread: SIGTERM is not handled")
            return
        earlier = signal.getsignal(signal.SIGTERM)
        if earlier is None:
            _log.info("SIGTERM has a handler that was not installed from Python: it is left alone")
            return
        self._earlier = earlier
        signal.signal(signal.SIGTERM, self._on_signal)
        self._installed = True

    def remove(self) -> None:
        """Restore the earlier handler. If another one was installed on top since, it stays, and ours passes on."""
        self._closed = True
        if (
            self._installed
            and threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGTERM) == self._on_signal
        ):
            signal.signal(signal.SIGTERM, self._earlier)
            self._installed = False

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """While a save is being begun: a signal that comes now is acted on when it has begun."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._busy = True
        try:
            yield
        finally:
            self._busy = False
            if self._pending is not None:
                pending, self._pending = self._pending, None
                self._on_signal(*pending)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._busy:
            self._pending = number, frame
            return
        if not self._closed and not self._sealing:
            self._sealing = True
            try:
                self._seal()
            except Exception:
                _log.exception("sealing on SIGTERM failed")
            finally:
                self._sealing = False
        self._chain(number, frame)

    def _chain(self, number: int, frame: FrameType | None) -> None:
        earlier = self._earlier
        if callable(earlier):
            earlier(number, frame)
        elif earlier == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
