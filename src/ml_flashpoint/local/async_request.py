"""`AsyncRequest`: the rest of an asynchronous save. Its fields are those of megatron-core's own request, so either
queue takes either request."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from multiprocessing.connection import wait
from typing import Any, NamedTuple

from ml_flashpoint.format.knobs import seal_deadline_s
from ml_flashpoint.local.errors import CallOrderError, CheckpointingException
from ml_flashpoint.ranks.rank_group import rank_group


class AsyncRequest(NamedTuple):
    """An asynchronous call and what follows it.

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

    def completed(self) -> AsyncRequest:
        """Return the same request, with nothing where programs leave None in place of arguments or finalizations."""
        return self._replace(
            async_fn_args=tuple(self.async_fn_args or ()),
            async_fn_kwargs=dict(self.async_fn_kwargs or {}),
            finalize_fns=self.finalize_fns if self.finalize_fns is not None else [],
        )

    def bound(self) -> Callable[[], Any]:
        """Preload, and return a call of ``async_fn`` with its arguments.

        Raises:
            CallOrderError: there is something to preload, and no second argument to take it.
        """
        request = self.completed()
        arguments = request.async_fn_args
        if self.preload_fn is not None:
            if len(arguments) < 2:
                raise CallOrderError("preload_fn needs a second argument of async_fn to replace")
            arguments = (arguments[0], self.preload_fn(), *arguments[2:])
        return partial(self.async_fn or _nothing, *arguments, **request.async_fn_kwargs)

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
        """Call the finalizations; collective if they are.

        Args:
            validate_matching_call_idx: check that all ranks finalize the same call.

        Returns:
            ``call_idx``.

        Raises:
            CallOrderError: ranks are at different calls; nothing was finalized.
        """
        if validate_matching_call_idx:
            # Before, not after them: no rank may be left alone in a collective when a finalization fails.
            ranks = rank_group()
            first = int(ranks.broadcast(str(self.call_idx).encode()))
            if not ranks.all_ok(first == self.call_idx):
                raise CallOrderError(
                    f"ranks finalize different calls: {self.call_idx} here, {first} on rank 0",
                    rank=ranks.rank,
                    hint="schedule and finalize the same requests on all ranks",
                )
        for finalize in self.finalize_fns or ():
            finalize()
        return self.call_idx


def _nothing(*_: Any, **__: Any) -> None:
    """Stand for an ``async_fn`` that is None."""


class BackgroundSave:
    """An ``async_fn`` of a local save, which the trainer's own engine commits.

    Called, it waits until the save has ended: here, in a process that a queue forked, or in one that it was pickled to.

    Args:
        ended: ends when the save does, by its deadline.

    Attributes:
        future: the same, in the process that saves; None in another one.
    """

    def __init__(self, ended: Future[Any]) -> None:
        self._ended = ended
        self._process = os.getpid()
        # Another process reaches the pipe by this one's descriptor of it. It can be read from once the save has ended.
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
    opened: list[int] = []
    try:
        opened.append(os.pidfd_open(trainer))
        opened.append(os.open(f"/proc/{trainer}/fd/{pipe}", os.O_RDONLY | os.O_NONBLOCK))
        wait(opened, timeout=seal_deadline_s())
    except OSError:
        pass  # the process is gone, or its request is
    finally:
        for each in opened:
            os.close(each)
