"""Saves of a `Flashpoint`: what the training thread does of each, and what became of them.

The training thread takes the state, compares its structure with the one before, and has the checkpointer copy what this
rank writes of it. Items are named and encoded on the committing executor.
"""

from __future__ import annotations

import concurrent.futures
import logging
import re
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from ml_flashpoint import events
from ml_flashpoint.adapter.pytorch.storage_data import METADATA_KEY, METADATA_SCOPE
from ml_flashpoint.copy import cuda
from ml_flashpoint.copy.collection import collection_paused
from ml_flashpoint.copy.overlap import Overlap
from ml_flashpoint.engine.checkpointer import Checkpointer
from ml_flashpoint.engine.committing import BytesItem, TensorItem
from ml_flashpoint.engine.replicas import Table
from ml_flashpoint.engine.save import Save
from ml_flashpoint.engine.signals import interrupts_held
from ml_flashpoint.facade.metadata import merged_metadata, metadata_of_share
from ml_flashpoint.format.errors import FlashpointError, SaveError, SkippedError
from ml_flashpoint.format.failure_kinds import text_of
from ml_flashpoint.format.manifest import Manifest
from ml_flashpoint.format.save_id import SaveId
from ml_flashpoint.state.archive import SafeGlobal
from ml_flashpoint.state.packed_state import item_bytes
from ml_flashpoint.state.plan import Captured, Offer, Share
from ml_flashpoint.state.tracked import TrackedState, rank_key
from ml_flashpoint.state.tree import Tree

_log = logging.getLogger(__name__)
_DIGITS = re.compile(r"\d+")


class _InterruptedError(SaveError):
    """The program was interrupted in the midst of a save."""


class Saves:
    """The saves of one rank. Begun by the training thread; everything else may be called from any.

    Args:
        tracked: what is saved.
        checkpointer: the engine.
        overlap: copies late what may be copied late.
        safe_globals, deadline_s: see `Flashpoint`.

    Attributes:
        failures, last_error, blocked_s, blocked_total_s, committed_s, bytes: see `Health`.
        failures_in_a_row: saves that have failed since one was committed.
        last_saved: step of the newest save of this run of which this rank's part is committed; None if there is none.
    """

    def __init__(
        self,
        tracked: TrackedState,
        checkpointer: Checkpointer,
        overlap: Overlap,
        *,
        safe_globals: tuple[SafeGlobal, ...],
        deadline_s: float,
    ) -> None:
        self.overlap = overlap
        self._tracked, self._checkpointer = tracked, checkpointer
        self._ranks = checkpointer.ranks
        self._safe_globals, self._deadline_s = safe_globals, deadline_s
        self._offer: Offer | None = None
        self._table: Table | None = None
        self._share: Share | None = None  # of the offer, by the table
        self._metadata: tuple[str, bytes] = ("", b"")  # of the table that was merged last; on the executor
        self._last: Save | None = None
        self._attempted = -1  # step of the latest call, the same on all ranks
        self._open: list[Save] = []
        self._beginning = False
        self._lock = threading.Lock()
        self._failure: FlashpointError | None = None
        self.last_saved: int | None = None
        self.failures = self.failures_in_a_row = self.bytes = 0
        self.last_error: str | None = None
        self.blocked_s = self.blocked_total_s = self.committed_s = 0.0

    # ---- the training thread -------------------------------------------------------------------------------

    def save(self, step: int, *, explicit: bool) -> None:
        """Save. Never raises for a save that fails, or is skipped.

        Args:
            explicit: somebody waits for this save: it waits for a slot where another one is skipped.
        """
        if self._beginning:
            text = "called while a save begins: in a signal handler, say"
            hint = "let the handler set a flag, and save in the loop"
            self._fail(step, SaveError(text, step=step, rank=self._ranks.rank, hint=hint))
            return
        cuda.settle()  # what the device still has to do of the step is not time that a save holds the loop
        began = time.perf_counter()
        try:
            self._beginning = True
            with interrupts_held(), collection_paused():
                self._save(step, began, explicit=explicit)
        finally:
            self._beginning = False
            self.blocked_s = time.perf_counter() - began
            self.blocked_total_s += self.blocked_s
        events.emit(events.LoopHeld, self._ranks, self._checkpointer.base, step, seconds=self.blocked_s)

    def _save(self, step: int, began: float, *, explicit: bool) -> None:
        try:
            if (step == self._attempted or self._checkpointer.is_between_runs) and self._is_there(step):
                return
        except Exception as failed:  # of whatever kind: ranks lost each other, or a filesystem refuses
            self._fail(step, failed)
            return
        self._attempted = step
        checkpointer, name = self._checkpointer, SaveId(self._checkpointer.run, step)
        tree: Tree | None = None
        error: Exception | None = None
        try:
            tree = self._look(name)
        except Exception as caught:  # of whatever kind: the other ranks learn that this rank has no part
            error = caught
            checkpointer.replicas.pass_over(name)
        table = "" if self._table is None else self._table.name
        try:
            save = checkpointer.begin(step, explicit=explicit, table=table)
        except Exception as caught:
            self._fail(step, error or caught)
            return
        self._open = [each for each in self._open if not each.committed.done()] + [save]
        self._last = save
        save.committed.add_done_callback(partial(self._ended, step, began))
        try:
            if error is not None or tree is None:
                raise error or SaveError("nothing was saved")
            self._stage(save, tree)
        except Exception as caught:
            checkpointer.fail(save, caught)
        except BaseException:  # the program is being interrupted
            checkpointer.fail(save, _InterruptedError("interrupted", step=step, rank=self._ranks.rank))
            raise

    def _is_there(self, step: int) -> bool:
        """Return True if the save of a step that was attempted before has not failed on any rank. Collective.

        A step is saved once in a run. Where it was skipped, or failed, on some rank, a new run begins.
        """
        last, checkpointer = self._last, self._checkpointer
        if self._ranks.all_ok(last is not None and last.id == SaveId(checkpointer.run, step) and not _has_failed(last)):
            return True
        checkpointer.latest()
        self._last = None
        return False

    def _look(self, save: SaveId) -> Tree:
        """Flatten the state. Afterwards there is a share of it, which this rank writes."""
        tree = Tree(self._tracked.to_save())
        offer, ranks = self._offer, self._ranks
        if offer is None or not offer.is_of(tree):
            self._offer = self._share = None
            self._offer = offer = Offer(tree, rank=ranks.rank, ranks=ranks.world_size, own=rank_key(ranks.rank))
        replicas, replicated = self._checkpointer.replicas, offer.replicas.values
        metadata = partial(_metadata_by, offer, ranks.rank)
        table = replicas.agree(save, *offer.digests, lambda: list(replicated()), self._deadline_s, share=metadata)
        if self._share is None or table is not self._table:
            self._table, self._share = table, Share(offer, offer.written(table.written))
        return tree

    def _stage(self, save: Save, tree: Tree) -> None:
        """Copy what this rank writes, or begin to, and leave the rest to the committing executor."""
        share, table, offer = self._share, self._table, self._offer
        assert share is not None
        assert table is not None
        assert offer is not None
        captured = share.capture(tree)
        copies = self._checkpointer.stage(
            save,
            captured.tensors,
            [*share.byte_keys, METADATA_KEY],
            kind=captured.plan,
            late=self.overlap.begin(tensor for _, tensor in captured.tensors),
        )
        captured.tensors = ()
        labels = {"door": "dcp", **({METADATA_SCOPE: "global"} if self._ranks.rank == 0 else {})}
        items = partial(self._items, share, table.name, offer.plan.planner_data, captured, copies)
        self._checkpointer.commit(save, items=items, labels=labels)

    # ---- the committing executor ---------------------------------------------------------------------------

    def _items(
        self, share: Share, table: str, paths: dict[str, Any], captured: Captured, copies: Sequence[torch.Tensor]
    ) -> tuple[list[TensorItem], list[BytesItem]]:
        """Return the items of a save under their names."""
        tensors, byte_items = share.named(captured, copies, partial(item_bytes, allowed=self._safe_globals))
        rank, replicas = self._ranks.rank, self._checkpointer.replicas
        replicas.publish(table, lambda: metadata_of_share(share.items, share.keys, paths, rank))
        if rank == 0:
            if self._metadata[0] != table:
                self._metadata = table, merged_metadata(replicas.collect(table, self._deadline_s))
            byte_items.append((METADATA_KEY, self._metadata[1]))
        return tensors, byte_items

    # ---- outcomes ------------------------------------------------------------------------------------------

    def _ended(self, step: int, began: float, committed: Future[Manifest]) -> None:
        error = committed.exception()
        if error is not None:
            if not isinstance(error, (SkippedError, _InterruptedError)):  # of which the program knows
                self._fail(step, error)
            return
        with self._lock:
            if self.failures_in_a_row:
                _log.warning("saves work again from step %d on", step)
            self.failures_in_a_row = 0
            self.committed_s = time.perf_counter() - began
            self.bytes = committed.result().total_size
            self.last_saved = step

    def _fail(self, step: int, error: BaseException) -> None:
        failure = error if isinstance(error, FlashpointError) else None
        failure = failure or SaveError(text_of(error), step=step, rank=self._ranks.rank)
        text = str(failure)
        with self._lock:
            self.failures += 1
            self.failures_in_a_row += 1
            # A job that cannot save says so again and again, but not at every step. Steps and paths are in the text.
            same = self.last_error is not None and _DIGITS.sub("", text) == _DIGITS.sub("", self.last_error)
            loud = not same or self.failures_in_a_row.bit_count() == 1
            self.last_error, self._failure = text, failure
            _log.log(
                logging.ERROR if loud else logging.DEBUG,
                "the save of step %s failed (%d in a row), training goes on: %s",
                step,
                self.failures_in_a_row,
                text,
            )

    def begin_run(self) -> None:
        """Note that another run has begun, whose saves follow."""
        self._last, self._open, self.last_saved, self._attempted = None, [], None, -1

    def take_failure(self) -> FlashpointError | None:
        """Return the latest failure, once."""
        with self._lock:
            failure, self._failure = self._failure, None
        return failure

    def await_commits(self, deadline_s: float) -> bool:
        """Wait until this rank's parts of all saves are committed, or have failed. Return True if in time."""
        return not concurrent.futures.wait([each.committed for each in self._open], deadline_s).not_done


def _metadata_by(offer: Offer, rank: int, table: Table) -> bytes:
    share = Share(offer, offer.written(table.written))
    return metadata_of_share(share.items, share.keys, offer.plan.planner_data, rank)


def _has_failed(save: Save) -> bool:
    return save.committed.done() and save.committed.exception() is not None
