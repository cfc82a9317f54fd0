"""The saves of DCP in the process that trains: what is staged for them, their order, and giving up abandoned ones."""

from __future__ import annotations

import logging
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ml_flashpoint import events
from ml_flashpoint.adapter.pytorch.saving_process import MappedFile, RemoteSaves, SaveServer
from ml_flashpoint.adapter.pytorch.staged_state import StagedStateDict
from ml_flashpoint.copy.cpu import copy_all
from ml_flashpoint.copy.late import LateCopy
from ml_flashpoint.engine.checkpointer import Checkpointer
from ml_flashpoint.engine.committing import BytesItem, TensorItem
from ml_flashpoint.engine.save import Save
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.errors import InvalidArgumentError, SaveError
from ml_flashpoint.format.knobs import seal_deadline_s
from ml_flashpoint.format.save_id import SaveId
from ml_flashpoint.ranks.rank_group import RankGroup

_log = logging.getLogger(__name__)

GIVEN_S = 1e-3
"""Seconds in which a thread that DCP has just started lets the training thread return to its loop."""
_ALIGNMENT = 64
_POLL_S = 0.002
_TAKE_UP_S = 10.0
"""Seconds after which a single rank goes on beside a staged state that no thread has begun to save."""


class Clones(MappedFile):
    """Copies of tensors in a file without a name, for a save whose base container is not known yet.

    Attributes:
        views: the copies. path: where another process finds the file as long as this object lives.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        begins, end = list[int](), 0
        for tensor in tensors:
            begins.append(end)
            end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        descriptor = os.memfd_create("flashpoint-staged")
        weakref.finalize(self, os.close, descriptor)
        self.path = f"/proc/{os.getpid()}/fd/{descriptor}"
        os.posix_fallocate(descriptor, 0, max(end, 1))  # a store to a page that is not there would be a SIGBUS
        super().__init__(mmap.mmap(descriptor, max(end, 1)))
        self.views = [self.tensor_at(begin, t.dtype, t.shape) for begin, t in zip(begins, tensors, strict=True)]
        copy_all(self.views, tensors)


class Staged:
    """A save of DCP's, with the tensors that were copied for it; one that was not staged has none.

    Args:
        saves: the saves that it is one of.
        checkpointer: None if no base container is known yet: the copies then lie in memory of this process.

    Attributes:
        save: None before it is begun.
        error: why there is nothing to save; raised by the write, where DCP tells all ranks.
        others: names of this rank's tensors that other ranks write, once its final plan is known; see `omission`.
        held_s: time that staging held the training loop; 0 if nothing was staged.
        thread: carries it on: saves it, or waits for the process that does. None before.
        state: refers to the state that consists of the copies, for as long as DCP keeps that.
        is_claimed: True once a save has read what was staged.
    """

    def __init__(self, saves: LocalSaves, checkpointer: Checkpointer | None) -> None:
        self.save: Save | None = None
        self.error: BaseException | None = None
        self.others: frozenset[str] | None = None
        self.held_s = 0.0
        self.thread: threading.Thread | None = None
        self.state: Callable[[], object] = object
        self.is_claimed = False
        self._saves = saves
        self._checkpointer = checkpointer
        self._clones: Clones | None = None
        self._late: LateCopy | None = None
        self._stager = threading.current_thread()
        self._threads = weakref.WeakSet(threading.enumerate())

    def copy(self, tensors: Sequence[TensorItem], late: LateCopy | None) -> Sequence[torch.Tensor]:
        """Begin the save, if a base container is known, and copy tensors away. Return the copies in order.

        Raises:
            FlashpointError: that cannot be done.
        """
        if self._checkpointer is None:
            self._clones = Clones([tensor for _, tensor in tensors])
            return self._clones.views
        self.save, self._late = self._checkpointer.begin(explicit=True), late
        return self._checkpointer.stage(self.save, tensors, late=late)

    @property
    def is_copied(self) -> bool:
        """True if nothing is copied any more: nothing was late, or it is over."""
        return self._late is None or self._late.over

    def await_copies(self) -> None:
        """Wait until all is copied: whoever reads the copies needs all of them. An error is raised by the write."""
        if self._late is None or self.error is not None:
            return
        try:
            self._late.wait(seal_deadline_s())
        except SaveError as error:
            self.fail(error)

    def claim(self, checkpointer: Checkpointer, step: int) -> None:
        """Give the save its step, on the thread that saves it. Raises `FlashpointError`, also if staging failed."""
        self.thread = self.thread or threading.current_thread()
        self.await_copies()
        failure, self._checkpointer = self.error, checkpointer
        try:
            if self.save is None:
                self.save = checkpointer.begin(step, explicit=True)
            else:
                checkpointer.name(self.save, step)
            if failure is not None:
                raise failure
        except Exception as error:
            self.fail(error)
            if failure is not None:
                raise SaveError(f"staging failed: {failure}", step=step) from failure
            raise

    def fill(self, tensors: Sequence[TensorItem], byte_items: Sequence[BytesItem]) -> None:
        """Bring all items into one object."""
        checkpointer, save = self._begun
        checkpointer.fill(save, tensors, byte_items)

    def commit(self, *, extra: Sequence[BytesItem] = (), labels: Mapping[str, str]) -> None:
        """Commit the object; return when this rank's part is committed."""
        checkpointer, save = self._begun
        checkpointer.commit(save, extra=extra, labels=labels)
        save.committed.result()

    def fail(self, error: BaseException) -> None:
        """Give it up. Safe to repeat, and after it was committed."""
        self.error = self.error or error
        self._clones = None
        if self.save is not None and self._checkpointer is not None:
            self._checkpointer.fail(self.save, error)

    @property
    def succeeded(self) -> bool | None:
        """True if this rank's part is committed, False if there will be none, None as long as that is open."""
        if self.save is not None and self.save.committed.done():
            return self.save.committed.exception() is None
        return None if self.error is None else False

    @property
    def is_over(self) -> bool:
        """True if DCP does nothing with it any more: its thread has ended or begins another save, its state is dropped,
        or, on the thread that has staged it, no thread has been started for it."""
        current = threading.current_thread()
        if self.thread is not None:
            return self.thread is current or not self.thread.is_alive()
        if self.state() is None:
            return True
        # DCP starts a thread for each asynchronous save before that returns.
        started = set(threading.enumerate()).difference(self._threads)
        return current is self._stager and all(each.name.startswith("flashpoint-") for each in started)

    @property
    def _begun(self) -> tuple[Checkpointer, Save]:
        if self.save is None or self._checkpointer is None:
            raise SaveError("nothing was staged")
        return self._checkpointer, self.save

    # ---- for another process ----------------------------------------------------------------------------------

    def sent(self, state: dict[str, Any]) -> tuple[Any, ...]:
        """Return what the state is pickled as."""
        if (thread := threading.current_thread()) is not self._stager:
            time.sleep(GIVEN_S)  # for pickling, its thread would keep the interpreter's lock
            self.thread = thread
        self.await_copies()
        return self._saves.server.send(self, state)

    def place_of(self, tensor: torch.Tensor) -> tuple[str, int] | None:
        """Return file and offset of one of the copies; None for any other tensor."""
        if self._clones is not None:
            offset = self._clones.place_of(tensor)
            return None if offset is None else (self._clones.path, offset)
        if self.save is None or self._checkpointer is None:
            return None
        return self._checkpointer.place_of(self.save, tensor)

    def tensor_at(self, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """Return the copy, or a part of it, that lies at an offset. Raises `SaveError` if there is none."""
        if self._clones is not None:
            return self._clones.tensor_at(offset, dtype, shape)
        checkpointer, save = self._begun
        if self.error is not None:
            raise self.error
        return checkpointer.tensor_at(save, offset, dtype, shape)


class LocalSaves:
    """Saves into the slots of this process. Thread-safe.

    Args:
        ranks: of the job.
        open_base: returns the checkpointer of a base container, which it opens the first time: then it is collective.
        opened: returns the checkpointer of the base container that was opened, None before.
    """

    def __init__(
        self,
        ranks: RankGroup,
        open_base: Callable[[CheckpointContainerId], Checkpointer],
        opened: Callable[[], Checkpointer | None],
    ) -> None:
        self.rank, self.world_size = ranks.rank, ranks.world_size
        self.server = SaveServer(self)
        self._ranks = ranks
        self._open_base, self._opened = open_base, opened
        self._lock = threading.Lock()
        self._entering = threading.Lock()
        self._entered = SaveId(0, -1)
        self._open: list[Staged] = []
        self._previous: Staged | None = None
        self._stager: threading.Thread | None = None

    @classmethod
    def of(cls, checkpointer: Checkpointer) -> LocalSaves:
        """Return saves into a base container that is open."""

        def open_base(base: CheckpointContainerId) -> Checkpointer:
            if base != checkpointer.base:
                raise InvalidArgumentError(
                    f"a writer saves into one base container, {checkpointer.base} here",
                    argument="checkpoint_id",
                    value=str(base),
                )
            return checkpointer

        return cls(checkpointer.ranks, open_base, lambda: checkpointer)

    def enter(self, version: CheckpointContainerId) -> Checkpointer:
        """Return the checkpointer of a version that all ranks are about to save. Collective where its base container is
        not open yet, or where its step was saved before: that begins a new run.

        Raises:
            InvalidArgumentError: the path is that of no version, or another base container is open.
        """
        if version.step is None:
            raise InvalidArgumentError(
                "must end in step-<n>_ckpt",
                argument="checkpoint_id",
                value=str(version),
                hint="CheckpointContainerId.create_child(base, CheckpointContainerId.format_version_container(step))",
            )
        checkpointer = self._open_base(version.parent)
        with self._entering:
            name = SaveId(checkpointer.run, version.step)
            if checkpointer.is_between_runs or (checkpointer.run and name <= self._entered):
                checkpointer.latest()
            self._entered = SaveId(checkpointer.run, version.step)
        return checkpointer

    # ---- order ------------------------------------------------------------------------------------------------

    def stage(self, state_of: Callable[[Staged], dict[str, Any]]) -> StagedStateDict:
        """Return a staged state: what a function returns that copies its tensors. The function raises nothing."""
        self._stager = threading.current_thread()
        self.await_previous()
        self.give_up()
        staged = Staged(self, self._opened())
        state = StagedStateDict(state_of(staged), staged)
        staged.state = weakref.ref(state)
        self._previous = staged
        with self._lock:
            self._open.append(staged)
        return state

    def await_previous(self) -> None:
        """Let the asynchronous save that was staged last go on first; on another thread than stages, for a moment.

        A single rank waits until that save has its step: steps rise in the order of the calls. Several wait until it is
        over: DCP's collectives of two saves on one group would be mixed up, and DCP's own tutorial does not wait.
        """
        if self._stager is not threading.current_thread():
            if self._stager is not None:
                time.sleep(GIVEN_S)
            return
        staged, self._previous, alone = self._previous, None, self.world_size == 1
        until = time.monotonic() + (_TAKE_UP_S if alone else seal_deadline_s())
        while staged is not None and not (staged.is_over or (alone and (staged.is_claimed or staged.error))):
            if time.monotonic() > until:
                _log.error("an asynchronous save is still in flight; going on")
                return
            time.sleep(_POLL_S)

    def give_up(self, *, besides: Staged | None = None) -> None:
        """Give up saves that nobody goes on with: DCP does not say that a save has failed on another rank. Not done as
        DCP drops a state: that may be under any lock."""
        with self._lock:
            self._open = [each for each in self._open if each.succeeded is None]
            gone = [each for each in self._open if each is not besides and each.is_over]
        for staged in gone:
            text = "given up: the checkpoint failed on another rank, or nobody has saved what was staged"
            staged.fail(SaveError(text, rank=self.rank))

    def wait(self, deadline_s: float) -> None:
        """Wait until saves in flight are committed, on whatever thread or process they are, at most for a time."""
        until = time.monotonic() + deadline_s
        while time.monotonic() < until:
            self.give_up()
            with self._lock:
                if all(each.succeeded is not None for each in self._open):
                    return
            time.sleep(_POLL_S)

    def begin(self, version: CheckpointContainerId, staged: Staged | None) -> Staged:
        """Start a save of what was staged, or of what `Staged.fill` is given if ``staged`` is None. Collective as
        `enter`. Raises `FlashpointError`; what was staged is of no use then."""
        checkpointer = self.enter(version)
        self.give_up(besides=staged)
        with self._lock:
            if staged is None:
                staged = Staged(self, checkpointer)
                self._open.append(staged)
            elif staged.is_claimed:
                raise SaveError("what was staged was saved or given up before, and is not kept", rank=self.rank)
            staged.is_claimed = True
        staged.claim(checkpointer, version.step or 0)
        if staged.held_s:
            self.note_held(version, staged.held_s)
        return staged

    def note_held(self, version: CheckpointContainerId, seconds: float) -> None:
        """Publish how long a save has held the loop."""
        events.emit(events.LoopHeld, self._ranks, version.parent, version.step, seconds=seconds)

    def sent(self) -> RemoteSaves:
        """Return the saves of this process as another one sees them."""
        return RemoteSaves(*self.server.reached_by(), self.rank, self.world_size)
