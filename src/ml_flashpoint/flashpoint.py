"""`Flashpoint`: a counter of steps, a schedule, and a policy for failed saves, over a `Checkpointer`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ml_flashpoint import events
from ml_flashpoint.checkpointer import Checkpointer
from ml_flashpoint.config import Config
from ml_flashpoint.data import LoaderBatches, Loaders, Loop, Through
from ml_flashpoint.engine.recovery import KeptVersion
from ml_flashpoint.format.arguments import (
    checked_base,
    checked_bool,
    checked_callable,
    checked_integer,
    checked_seconds,
)
from ml_flashpoint.format.errors import (
    FlashpointError,
    InvalidArgumentError,
    SaveError,
    SkippedError,
    text_of,
    without_frames,
)
from ml_flashpoint.format.knobs import exit_deadline_s
from ml_flashpoint.format.manifest import Manifest
from ml_flashpoint.format.names import MAX_STEP
from ml_flashpoint.ranks.rank_group import default_group, rank_group
from ml_flashpoint.state.tracked import Reshard, TrackedState, checked_reshard
from ml_flashpoint.status import Health

_log = logging.getLogger(__name__)


class Flashpoint:
    """Saves a training loop's state into memory every few steps, and restores it after a crash.

    ::

        with Flashpoint("/dev/shm/mlf-jobs/job-145", every_n_steps=1) as fp:   # after init_process_group, if any
            fp.track(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
            step = fp.resume()                                                # 0 when fresh
            for batch in fp.batches(loader):
                ...
                optimizer.step()
                fp.step()

    Construct it on all ranks, and save the same steps on all of them. Construction, `resume` and `versions` are
    collective. Call all methods from the training thread. The version of step n contains the state after n steps: all
    tracked objects, and the random number generators of Python, NumPy, torch and CUDA. A save returns once this state
    is copied. It waits for the other ranks only if the structure of the state has changed.

    Args:
        base: base container of the job on this node: an absolute path on a tmpfs. A restart must use the same path.
        every_n_steps: `step` saves at every multiple of this. `flashpoint plan` computes an interval for a job.
        strict: raise an error for a failed save, from the next `step`, `save`, `wait` or `close`. By default, failed
            saves are logged and counted in `health`, and training continues.
        discard_existing: first remove all versions in the base container, on all nodes. Do not use this in a script
            that is started again after a crash: it would remove the version to resume from.
        on_event: called with each `events.Event` of this base container from the end of the construction on, on a
            separate thread.
        config: all settings. Alternatively, pass some of these keywords: ``replication``, ``keep``, ``safe_globals``,
            ``overlap``, ``on_world_size_change``, ``deadline_s``, ``persist``, ``persist_every``, ``persist_keep``,
            ``persist_bytes_per_s``, ``handle_sigterm`` and ``grace_s``; see `Config.of`.

    Raises:
        InvalidArgumentError: an argument is invalid, or differs between ranks.
        JobInUseError: another live process uses the base container.
        FlashpointError: the base container cannot be used, or ranks cannot agree.
    """

    _tracked_type: type[TrackedState] = TrackedState  # an adapter whose state has another form has another one
    _watches_optimizers = True

    def __init__(
        self,
        base: str | os.PathLike[str],
        *,
        every_n_steps: int = 1,
        strict: bool = False,
        discard_existing: bool = False,
        on_event: Callable[[events.Event], object] | None = None,
        config: Config | None = None,
        **settings: Any,
    ) -> None:
        every_n_steps = checked_integer("every_n_steps", every_n_steps, 1)
        self._every, self._strict = every_n_steps, checked_bool("strict", strict)
        on_event = checked_callable("on_event", on_event, "of one event")
        if config is not None and settings:
            text = "must be all settings, without keywords for some of them"
            raise InvalidArgumentError(text, argument="config", value=config)
        config = config or Config.of(**settings)
        base = checked_base(base)
        self._world, self._ranks = default_group(), rank_group()
        self._ranks.agree_on(every_n_steps=every_n_steps)
        self._checkpointer = Checkpointer(base, config, discard_existing=discard_existing)
        self._loop = Loop()
        self._loaders = Loaders(self._loop)
        self._tracked = self._tracked_type(self._ranks.rank, self._ranks.world_size)
        self._tracking_ended = False
        self._told = False  # that saving works
        self._pending: list[tuple[int, Future[Manifest]]] = []  # saves that had not ended when they were looked at last
        self._failures = self._failures_in_a_row = 0
        self._last_error: str | None = None
        self._resumed_from: int | None = None
        if on_event is not None:
            self._checkpointer.subscribe(on_event)

    def _check(self, *, tracked: bool = True, saves: bool = False) -> None:
        """Raise if this cannot be used now: at all, for what is tracked, or to save."""
        if saves:
            self._checkpointer.answer_sigterm()
        self._checkpointer.check_usable()
        if default_group() is not self._world:
            text = "torch.distributed was initialized or destroyed since this Flashpoint was constructed"
            hint = "construct it after init_process_group, and close it before destroy_process_group"
            raise FlashpointError(text, rank=self._ranks.rank, hint=hint)
        if tracked and not self._tracking_ended:
            if not self._tracked.names:
                raise FlashpointError("nothing is tracked", hint="call track(model=..., optimizer=...) first")
            self._tracking_ended = True
        if saves:
            hint = "call resume() before the first step, or construct with discard_existing=True"
            self._checkpointer.check_usable("resume()", hint=hint)

    # ---- what is saved ------------------------------------------------------------------------------------

    def track(self, /, *, reshard: Reshard | Mapping[str, Reshard] | None = None, **named: object) -> Flashpoint:
        """Add objects to save and restore. Call it before `resume` and the first save. Return this object.

        Modules and optimizers are saved by shards, and can be loaded by another number of ranks. The state of any
        other object belongs to one rank; see `Config.on_world_size_change`.

        Args:
            reshard: for objects that are neither modules nor optimizers: ``reshard(states, rank, world_size)``, or a
                dict of such functions by name. Called on each rank when the number of ranks has changed. ``states`` is
                a list of the results of ``state_dict()`` on each rank that saved, in the order of ranks; None where the
                name was not tracked. The result is passed to ``load_state_dict()`` on this rank. `rest_of_epoch` is
                such a function for data loaders.
            named: objects with ``state_dict()`` and ``load_state_dict()``, by the names to save them under.

        Raises:
            FlashpointError: a name, an object or ``reshard`` is invalid, or `resume` or a save was called before.
        """
        self._check(tracked=False)
        if self._tracking_ended:
            text = "tracking ends with resume() or the first save: what is tracked later could not be restored"
            raise FlashpointError(text, rank=self._ranks.rank, hint="call track() before resume()")
        functions = checked_reshard(reshard, named)
        for name, value in named.items():
            self._tracked.add(name, self._loaders.tracked(name, value), functions.get(name))
            if isinstance(value, Optimizer) and self._watches_optimizers:
                self._checkpointer.overlap.watch(value)
        return self

    def batches(self, loader: DataLoader[Any], through: Through | None = None) -> LoaderBatches:
        """Return the batches of a tracked loader, from its current position. Each ``for`` loop is one pass.

        Args:
            through: a function that prefetches: it takes an iterable, and yields each of its batches once, in order.
        """
        return self._loaders.batches(loader, through)

    # ---- recovery -----------------------------------------------------------------------------------------

    def resume(self, fallback: Callable[[], int | None] | None = None, *, step: int | None = None) -> int:
        """Restore the newest version that all ranks can load, or the version of a step. Collective.

        Returns the number of steps done, 0 at a fresh start. May be called again during training, to go back. For the
        arguments and errors see `Checkpointer.load`.
        """
        self._check()
        recovery = self._checkpointer.load_tracked(self._tracked, step=step, fallback=fallback)
        self._loop.steps = recovery.step or 0
        self._resumed_from = None if recovery.version is None else self._loop.steps
        events.announce(_log, self._ranks.rank, "%s", recovery.in_words(str(self._checkpointer.base)))
        return self._loop.steps

    def versions(self) -> list[KeptVersion]:
        """Return the versions in memory that `resume` can load, newest save first. Collective."""
        self._check(tracked=False)
        return self._checkpointer.versions()

    # ---- saving -------------------------------------------------------------------------------------------

    def step(self) -> int:
        """Count a step, and save if a save is due. Call it after the optimizer's step. Return the number of steps done.

        If no slot is free, because earlier saves are still being copied, the save is skipped.

        Raises:
            UnaskedVersionsError: the base container has earlier versions, and `resume` was not called.
            FlashpointError: a save has failed (with ``strict`` only).
        """
        self._check(saves=True)
        self._loop.steps += 1
        if self._loop.steps % self._every == 0:
            self._save(self._loop.steps, explicit=False)
        self._report()
        return self._loop.steps

    def save(self, step: int | None = None) -> None:
        """Save now, regardless of the schedule. If no slot is free, wait until earlier saves are copied.

        Raises as `step` does.

        Args:
            step: step to save under; by default the number of steps done. See `Checkpointer.save`.
        """
        self._check(saves=True)
        step = self._loop.steps if step is None else checked_integer("step", step, 0, MAX_STEP)
        self._save(step, explicit=True)
        self._report()

    def before_update(self) -> None:
        """Let work that this thread launches on its devices from now on wait for the copy of the latest save.

        With ``overlap``, call it before code other than ``optimizer.step()`` changes tensors of a tracked optimizer.
        """
        self._checkpointer.overlap.before_update()

    def _save(self, step: int, *, explicit: bool) -> None:
        """Save. A save that fails is counted and logged, once it has ended."""
        committed: Future[Manifest]
        try:
            committed = self._checkpointer.save_tracked(step, self._tracked, explicit=explicit).committed
        except Exception as error:
            committed = Future()
            committed.set_exception(without_frames(error))
        self._pending.append((step, committed))

    def _report(self) -> None:
        """Count and log the saves that have ended. Raise the latest failure, once, if failures are to be raised."""
        status, failure = self._checkpointer.status, None
        if not self._told and status.committed is not None:
            self._told = True
            what = "first save committed: step %s, %.3g MB on this rank; it blocked training for %.3f s"
            events.announce(_log, self._ranks.rank, what, status.committed, status.part_bytes / 1e6, status.held_s)
        pending, self._pending = self._pending, []
        for step, committed in pending:
            if not committed.done():
                self._pending.append((step, committed))
            elif (error := committed.exception()) is None:
                if self._failures_in_a_row:
                    _log.warning("saves work again from step %d on", step)
                self._failures_in_a_row = 0
            elif not isinstance(error, SkippedError):
                is_typed = isinstance(error, FlashpointError)
                failure = error if is_typed else SaveError(text_of(error), step=step, rank=self._ranks.rank)
                self._failures += 1
                self._failures_in_a_row += 1
                self._last_error = str(failure)
                # A job that cannot save says so again and again, but not at every step.
                level = logging.ERROR if self._failures_in_a_row.bit_count() == 1 else logging.DEBUG
                text = "the save of step %s failed (%d in a row), training goes on: %s"
                _log.log(level, text, step, self._failures_in_a_row, self._last_error)
        if self._strict and failure is not None:
            raise failure

    def wait(self, deadline_s: float | None = None) -> bool:
        """Wait until every save is verified, has failed, or was superseded by a newer one. Return False after
        ``deadline_s`` seconds, by default those of the constructor. Raises as `step` does."""
        ended = self._checkpointer.wait(None if deadline_s is None else checked_seconds("deadline_s", deadline_s))
        self._report()
        return ended

    # ---- readings -----------------------------------------------------------------------------------------

    @property
    def steps_done(self) -> int:
        """Number of steps done, including those before `resume`."""
        return self._loop.steps

    @property
    def last_saved(self) -> int | None:
        """Step of the newest version committed on this rank, or resumed from; None if there is none."""
        saved = self._checkpointer.status.committed
        return self._resumed_from if saved is None else saved

    @property
    def last_replicated(self) -> int | None:
        """Step of the newest version of which all ranks have all copies; None without, or if nobody holds copies."""
        return self._checkpointer.status.verified if self._checkpointer.holders else None

    @property
    def last_recovery(self) -> events.Resumed | None:
        """The last `resume`; None before."""
        return self._checkpointer.last_load

    @property
    def health(self) -> Health:
        """Counters and errors of saves until now. A save that failed in the background counts after the next call."""
        status = self._checkpointer.status
        return Health(
            saves=status.saves,
            skipped=status.skipped,
            failures=self._failures,
            last_error=self._last_error,
            replication_error=status.replication_error,
            agreement_error=status.agreement_error,
            blocked_s=status.held_s,
            blocked_total_s=status.held_total_s,
            committed_s=status.committed_after_s,
            bytes=status.part_bytes,
            degraded=self._failures_in_a_row > 0 or status.degraded,
            persisted=status.persisted,
            persist_error=status.persist_error,
            persist_lag=status.persist_lag,
        )

    def scalars(self, prefix: str = "flashpoint/") -> dict[str, float]:
        """Return the numbers of `health` and the newest steps by name, for TensorBoard or W&B, except unknown ones."""
        saved, copied, recovery = self.last_saved, self.last_replicated, self.last_recovery
        lag = None if copied is None else max(0, (saved or 0) - copied)
        more: dict[str, float | None] = {"last_saved": saved, "last_replicated": copied, "copies_lag": lag}
        more["recovery_s"] = None if recovery is None else recovery.seconds
        return self.health.scalars(prefix) | {f"{prefix}{k}": float(v) for k, v in more.items() if v is not None}

    @property
    def is_closed(self) -> bool:
        """True once it is closed, or where this process is a forked child."""
        return self._checkpointer.is_closed

    def close(self) -> None:
        """Wait for unfinished saves, and close. Versions stay in memory. Safe to call twice. Raises as `step` does."""
        self._close(self._checkpointer.deadline_s)
        self._report()

    def _close(self, deadline_s: float) -> None:
        if not self.is_closed:
            if not self._checkpointer.await_commits(deadline_s):
                _log.warning("closed during a save, which may not be committed")
            self._checkpointer.close(deadline_s)

    def __enter__(self) -> Flashpoint:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        else:
            # The peers may be dead, or about to be. They are not waited for as long.
            self._close(min(exit_deadline_s(), self._checkpointer.deadline_s))
