"""Operations on files that stop before every change to a name and every look at a directory, to be interleaved or
cut short at will.

Owns that: a thread for each operation, of which one runs at a time, and an audit hook that makes it wait. An
operation that is killed fails at that step and at all that would follow, so that no cleanup runs that would
not run after SIGKILL. Works on single operations, not on what holds locks that another one wants.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

_DEADLINE_S = 30.0
_STEPS = frozenset(
    {"os.link", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.listdir", "os.scandir"}
)
_here = threading.local()
_installed = False


class Killed(BaseException):
    """What a killed operation ends with. No `Exception`, so that nothing handles it."""


def is_step(event: str, arguments: tuple[Any, ...]) -> bool:
    """Whether an audit event announces a call that makes, removes, renames or cuts a file, or lists some."""
    if event != "open":
        return event in _STEPS
    _, _, flags = arguments
    return isinstance(flags, int) and bool(flags & os.O_CREAT)


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    operation: Operation | None = getattr(_here, "operation", None)
    if operation is not None and is_step(event, arguments):
        operation._pause(event, arguments)


class Operation:
    """A function that runs on a thread of its own, one step at a time.

    Args:
        function: what it does.
        within: text in the paths of the steps that it stops before; all of them by default.
    """

    def __init__(self, function: Callable[[], object], within: str = "") -> None:
        global _installed
        if not _installed:
            sys.addaudithook(_hook)
            _installed = True
        self._function = function
        self._within = within
        self._may_go = threading.Semaphore(0)
        self._stands = threading.Semaphore(0)
        self._killed = False
        self.done = False
        self.error: BaseException | None = None
        self.result: object = None
        self.at = "the start"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._await()

    def _run(self) -> None:
        _here.operation = self
        try:
            self.result = self._function()
        except BaseException as error:
            self.error = error
        self.done = True
        self._stands.release()

    def _pause(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not any(self._within in str(argument) for argument in arguments[:2]):
            return
        if not self._killed:
            self.at = f"{event} {Path(str(arguments[0])).name}"
            self._stands.release()
            self._may_go.acquire()
        if self._killed:
            raise Killed

    def _await(self) -> None:
        if not self._stands.acquire(timeout=_DEADLINE_S):
            raise TimeoutError(f"an operation does not go on from {self.at}")

    def step(self) -> bool:
        """Let it make one step, and go on up to the next; returns whether it is done.

        Raises whatever the operation failed with.
        """
        if not self.done:
            self._may_go.release()
            self._await()
        if self.error is not None:
            raise self.error
        return self.done

    def finish(self) -> object:
        """Let it run to the end; its result."""
        while not self.step():
            pass
        return self.result

    def kill(self) -> None:
        """End it before the step that it stands at; nothing of it happens any more."""
        if not self.done:
            self._killed = True
            self._may_go.release()
            self._await()
        self._thread.join(_DEADLINE_S)
