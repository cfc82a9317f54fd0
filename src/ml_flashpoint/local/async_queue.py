"""`AsyncRequest`: the rest of an asynchronous save. `AsyncCallsQueue`: finalizes them in order, on all ranks alike."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.util import Finalize
from typing import Any, NamedTuple

from ml_flashpoint.format.arguments import ignored
from ml_flashpoint.format.errors import InvalidArgumentError
from ml_flashpoint.format.knobs import call_deadline_s, exit_deadline_s, seal_deadline_s
from ml_flashpoint.local.errors import BackgroundWorkerError, CallOrderError, CheckpointingException
from ml_flashpoint.ranks.rank_group import rank_group

_log = logging.getLogger(__name__)
_VOTE_S = 1.0
"""A blocking wait asks the other ranks this often: those that are done must not wait beyond a collective's deadline."""


class AsyncRequest(NamedTuple):
    """An asynchronous call and what follows it. The fields are those of megatron-core's own request.

    Attributes:
        async_fn: runs in the background, with its arguments; None for nothing.
        finalize_fns: called in order, in the caller's thread, once ``async_fn`` is done on all ranks.
        preload_fn: if given, called first, before the caller goes on; what it returns replaces the second argument.
        is_frozen: no finalization may be added any more.
        call_idx: number that the queue gave it.
    """

    async_fn: Callable[..., Any] | None
    async_fn_args: tuple[Any, ...]
    finalize_fns: list[Callable[[], Any]]
    async_fn_kwargs: dict[str, Any] = {}  # noqa: RUF012 - a NamedTuple's default; never changed
    preload_fn: Callable[[], Any] | None = None
    is_frozen: bool = False
    call_idx: int = 0

    def add_finalize_fn(self, fn: Callable[[], Any]) -> None:
        """Have one more function called at the end. Raises a `CallOrderError` once the request is scheduled."""
        if self.is_frozen:
            raise CallOrderError("nothing can be added to a frozen AsyncRequest: add it before scheduling that")
        self.finalize_fns.append(fn)

    def freeze(self) -> AsyncRequest:
        """Return the same request, to which nothing can be added."""
        return self._replace(is_frozen=True)

    def bound(self) -> Callable[[], Any]:
        """Preload, and return a call of ``async_fn`` with its arguments, which programs may leave None."""
        arguments = list(self.async_fn_args or ())
        if self.preload_fn is not None:
            if len(arguments) < 2:
                raise CallOrderError("preload_fn needs a second argument of async_fn to replace")
            arguments[1] = self.preload_fn()
        return partial(self.async_fn or (lambda *_, **__: None), *arguments, **(self.async_fn_kwargs or {}))

    def execute_sync(self) -> None:
        """Do all of it now. Collective: finalizations follow once all ranks have run ``async_fn``. Raises a
        `CheckpointingException` if it failed on a rank; nothing was finalized."""
        ranks, error = rank_group(), None
        try:
            self.bound()()
        except Exception as caught:
            error = caught
        if not ranks.all_ok(error is None):
            failed = error or "on another rank; its own error says why"
            raise CheckpointingException(f"the request failed: {failed}", rank=ranks.rank) from error
        self.execute_finalize_fns()

    def execute_finalize_fns(self, validate_matching_call_idx: bool = True) -> int:
        """Call the finalizations, and return ``call_idx``. Collective if they are. Unless told not to, raises a
        `CallOrderError` if ranks finalize different calls."""
        ranks = rank_group()
        if validate_matching_call_idx and len(set(ranks.gather(str(self.call_idx).encode()))) > 1:
            raise CallOrderError(f"ranks finalize different calls: {self.call_idx} here", rank=ranks.rank)
        for finalize in self.finalize_fns or ():
            finalize()
        return self.call_idx


class BackgroundSave:
    """The ``async_fn`` of a local save, which the trainer's own engine makes: waits until that has ended, well or not.

    Another process, to which another queue has forked or pickled it, waits for a byte in a pipe of the trainer's.
    """

    def __init__(self, save: Future[Any]) -> None:
        self.ended: Future[None] = Future()
        self._process = os.getpid()
        self._pipe, write_end = os.pipe()
        weakref.finalize(self, os.close, self._pipe)
        save.add_done_callback(partial(_announce, self.ended, write_end))

    def __call__(self) -> None:
        """Wait."""
        if os.getpid() == self._process:
            self.ended.result()
        else:
            _await_end(self._process, self._pipe)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (_await_end, self._process, self._pipe)


def _announce(ended: Future[None], write_end: int, _: Future[Any]) -> None:
    with contextlib.suppress(OSError):  # nobody can read from it any more
        os.write(write_end, b".")
    os.close(write_end)
    ended.set_result(None)


def _await_end(trainer: int, pipe: int) -> None:
    """Wait until a save of another process has ended, or that process has."""
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:  # the process is gone, or its request is
        alive = os.pidfd_open(trainer)
        stack.callback(os.close, alive)
        ended = os.open(f"/proc/{trainer}/fd/{pipe}", os.O_RDONLY | os.O_NONBLOCK)
        stack.callback(os.close, ended)
        wait([alive, ended], timeout=seal_deadline_s())


class AsyncCallsQueue:
    """Requests under way, in order. Scheduling, finalizing and closing are collective, in the training thread.

    A local save ends with its engine's future; functions of foreign requests run in threads of this process. If the
    process ends without `close`, it waits for both, up to ``FLASHPOINT_EXIT_DEADLINE_S``; nobody finalizes them. All
    arguments are accepted, and ignored: there is no worker process.
    """

    def __init__(self, persistent: bool = True, is_daemon: bool = False, **unused: Any) -> None:
        ignored("AsyncCallsQueue", **unused)
        self._calls: deque[tuple[AsyncRequest, Future[Any]]] = deque()
        self._next_index = 0
        self._closed = False
        # Not by atexit: up to Python 3.12, a process that multiprocessing has forked ends without that.
        self._at_exit = Finalize(None, self._wait_at_exit, exitpriority=20)

    def schedule_async_request(self, async_request: AsyncRequest) -> int:
        """Start a request, ours or another named tuple with the same fields, and return its number. It is frozen from
        now on. If it cannot start, since ``preload_fn`` fails for example, finalizing it raises.

        Raises:
            CallOrderError: the queue is closed, or there is something to preload and no second argument to take it.
            InvalidArgumentError: it is no request.
        """
        if self._closed:
            raise CallOrderError("the queue is closed", hint="make a new AsyncCallsQueue")
        try:
            request = AsyncRequest(**async_request._asdict())
        except (AttributeError, TypeError) as error:
            text = f"must be an AsyncRequest: {error}"
            raise InvalidArgumentError(text, argument="async_request", value=async_request) from error
        request = request.freeze()._replace(call_idx=self._next_index)
        self._next_index += 1
        self._calls.append((request, self._started(request)))
        return request.call_idx

    def _started(self, request: AsyncRequest) -> Future[Any]:
        """Start what a request has to run. Return a future that ends with it."""
        if isinstance(request.async_fn, BackgroundSave):
            return request.async_fn.ended
        ended: Future[Any] = Future()
        try:
            if request.async_fn is None:
                ended.set_result(None)
            else:
                call = request.bound()
                threading.Thread(target=_run, args=(call, ended), name="flashpoint-call", daemon=True).start()
        except CallOrderError:  # on all ranks
            raise
        except Exception as error:  # the other ranks, whose calls have begun, learn of it as they finalize the request
            ended.set_exception(error)
        return ended

    def maybe_finalize_async_calls(self, blocking: bool = False, no_dist: bool = False) -> list[int]:
        """Finalize the requests that have ended on all ranks, oldest first, and return their numbers.

        Args:
            blocking: wait for all of them, up to ``FLASHPOINT_CALL_DEADLINE_S`` for each.
            no_dist: do not ask the other ranks: a request counts as ended when it has here.

        Raises:
            BackgroundWorkerError: a request failed, or did not end in time, on some rank. It is given up; younger ones
                stay in the queue. So it is with one whose finalization raises.
        """
        finalized: list[int] = []
        ranks = rank_group()
        while self._calls:
            (request, future), deadline_s = self._calls[0], call_deadline_s()
            give_up = time.monotonic() + deadline_s
            while True:
                futures.wait([future], _VOTE_S if blocking else 0.0)
                is_over = future.done() or (blocking and time.monotonic() > give_up)
                if is_over if no_dist else ranks.all_ok(is_over):
                    break
                if not blocking:
                    return finalized
            self._calls.popleft()
            why = f"it has not ended within {deadline_s:.0f} s (FLASHPOINT_CALL_DEADLINE_S)"
            if future.done():
                why = "" if (error := future.exception()) is None else f"{type(error).__name__}: {error}"
            told = [why.encode(errors="replace")] if no_dist else ranks.gather(why.encode(errors="replace"))
            for rank, each in enumerate(told):
                if each:
                    text = f"asynchronous call {request.call_idx} failed: {each.decode(errors='replace')}"
                    raise BackgroundWorkerError(text, rank=ranks.rank if no_dist else rank)
            finalized.append(request.execute_finalize_fns(validate_matching_call_idx=not no_dist))
        return finalized

    def get_num_unfinalized_calls(self) -> int:
        """Return the number of requests that are scheduled and not finalized."""
        return len(self._calls)

    def close(self, abort: bool = False) -> None:
        """Finalize everything, or, with ``abort``, give up what is under way (not collective). Safe to call twice."""
        self._closed = True
        try:
            if not abort:
                self.maybe_finalize_async_calls(blocking=True)
        finally:
            self._calls.clear()
            self._at_exit.cancel()

    def _wait_at_exit(self) -> None:
        deadline_s = exit_deadline_s()
        under_way = futures.wait([future for _, future in self._calls], deadline_s).not_done
        if under_way:
            text = (
                "nobody closed the queue: the process ends, and %d asynchronous calls have not ended within %.0f s (%s)"
            )
            _log.error(text, len(under_way), deadline_s, "FLASHPOINT_EXIT_DEADLINE_S")


def _run(call: Callable[[], Any], ended: Future[Any]) -> None:
    try:
        ended.set_result(call())
    except BaseException as error:  # of whatever kind: finalizing the request tells it
        ended.set_exception(error)
