"""Saves of a façade, one at a time: begun in the training thread, ended in the background.

Owns the save under way, its outcome and the counters. What is saved, and when, is decided elsewhere.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from ml_flashpoint.adapter.pytorch.memory_storage_writer import MemoryStorageWriter
from ml_flashpoint.core.checkpoint_saver import DefaultMLFlashpointCheckpointSaver
from ml_flashpoint.core.save import Save
from ml_flashpoint.facade.failures import as_flashpoint_error, causes_of
from ml_flashpoint.facade.planners import FacadeSavePlanner, FailingSavePlanner, forget_plans
from ml_flashpoint.facade.sigterm import ReentrantEvent, TerminationGuard
from ml_flashpoint.facade.tracked_state import TrackedState
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.errors import DeadlineError, DivergedError, FlashpointError
from ml_flashpoint.ranks.lasting_group import LastingGroup
from ml_flashpoint.staging.collection import collection_paused
from ml_flashpoint.staging.device_copy import take_queued_s
from ml_flashpoint.unpickling.safe_archive import SafeGlobal

_log = logging.getLogger(__name__)
_DIGITS = re.compile(r"\d+")


class BlockingStager:
    """Begins saves: the state is copied before :meth:`stage` returns, the rest happens in the background.

    The seam for overlapping the copy with the next forward and backward: another object with this method, which
    returns before the copy is done and holds the next optimizer step back until then.

    Args:
        writer: where saves go.
        group: processes that save together; None without torch.distributed.
    """

    def __init__(self, writer: MemoryStorageWriter, group: LastingGroup | None) -> None:
        self._writer = writer
        self._lasting = group
        self._group: dist.ProcessGroup | None = None
        self._planned = group is None

    def collect(self, collect: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The state of a save. Before the first, ranks plan together, or each would need room for what all of them
        hold alike, of which it will write a share."""
        if self._planned or self._lasting is None:
            return collect()
        self._planned = True
        self._group = self._lasting.await_group()
        return self._writer.collect_planned(collect, self._group)

    def stage(
        self,
        state: dict[str, Any],
        version: CheckpointContainerId,
        planner: FacadeSavePlanner,
        *,
        beside: object = None,
    ) -> Future[Any]:
        """Begin the save of ``state`` as ``version``. The future ends when it is committed on all ranks, or failed.

        Args:
            beside: see `MemoryStorageWriter.beside`.
        """
        self._writer.beside(beside)
        if self._lasting is not None:
            self._group = self._lasting.await_group()
        begun: Any = async_save(
            state,
            checkpoint_id=str(version),
            storage_writer=self._writer,
            planner=planner,
            process_group=self._group,
        )
        ended: Future[Any] = getattr(begun, "upload_completion", begun)
        return ended

    def take_part(self, version: CheckpointContainerId, planner: FailingSavePlanner, error: Exception) -> None:
        """Take part in a save that this rank could not begin: the others are saving, and learn by a plan that fails.

        On the caller's thread, since it may be threads that there are no more of; the others are about to come.
        """
        self._writer.give_up_staged(error)
        if self._lasting is not None and self._group is not None and self._lasting.group is self._group:
            options: dict[str, Any] = {"storage_writer": self._writer, "planner": planner}
            try:
                save({}, checkpoint_id=str(version), process_group=self._group, **options)
            except CheckpointException:  # which it ends with
                pass
            except Exception as failed:
                groups, self._group = [self._group], None
                self._lasting.broke(groups.pop(), failed)

    def explain(self, error: BaseException) -> BaseException:
        """The error of a save that has ended. DCP tells all ranks of what fails, by a `CheckpointException`: anything
        else has ended the exchange on this rank alone, whose group the others cannot be met in any more."""
        if self._lasting is None or isinstance(error, CheckpointException) or not isinstance(error, Exception):
            return error
        groups, self._group = [self._group], None
        self._lasting.broke(groups.pop(), error)
        return error if isinstance(error, FlashpointError) else self._lasting.failure("the save", error)


@dataclass(slots=True, eq=False)
class _UnderWay:
    """A save under way. ``ended`` is set after its outcome was taken note of."""

    step: int
    began: float
    ended: ReentrantEvent = field(default_factory=ReentrantEvent)
    withdrawn: BaseException | None = None


class SaveRunner:
    """See the module. Saves are begun from one thread; reading and waiting may be done from any.

    Args:
        tracked: what to save.
        saver: the engine's saver.
        group: processes that save together; None without torch.distributed.
        guard: holds signals back while a save is being begun.
        safe_globals: see `Flashpoint`.
        deadline_s: seconds to wait for the save before.

    Attributes:
        last_saved: step of the latest save committed on all ranks, None before.
        saves, failures, failures_in_a_row, last_error, blocked_s, blocked_total_s, committed_s: see `Health`.
    """

    def __init__(
        self,
        tracked: TrackedState,
        saver: DefaultMLFlashpointCheckpointSaver,
        group: LastingGroup | None,
        guard: TerminationGuard,
        *,
        safe_globals: tuple[SafeGlobal, ...],
        deadline_s: float,
    ) -> None:
        self._tracked = tracked
        self._saver = saver
        self._stager = BlockingStager(
            # What is no tensor is checked by the planner, which can tell whose state it is.
            MemoryStorageWriter(saver, safe_globals=safe_globals, trust_bytes=True),
            group,
        )
        self._guard = guard
        self._safe_globals = safe_globals
        self._deadline_s = deadline_s
        self._plans = f"flashpoint-{id(self):x}-{time.monotonic_ns():x}"
        self._current: _UnderWay | None = None
        self._failure: FlashpointError | None = None
        self._outcome = threading.Lock()
        saver.on_withdrawn = self._withdraw
        self._aligned_after = -1
        self.last_saved: int | None = None
        self.saves = self.failures = self.failures_in_a_row = 0
        self.last_error: str | None = None
        self.blocked_s = self.blocked_total_s = self.committed_s = 0.0

    # ---- beginning ----------------------------------------------------------------------------------------

    def save(self, version: CheckpointContainerId) -> None:
        """Begin a save, after the one before has ended. Never raises for a save that fails."""
        began = time.perf_counter()
        take_queued_s()
        try:
            if version.step is not None and version.step <= self._aligned_after:
                # It was others' turn to wait: with the first save after this step, all ranks are in step again.
                text = f"other ranks have gone on to step {self._aligned_after} without this save"
                self._fail(version, DivergedError(text, step=version.step, rank=self._saver.rank))
                return
            if self.await_current(self._deadline_s):
                with self._guard.deferred(), collection_paused():
                    self._begin(version, began)
                return
            assert self._current is not None
            unfinished = f"the save of step {self._current.step} is unfinished after {self._deadline_s:.0f} s"
            self._fail(version, DeadlineError(unfinished, step=version.step, rank=self._saver.rank))
        finally:
            self.blocked_s = time.perf_counter() - began - take_queued_s()
            self.blocked_total_s += self.blocked_s

    def _begin(self, version: CheckpointContainerId, began: float) -> None:
        try:
            planner = FacadeSavePlanner(self._plans, self._safe_globals)
            state = self._stager.collect(self._tracked.to_save)
            future = self._stager.stage(state, version, planner, beside=self._tracked.left_out)
        except Exception as error:
            self._stager.take_part(version, self._failing_planner(version, error), error)
            self._fail(version, error)
            return
        self._current = _UnderWay(version.step or 0, began)
        future.add_done_callback(lambda done, save=self._current: self._end(save, version, done))  # type: ignore[misc]

    def _failing_planner(self, version: CheckpointContainerId, error: Exception) -> FailingSavePlanner:
        # Errors of ours survive the way to the other ranks.
        reason = as_flashpoint_error({-1: error}, step=version.step or 0, rank=self._saver.rank)
        return FailingSavePlanner(self._plans, reason)

    # ---- ending -------------------------------------------------------------------------------------------

    def _end(self, save: _UnderWay, version: CheckpointContainerId, future: Future[Any]) -> None:
        """Called on the thread that carried the save out."""
        with self._outcome:
            self._take_note(save, version, future)

    def _take_note(self, save: _UnderWay, version: CheckpointContainerId, future: Future[Any]) -> None:
        try:
            error = future.exception()
            failure = save.withdrawn if error is None else self._stager.explain(error)
            if failure is not None:
                self._fail(version, failure)
                return
            if self.failures_in_a_row:
                _log.warning("saves work again from step %d on", save.step)
            self.failures_in_a_row = 0
            self.saves += 1
            self.committed_s = time.perf_counter() - save.began
            self.last_saved = save.step
        finally:
            save.ended.set()

    def _withdraw(self, save: Save) -> None:
        """Called on a background thread: a save that was committed is damaged."""
        current, error = self._current, save.error
        assert error is not None
        with self._outcome:
            if current is not None and current.step == save.step and not current.ended.is_set():
                current.withdrawn = error
                return
            self.saves -= 1
            if self.last_saved == save.step:
                self.last_saved = self._saver.stats.last_verified
            version = CheckpointContainerId.format_version_container(save.step or 0)
            self._fail(CheckpointContainerId(f"/{version}"), error)

    def _fail(self, version: CheckpointContainerId, error: BaseException) -> None:
        failure = as_flashpoint_error(causes_of(error), step=version.step or 0, rank=self._saver.rank)
        if isinstance(failure, DivergedError) and failure.highest_step is not None:
            self._aligned_after = failure.highest_step
        # No rank may go on with a plan that another one may not have.
        forget_plans(self._plans)
        text = str(failure)
        self.failures += 1
        self.failures_in_a_row += 1
        # A job that cannot save says so again and again, but not at every step. Steps and paths are in the text.
        same = self.last_error is not None and _DIGITS.sub("", text) == _DIGITS.sub("", self.last_error)
        loud = not same or self.failures_in_a_row.bit_count() == 1
        self.last_error = text
        self._failure = failure
        _log.log(
            logging.ERROR if loud else logging.DEBUG,
            "the save of step %s failed (%d in a row), training goes on: %s",
            version.step,
            self.failures_in_a_row,
            text,
        )

    def align(self) -> None:
        """All ranks are at the same step from now on."""
        self._aligned_after = -1

    def take_failure(self) -> FlashpointError | None:
        """The latest failure, once."""
        failure, self._failure = self._failure, None
        return failure

    # ---- waiting ------------------------------------------------------------------------------------------

    def await_current(self, deadline_s: float) -> bool:
        """Wait until no save is under way on this rank; returns whether that was so in time."""
        return self._current is None or self._current.ended.wait(deadline_s)

    def settle(self, deadline_s: float) -> bool:
        """Wait until all saves are committed and have their copies, or failed; returns whether that was so in time."""
        give_up = time.monotonic() + deadline_s
        return self.await_current(deadline_s) and self._saver.wait(max(give_up - time.monotonic(), 1e-3))

    @property
    def hangs(self) -> bool:
        """Whether the save under way has taken longer than the deadline."""
        save = self._current
        return save is not None and not save.ended.is_set() and time.perf_counter() - save.began > self._deadline_s

    def forget(self) -> None:
        """Drop what torch keeps between saves. No save may follow."""
        forget_plans(self._plans)
