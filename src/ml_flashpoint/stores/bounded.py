"""Calls to what may hang, such as a durable store: waited for with a deadline, and then left to themselves.

Owns the thread of such a call, which no process waits for when it ends, and when a call that takes long counts as hung.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from ml_flashpoint.format.errors import DeadlineError

_T = TypeVar("_T")

_TO_CLEAN_UP_S: Final = 10.0


class Bounded(Generic[_T]):
    """A call on a daemon thread of its own, whose result is waited for with a deadline."""

    def __init__(self, call: Callable[[], _T], name: str = "flashpoint-persisted") -> None:
        self._call = call
        self._ended = threading.Event()
        self._results: list[_T] = []
        self._error: BaseException | None = None
        try:
            threading.Thread(target=self._run, name=name, daemon=True).start()
        except RuntimeError:  # no thread can be had
            self._run()

    def _run(self) -> None:
        try:
            self._results.append(self._call())
        except BaseException as error:
            self._error = error
        self._ended.set()

    def wait(self, deadline_s: float | None) -> bool:
        """Whether it has ended, within so many seconds."""
        return self._ended.wait(deadline_s)

    def result(self, deadline_s: float | None) -> _T:
        """What it returned. Raises what it raised, or a `DeadlineError`."""
        if not self._ended.wait(deadline_s):
            raise DeadlineError(f"no answer within {deadline_s:.0f} s")
        if self._error is not None:
            raise self._error
        return self._results[0]


def while_it_moves(call: Callable[[Callable[[], None]], _T], deadline_s: float, path: str) -> _T:
    """What a call returns, however long it takes, unless nothing happens in it for too long.

    Args:
        call: is given what it has to call whenever something has happened, which raises a `DeadlineError` once nobody
            waits any more: so it ends then, if it ever goes on.
        deadline_s: for how long nothing may happen.
        path: what it is about, for the error.

    Raises:
        DeadlineError: nothing happened.
    """
    moved_at = [time.monotonic()]
    left_alone = threading.Event()

    def moved() -> None:
        moved_at[0] = time.monotonic()
        if left_alone.is_set():
            raise DeadlineError("nobody waits for this any more", path=path)

    bounded = Bounded(lambda: call(moved))
    try:
        while not bounded.wait(max(0.0, moved_at[0] + deadline_s - time.monotonic())):
            if time.monotonic() - moved_at[0] >= deadline_s:
                left_alone.set()
                raise DeadlineError(
                    f"nothing has happened for {deadline_s:g} s",
                    path=path,
                    hint="try again once the store answers",
                )
    finally:
        if not left_alone.is_set() and not bounded.wait(0.0):  # interrupted: it may still clean up
            left_alone.set()
            bounded.wait(_TO_CLEAN_UP_S)
    return bounded.result(0.0)
