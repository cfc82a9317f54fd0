"""What happens to a save after its commit here: replicate, agree, advance; in the order of the saves.

Owns the background thread of a saver and the rule by which older versions may go: a version is *verified* once
every rank has committed it and every copy that the strategy asks for was acknowledged, which the ranks learn from
one small all-reduce a save. A rank whose save failed takes part too, voting no. Ranks may come to such a vote with
different saves, because one of them has begun fewer: then the newer ones are held back until all have come to them,
and the others make no version. Nothing here can delay or fail a save; what goes wrong is logged once and counted.
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ml_flashpoint import events
from ml_flashpoint.checkpoint_object_manager.departed import sweep_departed
from ml_flashpoint.core.persisting import UNKNOWN_STEP, Persisting
from ml_flashpoint.core.save import Save, SaveState
from ml_flashpoint.core.save_identity import Numbering
from ml_flashpoint.format.errors import DeadlineError, FlashpointError
from ml_flashpoint.format.failure_kinds import is_transient
from ml_flashpoint.format.knobs import collective_deadline_s, transfer_deadline_s
from ml_flashpoint.ranks.rank_group import Agreement, RankGroup
from ml_flashpoint.replication.replication_manager import ReplicationManager

_log = logging.getLogger(__name__)

_UNKNOWN = 2**63 - 1
_COPY_AGAIN_S = 1.0


@dataclass
class CommitStats:
    """Counters of a commit queue. Steps are training steps, None before the first."""

    last_committed: int | None = None
    last_verified: int | None = None
    committed: int = 0
    failed: int = 0
    replicated_bytes: int = 0
    replication_failures: int = 0
    replication_error: str | None = None
    """Why copies are missing now; None while replication works."""
    replication_seconds: float = 0.0
    agreement_error: str | None = None
    """Why ranks do not agree on saves now; None while they do."""


class CommitQueue:
    """See the module. ``submit`` in the order of the saves; all ranks submit the same saves.

    Args:
        group: ranks that must agree.
        agreement: how they do.
        numbering: where the saves' numbers come from.
        replication: who makes the copies, or None for none.
        seal_deadline_s: seconds that a save may take to be committed once it is the oldest one.
        watch: called while that is waited for, and once more if it was in vain; may commit it (a save in another
            process) or fail it.
        base: where saves go of which nobody has said so, for events.
        persisting: writes verified saves to a durable store; None if nobody does, on any rank.
    """

    def __init__(
        self,
        group: RankGroup,
        agreement: Agreement,
        numbering: Numbering,
        replication: ReplicationManager | None,
        *,
        seal_deadline_s: Callable[[], float],
        watch: Callable[[Save], float | None],
        base: Callable[[], object] = lambda: None,
        persisting: Persisting | None = None,
    ) -> None:
        self._group = group
        self._agreement = agreement
        self._numbering = numbering
        self._replication = replication
        self._seal_deadline_s = seal_deadline_s
        self._watch = watch
        self._base = base
        self._persisting = persisting
        self._due = -1  # number of the save that all ranks would persist
        self._queue: deque[Save] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._current: Save | None = None
        self._changes = 0
        self._closing = False
        self._swept = False
        self._verified = -1
        self._uncertain: list[Save] = []
        self.stats = CommitStats()
        self.finished_count = 0

    def submit(self, save: Save) -> None:
        """Queue a save that has begun."""
        with self._changed:
            self._queue.append(save)
            self._ensure_thread()
            self._note_change()

    def go_on(self) -> None:
        """Have what is queued finished, if no thread could be started for that when it was queued."""
        with self._changed:
            if self._queue:
                self._ensure_thread()

    def _ensure_thread(self) -> None:
        """Start the thread if there is none. If there cannot be one now, whoever comes or waits next tries again."""
        if self._thread is not None:
            return
        thread = threading.Thread(target=self._run, name="flashpoint-commit", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            _log.warning("saves are not finished until a thread can be started: %s", error)
        else:
            self._thread = thread

    def evict(self, save: Save) -> bool:
        """Give up a committed save that is not being replicated now, to reuse its arena. Returns whether it was."""
        with self._changed:
            if save is self._current or not save.evict():
                return False
        if save.part is not None and save.store is not None:
            save.store.drop(save.part)
        return True

    def is_queue_thread(self) -> bool:
        """Whether the caller runs on the queue's own thread, and so must not wait for it."""
        return threading.current_thread() is self._thread

    def wait_for_change(self, done: Callable[[], bool], deadline_s: float) -> bool:
        """Wait until ``done()``, asked again after every save that ends."""
        give_up = time.monotonic() + deadline_s
        while True:
            with self._changed:
                if self._queue:
                    self._ensure_thread()
                seen = self._changes
            # Not under the lock: it may want others, whose holders want this one.
            if done():
                return True
            with self._changed:
                if not self._changed.wait_for(lambda: self._changes != seen, give_up - time.monotonic()):  # noqa: B023
                    return done()

    def _note_change(self) -> None:
        self._changes += 1
        self._changed.notify_all()

    def is_idle(self, held_up: threading.Thread | None = None) -> bool:
        """Whether nothing is queued or under way, but for what a thread that is held up has not committed."""
        with self._changed:
            saves = [*self._queue, *([] if self._current is None else [self._current])]
        return all(held_up is not None and save.worker is held_up and save.part is None for save in saves)

    def close(self, deadline_s: float) -> bool:
        """Finish what is queued, within ``deadline_s`` seconds, and stop. Returns whether all was finished."""
        finished = self.wait_for_change(self.is_idle, deadline_s)
        with self._changed:
            self._closing = True
            self._note_change()
        self._agreement.close()
        return finished

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if self._closing:
                    return
                save = self._current = self._queue.popleft()
            try:
                self._finish(save)
            except Exception:
                _log.exception("finishing the save of step %s failed", save.step)
            finally:
                with self._changed:
                    self._current = None
                    self.finished_count += 1
                    save.finished.set()
                    self._note_change()

    def _finish(self, save: Save) -> None:
        try:
            ready = self._make_ready(save)
        except Exception as error:
            # Whatever it is, the other ranks wait for this one's vote.
            _log.exception("the save of step %s is not verified", save.step)
            save.fail(error)
            ready = False
        if save.state is SaveState.FAILED:
            self._tell(events.SaveFailed, save, error=str(save.error))
        if save.part is None and not save.known:
            return  # the other ranks do not wait for it: they have not come to a name for it
        match self._agree(save, ready):
            case _Outcome.VERIFIED:
                self._verify_save(save)
            case _Outcome.NOT_VERIFIED:
                if save.store is not None:
                    save.store.reject(save.save_id)
            case _Outcome.UNCERTAIN:
                save.uncertain = True
                self._uncertain.append(save)

    def _tell(self, kind: type[events.Event], save: Save, **fields: Any) -> None:
        base = self._base() if save.version is None else save.version.parent
        events.emit(kind, self._group, base, save.step, **fields)

    def _verify_save(self, save: Save) -> None:
        save.verify()
        self._verified = save.sequence
        self.stats.last_verified = save.step
        self._tell(events.VersionVerified, save, seconds=time.monotonic() - save.began)
        if self._persisting is not None:
            self._persisting.verified(save, due=self._due == save.sequence)
        if save.store is None:
            return
        save.store.advance(save.save_id, step=save.step)
        if not self._swept and self._group.is_node_leader:
            here = self._group.topology.ranks_of(self._group.node)
            self._swept = sweep_departed(save.store, here, save.save_id)

    def _make_ready(self, save: Save) -> bool:
        """Whether this rank has committed the save and has all copies of it."""
        self._await_commit(save)
        if save.state is SaveState.COMMITTED:
            self.stats.committed += 1
            self.stats.last_committed = save.step
            assert save.part is not None
            assert save.store is not None
            seconds = time.monotonic() - save.began
            self._tell(events.PartCommitted, save, bytes=save.part.size, seconds=seconds)
            if save.held_s is not None:
                self._tell(events.LoopHeld, save, seconds=save.held_s)
            # A recovery of this process may find it useless meanwhile, and its arena would be the next save's.
            with save.store.pinned(save.part) as held:
                if held and self._copy(save):
                    save.replicate()
            if not held or save.part.doomed:
                save.evict()
        elif save.state is SaveState.FAILED:
            self.stats.failed += 1
        return save.state is SaveState.REPLICATED

    def _await_commit(self, save: Save) -> None:
        give_up = time.monotonic() + self._seal_deadline_s()
        while not save.decided.is_set():
            poll_s = self._watch(save)
            left = give_up - time.monotonic()
            if left <= 0:
                message = f"the save was not committed within {self._seal_deadline_s():.0f} s"
                save.fail(DeadlineError(message, step=save.step, rank=self._group.rank))
                _log.error("%s", save.error)
                self._watch(save)
                return
            save.decided.wait(min(left, poll_s if poll_s is not None else left))

    def _copy(self, save: Save) -> bool:
        """Have all copies made. Returns whether they are."""
        if self._replication is None or not self._replication.initialized:
            return True
        part = save.part
        assert part is not None
        if not (holders := self._replication.copies_of(part.rank)):
            return True
        began = time.monotonic()
        # The others wait in the agreement meanwhile.
        give_up = began + min(transfer_deadline_s(), collective_deadline_s() / 2)
        while True:
            try:
                self._replication.replicate(part, cancelled=lambda: self._closing)
                break
            except FlashpointError as error:
                if self.stats.replication_error is None:  # once, until it works again
                    _log.error("replication fails, older copies are kept: %s", error)
                self.stats.replication_error = str(error)
                if not is_transient(error) or part.doomed or not self._copy_again(give_up):
                    self.stats.replication_failures += 1
                    self._tell(events.ReplicationFailed, save, error=str(error))
                    return False
        if self.stats.replication_error is not None:
            _log.warning("replication works again from step %s on", save.step)
            self.stats.replication_error = None
        seconds = time.monotonic() - began
        self.stats.replication_seconds += seconds
        self.stats.replicated_bytes += part.size
        self._tell(events.PartReplicated, save, bytes=part.size, holders=holders, seconds=seconds)
        return True

    def _copy_again(self, give_up: float) -> bool:
        """Whether to try to copy a save once more, after a pause: until then, unless a newer save comes before. Where
        saves are far apart, what goes wrong for a moment must not leave a version without copies until the next. Not
        for want of room, which may take the next agreement: see `StoreBackend`."""
        with self._changed:
            left = give_up - time.monotonic()
            came = self._changed.wait_for(lambda: self._queue or self._closing, min(left, _COPY_AGAIN_S))
        return not came and left > _COPY_AGAIN_S

    def _agree(self, save: Save, ready: bool) -> _Outcome:
        if not self._group.distributed:
            self._note_due(save, ready and self._persisting is not None and self._persisting.wanted(save))
            return _Outcome.of(ready)
        while True:
            try:
                vote = self._vote(save, ready)
            except FlashpointError as error:
                # Expected when the job ends while saves are under way; the versions that exist stay.
                log = _log.debug if self._closing or self.stats.agreement_error is not None else _log.error
                log("ranks cannot agree on the save of step %s, older versions are kept: %s", save.step, error)
                self.stats.agreement_error = str(error)
                self._tell(events.AgreementFailed, save, error=str(error))
                # If this rank has not voted, it is certain that nothing is verified.
                return _Outcome.UNCERTAIN if self._agreement.was_asked else _Outcome.NOT_VERIFIED
            self._clear_up(vote.verified)
            if vote.is_one_save:
                if self.stats.agreement_error is not None:
                    _log.warning("ranks agree on saves again from step %s on", save.step)
                    self.stats.agreement_error = None
                self._note_due(save, vote.ready and vote.persist)
                return _Outcome.of(vote.ready)
            self._diverged(save, vote)
            if save.sequence < vote.newest or vote.oldest == vote.newest:
                return _Outcome.NOT_VERIFIED

    def _note_due(self, save: Save, due: bool) -> None:
        if due:
            self._due = save.sequence

    def _vote(self, save: Save, ready: bool) -> _Vote:
        # Of ranks that are not ready the step is unknown, and nothing depends on it.
        step = save.step if ready and save.step is not None else None
        low, negated = (_UNKNOWN, _UNKNOWN) if step is None else (step, -step)
        newest_ms = self._numbering.newest_ms(str(save.store.base)) if save.store is not None else -1
        persisting = self._persisting
        would, persisted = (False, UNKNOWN_STEP) if persisting is None else (ready, persisting.persisted_vote)
        would = would and persisting is not None and persisting.wanted(save)
        reported = self._agreement.minimum(
            (
                *(int(ready), save.sequence, -save.sequence, low, negated),
                *(-self._numbering.highest, -newest_ms, -self._verified),
                *(int(would), persisted),
            )
        )
        all_ready, oldest, newest, lowest, highest, used, latest_ms, verified = reported[:-2]
        persist, persisted = reported[-2:]
        same_step = lowest in (_UNKNOWN, -highest)
        if persisting is not None:
            persisting.heard(persisted)
        return _Vote(*(bool(all_ready), oldest, -newest, same_step, -used, -latest_ms, -verified), bool(persist))

    def _clear_up(self, verified: int) -> None:
        """Finish the saves of which only other ranks could know, now that all have reported which one is verified."""
        uncertain, self._uncertain = self._uncertain, []
        for save in uncertain:
            if save.sequence == verified:
                self._verify_save(save)
            elif save.sequence > verified and save.store is not None:
                # It never will be: its copies must not keep the room of later ones.
                save.store.reject(save.save_id)
            save.uncertain = False  # at last: until then, it must not be evicted

    def _diverged(self, save: Save, vote: _Vote) -> None:
        """Ranks came with different saves. Doors that exchange a save's name are in step again by themselves; those
        that count alone go on above all that was counted."""
        self._numbering.jump(vote.highest, vote.newest_ms)
        text = (
            f"ranks are at different saves (numbers {vote.oldest} to {vote.newest}, step {save.step} on rank "
            f"{self._group.rank}), which makes no version: every rank must save at the same steps"
            if vote.newest_ms < 0
            else "versions of an earlier run look newer than this one, whose clock is behind"
        )
        if self.stats.agreement_error is None:
            _log.error("%s; later saves are not affected", text)
        self.stats.agreement_error = text


class _Outcome(enum.Enum):
    """What ranks have come to about a save."""

    VERIFIED = enum.auto()
    NOT_VERIFIED = enum.auto()
    UNCERTAIN = enum.auto()
    """Only others can know."""

    @classmethod
    def of(cls, ready: bool) -> _Outcome:
        return cls.VERIFIED if ready else cls.NOT_VERIFIED


@dataclass(frozen=True, slots=True)
class _Vote:
    """What came of one all-reduce.

    Attributes:
        ready: whether all ranks have committed their save and have its copies.
        oldest, newest: numbers of the saves that ranks came with.
        same_step: whether those that know their step have the same.
        highest: highest number that a rank has used.
        newest_ms: see `SaveIdentity`.
        verified: number of the newest save that a rank knows to be verified.
        persist: whether all ranks would persist this save.
    """

    ready: bool
    oldest: int
    newest: int
    same_step: bool
    highest: int
    newest_ms: int
    verified: int
    persist: bool

    @property
    def is_one_save(self) -> bool:
        """Whether all came with the same save, which nothing older hides."""
        return self.oldest == self.newest and self.same_step and self.newest_ms < 0
