"""Who writes to a dictionary and where, and what can be committed for all that they say.

Owns the handles that write, the leases that keep them attached, which of their writes a commit has to cover, and the
rules for what may be committed and what may retire. Committing is `coordinator`'s.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import psutil

from ml_flashpoint.ddict.accounts import Attachment, IsGone, Needs, Rules, Write, Writer, merge, never, writes_lost
from ml_flashpoint.ddict.errors import DDictTimeoutError, DDictWritesLostError
from ml_flashpoint.format.errors import FlashpointError

_log = logging.getLogger(__name__)

EXPECT_S = 20.0
"""Longest time that commits wait for handles to find a main manager that was started anew: on another node, say."""

RETRY_S = 0.2

_MOST_LEFT = 10_000


class Attendance(ABC):
    """See the module. Thread-safe; the base of `Coordinator` and of nothing else.

    Args:
        rules: of the dictionary.
        committed: checkpoint that was committed last, for one that takes over; -1: none.
        sealed: checkpoints, that one included, of which every manager has a snapshot.
        expected: handles that wrote before, for one that takes over, with their leases: nothing is committed before
            they have come back, or for as long as `EXPECT_S`.
        pids: processes of these, of which it is enough that they end.
        died: handles that wrote before, and whose processes are gone.
        taken: what was committed before a rollback took that back, and may be lost: see `Writer.assumed`.
        settle_s: seconds to wait before committing anything, for others to come back.
    """

    def __init__(
        self,
        rules: Rules,
        *,
        committed: int,
        sealed: Sequence[int],
        expected: Mapping[str, str],
        pids: Mapping[str, int],
        died: Collection[str],
        taken: Needs,
        settle_s: float,
    ) -> None:
        self._rules = rules
        self._changed = threading.Condition()
        self._writers: dict[str, Writer] = {}
        self._leases: dict[str, Attachment] = {}
        self._departed = committed + 1
        self._died: dict[str, int] = dict.fromkeys(died, committed + 1)
        self._departed_wrote: Needs = dict(taken)
        self._taken: Needs = dict(taken)
        self._inherited: Needs = dict(taken)  # for each of the handles that are expected
        self._left: OrderedDict[str, None] = OrderedDict()  # so that what was under way does not bring them back
        self._any_departed = committed >= 0  # one that takes over does not know
        self._came_back: dict[int, tuple[str, int]] = {}  # incarnation, and checkpoint that it came back at
        self._floor = committed  # newest that is known to be complete, whatever handles do now
        self._orphaned: DDictWritesLostError | None = None
        self._torn: FlashpointError | None = None  # a restore that reached some managers only
        self._restored_at = -1  # is as good as committed, although there are no copies yet
        self._restoring: Any = None  # checkpoint that managers may hold already, or yet what was before
        self._newest = committed + 1
        self._oldest_told = 0
        self._committed = committed
        self._committing = -1
        self._sealed = list(sealed)
        self._trouble = ""
        self._expected = dict(expected)
        self._expected_pids = dict(pids)
        self._settled_at = time.monotonic() + settle_s
        self._not_before = time.monotonic() + (max(settle_s, EXPECT_S) if expected else settle_s)

    @abstractmethod
    def _await_keys(self, checkpoint_id: int, timeout_s: float) -> None:
        """Wait until all keys of a checkpoint are written again at a later one."""

    # ---- what handles say ---------------------------------------------------------------------------------

    def _arrived(self, handle: str) -> Needs:
        """A handle is there, or said that it will not be. Returns what it may have lost for another's rollback."""
        self._died.pop(handle, None)
        if self._expected.pop(handle, None) is None:
            return {}
        if not self._expected:
            self._not_before = min(self._not_before, self._settled_at)
        return dict(self._inherited)

    def _give_up_expected(self) -> None:
        pids = self._expected_pids
        for gone in [each for each in self._expected if each in pids and not psutil.pid_exists(pids[each])]:
            self._arrived(gone)
            self._died[gone] = self._committed + 1
        if self._expected and time.monotonic() >= self._not_before:
            _log.warning("%d handle(s) did not come back to the main manager", len(self._expected))
            self._died.update(dict.fromkeys(self._expected, self._committed + 1))
            self._expected.clear()

    def writers(self) -> dict[str, tuple[str, int | None]]:
        """Handles that write, each with its lease and, if that is on this machine, its process: for one that takes
        over."""
        with self._changed:
            pids = {lease: its.pid for lease, its in self._leases.items()}
            return {name: (writer.lease, pids.get(writer.lease)) for name, writer in self._writers.items()}

    def lease_began(
        self,
        lease: str,
        holder: object,
        pid: int | None = None,
        handles: Collection[str] | None = None,
        is_gone: IsGone = never,
    ) -> None:
        """A process has a connection that keeps its handles attached.

        Args:
            handles: all that it has, so that others of it are not waited for; None: not known.
            is_gone: whether the connection has ended, although nobody has said so yet.
        """
        with self._changed:
            self._leases[lease] = Attachment(holder, pid, is_gone)
            if handles is not None:
                for gone in [each for each, its in self._expected.items() if its == lease and each not in handles]:
                    self._arrived(gone)
            self._changed.notify_all()

    def join(self, handle: str, lease: str, position: int, wrote: Sequence[Write]) -> dict[str, Any]:
        """A handle is about to write for the first time, or comes back. One that is known stays where it is: it has
        moved since this was sent."""
        with self._changed:
            if handle in self._left:
                return self._state()
            assumed = self._arrived(handle)
            writer = self._writers.get(handle)
            if writer is None:
                self._newest = max(self._newest, position)
                self._writers[handle] = Writer(position, lease, self._newest, wrote=self._needs(wrote), assumed=assumed)
                self._changed.notify_all()
            else:
                writer.lease = lease
            return self._state()

    def note(self, wrote: Sequence[Write]) -> dict[str, Any]:
        """A handle that is not attached has written something."""
        with self._changed:
            merge(self._departed_wrote, self._needs(wrote))
            self._any_departed = True
            return self._state()

    def _needs(self, wrote: Sequence[Write]) -> Needs:
        needs: Needs = {}
        for each in wrote:
            need = max(each.need, self._fixed() + 1) if each.fresh else each.need
            incarnation, back_at = self._came_back.get(each.manager, (each.incarnation, need))
            # One who says so only after a commit was not waited for: what the manager came back without is lost.
            if need > self._committed or (incarnation != each.incarnation and need > back_at):
                merge(needs, {(each.manager, each.incarnation): need})
        return needs

    def _fixed(self) -> int:
        """The newest checkpoint of which it is settled what is committed: a write there comes too late for it."""
        return max(self._committed, self._committing)

    def move(self, handle: str, lease: str, position: int, wrote: Sequence[Write], timeout_s: float) -> dict[str, Any]:
        """A handle moves on to another checkpoint.

        Raises:
            DDictWritesLostError: a manager came back without what this handle wrote, or, told to one handle only,
                without what a handle wrote that is gone.
            DDictTimeoutError: with `wait_for_writers` or `wait_for_keys`, others did not do their part in time; or
                commits are too far behind.
        """
        until = time.monotonic() + timeout_s
        with self._changed:
            self._check_whole()
            # Unknown, it is one that comes back; or its process died with this on the way.
            self._changed.wait_for(lambda: handle in self._writers or lease in self._leases, timeout_s)
            if handle in self._left:
                return self._state()
            writer = self._writers.get(handle)
            if writer is None:
                if lease not in self._leases:
                    raise DDictTimeoutError("the process of this handle is not attached")
                # With all that it says, since it counts from now on: this may have to wait, and commits do not.
                writer = Writer(position, lease, self._newest, wrote=self._needs(wrote), assumed=self._arrived(handle))
                self._writers[handle] = writer
            writer.told = None  # it has heard that, and goes on
            self._tell(writer)
            writer.moving_to = position
            self._changed.notify_all()
        retires = position - self._rules.working_set_size
        if position > self._newest and retires >= 0:
            try:
                self._wait_for_commits(position, until)
                self._wait_to_retire(handle, position, retires, until)
            except BaseException:
                with self._changed:
                    writer.moving_to = -1
                raise
        with self._changed:
            if handle in self._left or (handle not in self._writers and lease not in self._leases):
                return self._state()  # it has left; or its process is gone, or comes back with what it is told now
            # It may have been removed meanwhile: its process lost the connection and has another by now.
            writer = self._writers.setdefault(handle, writer)
            self._arrived(handle)
            writer.position, writer.moving_to = position, -1
            writer.lease = lease
            writer.wrote = self._needs(wrote)
            writer.since = self._newest = max(self._newest, position)
            fixed = self._fixed()  # what this move itself commits is not too late for what the handle wrote before
            if not self._rules.snapshots:
                self._committed = max(self._committed, self._target())
            self._changed.notify_all()
            return {**self._state(), "fixed": fixed}

    def _wait_for_commits(self, position: int, until: float) -> None:
        """Wait while commits that could be made are a working set behind: what is not committed stays in memory, which
        would fill up with it."""
        if not self._rules.snapshots:
            return
        with self._changed:
            while self._committed < min(self._target(), position - self._rules.working_set_size - 2):
                self._wait_for(self._committed + 1, until)

    def _wait_to_retire(self, handle: str, position: int, retires: int, until: float) -> None:
        """Wait until a checkpoint may leave the working set."""
        if self._rules.wait_for_writers:
            with self._changed:
                while (left := min(until, self._not_before) - time.monotonic()) > 0:
                    self._changed.wait(left)  # those behind may not be back yet
                while behind := [
                    name
                    for name, writer in self._writers.items()
                    if name != handle and max(writer.position, writer.moving_to) <= retires
                ]:
                    left = until - time.monotonic()
                    if left <= 0:
                        raise DDictTimeoutError(
                            f"checkpoint {retires} cannot retire: {len(behind)} other handle(s) have not moved past it",
                            checkpoint_id=retires,
                        )
                    self._changed.wait(left)
        if self._rules.wait_for_keys and position > self._newest:
            self._await_keys(retires, max(0.05, until - time.monotonic()))

    def leave(self, handle: str, position: int, wrote: Sequence[Write]) -> None:
        """A handle writes no more. What it wrote since it moved last can be lost like all the rest."""
        with self._changed:
            if handle in self._left:
                return
            self._left[handle] = None
            while len(self._left) > _MOST_LEFT:
                self._left.popitem(last=False)
            self._arrived(handle)
            writer = self._writers.get(handle)
            if writer is not None:
                writer.wrote = self._needs(wrote)
                self._remove(handle)
            else:
                # Its process had lost the connection, or this one took over meanwhile.
                self._departed = max(self._departed, position)
                merge(self._departed_wrote, self._needs(wrote))
                self._any_departed = True
            self._changed.notify_all()

    def lease_ended(self, lease: str, holder: object) -> None:
        """The process that held a lease is gone, and so are its handles; unless it has another connection by now."""
        with self._changed:
            its = self._leases.get(lease)
            if its is None or its.holder is not holder:
                return
            del self._leases[lease]
            for handle, writer in [each for each in self._writers.items() if each[1].lease == lease]:
                self._died[handle] = writer.position
                self._orphaned = self._orphaned or writer.told  # which did not get to act on it
                self._remove(handle)
            self._died = {name: position for name, position in self._died.items() if position >= self._window()}
            self._changed.notify_all()

    def _remove(self, handle: str) -> None:
        writer = self._writers.pop(handle, None)
        if writer is None:
            return
        if handle not in self._died:
            self._departed = max(self._departed, writer.position)
        self._any_departed = True
        if writer.lost is None:  # else that says it, once
            merge(self._departed_wrote, writer.wrote)
            merge(self._departed_wrote, writer.assumed)
        self._orphaned = self._orphaned or writer.lost
        if not self._rules.snapshots:
            self._committed = max(self._committed, self._target())

    # ---- where the dictionary is --------------------------------------------------------------------------

    def newest(self, timeout_s: float, is_gone: IsGone = never) -> dict[str, Any]:
        """The newest committed checkpoint, once what can be committed now is.

        Raises:
            DDictWritesLostError: a manager died with writes of handles that are gone: what they moved past last will
                never be committed. Raised once.
            DDictTimeoutError: commits did not end in time.
        """
        until = time.monotonic() + timeout_s
        with self._changed:
            self._check_whole()
            # Before they are back it is not known what can be committed, nor that nobody writes.
            while self._expected and (left := self._not_before - time.monotonic()) > 0:
                self._give_up_expected()
                if time.monotonic() >= until:
                    raise DDictTimeoutError(f"{len(self._expected)} handle(s) are not back at the main manager yet")
                self._changed.wait(max(0.0, min(left, until - time.monotonic(), RETRY_S)))
            self._give_up_expected()
            # Whoever asks may know already of processes that died, and must not find them writing.
            for lease, its in list(self._leases.items()):
                if its.is_gone():
                    self.lease_ended(lease, its.holder)
            wanted = self._target()
            # A rollback meanwhile can mean that less is to be committed than it was.
            while self._committed < (wanted := min(wanted, self._target())) or self._orphaned is not None:
                if is_gone():
                    return self._state()
                self._raise_orphaned()
                self._wait_for(wanted, until)
            self._begin_anew()
            return self._state()

    def await_commit(
        self, handle: str, checkpoint_id: int, timeout_s: float, is_gone: IsGone = never, if_written: bool = False
    ) -> dict[str, Any]:
        """Wait until a checkpoint is committed, for a handle that may be one that writes.

        Args:
            if_written: where nobody writes, do not wait for somebody who may begin to.

        Raises:
            DDictWritesLostError: what :meth:`move` would raise.
            DDictTimeoutError: it was not in time.
        """
        until = time.monotonic() + timeout_s
        with self._changed:
            while self._committed < checkpoint_id and not is_gone():
                self._check_whole()
                writer = self._writers.get(handle)
                if writer is not None:
                    self._tell(writer)
                elif not self._writers and not self._expected:  # else it is for those who write to act on it
                    self._raise_orphaned()
                    if if_written and self._committed >= self._target():
                        break
                self._wait_for(checkpoint_id, until)
            return self._state()

    def _tell(self, writer: Writer) -> None:
        """Raise what a handle has to hear before it goes on."""
        if writer.lost is not None:
            raise writer.lost
        writer.told = self._orphaned or writer.told
        self._raise_orphaned()
        if writer.told is not None:
            raise writer.told

    def _wait_for(self, checkpoint_id: int, until: float) -> None:
        left = until - time.monotonic()
        if left <= 0:
            raise self._not_yet(checkpoint_id)
        self._changed.wait(min(left, RETRY_S))

    def _not_yet(self, checkpoint_id: int) -> DDictTimeoutError:
        behind = sum(self._held_up_at(writer) <= checkpoint_id for writer in self._writers.values())
        died = sum(self._window() <= position <= checkpoint_id for position in self._died.values())
        reasons = [f"{behind} handle(s) have not moved past it"] if behind else []
        reasons += [f"{died} process(es) died there, and others have not left that behind yet"] if died else []
        reasons += [f"{len(self._expected)} handle(s) are not back at the main manager"] if self._expected else []
        told = sum(writer.told is not None or writer.lost is not None for writer in self._writers.values())
        reasons += [f"{told} handle(s) have to go back first, as a manager lost writes"] if told else []
        reasons += ["a manager lost writes of handles that are gone"] if self._orphaned is not None else []
        reasons += [self._trouble] if self._trouble else []
        why = ": " + "; ".join(reasons) if reasons else ""
        return DDictTimeoutError(f"checkpoint {checkpoint_id} is not committed yet{why}", checkpoint_id=checkpoint_id)

    def _begin_anew(self) -> None:
        """Where nobody writes, whoever goes on does so from what is committed, whatever was begun by those now gone."""
        if not self._writers and not self._expected:
            self._died.clear()
            self._departed = self._newest = self._committed + 1

    def _check_whole(self) -> None:
        if self._torn is not None:
            raise self._torn

    def _raise_orphaned(self) -> None:
        if self._orphaned is not None:
            orphaned, self._orphaned = self._orphaned, None
            self._begin_anew()
            self._changed.notify_all()
            raise orphaned

    def state(self) -> dict[str, Any]:
        """Where the dictionary is: ``committed``, ``fixed`` (the newest checkpoint for whose commit a write there would
        be late), ``newest``, ``oldest`` and ``writers``."""
        with self._changed:
            return self._state()

    def recovering(self, manager: int, incarnation: str) -> dict[str, Any]:
        """A manager came back, and goes on from what is committed. A commit that another incarnation of it has taken
        part in, and that is not decided yet, is off: this one will not have it."""
        with self._changed:
            self._came_back[manager] = (incarnation, self._safe())
            return {**self._state(), "restoring": self._restoring}

    def _state(self) -> dict[str, Any]:
        return {
            "committed": self._committed,
            "safe": self._safe(),
            "fixed": self._fixed(),
            "newest": self._newest,
            "oldest": self._oldest(),
            "writers": len(self._writers),
        }

    def _all_needs(self) -> Iterator[Needs]:
        yield self._departed_wrote
        for writer in self._writers.values():
            yield writer.wrote
            yield writer.assumed

    def _note_losses(self, incarnations: Mapping[int, str]) -> bool:
        """Find handles whose writes a manager has lost. Returns whether there are any."""
        with self._changed:
            for handle, writer in self._writers.items():
                for manager, incarnation in (*writer.wrote, *writer.assumed):
                    if writer.lost is None and incarnations[manager] != incarnation:
                        _log.warning("manager %d lost uncommitted writes of handle %s", manager, handle)
                        writer.lost = writes_lost(manager, self._back_at(manager, incarnations[manager]))
            for manager, incarnation in list(self._departed_wrote):
                if incarnations[manager] != incarnation:
                    _log.warning("manager %d lost uncommitted writes of handles that are gone", manager)
                    self._orphaned = writes_lost(manager, self._safe())
                    del self._departed_wrote[manager, incarnation]
            self._changed.notify_all()
            return self._orphaned is not None or any(writer.lost is not None for writer in self._writers.values())

    def _back_at(self, manager: int, incarnation: str) -> int:
        """Where a manager came back: what is committed, but for handles that told too late what they had there."""
        known, at = self._came_back.get(manager, (incarnation, self._safe()))
        return min(at, self._safe()) if known == incarnation else self._safe()

    def _safe(self) -> int:
        """The newest checkpoint that a manager that comes back has."""
        return max(self._committed, self._restored_at)

    # ---- what may be committed ----------------------------------------------------------------------------

    def _oldest(self) -> int:
        """The oldest checkpoint of the working set. What is committed stays in it, or nothing could be gone back to; so
        does what a handle is going back to, while a commit that is under way ends."""
        oldest = max(0, self._newest - self._rules.working_set_size + 1)
        if self._rules.snapshots:
            redone = [writer.position for writer in self._writers.values() if not self._is_out(writer)]
            oldest = min(oldest, max(self._committed, 0), *redone)
            # Commits may have skipped it: who goes back to it then falls back to the one before, if a manager dies.
            oldest = max((each for each in self._sealed if each <= oldest), default=0)
        return max(self._oldest_told, oldest)

    def _window(self) -> int:
        return self._newest - self._rules.working_set_size + 1

    def _target(self) -> int:
        """The newest checkpoint that every handle has moved past."""
        if self._orphaned is not None or any(writer.told or writer.lost for writer in self._writers.values()):
            return self._committed
        # What a process has not finished when it died is not committed by that alone: others would take it for whole.
        positions = [position for position in self._died.values() if position >= self._window()]
        positions += map(self._held_up_at, self._writers.values())
        return max(self._committed, self._floor, min(positions, default=self._departed) - 1)

    def _held_up_at(self, writer: Writer) -> int:
        """Where a handle keeps checkpoints from being committed: not below the working set, out of which it falls when
        others go on by as much without it. One that has gone back, to write again what was lost, is not out of it."""
        at = max(writer.position, self._window()) if self._is_out(writer) else writer.position
        return max(at, self._oldest())

    def _is_out(self, writer: Writer) -> bool:
        return self._newest - writer.since >= self._rules.working_set_size
