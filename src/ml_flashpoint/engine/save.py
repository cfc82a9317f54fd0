"""One save of one rank, from its begin to its verdict.

A save passes three threads, and has a future for each. The program's thread takes a slot, copies the state into it and
names the copies (`Save.stage`, `Save.fill`). The committing thread writes the header, completes the digests and commits
the part (`Save.commit`). The board's thread has the holders copy it, and learns which save is verified.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ml_flashpoint import events
from ml_flashpoint.engine.board import Board
from ml_flashpoint.engine.committing import BytesItem, CommittingThread, Part, PartWriter, TensorItem
from ml_flashpoint.engine.rounds import Fate, Verdict
from ml_flashpoint.format.arguments import checked_integer
from ml_flashpoint.format.errors import (
    DeadlineError,
    FlashpointError,
    SaveError,
    SkippedError,
    SupersededError,
    without_frames,
)
from ml_flashpoint.format.knobs import seal_deadline_s
from ml_flashpoint.format.manifest import JOB_LABEL, TABLE_LABEL, Manifest
from ml_flashpoint.format.names import MAX_STEP, CheckpointContainerId, SaveId
from ml_flashpoint.memory.pool import Pool, SlotRequest
from ml_flashpoint.memory.slot import Slot
from ml_flashpoint.ranks.rank_group import RankGroup

if TYPE_CHECKING:
    import torch

    from ml_flashpoint.copy.overlap import LateCopy

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

Items = Callable[[], tuple[Sequence[TensorItem], Sequence[BytesItem]]]
"""Returns the tensors and the byte items of an object, under their names."""

_POLL_S = 0.25
"""Seconds after which a waiting save looks for a slot."""


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of a save: see `Checkpointer.begin`. It ends by ``until`` (`time.monotonic`)."""

    explicit: bool
    table: str
    began: float
    until: float

    @property
    def left_s(self) -> float:
        """Seconds to the deadline."""
        return max(self.until - time.monotonic(), 0.0)


def _future() -> Future[_T]:
    future: Future[_T] = Future()
    future.set_running_or_notify_cancel()  # nobody can cancel it
    return future


def _resolve(future: Future[Any], result: object = None, error: BaseException | None = None) -> bool:
    """End a future by a result, or by an error. Return False if it has ended before."""
    try:
        future.set_result(result) if error is None else future.set_exception(error)
    except concurrent.futures.InvalidStateError:
        return False
    return True


@dataclass(slots=True, eq=False)
class Save:
    """One rank's save of one version. Begun by `Checkpointer.begin`.

    Call `stage` (optional), `fill` and `commit` in this order; or `fail`. If one of these raises, the save fails.

    Attributes:
        id: run and step; None while the step is not known.
        staged: done once the program may change the tensors.
        committed: done once this rank's part is committed. The result is its manifest.
        verified: done once the parts of all ranks are committed and all their copies are complete. Fails with
            `SupersededError` if a newer save is verified instead, or the ranks pass over this one.
        part: the object that is being written, for the engine.

    All three futures end by the deadline of the save (``FLASHPOINT_SEAL_DEADLINE_S``).
    """

    _saves: Saves = field(repr=False)
    terms: Terms
    part: Part = field(repr=False)
    id: SaveId | None = None
    staged: Future[None] = field(default_factory=_future)
    committed: Future[Manifest] = field(default_factory=_future)
    verified: Future[None] = field(default_factory=_future)
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    @property
    def step(self) -> int | None:
        """The step; None as long as `id` is."""
        return None if self.id is None else self.id.step

    def name(self, step: int) -> None:
        """Give a save that was begun without a step its step. Raises as `Checkpointer.begin` does.

        One that has failed before is named, too: other ranks may have a part of it, and learn that this one has none.
        """
        if self.committed.done() and self.id is None and (board := self._saves.board) is not None:
            board.fail(self._saves.name(self, step))
        with self._working():
            if self.id is not None:
                raise SaveError("the save has a step already", step=self.step)
            name = self._saves.name(self, step)
            if self.committed.done():  # meanwhile, by a thread that saw no name to answer for
                self._saves.board_of_run.fail(name)
            elif self.part.slot is not None:
                self._saves.pool.name(self.part.slot, name)

    def ask(self) -> bool:
        """Have somebody wait for this save, the last one, which may have been a loop's. Return False if it was passed
        over before."""
        self.terms = replace(self.terms, explicit=True)
        if self.id is not None:
            self._saves.board_of_run.ask(self.id)
        return not self.verified.done() or self.verified.exception() is None

    def stage(
        self,
        tensors: Sequence[TensorItem],
        byte_keys: Sequence[str] = (),
        *,
        kind: object = None,
        late: LateCopy | None = None,
    ) -> Sequence[torch.Tensor]:
        """Take a slot and copy tensors into it, to be named by `fill`.

        Args:
            tensors: names (which only size the header) and plain strided tensors on any device.
            byte_keys: names of byte items, if they are known and many.
            kind: the same object as before only if keys, dtypes and shapes are the same, in the same order; None: they
                are compared.
            late: is started for those of the tensors that it takes.

        Returns:
            The copies, in order.

        Raises:
            SkippedError: there is no free slot. `SaveError`, `CapacityError`: no room, or the save has ended.
        """
        with self._working():
            copies = self._saves.writer.stage(self.part, self._take, tensors, byte_keys, kind=kind, late=late)
            if self.part.late is None:
                _resolve(self.staged)
            return copies

    def place_of(self, tensor: torch.Tensor) -> tuple[str, int] | None:
        """Return where another process finds a staged tensor: the file of the slot, and the offset in it. None if the
        tensor is not one of the copies in the slot, or no contiguous view of one."""
        part = self.part
        if part.slot is None or not tensor.is_contiguous() or tensor.is_neg() or tensor.is_conj():
            return None
        offset = tensor.data_ptr() - part.slot.address
        inside = part.begin <= offset and offset + tensor.nbytes <= part.end
        return (os.fspath(part.slot.path), offset) if inside else None

    def tensor_at(self, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """Return the staged bytes at an offset of the slot as a tensor, without a copy. Raise a `SaveError` if nothing
        was staged there."""
        part, nbytes = self.part, dtype.itemsize
        for size in shape:
            nbytes *= size
        if part.slot is None or not part.begin <= offset <= offset + nbytes <= part.end:
            raise SaveError(f"nothing is staged at bytes {offset} to {offset + nbytes}")
        return part.slot.view(offset, offset + nbytes, dtype, shape)

    def fill(self, tensors: Sequence[TensorItem], byte_items: Sequence[BytesItem] = ()) -> None:
        """Bring all items into one object. Tensors that were staged are not copied again. Raises as `stage` does."""
        with self._working():
            self._saves.writer.fill(self.part, self._take, tensors, byte_items)
            if self.part.late is None:
                _resolve(self.staged)

    def commit(
        self, *, items: Items | None = None, extra: Sequence[BytesItem] = (), labels: Mapping[str, str] | None = None
    ) -> None:
        """Have the committing thread seal and commit what was filled; `committed` ends then. Does not wait.

        Args:
            items: in place of `fill`: called on the committing thread, returns the tensors and byte items.
            extra: further byte items, known only now.
            labels: short strings for the manifest.
        """
        with self._working():
            if (items is None and self.part.layout is None) or self.id is None:
                raise SaveError("a save must be filled and have a step before it is committed")
        self._saves.thread.submit(partial(self._commit, items, tuple(extra), dict(labels or {})))

    def _commit(self, items: Items | None, extra: Sequence[BytesItem], labels: dict[str, str]) -> None:
        """Complete the object, and commit it. On the committing thread."""
        part, saves, take = self.part, self._saves, self._take
        assert self.id is not None
        labels[JOB_LABEL] = saves.ranks.job
        if self.terms.table:
            labels[TABLE_LABEL] = self.terms.table
        try:
            with self._working():
                if items is not None:
                    saves.writer.fill(part, take, *items())
                part.wait()
                _resolve(self.staged)
                slot, record = saves.writer.seal(part, take, extra)
                ranks = saves.ranks
                manifest = Manifest(self.id, ranks.rank, ranks.world_size, ranks.node, record, labels)
                self.part = Part(self.terms.until)
                saves.pool.commit(slot, manifest)
        except FlashpointError as error:  # which is that of the futures
            without_frames(error)
            return
        saves.note_commit(self, self.id, manifest)

    def fail(self, error: BaseException) -> None:
        """Give the save up if it is not committed: its futures end with the error, its slot is free. Safe to repeat."""
        if _resolve(self.committed, error=error):
            _resolve(self.staged, error=error)
            self._saves.note_failure(self, error)
            _resolve(self.verified, error=error)  # last: whoever waits for all of the save sees the status after it
            self._free()

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        """Work on a save that has not ended. If that raises, the save fails."""
        try:
            with self._lock:
                if self.committed.done():
                    raise self.committed.exception() or SaveError("the save is committed", step=self.step)
                yield
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            if self.committed.done() and self.committed.exception() is not None:
                self._free()

    def _free(self) -> None:
        """Free the slot of a save that has failed, unless a thread is at work in it, which comes here afterwards."""
        if self._lock.acquire(blocking=False):
            try:
                part, self.part = self.part, Part(self.terms.until)
                if part.late is not None:
                    part.late.settle()
                if part.slot is not None:
                    self._saves.free(part.slot)
            finally:
                self._lock.release()

    def _take(self, size: int, old: Slot | None, exact: bool) -> Slot:
        """Return a slot (`committing.Take`)."""
        saves, explicit = self._saves, self.terms.explicit
        if old is not None:
            (saves.pool.remove if exact else saves.pool.free)(old)
        before = saves.pool.saves

        def request() -> SlotRequest:
            return saves.board_of_run.request(self.id, explicit=explicit)

        while (slot := saves.pool.take(size, request, exact=exact)) is None:
            if (shortage := saves.pool.shortage(size, saves.board_of_run.retained)) is not None:
                raise shortage
            if self.committed.done():
                raise self.committed.exception() or SaveError("the save has ended", step=self.step)
            text = "no slot is free, because earlier saves are still being written, copied or read"
            hint = "end stopped readers, save less often, or give the node memory for two more slots (flashpoint plan)"
            if not explicit or saves.thread.is_current:  # nothing becomes free while that one waits
                raise SkippedError(f"the save is skipped: {text}", step=self.step, rank=saves.ranks.rank, hint=hint)
            if not self.terms.left_s:
                raise DeadlineError(text, step=self.step, rank=saves.ranks.rank, hint=hint)
            with saves.changed:
                saves.changed.wait(min(_POLL_S, self.terms.left_s))
        if (board := saves.board) is not None:  # nothing raises from here on: nobody would free the slot
            for lost in before - saves.pool.saves:  # no round can be about these any more
                board.fail(lost)
        return slot


class Saves:
    """All saves of one rank under way, and the thread that commits them. Thread-safe.

    Args:
        look: called again and again on the committing thread.

    Attributes:
        run, board: of the run that has begun; 0 and None between runs.
        under_way: all that are not verified yet, and some that have ended; under the lock of `changed`.
        changed: notified when a slot may be free, or a verdict was heard.

    Raises:
        SaveError: no thread can be started.
    """

    def __init__(
        self, ranks: RankGroup, base: CheckpointContainerId, pool: Pool, look: Callable[[], object] | None
    ) -> None:
        self.ranks, self.base, self.pool, self._look = ranks, base, pool, look
        self.run = 0
        self.board: Board | None = None
        self.writer = PartWriter()
        self.changed = threading.Condition()
        self.under_way: set[Save] = set()
        self._skipped = 0
        self._size_ahead: int | None = None  # of slots to be made
        self.thread = CommittingThread(self._idle)

    def begin(self, step: int | None, *, explicit: bool, table: str) -> Save:
        """See `Checkpointer.begin`."""
        now = time.monotonic()
        until = now + seal_deadline_s()
        save = Save(self, Terms(explicit, table, now, until), Part(until))
        if step is not None:
            self.name(save, step)
        with self.changed:
            self.under_way.add(save)
        return save

    def name(self, save: Save, step: int) -> SaveId:
        """Give a save its name, and tell the board of it. Return the name."""
        name, board = SaveId(self.run, checked_integer("step", step, 0, MAX_STEP)), self.board_of_run
        board.call(name, explicit=save.terms.explicit, table=save.terms.table)
        save.id = name
        return name

    @property
    def board_of_run(self) -> Board:
        """The board. Raise a `SaveError` if there is none."""
        if (board := self.board) is None:
            raise SaveError("no run has begun since the last one ended: call latest()", rank=self.ranks.rank)
        return board

    def free(self, slot: Slot) -> None:
        """Free the slot of a save that has failed."""
        self.pool.free(slot)
        with self.changed:
            self.changed.notify_all()

    def wait(self, deadline_s: float, *, verified: bool = True) -> bool:
        """Wait until all saves are committed or have failed, and, if asked for, verified or passed over. Return True if
        that was so in time."""
        with self.changed:
            saves = list(self.under_way)
        futures: list[Future[Any]] = [save.committed for save in saves]
        futures += [save.verified for save in saves if verified]
        return not concurrent.futures.wait(futures, deadline_s).not_done

    def give_up(self, save: Save, kind: type[FlashpointError], text: str) -> None:
        """Have a save fail, or `Save.verified` if it is committed."""
        error = kind(text, step=save.step, rank=self.ranks.rank)
        save.fail(error)
        _resolve(save.verified, error=error)

    # ---- what becomes of them -------------------------------------------------------------------------------

    def note_commit(self, save: Save, name: SaveId, manifest: Manifest) -> None:
        """Take note of a save that is committed."""
        size, seconds = manifest.record.size, time.monotonic() - save.terms.began
        self._size_ahead, board = size, self.board
        events.emit(events.PartCommitted, self.ranks, self.base, name.step, bytes=size, seconds=seconds)
        if board is not None:
            self._judge(save, name, board.verdict)  # as it was called; that it is verified is always heard later
            board.commit(name)
        _resolve(save.committed, manifest)

    def note_failure(self, save: Save, error: BaseException) -> None:
        """Take note of a save that has failed, or was skipped."""
        is_skipped = isinstance(error, SkippedError)
        if (board := self.board) is not None and save.id is not None:
            board.fail(save.id, late=int(is_skipped))
        if is_skipped:
            self._skipped += 1
            level = logging.WARNING if self._skipped.bit_count() == 1 else logging.DEBUG  # less and less often
            _log.log(level, "%s (%d skipped so far)", error, self._skipped)
            events.emit(events.SaveSkipped, self.ranks, self.base, save.step)
        else:
            events.emit(events.SaveFailed, self.ranks, self.base, save.step, error=str(error))

    def _idle(self) -> bool:
        """Have saves fail whose deadlines have passed, and make slots ahead. Return True if there may be more to do."""
        if self._look is not None:
            self._look()
        with self.changed:
            self.under_way = {each for each in self.under_way if not (each.committed.done() and each.verified.done())}
            late = [each for each in self.under_way if each.terms.until <= time.monotonic()]
        for save in late:
            what, seconds = "verified" if save.committed.done() else "committed", save.terms.until - save.terms.began
            self.give_up(save, DeadlineError, f"the save was not {what} within {seconds:.0f} s")
        board, size = self.board, self._size_ahead
        if board is None or size is None:
            return False
        if self.pool.prepare(size, board.request(None)):
            return True
        self._size_ahead = None
        return False

    def heard(self, verdict: Verdict) -> None:
        """Resolve the saves that a verdict decides about. On the board's thread."""
        with self.changed:
            self.changed.notify_all()
            named = {save.id: save for save in self.under_way if save.id is not None and save.id.run == self.run}
        for name in sorted(named):
            self._judge(named[name], name, verdict)

    def _judge(self, save: Save, name: SaveId, verdict: Verdict) -> None:
        """End `Save.verified` if a verdict decides about the save."""
        has_failed = save.committed.done() and save.committed.exception() is not None  # `Save.fail` tells why
        if has_failed or save.verified.done():
            return
        fate = verdict.fate(name, explicit=save.terms.explicit)
        if fate is Fate.VERIFIED:
            seconds = time.monotonic() - save.terms.began
            events.emit(events.VersionVerified, self.ranks, self.base, name.step, seconds=seconds)
            _resolve(save.verified)
        elif fate is Fate.SUPERSEDED:
            why = "the ranks go on with a later one"
            if name in verdict.lost:
                why = "some rank has no part of it, or no room for a copy"
            elif name < verdict.newest:
                why = f"step {verdict.newest.step} is verified instead"
            error = SupersededError(f"the save is not verified: {why}", step=name.step, rank=self.ranks.rank)
            _resolve(save.verified, error=error)
