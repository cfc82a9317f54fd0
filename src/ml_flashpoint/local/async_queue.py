"""`AsyncCallsQueue`: finalizes requests in order, on all ranks alike, once their futures have ended.

A local save has its engine's future. A foreign request runs in a process, whose answer ends its future.
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
from collections.abc import Callable, Iterable
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from multiprocessing.util import Finalize
from typing import Any

import torch.multiprocessing as multiprocessing

from ml_flashpoint.format.arguments import ignored
from ml_flashpoint.format.errors import InvalidArgumentError
from ml_flashpoint.format.knobs import call_deadline_s, exit_deadline_s
from ml_flashpoint.local.async_request import AsyncRequest, BackgroundSave
from ml_flashpoint.local.errors import BackgroundWorkerError, CallOrderError
from ml_flashpoint.ranks.rank_group import rank_group

_log = logging.getLogger(__name__)
_VOTE_S = 1.0
"""A blocking wait asks the other ranks this often: those that are done must not wait beyond a collective's deadline."""


class _Process:
    """A process that runs calls, one after the other: all that it is sent, or the one that it inherits by a fork.

    Args:
        inherited: number and call; None for a process that stays.
        daemon: end it with this process, whatever it is doing.
    """

    def __init__(self, *, inherited: tuple[int, Callable[[], Any]] | None = None, daemon: bool = False) -> None:
        context: Any = multiprocessing.get_context("spawn" if inherited is None else "fork")
        self._pipe, remote = context.Pipe()
        self._process = context.Process(target=_work, args=(remote, inherited), daemon=daemon)
        self._process.start()
        remote.close()
        self.inherited: Future[None] = Future()
        self._calls = {} if inherited is None else {inherited[0]: self.inherited}
        self._preloaded = -1
        self.ended = False

    def send(self, request: AsyncRequest) -> Future[None]:
        """Have the process run a request, which travels by pickle. Return its future once it has preloaded."""
        index, deadline_s = request.call_idx, call_deadline_s()
        future: Future[None] = Future()
        self._calls[index] = future
        # Pickled apart, so that the process can answer even if it cannot unpickle the request.
        pickled = bytes(ForkingPickler.dumps(tuple(request._replace(finalize_fns=[]))))
        try:
            self._pipe.send((index, pickled))
        except OSError:
            self._note_end()
        if request.preload_fn is not None:
            self.receive(lambda: self._preloaded >= index or future.done(), deadline_s)
            if not (self._preloaded >= index or future.done()):
                self.kill(f"it did not preload within {deadline_s:.0f} s")
        return future

    def receive(self, ready: Callable[[], bool], timeout_s: float) -> None:
        """Take answers until ``ready`` is true, or for so many seconds."""
        give_up = time.monotonic() + timeout_s
        while not ready() and wait([self._pipe, self._process.sentinel], max(0.0, give_up - time.monotonic())):
            try:
                # A process that has just ended may have answered before.
                kind, index, failure = self._pipe.recv() if self._pipe.poll() else (None, -1, None)
            except (EOFError, OSError):
                kind = None
            if kind is None:
                self._note_end()
            elif kind == "preloaded":
                self._preloaded = index
            elif failure is None:
                self._calls.pop(index).set_result(None)
            else:
                self._calls.pop(index).set_exception(BackgroundWorkerError(failure))

    def _note_end(self, why: str | None = None) -> None:
        self._join()
        code = self._process.exitcode
        ended = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"ended with exit code {code}"
        while self._calls:
            self._calls.popitem()[1].set_exception(BackgroundWorkerError(why or f"its process {ended}"))

    def _join(self) -> None:
        self._process.join(exit_deadline_s())
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join(exit_deadline_s())
        self._pipe.close()
        self.ended = True

    def kill(self, why: str) -> None:
        """End the process now. The calls that have not ended fail for this reason."""
        if not self.ended:
            self._process.kill()
            self._note_end(why)

    def close(self) -> None:
        """End the process after what it was sent."""
        if not self.ended:
            with contextlib.suppress(OSError):
                self._pipe.send(None)
            self._join()


def _work(pipe: Connection, inherited: tuple[int, Callable[[], Any]] | None) -> None:
    # The process must not outlive its trainer, which closes the pipe with its end.
    with contextlib.suppress(EOFError, OSError):
        sent: Iterable[tuple[int, Any]] = iter(pipe.recv, None) if inherited is None else [inherited]
        for index, call in sent:
            failure: str | None = None
            doing = "reading its request"
            try:
                if inherited is None:
                    request = AsyncRequest(*pickle.loads(call))
                    doing = "preloading"
                    call = request.bound()
                    pipe.send(("preloaded", index, None))
                doing = ""
                call()
            except BaseException as error:
                failure = f"{doing and doing + ': '}{type(error).__name__}: {error}\n{traceback.format_exc()}"
            pipe.send(("done", index, failure))


@dataclass(frozen=True, slots=True)
class _Active:
    """A request under way.

    Attributes:
        future: ends with it. process: that runs it; None if this process does.
    """

    index: int
    request: AsyncRequest
    future: Future[Any]
    process: _Process | None

    def wait(self, timeout_s: float) -> bool:
        """Return True once it has ended, or False after so many seconds."""
        if self.process is not None:
            self.process.receive(self.future.done, timeout_s)
        else:
            futures.wait([self.future], timeout_s)
        return self.future.done()

    def give_up(self, why: str) -> None:
        """End it now."""
        if self.process is not None:
            self.process.kill(why)


class AsyncCallsQueue:
    """Requests under way, in order. Not thread-safe: it belongs to the training thread.

    Scheduling, finalizing and closing are collective.

    Args:
        persistent: run foreign requests in one process that stays, to which they travel by pickle; else each in a
            process forked for it.
        is_daemon: end that process with this one, whatever it is doing. Else a process that ends without `close` lets
            requests end, within ``FLASHPOINT_CALL_DEADLINE_S`` each. Either way an error is logged for each of them,
            since nobody finalizes it; the exit code of the process is what it would have been. `close` raises.
        cpu_priority, io_priority, sigterm_timeout, cpu_shm_mode: accepted for callers that pass them, and ignored: the
            trainer's own threads copy local saves.
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
        self._process: _Process | None = None
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
        self._calls.append(_Active(index, request, *self._start(request)))
        return index

    def _start(self, request: AsyncRequest) -> tuple[Future[Any], _Process | None]:
        if self._at_exit is None:
            # Before multiprocessing joins its processes, and removes what tensors travel by.
            self._at_exit = Finalize(None, self._end_with_process, exitpriority=20)
        function, index = request.async_fn, request.call_idx
        if isinstance(function, BackgroundSave) and function.future is not None:
            return function.future, None
        if function is None:
            ended: Future[Any] = Future()
            ended.set_result(None)
            return ended, None
        if not self.persistent:
            forked = _Process(inherited=(index, request.bound()))
            return forked.inherited, forked
        if self._process is None or self._process.ended:
            self._process = _Process(daemon=self.is_daemon)
        return self._process.send(request), self._process

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
            deadline_s = call_deadline_s()
            give_up = time.monotonic() + deadline_s
            while not self._has_ended(active, _VOTE_S if blocking else 0.0, no_dist):
                if not blocking:
                    return finalized
                if time.monotonic() > give_up:
                    active.give_up(f"it has not ended within {deadline_s:.0f} s (FLASHPOINT_CALL_DEADLINE_S)")
            self._calls.popleft()
            self._check(active, no_dist)
            active.request.execute_finalize_fns(validate_matching_call_idx=not no_dist)
            finalized.append(active.index)
        return finalized

    def _has_ended(self, active: _Active, timeout_s: float, no_dist: bool) -> bool:
        """Return True if a call has ended here within so many seconds, and on all ranks."""
        ended = active.wait(timeout_s)
        return ended if no_dist else rank_group().all_ok(ended)

    def _check(self, active: _Active, no_dist: bool) -> None:
        """Raise if a call has failed on some rank. Finalizing a local save tells its failure."""
        error = None if active.process is None else active.future.exception()
        failure, ranks = "" if error is None else str(error), rank_group()
        gathered = {ranks.rank: failure}
        if not no_dist:
            blobs = ranks.gather(failure.encode(errors="replace"))
            gathered = {rank: blob.decode(errors="replace") for rank, blob in enumerate(blobs)}
        for rank, why in gathered.items():
            if why:
                raise BackgroundWorkerError(f"asynchronous call {active.index} failed: {why}", rank=rank)

    def _end_with_process(self) -> None:
        """Let requests end that nobody waits for, and log what became of them: nobody finalizes them."""
        for active in self._calls:
            ended = active.wait(0 if self.is_daemon else call_deadline_s())
            error = active.future.exception() if ended else "it had not ended when the process did"
            if error is not None or active.process is not None:
                outcome = "was not finalized" if error is None else f"failed: {error}"
                _log.error("the queue was not closed: asynchronous call %d %s", active.index, outcome)
        if self._process is not None and not self.is_daemon:
            self._process.close()

    def get_num_unfinalized_calls(self) -> int:
        """Return the number of requests that are scheduled and not finalized."""
        return len(self._calls)

    def close(self, abort: bool = False) -> None:
        """Finalize everything and end the processes. Safe to call twice.

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
                active.give_up("the queue was closed")
            if self._calls:
                _log.warning("process %d gave up %d asynchronous calls", os.getpid(), len(self._calls))
            if self._process is not None:
                self._process.kill("the queue was closed") if abort or self._calls else self._process.close()
            self._calls.clear()
            self._process = None
