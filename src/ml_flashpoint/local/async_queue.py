"""`AsyncRequest`: the rest of an asynchronous save. `AsyncCallsQueue`: finalizes requests in order, on all ranks alike.

A local save ends with its engine's future. The function of a foreign request runs in a process, whose answer ends one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from multiprocessing.util import Finalize
from typing import Any, NamedTuple

import torch.multiprocessing as multiprocessing

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
        async_fn: runs in the background; None for nothing.
        async_fn_args, async_fn_kwargs: its arguments.
        finalize_fns: called without arguments, in order and in the caller's thread, once ``async_fn`` is done on all
            ranks.
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
        """Have one more function called at the end, after those there.

        Raises:
            CallOrderError: the request is frozen: it was scheduled.
        """
        if self.is_frozen:
            raise CallOrderError(
                "nothing can be added to a frozen AsyncRequest", hint="add finalizations before scheduling it"
            )
        self.finalize_fns.append(fn)

    def freeze(self) -> AsyncRequest:
        """Return the same request, to which nothing can be added."""
        return self._replace(is_frozen=True)

    def bound(self) -> Callable[[], Any]:
        """Preload, and return a call of ``async_fn`` with its arguments, which programs may leave None.

        Raises:
            CallOrderError: there is something to preload, and no second argument to take it.
        """
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

    Called, it waits until the save has ended: here, in a process that a queue forked, or in one that it was pickled to.

    Args:
        ended: ends when the save does, by its deadline.
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


class _Worker:
    """A process that runs calls, one after the other: all that it is sent, or the one that it inherits by a fork.

    Args:
        inherited: None for a process that stays.
        daemon: end it with this process, whatever it is doing.
    """

    def __init__(self, inherited: Callable[[], Any] | None = None, *, daemon: bool = False) -> None:
        context: Any = multiprocessing.get_context("spawn" if inherited is None else "fork")
        self._pipe, remote = context.Pipe()
        self._process = context.Process(target=_work, args=(remote, inherited), daemon=daemon)
        self._process.start()
        remote.close()
        self.inherited: Future[None] = Future()
        self._awaited = deque([] if inherited is None else [self.inherited])  # the next answers end these
        self.ended = False

    def send(self, request: AsyncRequest) -> Future[None]:
        """Have the process run a request, which travels by pickle. Return its future once it has preloaded."""
        preloaded: Future[None] = Future()
        done: Future[None] = Future()
        pickled = ForkingPickler.dumps(tuple(request._replace(finalize_fns=[])))
        self._awaited += preloaded, done
        try:
            self._pipe.send_bytes(pickled)
        except OSError:
            self._note_end()
        deadline_s = call_deadline_s()
        if request.preload_fn is not None and not self.wait(preloaded, deadline_s):
            self.kill(f"it did not preload within {deadline_s:.0f} s")
        return done

    def wait(self, future: Future[None], timeout_s: float) -> bool:
        """Take answers until a future has ended, or for so many seconds. Return True if it has ended."""
        give_up = time.monotonic() + timeout_s
        while not future.done() and wait([self._pipe, self._process.sentinel], max(0.0, give_up - time.monotonic())):
            try:  # a process that has just ended may have answered before
                failure: Any = self._pipe.recv() if self._pipe.poll() else _ENDED
            except (EOFError, OSError):
                failure = _ENDED
            if failure == _ENDED:
                self._note_end()
            elif failure is None:
                self._awaited.popleft().set_result(None)
            else:
                self._awaited.popleft().set_exception(BackgroundWorkerError(failure))
        return future.done()

    def _note_end(self, why: str | None = None) -> None:
        self._join()
        code = self._process.exitcode
        ended = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"ended with exit code {code}"
        while self._awaited:
            self._awaited.popleft().set_exception(BackgroundWorkerError(why or f"its process {ended}"))

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
                self._pipe.send_bytes(_ENDED)
            self._join()


_ENDED = b""


def _work(pipe: Connection, inherited: Callable[[], Any] | None) -> None:
    """Answer a call by None or the text of its failure; a request that was sent twice, at first once it has
    preloaded."""
    with contextlib.suppress(EOFError, OSError):  # the trainer closes the pipe with its end
        if inherited is not None:
            pipe.send(_tried(inherited)[1])
            return
        for pickled in iter(pipe.recv_bytes, _ENDED):
            call, failure = _tried(lambda: AsyncRequest(*pickle.loads(pickled)).bound())  # noqa: B023 - called here
            pipe.send(failure)
            pipe.send(failure or _tried(call)[1])


def _tried(call: Callable[[], Any]) -> tuple[Any, str | None]:
    try:
        return call(), None
    except BaseException as error:  # of whatever kind: the process goes on
        return None, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"


class _Active(NamedTuple):
    """A request under way: the future that ends with it, and the process that runs it, None if it is this one."""

    request: AsyncRequest
    future: Future[Any]
    worker: _Worker | None

    def wait(self, timeout_s: float) -> bool:
        """Return True once it has ended, or False after so many seconds."""
        if self.worker is not None:
            return self.worker.wait(self.future, timeout_s)
        futures.wait([self.future], timeout_s)
        return self.future.done()

    def give_up(self, why: str) -> None:
        """End it now."""
        if self.worker is not None:
            self.worker.kill(why)


class AsyncCallsQueue:
    """Requests under way, in order. Not thread-safe: it belongs to the training thread.

    Scheduling, finalizing and closing are collective.

    Args:
        persistent: run foreign requests in one process that stays, to which they travel by pickle; else each in a
            process forked for it.
        is_daemon: end that process with this one, whatever it is doing. Else a process that ends without `close` lets
            requests end, within ``FLASHPOINT_CALL_DEADLINE_S`` each. Either way an error is logged for each of them,
            since nobody finalizes it.
        cpu_priority, io_priority, sigterm_timeout, cpu_shm_mode: accepted, and ignored: the trainer's own threads copy
            local saves.
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
        # Before multiprocessing joins its processes, and removes what tensors travel by.
        self._at_exit = Finalize(None, self._end_with_process, exitpriority=20)

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
        request = request.freeze()._replace(call_idx=self._next_index)
        self._next_index += 1
        self._calls.append(self._started(request))
        return request.call_idx

    def _started(self, request: AsyncRequest) -> _Active:
        function = request.async_fn
        if isinstance(function, BackgroundSave) and function.future is not None:
            return _Active(request, function.future, None)
        if function is None:
            ended: Future[None] = Future()
            ended.set_result(None)
            return _Active(request, ended, None)
        if not self.persistent:
            forked = _Worker(request.bound())
            return _Active(request, forked.inherited, forked)
        if self._worker is None or self._worker.ended:
            self._worker = _Worker(daemon=self.is_daemon)
        return _Active(request, self._worker.send(request), self._worker)

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
            active, deadline_s = self._calls[0], call_deadline_s()
            give_up = time.monotonic() + deadline_s
            while not self._has_ended(active, _VOTE_S if blocking else 0.0, no_dist):
                if not blocking:
                    return finalized
                if time.monotonic() > give_up:
                    active.give_up(f"it has not ended within {deadline_s:.0f} s (FLASHPOINT_CALL_DEADLINE_S)")
            self._calls.popleft()
            self._check(active, no_dist)
            finalized.append(active.request.execute_finalize_fns(validate_matching_call_idx=not no_dist))
        return finalized

    def _has_ended(self, active: _Active, timeout_s: float, no_dist: bool) -> bool:
        """Return True if a call has ended here within so many seconds, and on all ranks."""
        ended = active.wait(timeout_s)
        return ended if no_dist else rank_group().all_ok(ended)

    def _check(self, active: _Active, no_dist: bool) -> None:
        """Raise if a call has failed on some rank. Finalizing a local save tells its failure."""
        ranks, error = rank_group(), None if active.worker is None else active.future.exception()
        failures = {ranks.rank: "" if error is None else str(error)}
        if not no_dist:
            blobs = ranks.gather(failures[ranks.rank].encode(errors="replace"))
            failures = {rank: blob.decode(errors="replace") for rank, blob in enumerate(blobs)}
        for rank, why in failures.items():
            if why:
                raise BackgroundWorkerError(f"asynchronous call {active.request.call_idx} failed: {why}", rank=rank)

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
        self._at_exit.cancel()
        try:
            if not abort:
                self.maybe_finalize_async_calls(blocking=True)
        finally:
            for active in self._calls:
                active.give_up("the queue was closed")
            if self._calls:
                _log.warning("process %d gave up %d asynchronous calls", os.getpid(), len(self._calls))
            if self._worker is not None:
                self._worker.kill("the queue was closed") if abort or self._calls else self._worker.close()
            self._calls.clear()
            self._worker = None

    def _end_with_process(self) -> None:
        """Let requests end that nobody waits for, and log what became of them: nobody finalizes them."""
        for active in self._calls:
            ended = active.wait(0 if self.is_daemon else call_deadline_s())
            error = active.future.exception() if ended else "it had not ended when the process did"
            if error is not None or active.worker is not None:
                outcome = "was not finalized" if error is None else f"failed: {error}"
                _log.error("the queue was not closed: asynchronous call %d %s", active.request.call_idx, outcome)
        if self._worker is not None and not self.is_daemon:
            self._worker.close()
