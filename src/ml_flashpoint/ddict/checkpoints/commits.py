"""Having managers begin epochs, commit checkpoints, and let go of them: the coordinator's thread.

Owns the order in which managers are asked to begin an epoch, to take a snapshot, to seal it, and to let older ones go.
Who writes, and what is whole for that, is `writers`'; what is persisted, `queue`'s. What a manager does is its own
matter; how it is reached, the caller's; what handles are told, `coordinator`'s.

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
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, NamedTuple, TypeAlias, TypeVar

from ml_flashpoint.ddict.checkpoints.writers import Beginning, Epochs, Writers
from ml_flashpoint.ddict.errors import DDictTimeoutError, DDictWritesLostError
from ml_flashpoint.ddict.options import Options
from ml_flashpoint.ddict.persistence.queue import PersistedRun, Persisting
from ml_flashpoint.ddict.written import Written
from ml_flashpoint.format.errors import FlashpointError, ProtocolError
from ml_flashpoint.format.knobs import seal_deadline_s

CALL_S = 30.0

Call: TypeAlias = Callable[[int, str, "dict[str, Any]", float], "dict[str, Any]"]
"""``(manager, operation, fields, timeout in seconds) -> fields of the answer``."""

_Found = TypeVar("_Found")

_NEVER_LATE = 1 << 60  # the cut where no manager makes any: what is there is all there is

_log = logging.getLogger(__name__)
_BEGIN_S = 10.0
RETRY_S = 0.2


class Sealed(NamedTuple):
    """A cut that is committed."""

    cut: int  # its number
    names: list[str]  # of each manager's snapshot; empty without replication


class AllManagers:
    """See the module. Thread-safe."""

    def __init__(self, call: Call, count: int) -> None:
        self._call = call
        self._count = count
        self._pool = self._threads("commit")
        self.unanswered: dict[int, str] = {}  # managers that commits wait for, and what they were asked

    def _threads(self, name: str) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(min(32, self._count), thread_name_prefix=f"ddict-{name}")

    def ask(
        self, operation: str, fields: dict[str, Any], timeout_s: float = CALL_S, *, apart: bool = False
    ) -> list[dict[str, Any]]:
        """Their answers. ``apart``: see `at_once`."""
        call, left = (self._call if apart else self.call), max(0.05, timeout_s)
        return self.at_once(
            range(self._count), operation, lambda each: call(each, operation, dict(fields), left), apart=apart
        )

    def at_once(
        self, managers: Iterable[int], operation: str, ask: Callable[[int], _Found], *, apart: bool = False
    ) -> list[_Found]:
        """What ``ask`` returns for each of these, or the first error once all have answered, or that of asking.
        ``apart``: with threads of its own, as it takes long, and commits must not wait for it."""
        with self._threads(operation) if apart else contextlib.nullcontext(self._pool) as pool:
            try:
                asked = [pool.submit(ask, each) for each in managers]
            except RuntimeError as error:  # no thread can be had; or the program ends, without `destroy`
                raise FlashpointError(f"managers cannot be asked to {operation}: {error}") from error
            wait(asked)
            return [each.result() for each in asked]

    def call(self, manager: int, operation: str, fields: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """The answer of one that commits wait for."""
        self.unanswered[manager] = operation
        try:
            return self._call(manager, operation, fields, timeout_s)
        finally:
            self.unanswered.pop(manager, None)

    def close(self) -> None:
        """Ask nothing more. Does not wait."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class Committer:
    """See the module. Thread-safe; the base of `Coordinator` and of nothing else. ``run``: that is persisted under."""

    def __init__(self, rules: Options, call: Call, run: PersistedRun) -> None:
        self._rules = rules
        self._managers = AllManagers(call, rules.managers)
        self.run = run
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
        self._persisting = Persisting(self._changed, self._write_parts, run)
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
        """With the lock held. The coordinator's thread has managers begin it. ``written``: by handles whose end others
        are told of."""
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
        """A manager was lost, and is back: it has found what it can go on from, and waits for an epoch to begin."""
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

    def sealed_by(self, manager: int) -> list[tuple[str, int, int]]:
        """The snapshots that a manager has of what is committed, each with its cut and its checkpoint."""
        self.check_manager(manager)
        with self._changed:
            keep = self._keep()
            return [
                (its.names[manager], its.cut, at) for at, its in self._sealed.items() if its.names and its.cut in keep
            ]

    def check_manager(self, manager: int) -> None:
        """Raises `ProtocolError`: there is no such manager."""
        if not 0 <= manager < self._rules.managers:
            raise ProtocolError(f"there is no manager {manager}")

    def _let_begin(self) -> None:
        """Have managers begin the epoch that they are behind of. Those that cannot be reached now must before anything
        is committed; others need not wait for them."""
        with self._changed:
            epoch, base = self.epoch, self._epochs.base
            fields = {"run": self.run.run_id, "e": epoch, "base": base, "cut": self._cut, "keep": self._keep()}
            fields.update(frozen=self._frozen, n=self._freezes, pinned=self._pinned(base), restored=None)
            if self._restored is not None:
                fields.update(restored=self._restored[1], keep=[self._restored[2]])
            behind = sorted(self._epochs.behind)

        def begin(manager: int) -> None:
            told = {**fields, "sealed": self.sealed_by(manager)}
            self._managers.call(manager, "begin", told, _BEGIN_S)
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
                    self._changed.wait(RETRY_S)
            except Exception:  # the thread must go on: what stops it would stop all commits, without a word
                _log.exception("a commit failed")
                with self._changed:
                    self._changed.wait(RETRY_S)
            finally:
                with self._changed:
                    self._busy, self._committing = False, -1
                    self._changed.notify_all()

    def _next_job(self) -> Callable[[], None] | None:
        """What is to be done next. With the lock held."""
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
        """Whether what is committed is to be committed again, with what was written there late."""
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
                fields = {"w": handle, "to": to, "n": self._discard_number, "dead": True, "e": self.epoch, "g": 0}
            self._managers.ask("discard", fields)
            with self._changed:
                if self._discards.get(handle) == to:
                    del self._discards[handle]

    def _commit(self) -> None:
        with self._changed:
            self._cut += 1
            checkpoint_id, epoch, cut = self._committing, self.epoch, self._cut
            fields = {"e": epoch, "checkpoint_id": checkpoint_id, "cut": cut}
            committed = self._cut_of(self._committed)
        self._managers.ask("prepare", {**fields, "committed": committed})
        sealed: list[str] = []
        if self._rules.replicated and not self._called_off:
            sealed = [str(answer["attempt"]) for answer in self._managers.ask("seal", fields, seal_deadline_s())]
        with self._changed:
            if epoch != self.epoch or self._called_off:
                return  # somebody went back: what it has is not what is written
            self._committed = checkpoint_id
            self._restored = None
            self._sealed[checkpoint_id] = Sealed(cut, sealed)
            if self._rules.next_due(checkpoint_id - 1) == checkpoint_id:
                self._persisting.add(checkpoint_id, due=True)
            self._changed.notify_all()
        self._settle()

    def _follow(self) -> None:
        """Who writes, or where, has changed. Where there are no snapshots, what is whole is committed. With the lock
        held."""
        if not self._rules.snapshots:
            self._committed = self._target()
        self._changed.notify_all()

    def _settle(self) -> None:
        """Let managers forget what is not needed any more."""
        with self._changed:
            told, epoch, keep = self._to_settle(), self.epoch, self._keep()
            fields = {"e": epoch, "oldest": told[0], "keep": keep, "committed": told[1], "cut": told[2]}
            fields["pinned"] = pinned = self._pinned()
            # Before they are asked: nobody may go back to what one of them may have forgotten.
            self._oldest_told = told[0]
            self._retain(lambda each: self._sealed[each].cut in (*keep, *pinned) or each > self._committed)
        self._managers.ask("settle", fields)
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
        """Where the dictionary is: its ``epoch``, ``committed``, ``newest``, ``oldest`` and ``writers``."""
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

    def _write_parts(self, checkpoint_id: int) -> list[str]:
        with self._changed:
            fields = {"checkpoint_id": checkpoint_id, "cut": self._cut_of(checkpoint_id)}
        written = self._managers.ask("persist", fields, seal_deadline_s(), apart=True)
        return [str(answer["receipt"]) for answer in written]

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

    def close(self) -> None:
        """Stop committing."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._opened.notify_all()
        self._persisting.close()
        self._thread.join(1.0)
        self._managers.close()
