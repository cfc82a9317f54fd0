"""Which checkpoints are committed, which retire, and in which epoch the dictionary is. One of these, in one process.

Owns what handles that write, and all others, may say and are told. The rules, and what managers are asked, are
`commits`', who writes is `writers`'.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from ml_flashpoint.ddict.checkpoints.commits import RETRY_S, Call, Committer
from ml_flashpoint.ddict.checkpoints.writers import Beginning, Session
from ml_flashpoint.ddict.errors import DDictDestroyedError, DDictTimeoutError, StaleEpochError, retired
from ml_flashpoint.ddict.fence import Fence
from ml_flashpoint.ddict.options import Options
from ml_flashpoint.ddict.persistence.persister import new_run_id
from ml_flashpoint.ddict.persistence.queue import PersistedRun
from ml_flashpoint.ddict.written import NOTHING, Written
from ml_flashpoint.format.errors import FlashpointError

_log = logging.getLogger(__name__)
_LOOK_S = 0.5
_HEAR_S = 2.0

IsGone: TypeAlias = Callable[[], bool]
"""Whether whoever asked does not wait for the answer any more, so that nobody is told anything by it."""


class Coordinator(Committer):
    """See the module. Thread-safe. What handles ask for with a ``generation`` is refused, by `StaleRequestError`, where
    it comes late; see `fence`."""

    def __init__(self, rules: Options, call: Call, run: PersistedRun) -> None:
        self._fence = Fence()  # of all handles that there ever were: of nothing that they ask for it is over when
        self._restoring = threading.Lock()
        super().__init__(rules, call, run)

    def attach(self, session: Session, session_id: str) -> None:
        """A process has a connection that keeps the handles attached that join with this id."""
        with self._changed:
            session.id = session_id
            self._writers.sessions[session_id] = session
            self._changed.notify_all()

    def session_ended(self, session: Session) -> None:
        """The process of a session is gone, and so are those of its handles that have not said that they leave: what
        they had open when it was killed is dropped."""
        with self._changed:
            for handle, position in self._writers.kill(session, self._fixed()).items():
                self._discards[handle] = max(position - 1, self._fixed())
            self._follow()

    def join(self, handle: str, session_id: str, position: int, epoch: int, generation: int = 0) -> dict[str, Any]:
        """A handle is about to write for the first time, or comes back. One that is known stays where it is, as it has
        moved since this was sent; except where this is the first that is heard of it since a request of it was lost.

        Raises:
            StaleEpochError: See `catch_up`.
            DDictCheckpointRetiredError: Nobody can write where it is.
        """
        with self._changed:
            self._check_epoch(epoch, handle)
            is_first = self._fence.hear(handle, generation)
            if not self._writers.has_left(handle):
                writer = self._writers.live.get(handle)
                if writer is None or is_first:
                    self._reachable(position)
                    self._writers.place(handle, session_id, position, epoch)
                    self._changed.notify_all()
                else:
                    writer.session = session_id
            return self.state()

    def move(
        self,
        handle: str,
        session_id: str,
        position: int,
        epoch: int,
        timeout_s: float,
        written: Written = NOTHING,
        onwards: bool = False,
        generation: int = 0,
    ) -> dict[str, Any]:
        """A handle moves on to another checkpoint; with ``onwards``, or to the next one that nobody has skipped.
        Returns the state, and where it is now, ``position``. Raises `StaleEpochError`: see `catch_up`;
        `DDictWritesLostError`: told once: what a handle had written that is gone was lost; `DDictTimeoutError`: others
        did not do their part in time: commits, or writers, or keys, are behind."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._check_epoch(epoch, handle)
            self._fence.hear(handle, generation)
            if self._writers.has_left(handle):
                return {**self.state(), "position": position}
            position = self._reachable(position, onwards)
            self._raise_orphaned()
            writer = self._writers.live.get(handle) or self._writers.place(handle, session_id, position, epoch)
            writer.moving_to = position
            self._changed.notify_all()
        retires = position - self._rules.working_set_size
        if position > self._writers.newest and retires >= 0:
            try:
                self._wait_to_retire(handle, position, retires, epoch, deadline)
            except BaseException:
                with self._changed:
                    writer.moving_to = -1
                raise
        with self._changed:
            self._check_epoch(epoch, handle)
            self._fence.hear(handle, generation)
            if self._writers.has_left(handle):
                return {**self.state(), "position": position}
            position = self._reachable(position, onwards)
            self._writers.place(handle, session_id, position, epoch)
            self._late = max(self._late, written.late)
            self._follow()
            return {**self.state(), "position": position}

    def _wait_to_retire(self, handle: str, position: int, retires: int, epoch: int, deadline: float) -> None:
        """Wait until a checkpoint may leave the working set."""
        with self._changed:
            if self._rules.whole_steps:
                while behind := self._writers.behind(retires, but=handle):
                    why = f"checkpoint {retires} cannot retire: {'; '.join(behind)}"
                    self._wait_for(retires, epoch, handle, deadline, why)
            # What is not committed stays in memory, which would fill up with it.
            while self._rules.snapshots and self._committed < min(
                self._target(), position - self._rules.working_set_size - 2
            ):
                self._wait_for(self._committed + 1, epoch, handle, deadline)
        if self._rules.wait_for_keys and position > self._writers.newest:
            self._managers.ask("complete", {"checkpoint_id": retires}, deadline - time.monotonic(), apart=True)

    def _wait_for(self, checkpoint_id: int, epoch: int, handle: str, deadline: float, why: str = "") -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise self._too_late(why or self._why_not(checkpoint_id), checkpoint_id)
        self._changed.wait(min(left, RETRY_S))
        self._check_epoch(epoch, handle)

    def leave(
        self, handle: str, written: Written, epoch: int, generation: int = 0, back: int = -1, onwards: bool = False
    ) -> None:
        """A handle writes no more. What it wrote counts, and can be lost like all the rest.

        Args:
            handle: Its id.
            written: By it.
            epoch: That it is in.
            generation: Of its request.
            back: The checkpoint that it was going back to, which is finished now; -1: none.
            onwards: See `rollback`.
        """
        with self._changed:
            self._fence.hear(handle, generation)
            if self._writers.has_left(handle):
                return
            lost, _ = self._epochs.account(epoch, handle, 0, written, writes=False)
            if lost is not None:
                self._orphaned = self._orphaned or lost.error
                written = Written()
            self._discards.pop(handle, None)
            taken, to = self._committed, max(back, self._committed) if onwards else back
            if 0 <= to < taken and self._is_there(to):
                self._take_back(to, handle)
                written = Written()
            self._writers.leave(handle, written)
            self._late = max(self._late, written.late)
            if back >= 0:
                self._called_off = self._called_off or self._committing >= to
                self._discards[handle] = max(to, self._committed)
            self._follow()
        if 0 <= to < taken:
            self._remove_rolled_back()

    def rollback(
        self,
        handle: str,
        session_if_any: str | None,
        position: int,
        epoch: int,
        timeout_s: float,
        onwards: bool = False,
        generation: int = 0,
    ) -> dict[str, Any]:
        """A handle goes back to a checkpoint, and what it wrote above is discarded. Below what is committed, all go
        back: an epoch begins there.

        Args:
            handle: Its id; it need not be attached.
            session_if_any: The session that keeps it attached.
            position: The checkpoint to go to.
            epoch: That it is in.
            timeout_s: Seconds that this may take.
            onwards: Whether it goes to what is committed by now instead, where that is above.
            generation: Of its request.

        Returns:
            The state, where it is now, ``position``, and why what was persisted above ``stays`` in the store, or null.

        Raises:
            StaleEpochError: See `catch_up`; but not for a handle that was killed, which comes back by this.
            DDictCheckpointRetiredError: Nobody can go back there.
            DDictTimeoutError: Not all managers could be reached; the same call again finishes it.
        """
        deadline, session = time.monotonic() + timeout_s, session_if_any
        with self._changed:
            self._check_epoch(epoch)
            self._fence.hear(handle, generation)
            to = max(position, self._committed) if onwards else position
            self._check_there(to)
            taken, numbered = self._committed, self._discard_number + 1
            if session is not None and not self._writers.has_left(handle):
                self._writers.place(handle, session, to, epoch)
            self._discards.pop(handle, None)
            if to < taken:
                self._take_back(to, handle)
                if session is not None:
                    self._writers.place(handle, session, to, self.epoch)
            else:
                self._discard_number = numbered
                # Also at `to` itself: what it writes there now must not be in it by halves.
                self._called_off = self._called_off or self._committing >= to
            self._changed.notify_all()
        if to >= taken:
            fields = {"w": handle, "to": to, "n": numbered, "dead": False, "e": epoch, "g": generation}
            self._managers.ask("discard", fields, deadline - time.monotonic(), apart=True)
        self._await_open(deadline)
        return {**self.state(), "position": to, "stays": self._remove_rolled_back(deadline)}

    def _take_back(self, to: int, handle: str) -> None:
        """Have all go back below what is committed. With the lock held."""
        taken = self._committed
        why = f"a handle went back to checkpoint {to}, below {taken}, which was committed"
        self._begin_epoch(Beginning(to, to, self._cut_of(to), why, taken, by=handle))
        self._persisting.take_back(to)

    def _remove_rolled_back(self, deadline: float | None = None) -> str | None:
        """Remove what was persisted above a checkpoint that somebody went back to. Returns why it could not be: whoever
        persists next tries again."""
        try:
            self._persisting.remove_rolled_back(deadline)
        except Exception as error:  # of a persister of the user's own, perhaps
            _log.warning("a persisted checkpoint that was rolled back stays: %s", error)
            return str(error) if isinstance(error, FlashpointError) else repr(error)
        return None

    def _reachable(self, position: int, onwards: bool = False) -> int:
        """Where a writer comes to that wants to be at a checkpoint. Commits that it is too late for are called off."""
        if self._rules.snapshots:
            if onwards:
                usable = [each for each in self._sealed if each >= max(position, self._oldest())]
                position = min([*usable, max(position, self._committed)])
            self._check_there(position)
            self._called_off = self._called_off or position <= self._committing
        return position

    def _check_there(self, checkpoint_id: int) -> None:
        """Raise unless a checkpoint can be gone back to, read and written at."""
        if not self._is_there(checkpoint_id):
            raise retired(checkpoint_id, self._oldest(), self._committed, self._sealed)

    def _is_there(self, checkpoint_id: int) -> bool:
        is_skipped = self._rules.snapshots and checkpoint_id < self._committed and checkpoint_id not in self._sealed
        return checkpoint_id >= self._oldest() and not is_skipped  # managers may be about to hear of the oldest

    def _check_epoch(self, epoch: int, handle: str = "") -> None:
        if epoch != self.epoch or not self._epochs.is_open or self._writers.was_killed(handle):
            raise StaleEpochError("this request is of another epoch")

    def catch_up(self, handle: str, position: int, written: Written, epoch: int, timeout_s: float) -> dict[str, Any]:
        """A handle was told that its epoch is over, or will be: what that means for it. Returns the state, and
        ``lost``: why what it wrote is lost, or null; ``manager``: that was lost; ``base``: what to go on from, and
        ``cut``: its number; ``taken``: what was committed below where it stands was taken back. Raises
        `DDictTimeoutError`: managers have not begun it in time."""
        self._await_open(time.monotonic() + timeout_s)
        with self._changed:
            writer = self._writers.live.get(handle)
            lost, taken = self._epochs.account(epoch, handle, position, written, writes=writer is not None)
            base, why = self._epochs.base, "" if lost is None else lost.why
            if self._writers.was_killed(handle):
                why, base = "the connection of its process broke: what it had open was taken for lost", self._committed
            if writer is not None and writer.epoch < self.epoch:
                if not why and epoch >= writer.epoch:  # else this was sent before it went elsewhere
                    writer.position = position
                writer.epoch = self.epoch
            if why:
                self._orphaned = None  # one is enough
            self._changed.notify_all()
            return {
                **self.state(),
                "lost": why or None,
                "manager": None if lost is None else lost.manager,
                "base": base,
                "cut": self._epochs.cut,
                "taken": taken,
            }

    def _await_open(self, deadline: float) -> None:
        with self._changed:
            left = max(0.0, deadline - time.monotonic())
            if not self._changed.wait_for(lambda: self._epochs.is_open or self._closing, left):
                raise self._too_late(f"not all managers have begun epoch {self.epoch} yet")
            if not self._epochs.is_open:
                raise DDictDestroyedError("the dictionary was destroyed")

    def newest(
        self, epoch: int | None, timeout_s: float, is_gone: IsGone = lambda: False, *, tells: bool = True
    ) -> dict[str, Any]:
        """The newest committed checkpoint, once what can be committed now is. Where nobody writes, all go on from it,
        whatever was begun by those now gone. ``tells``: whether this is one of the calls that losses of handles now
        gone are told by. Raises `StaleEpochError`, `DDictWritesLostError`: as :meth:`move`; `DDictTimeoutError`:
        commits did not end in time."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            epoch = self.epoch if epoch is None else epoch
            self._check_epoch(epoch)
            # Whoever asks may know already of processes that died, and must not find them writing.
            for session in [each for each in self._writers.sessions.values() if each.peer.is_gone()]:
                self.session_ended(session)
            # Processes that live hear of an epoch by themselves, and say where they are then.
            unheard = min(deadline, time.monotonic() + _HEAR_S)
            while self._writers.unheard(epoch) and (left := unheard - time.monotonic()) > 0:
                self._changed.wait(left)
                self._check_epoch(epoch)
            wanted = self._target()
            # A rollback meanwhile can mean that less is to be committed than it was.
            while self._committed < (wanted := min(wanted, self._target())) or (tells and self._orphaned is not None):
                if is_gone():
                    return self.state()
                if tells:
                    self._raise_orphaned()
                self._wait_for(wanted, epoch, "", deadline)
            if not self._writers.live:
                if self._writers.open():
                    why = f"processes were killed, and all go on from checkpoint {self._committed}"
                    # That processes were killed is known; but what handles have left counted so far.
                    cut = self._cut_of(self._committed)
                    self._begin_epoch(Beginning(self._committed, self._committed, cut, why), self._writers.left)
                    self._writers.killed = dict.fromkeys(self._writers.killed, -1)
                    if tells:
                        self._raise_orphaned()
                self._writers.newest = self._committed + 1
        self._await_open(deadline)
        return self.state()

    def await_commit(
        self,
        handle: str,
        checkpoint_id: int,
        epoch: int,
        timeout_s: float,
        written: Written = NOTHING,
        is_gone: IsGone = lambda: False,
        if_written: bool = False,
    ) -> dict[str, Any]:
        """Wait until a checkpoint is committed, and what the handle wrote late, unless it is still there. Raises
        `StaleEpochError`, `DDictWritesLostError`: as :meth:`move`; `DDictTimeoutError`: it was not in time.

        Args:
            handle: Its id; it may be one that writes.
            checkpoint_id: The checkpoint.
            epoch: That the handle is in.
            timeout_s: Seconds that this may take.
            written: By the handle.
            is_gone: See `IsGone`.
            if_written: Where nobody writes, do not wait for somebody who may begin to.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._check_epoch(epoch, handle)

            def is_late() -> bool:
                at = self._writers.live[handle].position if handle in self._writers.live else self._committed + 1
                return self._rules.snapshots and self._cut_of(self._committed) <= written.late and at > self._committed

            self._late = max(self._late, written.late)
            self._changed.notify_all()
            while (self._committed < checkpoint_id or is_late()) and not is_gone():
                if handle in self._writers.live or not self._writers.live:  # else it is for those who write
                    self._raise_orphaned()
                if if_written and not self._writers.live and self._committed >= self._target():
                    break
                self._wait_for(checkpoint_id, epoch, handle, deadline)
            return self.state()

    def _raise_orphaned(self) -> None:
        if self._orphaned is not None:
            orphaned, self._orphaned = self._orphaned, None
            raise orphaned

    def await_epoch(self, epoch: int, until: float, is_gone: IsGone) -> int:
        """Wait for another epoch than this one; returns the one that it is."""
        with self._opened:  # not with those who wait for commits: there is one here for each process that writes
            while (self.epoch == epoch or not self._epochs.is_open) and not self._closing and not is_gone():
                left = until - time.monotonic()
                if left <= 0:
                    break
                self._opened.wait(min(left, _LOOK_S))
            return self.epoch if self._epochs.is_open else epoch

    def freeze(self, frozen: bool, handle: str, timeout_s: float, generation: int = 0) -> None:
        """Have all managers refuse writes, or take them again."""
        with self._changed:
            self._fence.hear(handle, generation)
            self._frozen, self._freezes = frozen, self._freezes + 1
            fields = {"frozen": frozen, "n": self._freezes}
        self._managers.ask("freeze", fields, timeout_s, apart=True)

    def persist_newest(self, timeout_s: float, is_gone: IsGone = lambda: False) -> int:
        """Commit what can be, persist the newest committed checkpoint if it is not, and return it; -1: there is none.
        Raises `FlashpointError`: it could not be persisted; `DDictPersistError`: there is no persister."""
        _ = self.run.persister
        deadline = time.monotonic() + timeout_s
        while True:
            self._await_open(deadline)
            try:
                self.newest(None, max(0.0, deadline - time.monotonic()), is_gone, tells=False)
                break
            except StaleEpochError:
                continue  # an epoch has begun meanwhile: what is committed in that one is as good
        with self._changed:
            checkpoint_id = self._committed
            if checkpoint_id >= 0:
                self._persisting.add(checkpoint_id)
        if checkpoint_id >= 0:
            self._persisting.await_persisted(checkpoint_id, deadline)
        return checkpoint_id

    def restore(self, checkpoint_id: int, handle: str, timeout_s: float, generation: int = 0) -> dict[str, Any]:
        """Have all managers hold a persisted checkpoint, and nothing else: an epoch begins with it. ``handle``: whose
        doing it is. Raises `FlashpointError`: a manager cannot read it, or it is not there; all is as before;
        `DDictTimeoutError`: it was not done in time; or it was, but for the copies."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._fence.hear(handle, generation)
        found = self.run.persister.locate(checkpoint_id)
        checkpoint = found.to_fields()
        with self._alone(deadline), self._no_commits(deadline):
            self._persisting.await_idle(deadline)
            try:
                left = deadline - time.monotonic()
                self._managers.ask("restore_prepare", {"checkpoint": checkpoint}, left, apart=True)
                with self._changed:
                    self._fence.hear(handle, generation)
                self.run.begin(new_run_id(), found)
            except FlashpointError:
                with contextlib.suppress(FlashpointError):
                    self._managers.ask("restore_abort", {})
                raise
            with self._changed:
                why = f"checkpoint {checkpoint_id} was restored"
                kept, self._cut = self._committed, self._cut + 1
                self._begin_epoch(Beginning(checkpoint_id, kept, self._cut_of(kept), why, by=handle))
                self._writers.begin_at(checkpoint_id)
                if handle in self._writers.live:  # it goes there: what its process says of where it stood is too late
                    self._writers.live[handle].epoch = self.epoch
                self._committed = -1 if self._rules.snapshots else checkpoint_id
                self._restored = (checkpoint_id, checkpoint, self._cut)
                self._sealed, self._oldest_told, self._orphaned = {}, checkpoint_id, None
                self._persisting.restored(checkpoint_id)
        self._await_open(deadline)
        # It was committed before it was persisted, so it is again: at once, which makes the copies there are none of.
        with self._changed:
            while self._committed < checkpoint_id and not self._closing:
                why = f"it is restored, but has no copies yet: {self._why_not(checkpoint_id)}"
                with contextlib.suppress(StaleEpochError):  # a manager was lost: all go on from what is restored
                    self._wait_for(checkpoint_id, self.epoch, "", deadline, why)
            return self.state()

    @contextlib.contextmanager
    def _alone(self, deadline: float) -> Iterator[None]:
        """One restore at a time: who has given one up, and begins another, gets that one."""
        if not self._restoring.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise DDictTimeoutError("another checkpoint is being restored")
        try:
            yield
        finally:
            self._restoring.release()
