"""What happens to a save after its bytes are final: replicate, agree, advance; in the order of the saves.

Owns the background thread of a saver and the rule by which older versions may go: a version is *verified* once
every rank has sealed it and every copy that the strategy asks for was acknowledged, which the ranks learn from
one small all-reduce a save. A rank whose save failed takes part too, voting no. Nothing here can delay or fail
a save; what goes wrong is logged once and counted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ml_flashpoint.checkpoint_object_manager.departed import sweep_departed
from ml_flashpoint.checkpoint_object_manager.rank_store import HeldPart, RankStore
from ml_flashpoint.core.errors import DeadlineError, FlashpointError
from ml_flashpoint.core.rank_group import RankGroup
from ml_flashpoint.replication.replication_manager import ReplicationManager

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class PendingSave:
    """One save, from its begin until it is verified or lost.

    ``outcome`` is set exactly once, by :meth:`resolve`; ``verified`` may follow.
    """

    attempt: str
    sequence: int
    step: int | None = None
    part: HeldPart | None = None
    store: RankStore | None = None
    error: BaseException | None = None
    resolved: threading.Event = field(default_factory=threading.Event)
    settled: threading.Event = field(default_factory=threading.Event)
    """Set when the queue is done with it, verified or not."""
    verified: bool = False
    verified_elsewhere: bool = False
    """Set when the agreement broke off: other ranks may have learned that it is verified, and have pruned."""
    dropped: bool = False
    _resolving: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def resolve(self, part: HeldPart | None, store: RankStore | None, error: BaseException | None = None) -> bool:
        """Say what became of the save: a committed part, or an error. Returns whether that was not said before."""
        with self._resolving:
            if self.resolved.is_set():
                return False
            self.part, self.store, self.error = part, store, error
            self.resolved.set()
            return True


@dataclass
class CommitStats:
    """Counters of a commit queue. Steps are training steps, None before the first."""

    last_sealed: int | None = None
    last_verified: int | None = None
    sealed: int = 0
    failed: int = 0
    replicated_bytes: int = 0
    replication_failures: int = 0
    replication_error: str | None = None
    """Why copies are missing now; None while replication works."""
    replication_seconds: float = 0.0


class CommitQueue:
    """See the module. ``submit`` in the order of the saves; all ranks submit the same saves.

    Args:
        group: ranks that must agree.
        replication: who makes the copies, or None for none.
        seal_deadline_s: seconds that a save may take to be resolved once it is the oldest one.
        watch: called while an unresolved save is waited for; may resolve it (a save in another process).
    """

    def __init__(
        self,
        group: RankGroup,
        replication: ReplicationManager | None,
        *,
        seal_deadline_s: Callable[[], float],
        watch: Callable[[PendingSave], float | None],
    ) -> None:
        self._group = group
        self._replication = replication
        self._seal_deadline_s = seal_deadline_s
        self._watch = watch
        self._queue: deque[PendingSave] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._current: PendingSave | None = None
        self._closing = False
        self._agreeing = True
        self._swept = False
        self.stats = CommitStats()
        self.settled_count = 0

    def submit(self, save: PendingSave) -> None:
        """Queue a save that has begun."""
        with self._changed:
            self._queue.append(save)
            self._ensure_thread()
            self._changed.notify_all()

    def _ensure_thread(self) -> None:
        """Start the thread if there is none. If there cannot be one now, whoever comes or waits next tries again."""
        if self._thread is not None:
            return
        thread = threading.Thread(target=self._run, name="flashpoint-commit", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            _log.warning("saves are not settled until a thread can be started: %s", error)
        else:
            self._thread = thread

    def drop(self, save: PendingSave) -> bool:
        """Give up a resolved save that is not being replicated now, to reuse its arena. Returns whether it was."""
        with self._changed:
            if save is self._current or save.dropped or not save.resolved.is_set():
                return False
            if save.verified or save.verified_elsewhere:
                return False
            save.dropped = True
        if save.part is not None and save.store is not None:
            save.store.drop(save.part)
        return True

    def is_queue_thread(self) -> bool:
        """Whether the caller runs on the queue's own thread, and so must not wait for it."""
        return threading.current_thread() is self._thread

    def wait_for_change(self, done: Callable[[], bool], deadline_s: float) -> bool:
        """Wait until ``done()``, asked again after every save that settles."""
        with self._changed:
            if self._queue:
                self._ensure_thread()
            return self._changed.wait_for(done, deadline_s)

    @property
    def idle(self) -> bool:
        """Whether nothing is queued or under way."""
        with self._changed:
            return not self._queue and self._current is None

    def close(self, deadline_s: float) -> bool:
        """Finish what is queued, within ``deadline_s`` seconds, and stop. Returns whether all was finished."""
        finished = self.wait_for_change(lambda: not self._queue and self._current is None, deadline_s)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        return finished

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if self._closing:
                    return
                save = self._current = self._queue.popleft()
            try:
                self._settle(save)
            except Exception:
                _log.exception("settling the save of step %s failed", save.step)
            finally:
                with self._changed:
                    self._current = None
                    self.settled_count += 1
                    save.settled.set()
                    self._changed.notify_all()

    def _settle(self, save: PendingSave) -> None:
        try:
            ready = self._make_ready(save)
        except Exception as error:
            # Whatever it is, the other ranks wait for this one's vote.
            _log.exception("the save of step %s is not verified", save.step)
            save.resolve(None, None, error)
            ready = False
        agreed = self._agree(save, ready)
        save.verified_elsewhere = agreed is None
        if agreed:
            save.verified = True
            self.stats.last_verified = save.step
        if save.store is None or agreed is None:
            return
        if not agreed:
            save.store.reject(save.attempt)
            return
        save.store.advance(save.attempt)
        if not self._swept and self._group.is_node_leader:
            here = self._group.topology.ranks_of(self._group.node)
            self._swept = sweep_departed(save.store, here, save.attempt)

    def _make_ready(self, save: PendingSave) -> bool:
        """Whether this rank has sealed the save and has all copies of it."""
        self._await_seal(save)
        if save.part is not None and not save.dropped:
            self.stats.sealed += 1
            self.stats.last_sealed = save.step
            return self._replicate(save)
        if save.error is not None:
            self.stats.failed += 1
        return False

    def _await_seal(self, save: PendingSave) -> None:
        give_up = time.monotonic() + self._seal_deadline_s()
        while not save.resolved.is_set():
            poll_s = self._watch(save)
            left = give_up - time.monotonic()
            if left <= 0:
                message = f"the save was not sealed within {self._seal_deadline_s():.0f} s"
                save.resolve(None, None, DeadlineError(message, step=save.step, rank=self._group.rank))
                _log.error("%s", save.error)
                return
            save.resolved.wait(min(left, poll_s if poll_s is not None else left))

    def _replicate(self, save: PendingSave) -> bool:
        if self._replication is None or not self._replication.initialized:
            return True
        part = save.part
        assert part is not None
        if not self._replication.copies_of(part.rank):
            return True
        began = time.monotonic()
        try:
            self._replication.replicate(part, cancelled=lambda: self._closing)
        except FlashpointError as error:
            self.stats.replication_failures += 1
            if self.stats.replication_error is None:  # once, until it works again
                _log.error("replication fails, older copies are kept: %s", error)
            self.stats.replication_error = str(error)
            return False
        if self.stats.replication_error is not None:
            _log.warning("replication works again from step %s on", save.step)
            self.stats.replication_error = None
        self.stats.replication_seconds += time.monotonic() - began
        if part.manifest is not None:
            self.stats.replicated_bytes += part.manifest.total_size
        return True

    def _agree(self, save: PendingSave, ready: bool) -> bool | None:
        """Whether this save is verified on all ranks; None if only others can know."""
        if not self._group.distributed:
            return ready
        if not self._agreeing:
            return False  # for certain: nothing is verified without this rank
        step = save.step if ready and save.step is not None else -1
        try:
            agreed = self._group.agree_min((int(ready), save.sequence, -save.sequence, step, -step))
        except FlashpointError as error:
            self._agreeing = False
            # Expected when the job ends while saves are under way; the versions that exist stay.
            log = _log.debug if self._closing else _log.error
            log("ranks cannot agree any more, so no version is pruned from now on: %s", error)
            return None
        ready_all, sequence, negated_sequence, lowest_step, negated_step = agreed
        # Of ranks that are not ready the step is unknown, and nothing depends on it.
        if sequence != -negated_sequence or (ready_all and lowest_step != -negated_step):
            _log.error(
                "ranks are at different saves (numbers %d to %d, steps %d to %d), which makes no version: "
                "every rank must save at the same steps",
                sequence,
                -negated_sequence,
                lowest_step,
                -negated_step,
            )
            return False
        return bool(ready_all)
