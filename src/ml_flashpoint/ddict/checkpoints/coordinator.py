"""The coordinator: it decides which checkpoints are committed, which retire, and in which epoch the dictionary is.

Owns the order in which managers are asked to begin an epoch, to take a snapshot, to seal it, and to let older ones go;
and what handles may ask, and are told. Who writes, and what is whole for that, is `writers`'; what is persisted,
`queue`'s. What a manager does is its own matter; how it is reached, the caller's.

A checkpoint is committed when every handle that writes has moved past it and, with replication, every manager has
sealed it with verified copies. One is committed at a time, always the newest that can be, except that those due to be
persisted are not skipped. It lasts: what is written at or below a committed id later is part of the next commit, which
may be of the same checkpoint again. Each commit has a number of its own, its *cut*; see `written`.

A dictionary is always in an *epoch*. What is committed is the same for everybody, as long as the epoch lasts. When a
manager was lost, somebody goes back below what is committed, or a persisted checkpoint is restored, the next epoch
begins at a checkpoint, its base: all managers drop what lies above that, and answer requests of the new epoch only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, NamedTuple, TypeAlias, TypeVar

from ml_flashpoint.ddict.checkpoints.writers import Beginning, Epochs, Session, Writers
from ml_flashpoint.ddict.errors import (
    DDictDestroyedError,
    DDictTimeoutError,
    DDictWritesLostError,
    StaleEpochError,
    retired,
)
from ml_flashpoint.ddict.options import Options
from ml_flashpoint.ddict.persistence import History, Persisting
from ml_flashpoint.ddict.wire import requests as asked
from ml_flashpoint.ddict.wire.fence import Fence
from ml_flashpoint.ddict.wire.requests import Account, Back, Request, Whose, name_of
from ml_flashpoint.ddict.wire.written import Written
from ml_flashpoint.format.errors import FlashpointError, ProtocolError
from ml_flashpoint.format.knobs import seal_deadline_s
from ml_flashpoint.net.messages import Fields
from ml_flashpoint.stores.durable import save_of
from ml_flashpoint.stores.version_store import Version

CALL_S = 30.0

Call: TypeAlias = Callable[[int, Request, float], Fields]
"""``(manager, request, timeout in seconds) -> fields of the answer``."""

_Found = TypeVar("_Found")


class AllManagers:
    """See the module. Thread-safe."""

    def __init__(self, call: Call, count: int) -> None:
        self._call = call
        self._count = count
        self._pool = self._threads("commit")
        self.unanswered: dict[int, str] = {}  # managers that commits wait for, and what they were asked

    def _threads(self, name: str) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(min(32, self._count), thread_name_prefix=f"ddict-{name}")

    def ask(self, request: Request, timeout_s: float = CALL_S, *, apart: bool = False) -> list[Fields]:
        """Return their answers. ``apart``: see `at_once`."""
        call, left = (self._call if apart else self.call), max(0.05, timeout_s)
        return self.at_once(range(self._count), name_of(request), lambda each: call(each, request, left), apart=apart)

    def at_once(
        self, managers: Iterable[int], name: str, ask: Callable[[int], _Found], *, apart: bool = False
    ) -> list[_Found]:
        """Return what ``ask`` returns for each of these, or the first error once all have answered, or that of asking.
        ``apart``: with threads of its own, as it takes long, and commits must not wait for it."""
        with self._threads(name) if apart else contextlib.nullcontext(self._pool) as pool:
            try:
                asked = [pool.submit(ask, each) for each in managers]
            except RuntimeError as error:  # no thread can be had; or the program ends, without `destroy`
                raise FlashpointError(f"managers cannot be asked to {name}: {error}") from error
            wait(asked)
            return [each.result() for each in asked]

    def call(self, manager: int, request: Request, timeout_s: float) -> Fields:
        """Return the answer of one that commits wait for."""
        self.unanswered[manager] = name_of(request)
        try:
            return self._call(manager, request, timeout_s)
        finally:
            self.unanswered.pop(manager, None)

    def close(self) -> None:
        """Ask nothing more. Does not wait."""
        self._pool.shutdown(wait=False, cancel_futures=True)


_log = logging.getLogger(__name__)
_BEGIN_S = 10.0
_RETRY_S = 0.2
_LOOK_S = 0.5
_HEAR_S = 2.0
_NEVER_LATE = 1 << 60  # the cut where no manager makes any: what is there is all there is

IsGone: TypeAlias = Callable[[], bool]
"""Whether whoever asked does not wait for the answer any more, so that nobody is told anything by it."""


class Sealed(NamedTuple):
    """A cut that is committed."""

    cut: int  # its number
    names: list[str]  # of each manager's snapshot; empty without replication


class Coordinator:
    """See the module. Thread-safe. What handles ask for with a ``generation`` is refused, by `StaleRequestError`, where
    it comes late; see `fence`. ``history``: what is persisted; None: nothing is."""

    def __init__(self, rules: Options, call: Call, history: History | None) -> None:
        self._rules = rules
        self._fence = Fence()  # of all handles that there ever were: of nothing that they ask for it is over when
        self._restoring = threading.Lock()
        self._managers = AllManagers(call, rules.managers)
        self._frozen, self._freezes = False, 0  # how often that was said
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        self._opened = threading.Condition(lock)  # notified when an epoch may be told of
        self._writers = Writers(rules)
        self._epochs = Epochs(rules.managers)
        self._discards: dict[str, int] = {}  # killed handles, and what is left of what they wrote
        self._discard_number = 0
        self._returned: dict[int, str] = {}  # managers that were lost, and which process of each has said so last
        self._committed = -1
        self._committing = -1
        self._cut = 0  # number of the newest cut that managers were asked for
        self._late = -1  # newest cut that a write came late for of a handle that has moved on
        self._sealed: dict[int, Sealed] = {}  # cuts that are committed, by checkpoint
        self._restored: tuple[int, Any, int] | None = None  # as good as committed, without copies yet; its cut
        self._orphaned: DDictWritesLostError | None = None
        self._oldest_told = 0  # some managers at least
        self._settled = (0, -1, 0)  # what all of them have heard last: the oldest, the committed one and its cut
        self._trouble: FlashpointError | None = None  # why managers have not done what they were asked last
        self._busy = self._called_off = self._closing = False
        self._held_up = 0
        self._persisting = Persisting(self._changed, self._write_parts, history, rules.persist_count)
        self._thread = threading.Thread(target=self._run, name="ddict-coordinator", daemon=True)
        self._thread.start()

    @property
    def epoch(self) -> int:
        """The number of the epoch."""
        return self._epochs.present

    def _cut_of(self, checkpoint_id: int) -> int:
        """The number of the cut that a committed checkpoint is."""
        if not self._rules.snapshots:
            return _NEVER_LATE
        return self._sealed[checkpoint_id].cut if checkpoint_id in self._sealed else 0

    def _begin_epoch(self, beginning: Beginning, written: Written | None = None) -> None:
        """Begin an epoch, with the lock held; the coordinator's thread has managers begin it. ``written``: by handles
        whose end others are told of."""
        _log.warning("epoch %d begins at checkpoint %d: %s", self.epoch + 1, beginning.base, beginning.why)
        self._epochs.begin(beginning)
        self._called_off = True
        if (written or self._writers.departed).is_above(beginning.kept, beginning.cut):
            self._orphaned = self._orphaned or beginning.error
        self._writers.send_back(beginning.base)
        self._discards.clear()  # it lies above
        self._late = -1
        self._committed = min(self._committed, beginning.base)
        self._retain(lambda each: each <= beginning.base)
        self._changed.notify_all()

    def returned(self, manager: int, incarnation: str) -> None:
        """Begin an epoch: a manager was lost, is back, and has found what it can go on from."""
        self.check_manager(manager)
        with self._changed:
            if self._returned.get(manager) == incarnation:
                return  # it has said so before
            self._returned[manager] = incarnation
            base, cut = self._committed, self._cut_of(self._committed)
            if self._restored is not None:  # which it has, or can read
                base, _, cut = self._restored
            at = f"checkpoint {base}" if base >= 0 else "the beginning, as nothing was committed yet"
            why = f"manager {manager} was lost, and all go on from {at}"
            self._begin_epoch(Beginning(base, base, cut, why, manager=manager))

    def sealed_by(self, manager: int) -> list[asked.SealedPart]:
        """Return the snapshots that a manager has of what is committed."""
        self.check_manager(manager)
        with self._changed:
            keep = self._keep()
            return [
                asked.SealedPart(its.names[manager], its.cut, at)
                for at, its in self._sealed.items()
                if its.names and its.cut in keep
            ]

    def check_manager(self, manager: int) -> None:
        """Raise a `ProtocolError` if there is no such manager."""
        if not 0 <= manager < self._rules.managers:
            raise ProtocolError(f"there is no manager {manager}")

    def _let_begin(self) -> None:
        """Have managers begin the epoch that they are behind of. Those that cannot be reached now must before anything
        is committed; others need not wait for them."""
        with self._changed:
            epoch, base = self.epoch, self._epochs.base
            keep, pinned, restored = self._keep(), tuple(self._pinned(base)), None
            if self._restored is not None:
                _, restored, cut = self._restored
                keep = [cut]
            told = asked.Begin(epoch, base, self._cut, tuple(keep), pinned, (), restored, self._frozen, self._freezes)
            behind = sorted(self._epochs.behind)

        def begin(manager: int) -> None:
            its = dataclasses.replace(told, sealed=tuple(self.sealed_by(manager)))
            self._managers.call(manager, its, _BEGIN_S)
            with self._changed:
                if epoch == self.epoch:
                    self._epochs.behind.discard(manager)

        try:
            self._managers.at_once(behind, "begin", begin)
        finally:
            with self._changed:
                self._epochs.is_open = self._epochs.is_open or epoch == self.epoch
                self._opened.notify_all()
                self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                job = None
                while not self._closing and (job := self._next_job()) is None:
                    self._changed.wait()
                if self._closing or job is None:
                    return
                self._busy, self._called_off = True, False
            try:
                job()
                self._trouble = None
            except FlashpointError as error:
                with self._changed:
                    if str(error) != str(self._trouble):
                        _log.warning("nothing more is committed yet: %s", error)
                    self._trouble = error
                    self._changed.wait(_RETRY_S)
            except Exception:  # the thread must go on: what stops it would stop all commits, without a word
                _log.exception("a commit failed")
                with self._changed:
                    self._changed.wait(_RETRY_S)
            finally:
                with self._changed:
                    self._busy, self._committing = False, -1
                    self._changed.notify_all()

    def _next_job(self) -> Callable[[], None] | None:
        """Return what is to be done next. With the lock held."""
        if self._epochs.behind:
            return self._let_begin
        if self._discards:
            return self._discard
        if self._held_up:
            return None
        target = self._target()
        if self._rules.snapshots and (target > self._committed or self._is_late(target)):
            due = self._rules.next_due(max(self._committed, -1 if self._restored is None else self._restored[0] - 1))
            self._committing = target if due is None else min(target, due)
            return self._commit
        return self._settle if self._to_settle() != self._settled else None

    def _is_late(self, target: int) -> bool:
        """Return whether what is committed is to be committed again, with what was written there late."""
        return target == self._writers.whole() >= 0 and self._late >= self._cut_of(target)

    def _to_settle(self) -> tuple[int, int, int]:
        committed = self._committed if self._rules.snapshots else -1
        return self._oldest(), committed, self._cut_of(committed) if committed >= 0 else 0

    def _discard(self) -> None:
        """Drop what handles had open whose processes were killed; and whatever of that is still on its way."""
        with self._changed:
            discards = dict(self._discards)
        for handle, to in discards.items():
            with self._changed:
                self._discard_number += 1
                told = asked.Discard(Whose(handle, to, self.epoch), self._discard_number, dead=True)
            self._managers.ask(told)
            with self._changed:
                if self._discards.get(handle) == to:
                    del self._discards[handle]

    def _commit(self) -> None:
        with self._changed:
            self._cut += 1
            checkpoint_id, epoch, cut = self._committing, self.epoch, self._cut
            committed = self._cut_of(self._committed)
        self._managers.ask(asked.Prepare(epoch, checkpoint_id, cut, committed))
        sealed: list[str] = []
        if self._rules.replicated and not self._called_off:
            answers = self._managers.ask(asked.Seal(epoch, cut), seal_deadline_s())
            sealed = [str(answer["name"]) for answer in answers]
        with self._changed:
            if epoch != self.epoch or self._called_off:
                return  # somebody went back: what it has is not what is written
            self._committed = checkpoint_id
            if self._restored is None:
                self._persisting.committed(checkpoint_id)
            self._restored = None
            self._sealed[checkpoint_id] = Sealed(cut, sealed)
            if self._rules.next_due(checkpoint_id - 1) == checkpoint_id:
                self._persisting.add(checkpoint_id, due=True)
            self._changed.notify_all()
        self._settle()

    def _follow(self) -> None:
        """Take note that who writes, or where, has changed. Where there are no snapshots, what is whole is committed.
        With the lock held."""
        if not self._rules.snapshots:
            self._committed = self._target()
        self._changed.notify_all()

    def _settle(self) -> None:
        """Let managers forget what is not needed any more."""
        with self._changed:
            told, epoch, keep, pinned = self._to_settle(), self.epoch, self._keep(), self._pinned()
            oldest, committed, cut = told
            # Before they are asked: nobody may go back to what one of them may have forgotten.
            self._oldest_told = oldest
            self._retain(lambda each: self._sealed[each].cut in (*keep, *pinned) or each > self._committed)
        self._managers.ask(asked.Settle(epoch, oldest, tuple(keep), tuple(pinned), committed, cut))
        with self._changed:
            if epoch == self.epoch:
                self._settled = told

    def _retain(self, is_kept: Callable[[int], bool]) -> None:
        self._sealed = {each: its for each, its in self._sealed.items() if is_kept(each)}

    def _keep(self) -> list[int]:
        """The cuts that can be gone back to."""
        oldest = self._oldest()
        return [its.cut for each, its in self._sealed.items() if each >= oldest or each == self._committed]

    def _pinned(self, base: int | None = None) -> list[int]:
        """The cuts that are yet to be persisted; those up to ``base``."""
        waiting = [each for each in self._persisting.waiting if base is None or each <= base]
        return [self._sealed[each].cut for each in waiting if each in self._sealed]

    def _oldest(self) -> int:
        """The oldest checkpoint of the working set. What is committed stays in it, or nothing could be gone back to."""
        oldest = max(0, self._writers.window())
        if self._rules.snapshots:
            oldest = min(oldest, max(self._committed, 0), self._writers.lowest())
        return max(self._oldest_told, oldest)

    def _target(self) -> int:
        """The newest checkpoint that can be committed now."""
        restored = -1 if self._restored is None else self._restored[0]
        return max(self._committed, restored, self._writers.whole())

    def _fixed(self) -> int:
        """The newest checkpoint of which it is settled what is committed: a write there comes too late for it."""
        return self._committed if self._called_off else max(self._committed, self._committing)

    def _why_not(self, checkpoint_id: int) -> str:
        reasons = self._writers.behind(checkpoint_id)
        died = sum(at <= checkpoint_id for at in self._writers.open())
        reasons += [f"{died} process(es) were killed there, and others have not left that behind yet"] if died else []
        return "; ".join([f"checkpoint {checkpoint_id} is not committed yet", *reasons])

    def _too_late(self, why: str, checkpoint_id: int | None = None) -> DDictTimeoutError:
        """The error for who has waited in vain. If it is for a manager, that may be one that does not come back."""
        unanswered = sorted(self._managers.unanswered.items())
        reasons = [f"manager {manager} has not answered {asked!r} yet" for manager, asked in unanswered]
        why = "; ".join([why, *reasons, *([self._trouble.message] if self._trouble else [])])
        away = next(iter(sorted(self._managers.unanswered)), getattr(self._trouble, "manager", None))
        hint = f"if manager {away} stays away, make the dictionary anew, and restore() what was persisted"
        return DDictTimeoutError(why, checkpoint_id=checkpoint_id, manager=away, hint=None if away is None else hint)

    def state(self) -> dict[str, Any]:
        """The state of the dictionary: its ``epoch``, ``committed``, ``newest``, ``oldest`` and ``writers``."""
        with self._changed:
            return {
                "epoch": self.epoch,
                "committed": self._committed,
                "newest": self._writers.newest,
                "oldest": self._oldest(),
                "writers": len(self._writers.live),
            }

    def whole_state(self) -> dict[str, Any]:
        """The same, whether it is ``frozen``, and `Persisting.state`."""
        with self._changed:
            return {**self.state(), **self._persisting.state(), "frozen": self._frozen}

    def _write_parts(self, checkpoint_id: int, version: Version) -> None:
        with self._changed:
            told = asked.Persist(self._cut_of(checkpoint_id), save_of(version))
        self._managers.ask(told, seal_deadline_s(), apart=True)

    def persisted_ids(self) -> list[int]:
        """The checkpoints that can be restored."""
        return self._persisting.history.ids() if self._rules.persists else []

    @contextlib.contextmanager
    def _no_commits(self, deadline: float) -> Iterator[None]:
        """Wait until no commit is under way, and let none begin."""
        with self._changed:
            self._held_up += 1
        try:
            with self._changed:
                if not self._changed.wait_for(lambda: not self._busy, max(0.0, deadline - time.monotonic())):
                    raise DDictTimeoutError("a commit is under way", checkpoint_id=self._committing)
            yield
        finally:
            with self._changed:
                self._held_up -= 1
                self._changed.notify_all()

    # ---- what handles ask ---------------------------------------------------------------------------------

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
            cut = self._cut_of(self._committed) if self._rules.snapshots else -1
            for handle, position in self._writers.kill(session, self._fixed(), cut).items():
                self._discards[handle] = max(position - 1, self._fixed())
                if position <= self._fixed():
                    self._late = max(self._late, cut)
            self._follow()

    def join(self, account: Account) -> dict[str, Any]:
        """Count a handle as writing, which is about to for the first time, or comes back. One that is known stays
        where it is, as it has moved since this was sent; except where this is the first that is heard of it since a
        request of it was lost. Raises `StaleEpochError`: see `catch_up`; `DDictCheckpointRetiredError`: nobody can
        write where it is."""
        handle, position, epoch, generation = account.whose
        with self._changed:
            self._check_epoch(epoch, handle)
            is_first = self._fence.hear(handle, generation)
            if not self._writers.has_left(handle):
                writer = self._writers.live.get(handle)
                if writer is None or is_first:
                    self._reachable(position)
                    self._writers.place(handle, account.session, position, epoch)
                    self._changed.notify_all()
                else:
                    writer.session = account.session
            return self.state()

    def move(self, account: Account, to: int, onwards: bool, timeout_s: float) -> dict[str, Any]:
        """Let a handle move on to another checkpoint; with ``onwards``, or to the next one that nobody has skipped.
        Return the state, and where it is now, ``position``. Raises `StaleEpochError`: see `catch_up`;
        `DDictWritesLostError`, told once: what a handle had written that is gone was lost; `DDictTimeoutError`:
        others did not do their part in time."""
        deadline = time.monotonic() + timeout_s
        handle, _, epoch, generation = account.whose
        with self._changed:
            self._check_epoch(epoch, handle)
            self._fence.hear(handle, generation)
            if self._writers.has_left(handle):
                return {**self.state(), "position": to}
            position = self._reachable(to, onwards)
            self._raise_orphaned()
            writer = self._writers.live.get(handle)
            if writer is None:
                writer = self._writers.place(handle, account.session, position, epoch)
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
            self._writers.place(handle, account.session, position, epoch)
            self._late = max(self._late, account.written.late)
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
            self._managers.ask(asked.AwaitKeys(retires), deadline - time.monotonic(), apart=True)

    def _wait_for(self, checkpoint_id: int, epoch: int, handle: str, deadline: float, why: str = "") -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise self._too_late(why or self._why_not(checkpoint_id), checkpoint_id)
        self._changed.wait(min(left, _RETRY_S))
        self._check_epoch(epoch, handle)

    def leave(self, account: Account) -> None:
        """Count a handle no more. What it wrote counts, and can be lost like all the rest. A rollback that it has not
        finished is finished now."""
        handle, _, epoch, generation = account.whose
        written, back = account.written, account.back
        with self._changed:
            self._fence.hear(handle, generation)
            if self._writers.has_left(handle):
                return
            lost, _ = self._epochs.account(epoch, handle, 0, written, writes=False)
            if lost is not None:
                self._orphaned = self._orphaned or lost.error
                written = Written()
            self._discards.pop(handle, None)
            taken, to = self._committed, max(back.to, self._committed) if back.onwards else back.to
            if 0 <= to < taken and self._is_there(to):
                self._take_back(to, handle)
                written = Written()
            self._writers.leave(handle, written)
            self._late = max(self._late, written.late)
            if back.to >= 0:
                self._called_off = self._called_off or self._committing >= to
                self._discards[handle] = max(to, self._committed)
            self._follow()
        if 0 <= to < taken:
            self._record_rollback()

    def rollback(self, whose: Whose, session: str, back: Back, timeout_s: float) -> dict[str, Any]:
        """Take a handle back to a checkpoint, and discard what it wrote above. Below what is committed, all go back: an
        epoch begins there. ``session``: that keeps the handle attached; "": it is not.

        Returns:
            The state, where it is now, ``position``, and why what was persisted above ``stays`` on offer, or null.

        Raises:
            StaleEpochError: see `catch_up`; but not for a handle that was killed, which comes back by this.
            DDictCheckpointRetiredError: nobody can go back there.
            DDictTimeoutError: not all managers could be reached; the same call again finishes it."""
        deadline = time.monotonic() + timeout_s
        handle, _, epoch, generation = whose
        with self._changed:
            self._check_epoch(epoch)
            self._fence.hear(handle, generation)
            to = max(back.to, self._committed) if back.onwards else back.to
            self._check_there(to)
            taken, numbered = self._committed, self._discard_number + 1
            if session and not self._writers.has_left(handle):
                self._writers.place(handle, session, to, epoch)
            self._discards.pop(handle, None)
            if to < taken:
                self._take_back(to, handle)
                if session:
                    self._writers.place(handle, session, to, self.epoch)
            else:
                self._discard_number = numbered
                # Also at `to` itself: what it writes there now must not be in it by halves.
                self._called_off = self._called_off or self._committing >= to
            begun = self.epoch  # what begins after this one, the handle has yet to hear of
            self._changed.notify_all()
        if to >= taken:
            told = asked.Discard(Whose(handle, to, epoch, generation), numbered, dead=False)
            self._managers.ask(told, deadline - time.monotonic(), apart=True)
        self._await_open(deadline)
        return {**self.state(), "epoch": begun, "position": to, "stays": self._record_rollback(deadline)}

    def _take_back(self, to: int, handle: str) -> None:
        """Have all go back below what is committed. With the lock held."""
        taken = self._committed
        why = f"a handle went back to checkpoint {to}, below {taken}, which was committed"
        self._begin_epoch(Beginning(to, to, self._cut_of(to), why, taken, by=handle))
        self._persisting.take_back(to)

    def _record_rollback(self, deadline: float | None = None) -> str | None:
        """Have the store know that what was persisted above a checkpoint counts no more. Returns why it does not:
        whoever persists next tries again."""
        try:
            self._persisting.record(deadline)
        except Exception as error:  # of a persister of the user's own, perhaps
            _log.warning("a persisted checkpoint that was rolled back is still on offer: %s", error)
            return str(error) if isinstance(error, FlashpointError) else repr(error)
        return None

    def _reachable(self, position: int, onwards: bool = False) -> int:
        """Return the checkpoint that a writer comes to who wants to be at one. Commits that it is too late for are
        called off."""
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

    def catch_up(self, account: Account, timeout_s: float) -> dict[str, Any]:
        """Tell a handle, whose epoch is over or will be, what that means for it. Return the state, and ``lost``: why
        what it wrote is lost, or null; ``manager``: that was lost; ``base``: what to go on from, and ``cut``: its
        number; ``taken``: what was committed below where it stands was taken back. Raises `DDictTimeoutError`:
        managers have not begun it in time."""
        self._await_open(time.monotonic() + timeout_s)
        handle, position, epoch, _ = account.whose
        with self._changed:
            writer = self._writers.live.get(handle)
            lost, taken = self._epochs.account(epoch, handle, position, account.written, writes=writer is not None)
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
        account: Account,
        checkpoint_id: int,
        if_written: bool,
        timeout_s: float,
        is_gone: IsGone = lambda: False,
    ) -> dict[str, Any]:
        """Wait until a checkpoint is committed, and what the handle wrote late, unless it is still there. With
        ``if_written``, do not wait where nobody writes, for somebody who may begin to. Raises `StaleEpochError`,
        `DDictWritesLostError`: as :meth:`move`; `DDictTimeoutError`: it was not in time."""
        deadline, written = time.monotonic() + timeout_s, account.written
        handle, _, epoch, _ = account.whose
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

    def freeze(self, whose: Whose, frozen: bool, timeout_s: float) -> None:
        """Have all managers refuse writes, or take them again."""
        with self._changed:
            self._fence.hear(whose.handle, whose.generation)
            self._frozen, self._freezes = frozen, self._freezes + 1
            told = asked.Freeze(frozen, self._freezes)
        self._managers.ask(told, timeout_s, apart=True)

    def persist_newest(self, timeout_s: float, is_gone: IsGone = lambda: False) -> int:
        """Commit what can be, persist the newest committed checkpoint if it is not, and return it; -1: there is none.
        Raises `FlashpointError`: it could not be persisted; `DDictPersistError`: there is no persister."""
        _ = self._persisting.history
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

    def restore(self, whose: Whose, checkpoint_id: int, timeout_s: float) -> dict[str, Any]:
        """Have all managers hold a persisted checkpoint, and nothing else: an epoch begins with it.

        Raises:
            DDictTimeoutError: it was not done in time; or it was, and copies are missing.
            FlashpointError: a manager cannot read it, or it is not there; all is as before.
        """
        deadline, handle = time.monotonic() + timeout_s, whose.handle
        with self._changed:
            self._fence.hear(handle, whose.generation)
        checkpoint = save_of(self._persisting.history.locate(checkpoint_id))
        with self._alone(deadline), self._no_commits(deadline):
            self._persisting.await_idle(deadline)
            try:
                left = deadline - time.monotonic()
                self._managers.ask(asked.PrepareRestore(checkpoint), left, apart=True)
                with self._changed:
                    self._fence.hear(handle, whose.generation)
                self._persisting.history.restored(checkpoint_id)
            except FlashpointError:
                with contextlib.suppress(FlashpointError):
                    self._managers.ask(asked.AbortRestore())
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
        """Let one restore run at a time: who has given one up, and begins another, gets that one."""
        if not self._restoring.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise DDictTimeoutError("another checkpoint is being restored")
        try:
            yield
        finally:
            self._restoring.release()

    def close(self) -> None:
        """Stop committing."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._opened.notify_all()
        self._persisting.close()
        self._thread.join(1.0)
        self._managers.close()
