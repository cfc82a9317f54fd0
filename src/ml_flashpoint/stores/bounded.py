"""Calls to what may hang, such as a durable store: waited for with a deadline, and then left to themselves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Final, TypeVar

from ml_flashpoint.format.errors import DeadlineError

_T = TypeVar("_T")

_TO_CLEAN_UP_S: Final = 10.0


def in_background(call: Callable[[], _T], name: str = "flashpoint-persisted") -> Future[_T]:
    """Begin a call on a daemon thread of its own, which no process waits for when it ends. Return its future."""
    future: Future[_T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except RuntimeError:  # no thread can be had
        run()
    return future


def result_of(future: Future[_T], deadline_s: float) -> _T:
    """Return the result of a call, or raise its error. Raise a `DeadlineError` if it takes longer."""
    if not wait([future], deadline_s).done:
        raise DeadlineError(f"no answer within {deadline_s:.0f} s")
    return future.result()


def while_it_moves(call: Callable[[Callable[[], None]], _T], deadline_s: float, path: str) -> _T:
    """Return the result of a call. Raise a `DeadlineError` if nothing happens in it for ``deadline_s`` seconds.

    The call is given a function to call whenever something has happened. That raises a `DeadlineError` once nobody
    waits any more: so what hung ends then, if it ever goes on.
    """
    moved_at = [time.monotonic()]
    left_alone = threading.Event()

    def moved() -> None:
        moved_at[0] = time.monotonic()
        if left_alone.is_set():
            raise DeadlineError("nobody waits for this any more", path=path)

    future = in_background(lambda: call(moved))
    try:
        while not wait([future], max(0.0, moved_at[0] + deadline_s - time.monotonic())).done:
            if time.monotonic() - moved_at[0] >= deadline_s:
                left_alone.set()
                text = f"nothing has happened for {deadline_s:g} s"
                raise DeadlineError(text, path=path, hint="try again once the store answers")
    finally:
        if not left_alone.is_set() and not future.done():  # interrupted: it may still clean up
            left_alone.set()
            wait([future], _TO_CLEAN_UP_S)
    return future.result()
