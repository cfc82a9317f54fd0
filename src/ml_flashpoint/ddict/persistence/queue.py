"""Which committed checkpoints are to be persisted, under which run, and which persisted ones count no more.

Owns the coordinator's background thread for that, the account of what is persisted, and a process's persister. What is
committed is `coordinator`'s, which shares its lock with this; how checkpoints are written is its managers' and the
persister's.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ml_flashpoint.ddict.errors import DDictPersistError, DDictTimeoutError
from ml_flashpoint.ddict.options import Configuration
from ml_flashpoint.ddict.persister import CheckpointPersister, PersistedCheckpoint, new_run_id
from ml_flashpoint.format.errors import FlashpointError

_log = logging.getLogger(__name__)

_FIRST_RETRY_S, _LONGEST_RETRY_S = 1.0, 30.0


@dataclass(eq=False, slots=True)
class _Wanted:
    """A checkpoint that is to be persisted."""

    checkpoint_id: int
    due: bool  # tried again where that fails, until it works or a later one was tried
    pause_s: float = 0.0  # before the next try, if one has failed
    again_at: float = 0.0


class Persisting:
    """See the module. Thread-safe; what says so is called with the coordinator's lock held.

    Args:
        changed: the coordinator's lock; notified of what changes here.
        write: has all managers write their parts of a checkpoint for a run, and returns their receipts.
        run: that they are of.
    """

    def __init__(self, changed: threading.Condition, write: Callable[[int, str], list[str]], run: PersistedRun) -> None:
        self._changed = changed
        self._write = write
        self._persisted = run
        self._waiting: list[_Wanted] = []
        self._current = -1
        self._called_off = False  # the current one was rolled back
        self._outdated = False  # it was committed again
        self._tried = -1  # the newest that the history of this run has, perhaps
        self._recording = threading.Lock()
        self._done: set[int] = set()
        self._error: FlashpointError | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="ddict-persist", daemon=True)
        self._thread.start()

    # ---- with the lock held -------------------------------------------------------------------------------

    @property
    def waiting(self) -> Sequence[int]:
        """Checkpoints that managers must keep until they are persisted. With the lock held."""
        return [each.checkpoint_id for each in self._waiting]

    def add(self, checkpoint_id: int, *, due: bool = False) -> None:
        """Have a committed checkpoint persisted, unless it is. With the lock held. ``due``: if it fails, try again
        until that works, or the next one is due."""
        found = next((each for each in self._waiting if each.checkpoint_id == checkpoint_id), None)
        if found is not None:
            found.due, found.pause_s, found.again_at = found.due or due, 0.0, 0.0  # at once: somebody waits
        elif checkpoint_id not in self._done:
            self._waiting.append(_Wanted(checkpoint_id, due))
        self._changed.notify_all()

    def state(self) -> dict[str, Any]:
        """The newest checkpoint that is ``persisted`` (-1: none), and the ``persist_error`` of the last that could not
        be, unless a later one was. With the lock held."""
        error = None if self._error is None else str(self._error)
        return {"persisted": max(self._done, default=-1), "persist_error": error}

    def committed(self, checkpoint_id: int) -> None:
        """This was committed, perhaps again: what is persisted of it lacks late writes. With the lock held."""
        self._done.discard(checkpoint_id)
        self._outdated = self._outdated or self._current == checkpoint_id

    def take_back(self, to: int) -> None:
        """Checkpoints above this one are committed no more. Where any may be persisted, another run begins, which goes
        on from this one: `record` it. With the lock held."""
        if self._tried > to:
            self._persisted.go_back(to)
            self._tried = to
        self._done = {each for each in self._done if each <= to}
        self._waiting = [each for each in self._waiting if each.checkpoint_id <= to]
        self._called_off = self._called_off or self._current > to
        self._error = None

    def restored(self, checkpoint_id: int) -> None:
        """This persisted checkpoint is held, and nothing else. With the lock held."""
        self._done, self._tried = {checkpoint_id}, checkpoint_id

    # ---- without it ---------------------------------------------------------------------------------------

    def record(self, deadline: float | None = None) -> None:
        """Have the store know of a rollback. Nothing is persisted before.

        Raises:
            DDictTimeoutError: Somebody else does, and it takes too long.
            FlashpointError: The storage refuses: what was taken back is still offered there.
        """
        if not self._recording.acquire(timeout=-1 if deadline is None else max(0.0, deadline - time.monotonic())):
            raise DDictTimeoutError("a rollback is still being recorded where checkpoints are persisted")
        try:
            self._persisted.record()
        finally:
            self._recording.release()

    def await_persisted(self, checkpoint_id: int, deadline: float) -> None:
        """Wait until a checkpoint that was added is persisted. Raises `DDictTimeoutError`: not in time;
        `FlashpointError`: it could not be persisted."""
        with self._changed:
            self._await(
                lambda: all(each.pause_s for each in self._waiting if each.checkpoint_id == checkpoint_id), deadline
            )
            if checkpoint_id not in self._done:
                raise self._error or DDictPersistError("it was rolled back", checkpoint_id=checkpoint_id)

    def await_idle(self, deadline: float) -> None:
        """Wait until nothing is to be persisted. What could not be is given up. Raises `DDictTimeoutError`: not in
        time."""

        def is_idle() -> bool:
            self._waiting = [each for each in self._waiting if not each.pause_s]
            return not self._waiting and self._current < 0

        with self._changed:
            self._await(is_idle, deadline)

    def _await(self, holds: Callable[[], bool], deadline: float) -> None:
        if not self._changed.wait_for(holds, max(0.0, deadline - time.monotonic())):
            raise DDictTimeoutError("checkpoints are still being persisted")

    def close(self) -> None:
        """Begin nothing more."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(1.0)

    # ---- the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (wanted := self._await_next()) is not None:
            failure = self._try(wanted.checkpoint_id)
            with self._changed:
                if not (self._called_off or self._outdated):
                    self._note(wanted, failure)
                    if failure is not None:
                        _log.error("checkpoint %d was not persisted: %s", wanted.checkpoint_id, failure)
                self._current = -1
                self._changed.notify_all()

    def _await_next(self) -> _Wanted | None:
        """The next that is to be persisted, once there is one; None: nothing more is."""
        with self._changed:
            while not self._closing:
                now = time.monotonic()
                for wanted in self._waiting:
                    if wanted.again_at <= now:
                        self._current, self._called_off, self._outdated = wanted.checkpoint_id, False, False
                        self._tried = max(self._tried, self._current)
                        return wanted
                again_at = min((each.again_at for each in self._waiting), default=None)
                self._changed.wait(None if again_at is None else again_at - now)
        return None

    def _note(self, wanted: _Wanted, failure: FlashpointError | None) -> None:
        self._error = failure
        is_wanted = wanted in self._waiting  # nobody has given it up meanwhile
        self._waiting = [each for each in self._waiting if each is not wanted and not each.pause_s]
        if failure is None:
            self._done.add(wanted.checkpoint_id)
        elif wanted.due and is_wanted:
            wanted.pause_s = min(2 * wanted.pause_s, _LONGEST_RETRY_S) or _FIRST_RETRY_S
            wanted.again_at = time.monotonic() + wanted.pause_s
            self._waiting.append(wanted)  # after those that are new: one of them takes its place

    def _try(self, checkpoint_id: int) -> FlashpointError | None:
        try:
            self.record()
            run, receipts = "", list[str]()
            while run != self._persisted.run_id:  # or parts are of before and after a rollback
                run = self._persisted.run_id
                receipts = self._write(checkpoint_id, run)
                self.record()
            if not self._called_off:
                self._persisted.complete(checkpoint_id, receipts)
        except FlashpointError as error:
            return error
        except Exception as error:  # the thread must go on
            _log.exception("persisting checkpoint %d failed", checkpoint_id)
            return DDictPersistError(f"{type(error).__name__}: {error}", checkpoint_id=checkpoint_id)
        return None


class _Rollback(NamedTuple):
    """The run that begins where somebody went back to, with the run before and the newest checkpoint of that."""

    run_id: str
    run: str
    newest: int


class PersistedRun:
    """See the module."""

    def __init__(self, configuration: Configuration) -> None:
        self._options = configuration.options
        self._made = self._options.make_persister()
        self.run_id = ""
        self._unrecorded: _Rollback | None = None
        self.use(configuration.run_id)

    @property
    def persister(self) -> CheckpointPersister:
        """This process's. Raises `DDictPersistError`: there is none."""
        if self._made is None:
            raise DDictPersistError("this dictionary was made without a persister", hint="pass persister_class")
        return self._made

    def ids(self) -> list[int]:
        """What is persisted."""
        return [] if self._made is None else self._made.ids()

    def close(self) -> None:
        """Let go of the storage."""
        if self._made is not None:
            self._made.close()

    def begin(self, run_id: str | None = None, restored: PersistedCheckpoint | None = None) -> None:
        """As the coordinator: write for this run, or for the one that begins with a restored checkpoint. Raises
        `JobInUseError`: another dictionary of this name and path does."""
        self._begin(run_id or self.run_id, None if restored is None else (restored.run, restored.checkpoint_id))
        self.run_id, self._unrecorded = run_id or self.run_id, None

    def _begin(self, run_id: str, continues: tuple[str, int] | None) -> None:
        if self._made is not None and not self._options.read_only:
            self._made.begin_run(run_id, continues=continues)

    def go_back(self, to: int) -> None:
        """Write for another run, of which this one is the history, up to a checkpoint. It begins with `record`."""
        before = self._unrecorded or _Rollback("", self.run_id, to)
        self.run_id = new_run_id()
        self._unrecorded = _Rollback(self.run_id, before.run, min(before.newest, to))

    def record(self) -> None:
        """Begin the run that was gone back to, and remove what is not of its history any more.

        Raises:
            FlashpointError: The storage refuses to begin it.
        """
        if (rollback := self._unrecorded) is None:
            return
        self._remove_above(rollback.run, rollback.newest)
        try:
            self._begin(rollback.run_id, (rollback.run, rollback.newest))
        except BaseException:
            self.go_back(
                rollback.newest
            )  # with another name: that run may have begun all the same, which each does once
            raise
        if self._unrecorded is rollback:
            self._unrecorded = None

    def _remove_above(self, run: str, newest: int) -> None:
        try:
            for each in reversed(self.ids()):
                # What earlier runs have is below, or all there is: it is not this run's to touch.
                if each <= newest or self.persister.locate(each).run != run:
                    return
                self.persister.remove(each)
        except Exception as error:  # of a persister of the user's own, perhaps
            _log.warning("a checkpoint that was rolled back stays in the store, where it does not count: %s", error)

    def use(self, run_id: str) -> None:
        """In a manager: write for this run."""
        if run_id != self.run_id:
            self.run_id = run_id
            if self._made is not None:
                self._made.join_run(run_id)

    def complete(self, checkpoint_id: int, receipts: Sequence[str]) -> None:
        """Make a checkpoint exist, and remove those that are not to be kept."""
        self.persister.complete(checkpoint_id, receipts)
        self.persister.keep(self._options.persist_count)
