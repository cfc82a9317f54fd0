"""`AsyncRequest`: what is left to do of an asynchronous save, and how it is done.

Owns the request and its life: schedule, run, finalize once. Its fields are those of megatron-core's own request, so
either queue takes either request. Running requests in the background is `async_queue`'s.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from ml_flashpoint.core.save import Save
from ml_flashpoint.core.saving_process import Ticket
from ml_flashpoint.format.knobs import collective_deadline_s, seal_deadline_s
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
        """The same request, to which nothing can be added."""
        return self._replace(is_frozen=True)

    def completed(self) -> AsyncRequest:
        """The same request, with nothing where programs leave None in place of arguments or finalizations."""
        return self._replace(
            async_fn_args=tuple(self.async_fn_args or ()),
            async_fn_kwargs=dict(self.async_fn_kwargs or {}),
            finalize_fns=self.finalize_fns if self.finalize_fns is not None else [],
        )

    def resolved_args(self) -> tuple[Any, ...]:
        """The arguments of ``async_fn``, after preloading.

        Raises:
            CallOrderError: there is something to preload, and no second argument to take it.
        """
        if self.preload_fn is None:
            return tuple(self.async_fn_args or ())
        if len(self.async_fn_args or ()) < 2:
            raise CallOrderError("preload_fn needs a second argument of async_fn to replace")
        first, _, *rest = self.async_fn_args
        return (first, self.preload_fn(), *rest)

    def execute_sync(self) -> None:
        """Do all of it now. Collective: finalizations follow once all ranks have run ``async_fn``.

        Raises:
            CheckpointingException: it failed on this or another rank; nothing was finalized.
        """
        error: Exception | None = None
        try:
            if self.async_fn is not None:
                self.async_fn(*self.resolved_args(), **(self.async_fn_kwargs or {}))
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


class BackgroundSave:
    """The ``async_fn`` of a local save, which needs nobody to run it: the trainer's background threads do the work.

    Called, it waits for the end of the save: here, in a process that a queue forked, or in one that it was sent to.

    Args:
        save: the save.
        ticket: leads another process to it; None if the save has ended.
    """

    def __init__(self, save: Save, ticket: Ticket | None) -> None:
        self._save = save
        self._ticket = ticket
        self._process = os.getpid()
        # Longer than the engine lets any save take, so only a background thread that is lost makes it come to this.
        self._give_up = time.monotonic() + seal_deadline_s() + collective_deadline_s()

    @property
    def runs_here(self) -> bool:
        """Whether this process is the one that saves."""
        return os.getpid() == self._process

    @property
    def ended(self) -> bool:
        """Whether the save has ended, well or not, or should have."""
        return self._save.finished.is_set() or time.monotonic() > self._give_up

    @property
    def error(self) -> BaseException | None:
        """Why the save failed here, as far as that is known; finalizing the request tells it on all ranks."""
        return self._save.error

    def wait(self, timeout_s: float = float("inf")) -> None:
        """Wait for the end, in the process that saves, for so many seconds at most; never for ever."""
        self._save.finished.wait(max(0.0, min(timeout_s, self._give_up - time.monotonic())))

    def __call__(self) -> None:
        """Wait for the end, in any process."""
        if self.runs_here:
            self.wait()
        else:
            _await_end(self._ticket)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (_await_end, self._ticket)


def _await_end(ticket: Ticket | None) -> None:
    if ticket is not None:
        ticket.await_end()
