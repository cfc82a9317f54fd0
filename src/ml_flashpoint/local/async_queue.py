"""`AsyncCallsQueue`: runs requests in the background and finalizes them in order, on all ranks alike.

Owns the processes that foreign requests run in, and notices when one of them fails or dies. A local save needs none:
it is under way in the trainer's own background threads when its request is scheduled.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from multiprocessing.util import Finalize
from typing import Any, Protocol

import torch.multiprocessing as multiprocessing

from ml_flashpoint.format.arguments import ignored
from ml_flashpoint.format.errors import InvalidArgumentError
from ml_flashpoint.format.knobs import call_deadline_s, exit_deadline_s
from ml_flashpoint.local.async_request import AsyncRequest, BackgroundSave
from ml_flashpoint.local.errors import BackgroundWorkerError, CallOrderError
from ml_flashpoint.ranks.rank_group import rank_group

_log = logging.getLogger(__name__)
# A blocking wait asks the others this often: ranks that are done must not wait for one that is not beyond the deadline
# of a collective.
_VOTE_S = 1.0


class _Call(Protocol):
    """A request that runs."""

    def is_done(self) -> bool:
        """Whether it has ended, well or not."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Return when it has ended, or after so many seconds."""
        ...

    def failure(self) -> str | None:
        """Why it failed, once it has ended; None if it did not."""
        ...

    def abort(self) -> None:
        """End it now."""
        ...


class _Nothing:
    """A request without anything to run, or a local save, which tells of its failure when it is finalized."""

    def __init__(self, save: BackgroundSave | None = None) -> None:
        self._save = save

    def is_done(self) -> bool:
        return self._save is None or self._save.ended

    def wait(self, timeout_s: float) -> None:
        if self._save is not None:
            self._save.wait(timeout_s)

    def failure(self) -> str | None:
        return None

    def abort(self) -> None: ...

    def untold(self) -> str | None:
        """Why a save failed, which finalizing its request would have raised."""
        return None if self._save is None or self._save.error is None else str(self._save.error)


class _ForkedCall:
    """A request in a process of its own, forked from this one, so that nothing of it has to be picklable."""

    def __init__(self, request: AsyncRequest) -> None:
        arguments = request.resolved_args()
        context = multiprocessing.get_context("fork")
        self._pipe, remote = context.Pipe(duplex=False)
        assert request.async_fn is not None
        self._process = context.Process(
            target=_run_forked, args=(remote, request.async_fn, arguments, request.async_fn_kwargs)
        )
        self._process.start()
        remote.close()
        self._ended = False
        self._failure: str | None = None

    def is_done(self) -> bool:
        self.wait(0)
        return self._ended

    def wait(self, timeout_s: float) -> None:
        if not self._ended and wait([self._process.sentinel, self._pipe], timeout=timeout_s):
            self._end()

    def _end(self) -> None:
        report = None
        with contextlib.suppress(EOFError, OSError):
            report = self._pipe.recv() if self._pipe.poll() else None
        _join(self._process)
        self._failure = report[0] if report is not None else f"its process {_how_it_ended(self._process.exitcode)}"
        self._pipe.close()
        self._ended = True

    def failure(self) -> str | None:
        return self._failure

    def abort(self) -> None:
        if not self._ended:
            self._process.kill()
            self._process.join()


def _run_forked(pipe: Connection, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    pipe.send((_failure_of(function, args, kwargs),))
    pipe.close()


def _failure_of(function: Callable[..., Any], args: Any, kwargs: Any) -> str | None:
    try:
        function(*args, **kwargs)
    except BaseException as error:
        return f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
    return None


def _join(process: BaseProcess) -> None:
    """Wait for a process that has nothing left to do, and kill it if it does not end."""
    process.join(exit_deadline_s())
    if process.exitcode is None:
        process.kill()
        process.join(exit_deadline_s())


def _how_it_ended(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


class _Worker:
    """A process that runs one request after the other. Requests travel by pickle.

    Args:
        is_daemon: end it with this process, whatever it is doing.
    """

    def __init__(self, is_daemon: bool) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, remote = context.Pipe()
        self._process = context.Process(target=_work, args=(remote,), daemon=is_daemon)
        self._process.start()
        remote.close()
        self._answers: dict[int, str | None] = {}
        self._preloaded: set[int] = set()
        self.ended = False
        # Before a process that exits waits for its children, this one is told to end, if nobody has closed it.
        self._at_exit = Finalize(None, _send_end, args=(self._pipe,), exitpriority=10)

    def submit(self, request: AsyncRequest) -> None:
        """Send a request; returns when it has preloaded.

        Raises:
            BackgroundWorkerError: the process is gone, or did not preload in time.
        """
        # Pickled apart, so that the worker can tell of a request that it cannot unpickle.
        pickled = bytes(ForkingPickler.dumps(tuple(request._replace(finalize_fns=[]))))
        index, deadline_s = request.call_idx, call_deadline_s()
        try:
            self._pipe.send((index, pickled))
        except OSError as error:
            self._note_end()
            raise BackgroundWorkerError(f"the worker process is gone: {error}") from error
        if request.preload_fn is not None:
            self._receive_until(lambda: index in self._preloaded or index in self._answers, deadline_s)
            if not (index in self._preloaded or index in self._answers or self.ended):
                self.close(abort=True)
                raise BackgroundWorkerError(f"asynchronous call {index} did not preload within {deadline_s:.0f} s")

    def answered(self, index: int, timeout_s: float) -> bool:
        """Whether a request has ended, or the process has, within so many seconds."""
        self._receive_until(lambda: index in self._answers, timeout_s)
        return index in self._answers or self.ended

    def take(self, index: int) -> str | None:
        """Why a request that has ended failed; None if it did not."""
        return self._answers.pop(index, f"its worker process {_how_it_ended(self._process.exitcode)}")

    def _receive_until(self, ready: Callable[[], bool], timeout_s: float) -> None:
        give_up = time.monotonic() + timeout_s
        while not ready() and not self.ended:
            found = wait([self._pipe, self._process.sentinel], timeout=max(0.0, give_up - time.monotonic()))
            if not found:
                return
            # A process that has just ended may have answered before.
            if self._pipe in found or self._pipe.poll():
                try:
                    kind, index, failure = self._pipe.recv()
                except (EOFError, OSError):
                    self._note_end()
                    return
                if kind == "preloaded":
                    self._preloaded.add(index)
                else:
                    self._answers[index] = failure
            else:
                self._note_end()

    def _note_end(self) -> None:
        _join(self._process)
        self._at_exit.cancel()
        self.ended = True

    def close(self, *, abort: bool) -> None:
        """End the process, after what it was sent unless ``abort``."""
        if self.ended:
            return
        if abort:
            self._process.kill()
        self._at_exit()
        _join(self._process)
        self._pipe.close()
        self.ended = True


def _send_end(pipe: Connection) -> None:
    with contextlib.suppress(OSError):
        pipe.send(None)


def _work(pipe: Connection) -> None:
    # A worker must not outlive its trainer: that closes the pipe with its end.
    with contextlib.suppress(EOFError, OSError):
        while (sent := pipe.recv()) is not None:
            index, pickled = sent
            failure: str | None = None
            try:
                request = AsyncRequest(*pickle.loads(pickled))
            except BaseException as error:
                failure = f"it could not be unpickled: {type(error).__name__}: {error}"
            else:
                try:
                    arguments = request.resolved_args()
                except BaseException as error:
                    failure = f"preloading failed: {type(error).__name__}: {error}"
                else:
                    pipe.send(("preloaded", index, None))
                    assert request.async_fn is not None
                    failure = _failure_of(request.async_fn, arguments, request.async_fn_kwargs)
            pipe.send(("done", index, failure))


class _SentCall:
    """A request at a worker."""

    def __init__(self, worker: _Worker, request: AsyncRequest) -> None:
        self._worker = worker
        self._index = request.call_idx
        worker.submit(request)

    def is_done(self) -> bool:
        return self._worker.answered(self._index, 0)

    def wait(self, timeout_s: float) -> None:
        self._worker.answered(self._index, timeout_s)

    def failure(self) -> str | None:
        return self._worker.take(self._index)

    def abort(self) -> None:
        self._worker.close(abort=True)


@dataclass(frozen=True, slots=True)
class _Active:
    index: int
    request: AsyncRequest
    call: _Call


class AsyncCallsQueue:
    """Requests under way, in order. Not thread-safe: it belongs to the training thread.

    Scheduling, finalizing and closing are collective.

    Args:
        persistent: run foreign requests in one process that stays, to which they travel by pickle; else each in a
            process forked for it.
        is_daemon: end that process with this one, whatever it is doing. Else a process that ends without `close` lets
            requests end, within ``FLASHPOINT_CALL_DEADLINE_S`` each. Either way an error is logged for each of them,
            since nobody finalizes it; the exit code of the process is what it would have been. `close` raises.
        cpu_priority, io_priority, sigterm_timeout, cpu_shm_mode: accepted for callers that pass them, and ignored: what
            is saved here is copied in the trainer's own threads.
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
        self.persistent = persistent
        self.is_daemon = is_daemon
        self._calls: deque[_Active] = deque()
        self._next_index = 0
        self._worker: _Worker | None = None
        self._closed = False
        self._at_exit: Finalize | None = None

    def schedule_async_request(self, async_request: AsyncRequest) -> int:
        """Start a request, and return its number. It is frozen from now on.

        Args:
            async_request: ours, or another named tuple with the same fields.

        Raises:
            CallOrderError: the queue is closed.
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
        index = self._next_index
        self._next_index += 1
        request = request.completed().freeze()._replace(call_idx=index)
        self._calls.append(_Active(index, request, self._start(request)))
        return index

    def _start(self, request: AsyncRequest) -> _Call:
        function = request.async_fn
        if function is None:
            return _Nothing()
        if self._at_exit is None:
            # Before the workers are told to end, and before what tensors travel by is taken away.
            self._at_exit = Finalize(None, self._end_with_process, exitpriority=20)
        if isinstance(function, BackgroundSave) and function.runs_here:
            return _Nothing(function)
        if not self.persistent:
            return _ForkedCall(request)
        if self._worker is None or self._worker.ended:
            self._worker = _Worker(self.is_daemon)
        return _SentCall(self._worker, request)

    def maybe_finalize_async_calls(self, blocking: bool = False, no_dist: bool = False) -> list[int]:
        """Finalize the requests that have ended on all ranks, oldest first.

        Args:
            blocking: wait for all of them, up to ``FLASHPOINT_CALL_DEADLINE_S`` for each.
            no_dist: do not ask the other ranks: a request counts as ended when it has here.

        Returns:
            Their numbers.

        Raises:
            BackgroundWorkerError: a request failed, its process died, or it did not end in time, on some rank. It is
                given up; younger ones stay in the queue.
            Exception: a finalization failed. Its request is given up, likewise.
        """
        finalized: list[int] = []
        while self._calls:
            active = self._calls[0]
            give_up = time.monotonic() + call_deadline_s()
            while not self._is_done(active, _VOTE_S if blocking else 0.0, no_dist):
                if not blocking:
                    return finalized
                self._check_time(active, give_up, no_dist)
            self._calls.popleft()
            self._check(active, no_dist)
            active.request.execute_finalize_fns(validate_matching_call_idx=not no_dist)
            finalized.append(active.index)
        return finalized

    def _is_done(self, active: _Active, timeout_s: float, no_dist: bool) -> bool:
        """Whether a call has ended, here within so many seconds, and on all ranks."""
        active.call.wait(timeout_s)
        done = active.call.is_done()
        return done if no_dist else rank_group().all_ok(done)

    def _check_time(self, active: _Active, give_up: float, no_dist: bool) -> None:
        """Give a call up, on all ranks, once its time is over on one."""
        in_time = time.monotonic() < give_up
        if in_time if no_dist else rank_group().all_ok(in_time):
            return
        self._calls.popleft()
        active.call.abort()
        raise BackgroundWorkerError(
            f"asynchronous call {active.index} has not ended within {call_deadline_s():.0f} s and is given up",
            rank=rank_group().rank,
            hint="FLASHPOINT_CALL_DEADLINE_S sets the time that a call may take",
        )

    def _check(self, active: _Active, no_dist: bool) -> None:
        failure = active.call.failure()
        ranks = rank_group()
        failures = {ranks.rank: failure} if failure is not None else {}
        if not no_dist:
            gathered = ranks.gather(b"" if failure is None else failure.encode(errors="replace"))
            failures = {rank: blob.decode(errors="replace") for rank, blob in enumerate(gathered) if blob}
        for rank, why in failures.items():
            raise BackgroundWorkerError(f"asynchronous call {active.index} failed: {why}", rank=rank)

    def _end_with_process(self) -> None:
        """Let requests end that nobody waits for, and say what became of them: nobody else will."""
        for active in self._calls:
            active.call.wait(0 if self.is_daemon else call_deadline_s())
            if isinstance(active.call, _Nothing):
                if (why := active.call.untold()) is not None:
                    _log.error("the queue was not closed: asynchronous call %d failed: %s", active.index, why)
                continue
            failure = active.call.failure() if active.call.is_done() else "it had not ended when the process did"
            outcome = "was not finalized" if failure is None else f"failed: {failure}"
            _log.error("the queue was not closed: asynchronous call %d %s", active.index, outcome)

    def get_num_unfinalized_calls(self) -> int:
        """How many requests are scheduled and not finalized."""
        return len(self._calls)

    def close(self, abort: bool = False) -> None:
        """Finalize everything and end the processes. Idempotent.

        Args:
            abort: give up what is under way instead. Not collective.

        Raises:
            BackgroundWorkerError, Exception: see `maybe_finalize_async_calls`; the queue is closed nevertheless.
        """
        self._closed = True
        if self._at_exit is not None:
            self._at_exit.cancel()
        try:
            if not abort:
                self.maybe_finalize_async_calls(blocking=True)
        finally:
            for active in self._calls:
                active.call.abort()
            given_up = len(self._calls)
            self._calls.clear()
            if self._worker is not None and not self._worker.ended:
                self._worker.close(abort=abort or given_up > 0)
            self._worker = None
            if given_up:
                _log.warning("process %d gave up %d asynchronous calls", os.getpid(), given_up)
