"""The saves of DCP in the process that trains: their order, and giving up abandoned ones."""

from __future__ import annotations

import concurrent.futures
import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from ml_flashpoint import events
from ml_flashpoint.adapter.pytorch.saving_process import RemoteSaves, SaveServer
from ml_flashpoint.adapter.pytorch.staging import GIVEN_S, Staged, StagedStateDict
from ml_flashpoint.engine.checkpointer import Checkpointer
from ml_flashpoint.format.errors import InvalidArgumentError, SaveError
from ml_flashpoint.format.knobs import seal_deadline_s
from ml_flashpoint.format.names import CheckpointContainerId, SaveId
from ml_flashpoint.ranks.rank_group import RankGroup

_log = logging.getLogger(__name__)

_POLL_S = 0.002
_TAKE_UP_S = 10.0
"""Seconds after which a single rank goes on beside a staged state that no thread has begun to save."""


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
        self.server = SaveServer(self.begin, self.rank)
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
                text = f"a writer saves into one base container, {checkpointer.base} here"
                raise InvalidArgumentError(text, argument="checkpoint_id", value=str(base))
            return checkpointer

        return cls(checkpointer.ranks, open_base, lambda: checkpointer)

    def enter(self, version: CheckpointContainerId) -> Checkpointer:
        """Return the checkpointer of a version that all ranks are about to save. Collective where its base container is
        not open yet, or where its step was saved before: that begins a new run. Raises `InvalidArgumentError` if the
        path is that of no version, or another base container is open."""
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
        staged = Staged(self._opened(), self.server.send)
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
            self._open = [each for each in self._open if not each.has_ended]
            gone = [each for each in self._open if each is not besides and each.is_over]
        for staged in gone:
            text = "given up: the checkpoint failed on another rank, or nobody has saved what was staged"
            staged.fail(SaveError(text, rank=self.rank))

    def wait(self, deadline_s: float) -> None:
        """Wait until saves in flight are committed, on whatever thread or process they are, at most for a time."""
        until = time.monotonic() + deadline_s
        while True:
            self.give_up()
            with self._lock:
                waiting = list(self._open)
            # A save that was staged before a base container was known begins once DCP's thread or process goes on.
            if all(each.save is not None for each in waiting) or time.monotonic() > until:
                break
            time.sleep(_POLL_S)
        begun = [each.save.committed for each in waiting if each.save is not None]
        concurrent.futures.wait(begun, max(0.0, until - time.monotonic()))

    def begin(self, version: CheckpointContainerId, staged: Staged | None) -> Staged:
        """Start a save of what was staged, or of what `Staged.fill` is given if ``staged`` is None. Collective as
        `enter`. Raises `FlashpointError`; what was staged is of no use then."""
        checkpointer = self.enter(version)
        self.give_up(besides=staged)
        with self._lock:
            if staged is None:
                staged = Staged(checkpointer, self.server.send)
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
