"""`AsyncRequest`: the rest of an asynchronous save. `AsyncCallsQueue`: finalizes requests in order, on all ranks alike.

A local save ends with its engine's future. The function of a foreign request runs in a thread, which ends one.
"""

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
from concurrent.futures import Future, InvalidStateError
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.util import Finalize
from typing import Any, NamedTuple

from ml_flashpoint.format.arguments import ignored
from ml_flashpoint.format.errors import InvalidArgumentError
from ml_flashpoint.format.knobs import call_deadline_s, seal_deadline_s
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
            raise CallOrderError(
                "nothing can be added to a frozen AsyncRequest", hint="add finalizations before scheduling it"
            )
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
        """Do all of it now. Collective: finalizations follow once all ranks have run ``async_fn``.

        Raises:
            CheckpointingException: it failed on this or another rank; nothing was finalized.
        """
        error: Exception | None = None
        try:
            self.bound()()
        except Exception as caught:
            error = caught
        if not rank_group().all_ok(error is None):
            failed = error or "on another rank; its own error says why"
            raise CheckpointingException(f"the request failed: {failed}", rank=rank_group().rank) from error
        self.execute_finalize_fns()

    def execute_finalize_fns(self, validate_matching_call_idx: bool = True) -> int:
        """Call the finalizations, and return ``call_idx``. Collective if they are.

        Args:
            validate_matching_call_idx: check that all ranks finalize the same call.

        Raises:
            CallOrderError: ranks are at different calls; nothing was finalized.
        """
        ranks = rank_group()
        if validate_matching_call_idx and len(set(ranks.gather(str(self.call_idx).encode()))) > 1:
            raise CallOrderError(
                f"ranks finalize different calls: {self.call_idx} here",
                rank=ranks.rank,
                hint="schedule and finalize the same requests on all ranks",
            )
        for finalize in self.finalize_fns or ():
            finalize()
        return self.call_idx


class BackgroundSave:
    """The ``async_fn`` of a local save, which the trainer's own engine commits.

    Called, it waits until the save has ended: here, or in a process that another queue forked or pickled it to.
    """

    def __init__(self, ended: Future[Any]) -> None:
        self._ended = ended
        self._process = os.getpid()
        # Another process opens the pipe by this one's descriptor of it. There is something to read once the save ends.
        self._pipe, write_end = os.pipe()
        weakref.finalize(self, os.close, self._pipe)
        ended.add_done_callback(partial(_announce, write_end))

    @property
    def future(self) -> Future[Any] | None:
        """Return the future of the save if this process makes it."""
        return self._ended if os.getpid() == self._process else None

    def __call__(self) -> None:
        """Wait for the end, well or not: finalizing the request tells which."""
        if self.future is not None:
            self.future.exception()
        else:
            _await_end(self._process, self._pipe)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (_await_end, self._process, self._pipe)


def _announce(write_end: int, _: Future[Any]) -> None:
    with contextlib.suppress(OSError):  # nobody can read from it any more
        os.write(write_end, b".")
    os.close(write_end)


def _await_end(trainer: int, pipe: int) -> None:
    """Wait until a save of another process has ended, or that process has."""
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:  # the process is gone, or its request is
        alive = os.pidfd_open(trainer)
        stack.callback(os.close, alive)
        ended = os.open(f"/proc/{trainer}/fd/{pipe}", os.O_RDONLY | os.O_NONBLOCK)
        stack.callback(os.close, ended)
        wait([alive, ended], timeout=seal_deadline_s())


class AsyncCallsQueue:
    """Requests under way, in order. Not thread-safe: it belongs to the training thread.

    Scheduling, finalizing and closing are collective. Functions of foreign requests run in threads of this process.

    Args:
        is_daemon: if this process ends without `close`, do not wait for requests. Else they may end, within
            ``FLASHPOINT_CALL_DEADLINE_S`` each. Either way an error is logged for each, since nobody finalizes it.
        persistent, cpu_priority, io_priority, sigterm_timeout, cpu_shm_mode: accepted, and ignored: there is no worker
            process.
    """

    def __init__(
        self,
        persistent: bool = True,
        is_daemon: bool = False,
        *,
        cpu_priority: int | None = None,
        io_priority: int | None = None,
        sigterm_timeout: float | None = None,
        cpu_shm_mode: bool | None = None,
    ) -> None:
        unused = {"cpu_priority": cpu_priority, "io_priority": io_priority}
        ignored("AsyncCallsQueue", **unused, sigterm_timeout=sigterm_timeout, cpu_shm_mode=cpu_shm_mode)
        self._is_daemon = is_daemon
        self._calls: deque[tuple[AsyncRequest, Future[Any]]] = deque()
        self._next_index = 0
        self._closed = False
        self._at_exit = Finalize(None, self._end_with_process, exitpriority=20)

    def schedule_async_request(self, async_request: AsyncRequest) -> int:
        """Start a request, and return its number. It is frozen from now on. One that cannot start, since ``preload_fn``
        fails for example, has failed: finalizing it raises.

        Args:
            async_request: ours, or another named tuple with the same fields.

        Raises:
            CallOrderError: the queue is closed, or there is something to preload and no second argument to take it.
            InvalidArgumentError: it is no request.
        """
        if self._closed:
            raise CallOrderError("the queue is closed", hint="make a new AsyncCallsQueue")
        try:
            request = AsyncRequest(**async_request._asdict())
        except (AttributeError, TypeError) as error:
            raise InvalidArgumentError(
                f"must be an AsyncRequest: {error}", argument="async_request", value=async_request
            ) from error
        request = request.freeze()._replace(call_idx=self._next_index)
        self._next_index += 1
        self._calls.append((request, _started(request)))
        return request.call_idx

    def maybe_finalize_async_calls(self, blocking: bool = False, no_dist: bool = False) -> list[int]:
        """Finalize the requests that have ended on all ranks, oldest first.

        Args:
            blocking: wait for all of them, up to ``FLASHPOINT_CALL_DEADLINE_S`` for each.
            no_dist: do not ask the other ranks: a request counts as ended when it has here.

        Returns:
            Their numbers.

        Raises:
            BackgroundWorkerError: a request failed, or did not end in time, on some rank. It is given up; younger ones
                stay in the queue.
            Exception: a finalization failed. Its request is given up, likewise.
        """
        finalized: list[int] = []
        while self._calls:
            (request, future), deadline_s = self._calls[0], call_deadline_s()
            give_up = time.monotonic() + deadline_s
            while not self._has_ended(future, _VOTE_S if blocking else 0.0, no_dist):
                if not blocking:
                    return finalized
                if time.monotonic() > give_up and not _is_local(request):
                    _fail(future, f"it has not ended within {deadline_s:.0f} s (FLASHPOINT_CALL_DEADLINE_S)")
            self._calls.popleft()
            self._check(request, future, no_dist)
            finalized.append(request.execute_finalize_fns(validate_matching_call_idx=not no_dist))
        return finalized

    def _has_ended(self, future: Future[Any], timeout_s: float, no_dist: bool) -> bool:
        """Return True if a call has ended here within so many seconds, and on all ranks."""
        futures.wait([future], timeout_s)
        return future.done() if no_dist else rank_group().all_ok(future.done())

    def _check(self, request: AsyncRequest, future: Future[Any], no_dist: bool) -> None:
        """Raise if a call has failed on some rank. Finalizing a local save tells its failure."""
        ranks, error = rank_group(), None if _is_local(request) else future.exception()
        failures = {ranks.rank: "" if error is None else str(error)}
        if not no_dist:
            blobs = ranks.gather(failures[ranks.rank].encode(errors="replace"))
            failures = {rank: blob.decode(errors="replace") for rank, blob in enumerate(blobs)}
        for rank, why in failures.items():
            if why:
                raise BackgroundWorkerError(f"asynchronous call {request.call_idx} failed: {why}", rank=rank)

    def get_num_unfinalized_calls(self) -> int:
        """Return the number of requests that are scheduled and not finalized."""
        return len(self._calls)

    def close(self, abort: bool = False) -> None:
        """Finalize everything. Safe to call twice.

        Args:
            abort: give up what is under way instead. Not collective.

        Raises:
            BackgroundWorkerError, Exception: see `maybe_finalize_async_calls`; the queue is closed nevertheless.
        """
        self._closed = True
        self._at_exit.cancel()
        try:
            if not abort:
                self.maybe_finalize_async_calls(blocking=True)
        finally:
            if self._calls:
                _log.warning("process %d gave up %d asynchronous calls", os.getpid(), len(self._calls))
            self._calls.clear()

    def _end_with_process(self) -> None:
        """Let requests end that nobody waits for, and log what became of them: nobody finalizes them."""
        for request, future in self._calls:
            futures.wait([future], 0 if self._is_daemon else call_deadline_s())
            error = future.exception() if future.done() else "it had not ended when the process did"
            if error is not None or not _is_local(request):
                outcome = "was not finalized" if error is None else f"failed: {error}"
                _log.error("the queue was not closed: asynchronous call %d %s", request.call_idx, outcome)


def _is_local(request: AsyncRequest) -> bool:
    return isinstance(request.async_fn, BackgroundSave)


def _started(request: AsyncRequest) -> Future[Any]:
    """Start what a request has to run. Return a future that ends with it."""
    if isinstance(request.async_fn, BackgroundSave) and request.async_fn.future is not None:
        return request.async_fn.future
    future: Future[Any] = Future()
    if request.async_fn is None:
        future.set_result(None)
    else:
        try:
            call = request.bound()
            threading.Thread(target=_run, args=(call, future), name="flashpoint-call", daemon=True).start()
        except CallOrderError:  # on all ranks
            raise
        except Exception as error:  # the other ranks, whose calls have begun, learn of it as they finalize the request
            _fail(future, f"{type(error).__name__}: {error}")
    return future


def _run(call: Callable[[], Any], future: Future[Any]) -> None:
    try:
        call()
    except BaseException as error:  # of whatever kind: finalizing the request tells it
        _fail(future, f"{type(error).__name__}: {error}")
    else:
        with contextlib.suppress(InvalidStateError):  # it was given up
            future.set_result(None)


def _fail(future: Future[Any], why: str) -> None:
    with contextlib.suppress(InvalidStateError):  # it has ended before
        future.set_exception(BackgroundWorkerError(why))
