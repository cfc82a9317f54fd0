"""The saves of DCP in the process that trains: what is staged for them, their order, and giving up abandoned ones."""

from __future__ import annotations

import logging
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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


class Saves(Protocol):
    """The calls by which a writer saves, in the process that trains or in a saving process. In order: enter, begin,
    fill, commit; or fail.

    Attributes:
        rank, world_size: of the trainer.
    """

    rank: int
    world_size: int

    def enter(self, version: CheckpointContainerId) -> None:
        """Note that all ranks are about to save a version. Collective where its base container is not open yet, or
        where its step was saved before: that begins a new run."""

    def begin(self, version: CheckpointContainerId, staged: Any, owner: object) -> Any:
        """Start a save of what was staged, or of what `fill` is given if ``staged`` is None. It is given up once
        ``owner`` is gone."""

    def fill(self, save: Any, tensors: Sequence[TensorItem], byte_items: Sequence[BytesItem]) -> None:
        """Bring all items into one object."""

    def commit(self, save: Any, *, extra: Sequence[BytesItem] = (), labels: Mapping[str, str]) -> None:
        """Commit the object; return when this rank's part is committed."""

    def fail(self, save: Any, staged: Any, error: BaseException) -> None:
        """Give up a save, None if it could not even be begun, and what was staged for it, if anything."""

    def note_held(self, version: CheckpointContainerId, seconds: float) -> None:
        """Publish how long a save has held the loop."""


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


@dataclass(frozen=True, eq=False, slots=True)
class _Open:
    """A save that is given up once its owner is gone, or the thread that saves has ended: DCP does not say that a save
    has failed on another rank, and a traceback may keep the owner."""

    owner: weakref.ref[Any]
    save: Staged | Save
    thread: threading.Thread | None = None

    @property
    def is_abandoned(self) -> bool:
        thread = self.save.worker if isinstance(self.save, Staged) else self.thread
        return self.owner() is None or (thread is not None and not thread.is_alive())

    @property
    def has_ended(self) -> bool:
        save = self.save
        return save.succeeded is not None if isinstance(save, Staged) else save.committed.done()


class Staged:
    """The tensors of a state, copied for one save.

    Args:
        saves: the saves that it is one of.
        checkpointer: None if no base container is known yet: the copies then lie in memory of this process.

    Attributes:
        save: None before it is begun.
        error: why there is nothing to save; raised by the write, where DCP tells all ranks.
        others: names of this rank's tensors that other ranks write, once its final plan is known; see `omission`.
        held_s: time that staging held the training loop.
        worker: the thread that saves it, or that waits for another process.
    """

    def __init__(self, saves: LocalSaves, checkpointer: Checkpointer | None) -> None:
        self.save: Save | None = None
        self.error: BaseException | None = None
        self.others: frozenset[str] | None = None
        self.held_s = 0.0
        self.worker: threading.Thread | None = None
        self._saves = saves
        self._checkpointer = checkpointer
        self._clones: Clones | None = None
        self._late: LateCopy | None = None
        self._lock = threading.Lock()
        self._claimed = False
        self._threads = weakref.WeakSet(threading.enumerate())

    def begin(self) -> None:
        """Begin the save, if a base container is known. Raises as `Checkpointer.begin`."""
        if self._checkpointer is not None:
            self.save = self._checkpointer.begin(explicit=True)

    def copy(self, tensors: Sequence[TensorItem], late: LateCopy | None) -> Sequence[torch.Tensor]:
        """Copy tensors away, and return the copies in order. Raises `FlashpointError` if that cannot be done."""
        if self.save is None or self._checkpointer is None:
            self._clones = Clones([tensor for _, tensor in tensors])
            return self._clones.views
        self._late = late
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

    def claim(self, checkpointer: Checkpointer, step: int) -> Save:
        """Return the save, which now has a step and all copies. Only one thread or process may.

        Raises:
            SaveError: staging failed, or another one has claimed it.
            FlashpointError: as `Checkpointer.name`.
        """
        with self._lock:
            claimed, self._claimed = self._claimed, True
        if claimed:
            raise SaveError("what was staged was saved or given up before, and is not kept")
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
        return self.save

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

    # ---- for another process ----------------------------------------------------------------------------------

    def sent(self, state: dict[str, Any]) -> tuple[Any, ...]:
        """Return what the state is pickled as."""
        if threading.current_thread() not in self._threads:
            time.sleep(GIVEN_S)  # for pickling, its thread would keep the interpreter's lock
        self.worker = threading.current_thread()
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
        if self.save is None or self._checkpointer is None:
            raise SaveError("nothing was staged")
        if self.error is not None:
            raise self.error
        return self._checkpointer.tensor_at(self.save, offset, dtype, shape)

    # ---- order ------------------------------------------------------------------------------------------------

    def is_over(self, *, alone: bool) -> bool:
        """Return True if DCP does nothing with it any more; ``alone``, as a single rank without collectives: if it has
        its step."""
        if alone and (self._claimed or self.error is not None):
            return True
        worker = self.worker
        if worker is not None:
            return worker is threading.current_thread() or not worker.is_alive()
        # DCP starts a thread for each asynchronous save before that returns.
        started = set(threading.enumerate()).difference(self._threads)
        return all(each.name.startswith("flashpoint-") for each in started)

    @property
    def is_waiting(self) -> bool:
        """True if no save has read it yet."""
        return not self._claimed and self.worker is None


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
        self._left: list[Staged] = []
        self._open: list[_Open] = []

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

    def checkpointer(self, version: CheckpointContainerId) -> Checkpointer:
        """Return the checkpointer of a version's base container. Collective the first time.

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
        return self._open_base(version.parent)

    def stage(self, state_of: Callable[[Staged], dict[str, Any]]) -> StagedStateDict:
        """Return a staged state: what a function returns that copies its tensors. The function raises nothing."""
        self._give_up_left()
        self.give_up_abandoned()
        staged = Staged(self, self._opened())
        state = StagedStateDict(state_of(staged), staged)
        with self._lock:
            self._open.append(_Open(weakref.ref(state), staged))
        return state

    def await_previous(self, staged: Staged, state: weakref.ref[StagedStateDict]) -> None:
        """Let an asynchronous save go on first. A single rank waits until that save has its step: steps rise in the
        order of the calls. Several wait until it is over: DCP's collectives of two saves on one group would be mixed
        up, and DCP's own tutorial does not wait."""
        began, alone = time.monotonic(), self.world_size == 1
        while state() is not None and not staged.is_over(alone=alone):
            waited = time.monotonic() - began
            if waited > seal_deadline_s() or (alone and staged.is_waiting and waited > _TAKE_UP_S):
                _log.error("an asynchronous save is still in flight after %.0f s; going on", waited)
                break
            time.sleep(_POLL_S)
        if staged.is_waiting:
            self._left.append(staged)

    def _give_up_left(self) -> None:
        """Give up what was staged and nobody has begun to save, as another save needs the slot: no thread or process
        could be started, and a traceback keeps the state."""
        left, self._left = self._left, []
        for staged in left:
            if staged.is_waiting:
                staged.fail(SaveError("given up: nobody has saved what was staged", rank=self.rank))

    def give_up_abandoned(self) -> None:
        """Give up saves that nobody goes on with. Not done as an owner goes: that may be under any lock."""
        with self._lock:
            gone = [each.save for each in self._open if each.is_abandoned]
            self._open = [each for each in self._open if each.save not in gone]
        text = "given up: the checkpoint failed on another rank, or was dropped before it was written"
        for save in gone:
            if isinstance(save, Staged):
                save.fail(SaveError(text, rank=self.rank))
            else:
                self.fail(save, None, SaveError(text, rank=self.rank))

    # ---- the calls of a save ----------------------------------------------------------------------------------

    def enter(self, version: CheckpointContainerId) -> None:
        """See `Saves`."""
        self.give_up_abandoned()
        checkpointer, step = self.checkpointer(version), version.step or 0
        with self._entering:
            if checkpointer.is_between_runs or (checkpointer.run and SaveId(checkpointer.run, step) <= self._entered):
                checkpointer.latest()
            self._entered = SaveId(checkpointer.run, step)

    def begin(self, version: CheckpointContainerId, staged: Staged | None, owner: object) -> Save:
        """See `Saves`."""
        checkpointer, step = self.checkpointer(version), version.step or 0
        if staged is not None:
            save = staged.claim(checkpointer, step)
            self.note_held(version, staged.held_s)
            return save
        self._give_up_left()
        save = checkpointer.begin(step, explicit=True)
        with self._lock:
            self._open.append(_Open(weakref.ref(owner), save, threading.current_thread()))
        return save

    def fill(self, save: Save, tensors: Sequence[TensorItem], byte_items: Sequence[BytesItem]) -> None:
        """See `Saves`."""
        self._of(save).fill(save, tensors, byte_items)

    def commit(self, save: Save, *, extra: Sequence[BytesItem] = (), labels: Mapping[str, str]) -> None:
        """See `Saves`."""
        self._of(save).commit(save, extra=extra, labels=labels)
        save.committed.result()

    def fail(self, save: Save | None, staged: Staged | None, error: BaseException) -> None:
        """See `Saves`."""
        if staged is not None:
            staged.fail(error)
        elif save is not None:
            self._of(save).fail(save, error)

    def note_held(self, version: CheckpointContainerId, seconds: float) -> None:
        """See `Saves`."""
        events.emit(events.LoopHeld, self._ranks, version.parent, version.step, seconds=seconds)

    def _of(self, save: Save) -> Checkpointer:
        assert save.version is not None
        return self._open_base(save.version.parent)

    def wait(self, deadline_s: float) -> None:
        """Wait until saves in flight are committed, on whatever thread or process they are, at most for a time."""
        until = time.monotonic() + deadline_s
        while time.monotonic() < until and self._is_busy():
            time.sleep(_POLL_S)

    def _is_busy(self) -> bool:
        self.give_up_abandoned()
        with self._lock:
            return not all(each.has_ended for each in self._open)

    def sent(self) -> RemoteSaves:
        """Return the saves of this process as another one sees them."""
        return RemoteSaves(*self.server.reached_by(), self.rank, self.world_size)
