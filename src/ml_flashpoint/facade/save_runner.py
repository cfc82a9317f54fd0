"""Saves of a façade, one at a time: begun in the training thread, ended in the background.

Owns the order of a save, its outcome and the counters. What is saved, and when, is decided elsewhere; what ranks say to
each other about it is `save_exchange`'s.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ml_flashpoint import events
from ml_flashpoint.adapter.pytorch.storage_data import METADATA_KEY, METADATA_SCOPE
from ml_flashpoint.copy import cuda
from ml_flashpoint.copy.collection import collection_paused
from ml_flashpoint.copy.overlap import Overlap
from ml_flashpoint.core.background import BackgroundThread
from ml_flashpoint.core.checkpoint_saver import DefaultMLFlashpointCheckpointSaver
from ml_flashpoint.core.object_stages import BytesItem, TensorItem
from ml_flashpoint.core.save import Save
from ml_flashpoint.core.save_identity import SaveIdentity, missing_ranks
from ml_flashpoint.engine.signals import interrupts_held
from ml_flashpoint.facade.failures import as_flashpoint_error, causes_of
from ml_flashpoint.facade.save_exchange import SaveExchange
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.errors import DeadlineError, DivergedError, FlashpointError, SaveError
from ml_flashpoint.ranks.lasting_group import LastingGroup
from ml_flashpoint.state.archive import SafeGlobal
from ml_flashpoint.state.packed_state import item_bytes
from ml_flashpoint.state.plan import Captured, Share
from ml_flashpoint.state.tracked import TrackedState
from ml_flashpoint.state.tree import Tree

_log = logging.getLogger(__name__)
_DIGITS = re.compile(r"\d+")


@dataclass(slots=True, eq=False)
class _UnderWay:
    """A save under way.

    Attributes:
        identity: what all ranks call it, once they have agreed.
        error: why this rank cannot write its share.
        ended: set after its outcome was taken note of.
    """

    save: Save
    version: CheckpointContainerId
    proposal: SaveIdentity
    began: float
    identity: SaveIdentity | None = None
    captured: Captured | None = None
    copies: Sequence[torch.Tensor] = ()
    error: Exception | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def step(self) -> int:
        return self.version.step or 0


class SaveRunner:
    """See the module. Saves are begun from one thread; reading and waiting may be done from any.

    Args:
        tracked: what to save.
        saver: the engine's saver.
        group: processes that save together; None without torch.distributed.
        guard: holds signals back while a save is being begun.
        safe_globals: see `Flashpoint`.
        deadline_s: seconds to wait for the save before.
        overlap: copies late what may be, where that is wanted.

    Attributes:
        last_saved: step of the latest save committed on all ranks, None before.
        saves, failures, failures_in_a_row, last_error, blocked_s, blocked_total_s, committed_s: see `Health`.
    """

    def __init__(
        self,
        tracked: TrackedState,
        saver: DefaultMLFlashpointCheckpointSaver,
        group: LastingGroup | None,
        *,
        safe_globals: tuple[SafeGlobal, ...],
        deadline_s: float,
        overlap: Overlap,
    ) -> None:
        self.overlap = overlap
        self._tracked = tracked
        self._saver = saver
        self._exchange = SaveExchange(group, safe_globals)
        self._background = BackgroundThread("flashpoint-saves")
        self._safe_globals = safe_globals
        self._deadline_s = deadline_s
        self._current: _UnderWay | None = None
        self._held: CheckpointContainerId | None = None  # the version whose save has held the loop last
        self._failure: FlashpointError | None = None
        self._outcome = threading.Lock()
        self._aligned_after = -1
        self._beginning = False
        self.last_saved: int | None = None
        self.saves = self.failures = self.failures_in_a_row = 0
        self.last_error: str | None = None
        self.blocked_s = self.blocked_total_s = self.committed_s = 0.0

    # ---- beginning ----------------------------------------------------------------------------------------

    def save(self, version: CheckpointContainerId) -> None:
        """Begin a save, after the one before has ended. Never raises for a save that fails."""
        if self._beginning:
            text = "called while a save begins: in a signal handler, say"
            hint = "let the handler set a flag, and save in the loop"
            self._fail(version, SaveError(text, step=version.step, rank=self._saver.rank, hint=hint))
            return
        try:
            self._beginning = True
            self._save(version)
        finally:
            self._beginning = False

    def _save(self, version: CheckpointContainerId) -> None:
        self._tell_held()
        cuda.settle()  # what the device still has to do of the step is not time that a save holds the loop
        began = time.perf_counter()
        try:
            ended = self.help_and_await(self._deadline_s)
            if version.step is not None and version.step <= self._aligned_after:
                # It was others' turn to wait: with the first save after this step, all ranks are in step again.
                text = f"other ranks have gone on to step {self._aligned_after} without this save"
                self._fail(version, DivergedError(text, step=version.step, rank=self._saver.rank))
                return
            if ended:
                with interrupts_held(), collection_paused():
                    self._begin(version, began)
                return
            assert self._current is not None
            unfinished = f"the save of step {self._current.step} is unfinished after {self._deadline_s:.0f} s"
            self._fail(version, DeadlineError(unfinished, step=version.step, rank=self._saver.rank))
        finally:
            self.blocked_s = time.perf_counter() - began
            self.blocked_total_s += self.blocked_s
            self._held = version

    def _tell_held(self) -> None:
        """Tell how long the latest save has held the loop, now that it cannot any more."""
        held, self._held = self._held, None
        if held is not None:
            events.emit(events.LoopHeld, self._saver, held.parent, held.step, seconds=self.blocked_s)

    def _begin(self, version: CheckpointContainerId, began: float) -> None:
        try:
            save = self._saver.begin(exchanged=True, here=True)
        except Exception as error:
            self._give_up(None, version, partial(self._exchange.refuse, error, version.step or 0))
            return
        try:
            self._begin_with(save, version, began)
        except BaseException as error:  # the program is being interrupted: nobody goes on with it
            self._saver.fail(save, error)
            if (current := self._current) is not None and current.save is save:
                self._background.run(partial(self._go_on, current))  # which may have been given it, or not
            raise

    def _begin_with(self, save: Save, version: CheckpointContainerId, began: float) -> None:
        save.version = version  # for whoever is told why it fails
        # A copy that is being made may hold the room for this save for as long as its link is slow.
        save.room_until = time.monotonic() + self._deadline_s - (time.perf_counter() - began)
        try:
            under_way = _UnderWay(save, version, self._saver.propose(version, save), began)
            tree = self._exchange.look_at(self._tracked.to_save())
        except Exception as error:  # of whatever kind: the others are about to come, and would wait
            self._give_up(save, version, partial(self._exchange.refuse, error, version.step or 0))
            return
        if self._exchange.share is None and not self._give_up(save, version, partial(self._agree, under_way)):
            return
        try:
            self._stage(under_way, tree)
        except Exception as error:
            under_way.error = error
        self._current, save.worker = under_way, None
        self._background.run(partial(self._go_on, under_way))

    def _give_up(self, save: Save | None, version: CheckpointContainerId, exchange: Callable[[], object]) -> bool:
        """Take part in an exchange, here and now, and fail the save if that fails. Returns whether it did not."""
        try:
            exchange()
        except Exception as error:
            if save is not None:
                self._saver.fail(save, error)
            self._fail(version, error)
            return False
        return True

    def _agree(self, under_way: _UnderWay) -> None:
        late = missing_ranks(self._saver, under_way.version)
        under_way.identity = self._exchange.agree(under_way.proposal, late)

    def _stage(self, under_way: _UnderWay, tree: Tree) -> None:
        """Copy what this rank writes, or begin to."""
        share, save = self._share, under_way.save
        under_way.captured = captured = share.capture(tree)
        copies = self._saver.stage(
            save,
            captured.tensors,
            late=self.overlap.begin(tensor for _, tensor in captured.tensors),
            kind=captured.plan,
            base=under_way.version.parent,
            byte_keys=[*share.byte_keys, METADATA_KEY],
        )
        assert copies is not None  # the base container is known
        save.room_until = None  # what is left to do does not hold the loop
        under_way.copies, captured.tensors = copies, ()

    @property
    def _share(self) -> Share:
        share = self._exchange.share
        assert share is not None
        return share

    # ---- ending -------------------------------------------------------------------------------------------

    def _go_on(self, under_way: _UnderWay) -> None:
        """Carry a save out that was staged, or could not be. On the background's thread."""
        error: BaseException | None = None
        if under_way.ended.is_set():
            return
        try:
            self._carry_out(under_way)
        except BaseException as caught:  # whatever it is, nobody else would take note
            error = caught
            self._saver.fail(under_way.save, error)
        self._end(under_way, error)

    def _carry_out(self, under_way: _UnderWay) -> None:
        save, failure, step = under_way.save, under_way.error, under_way.step
        if under_way.identity is None and failure is not None:
            self._exchange.refuse(failure, step)
        if under_way.identity is None:
            self._agree(under_way)
        assert under_way.identity is not None
        is_coordinator = self._saver.rank == 0
        try:
            self._saver.adopt(save, under_way.identity)
            save.complete = False  # until all ranks have committed it
            if failure is None:
                self._saver.write(save, under_way.version, *self._items(under_way))
                if not is_coordinator:
                    self._saver.commit(save, labels={"door": "dcp"})
        except Exception as error:
            failure = error
        if failure is not None:
            self._saver.fail(save, failure)

        def commit(metadata: bytes) -> None:
            labels = {"door": "dcp", METADATA_SCOPE: "global"}
            self._saver.commit(save, extra=[(METADATA_KEY, metadata)], labels=labels)

        self._exchange.conclude(failure, commit, step)
        save.complete = True

    def _items(self, under_way: _UnderWay) -> tuple[list[TensorItem], list[BytesItem]]:
        captured, under_way.captured = under_way.captured, None
        copies, under_way.copies = under_way.copies, ()
        assert captured is not None
        named = self._share.named(captured, copies, partial(item_bytes, allowed=self._safe_globals))
        if under_way.save.staged is not None:
            # To let go of thousands takes its time, and the loop's thread would do it else.
            under_way.save.staged.views = ()
        return named

    def _end(self, under_way: _UnderWay, error: BaseException | None) -> None:
        with self._outcome:
            self._take_note(under_way, error)

    def _take_note(self, under_way: _UnderWay, error: BaseException | None) -> None:
        try:
            if error is not None:
                self._fail(under_way.version, error)
                return
            if self.failures_in_a_row:
                _log.warning("saves work again from step %d on", under_way.step)
            self.failures_in_a_row = 0
            self.saves += 1
            self.committed_s = time.perf_counter() - under_way.began
            self.last_saved = under_way.step
        finally:
            under_way.ended.set()

    def _fail(self, version: CheckpointContainerId, error: BaseException) -> None:
        failure = as_flashpoint_error(causes_of(error), step=version.step or 0, rank=self._saver.rank)
        if isinstance(failure, DivergedError) and failure.highest_step is not None:
            self._aligned_after = failure.highest_step
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

    def counters(self) -> dict[str, Any]:
        """The fields of `Health` that are known here."""
        here = ("saves", "failures", "last_error", "blocked_s", "blocked_total_s", "committed_s")
        return {name: getattr(self, name) for name in here}

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

    def help_and_await(self, deadline_s: float) -> bool:
        """The same in the training thread, which copies what is left to be copied meanwhile."""
        self.overlap.before_update()
        return self.await_current(deadline_s)

    def settle(self, deadline_s: float) -> bool:
        """Wait until all saves are committed and have their copies, or failed; returns whether that was so in time."""
        give_up = time.monotonic() + deadline_s
        return self.await_current(deadline_s) and self._saver.wait(max(give_up - time.monotonic(), 1e-3))

    @property
    def hangs(self) -> bool:
        """Whether the save under way has taken longer than the deadline."""
        save = self._current
        return save is not None and not save.ended.is_set() and time.perf_counter() - save.began > self._deadline_s

    def close(self) -> None:
        """End the background's thread, once it is through. No save may follow."""
        self._background.close()
        self.overlap.close()
        self._tell_held()
