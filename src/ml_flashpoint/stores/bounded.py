"""Calls to what may hang, such as a durable store: waited for with a deadline, and then left to themselves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from ml_flashpoint.format.errors import DeadlineError
from ml_flashpoint.stores.files import Files

if TYPE_CHECKING:
    from typing_extensions import Buffer

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
    """Return the result of a call, however long it takes, unless nothing happens in it for too long.

    Args:
        call: is given a function to call whenever something has happened. That raises a `DeadlineError` once nobody
            waits any more: so what hung ends then, if it ever goes on.
        deadline_s: for how long nothing may happen.
        path: for the error.

    Raises:
        DeadlineError: nothing happened.
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


def watched_files(files: Files, moved: Callable[[], None]) -> Files:
    """Return the same files, with ``moved`` called after each call, and for each piece that is streamed.
    It may raise."""
    return cast("Files", _Watched(files, moved))


class _Watched:
    def __init__(self, files: Files, moved: Callable[[], None]) -> None:
        self._files, self._moved = files, moved

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._files, name)

        def call(*args: Any, **options: Any) -> Any:
            result = method(*args, **options)
            self._moved()
            return result

        return call

    def write(self, name: str, chunks: Iterable[Buffer]) -> int:
        # A list stays one: an object store replaces a file by it in one request, and a failure leaves the old file.
        written = self._files.write(name, chunks if isinstance(chunks, list) else self._told(chunks))
        self._moved()
        return written

    def _told(self, chunks: Iterable[Buffer]) -> Iterator[Buffer]:
        for chunk in chunks:
            yield chunk
            self._moved()
