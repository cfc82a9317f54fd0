"""A thread that calls what it is given, in turn, and how one that was just started lets its starter go on."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

_log = logging.getLogger(__name__)

GIVEN_S = 1e-3
"""Seconds in which a thread returns to the loop that has begun a save."""


class BackgroundThread:
    """See the module. It is started when it is first needed; to be used by one thread.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._given: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, function: Callable[[], object]) -> None:
        """Have a function called, which must not raise: in the background, or here and now if no thread can be
        started."""
        if self._thread is None:
            thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                _log.warning("no thread can be started, so the caller has to wait: %s", error)
                function()
                return
            self._thread = thread
        self._given.put(function)

    def close(self) -> None:
        """End the thread, after what it was given. Does not wait for that."""
        if self._thread is not None:
            self._given.put(None)
            self._thread = None

    def _work(self) -> None:
        while (function := self._given.get()) is not None:
            function()
            del function  # it holds what it was given for


def give_way() -> None:
    """Let whoever has just started this thread, and is about to return to the loop, have the interpreter's lock, for
    which it asks right now. Python would have it wait for 5 ms, which is as long as copying 50 MB takes, and nothing
    tells when it has returned."""
    time.sleep(GIVEN_S)
