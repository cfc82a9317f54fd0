"""Writes verified versions to a durable store, in the background, while training and saves go on.

Owns the thread that does it, which version is written when, and what this rank tells about it. Each rank writes its own
part, from its memory; rank 0 also waits for the manifests of the others in the store, writes the marker, and removes
what is too old. How it all lies there is `stores.durable`', and how a part is read `persist_task`'s.

All ranks begin with the same version, without a collective of their own: each says in the vote that a save has anyway
(see `commit_queue`) whether it would begin with this one, and they begin if all would. That is the first version at or
after each multiple of ``every`` at which no rank is still writing an older one.

Nothing here can delay or fail a save: a part gives way to one that needs its memory, and a store that hangs keeps this
thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Final

from ml_flashpoint import events
from ml_flashpoint.core.persist_options import PersistHealth, PersistOptions
from ml_flashpoint.core.persist_task import PersistTask
from ml_flashpoint.core.save import Save
from ml_flashpoint.format.at_exit import at_exit
from ml_flashpoint.format.errors import (
    CapacityError,
    DeadlineError,
    FlashpointError,
    JobInUseError,
    SaveError,
)
from ml_flashpoint.format.failure_kinds import text_of
from ml_flashpoint.format.knobs import collective_deadline_s, exit_deadline_s, transfer_deadline_s
from ml_flashpoint.ranks.rank_group import RankGroup
from ml_flashpoint.stores.durable import DurableVersions
from ml_flashpoint.stores.location import open_durable
from ml_flashpoint.stores.ownership import PERIOD_S, Ownership
from ml_flashpoint.stores.part import PieceMemory

_log = logging.getLogger(__name__)

_NEVER: Final = -1
_FIRST_POLL_S, _LAST_POLL_S = 0.05, 1.0
_TRIES_AT_END: Final = 4.0
"""At the end, a second apart; ten times as many where another process has the store, which may have been killed."""
UNKNOWN_STEP: Final = 2**63 - 1
"""In a vote: this rank does not know."""


class _SupersededError(FlashpointError):
    """A newer version is to be persisted instead, or none any more."""


class Persisting:
    """See the module. Thread-safe.

    Args:
        options: where to, and which.
        ranks: of this process, and how many there are.
        base: the base container, for events.
        open_store: what `options.persist` leads to.
        period_s: see `stores.ownership`.
    """

    def __init__(
        self,
        options: PersistOptions,
        ranks: RankGroup,
        *,
        base: object = None,
        open_store: Callable[[str], DurableVersions] = open_durable,
        period_s: float = PERIOD_S,
    ) -> None:
        self.options = options
        self._ranks = ranks
        self._rank, self._world_size = ranks.rank, ranks.world_size
        self._base = base
        self._open_store = open_store
        self._period_s = period_s
        self._process = os.getpid()
        self._changed = threading.Condition()  # reentrant: a signal handler may come here
        self._thread: threading.Thread | None = None
        self._opened: DurableVersions | None = None
        self._ownership: Ownership | None = None
        self._next: PersistTask | None = None
        self._task: PersistTask | None = None
        self._collecting = self._hurrying = self._closing = False
        self._asked = False  # whether the store has said, once, if this process may persist there
        self._last = _NEVER
        self._newest: Save | None = None
        self._written = self._completed = self._gone = ""
        self._persisted: int | None = None
        self._error: str | None = None
        self._failures = 0
        self._tries_left = _TRIES_AT_END
        self._progress = time.monotonic()
        self._pace = 0.0
        self._buffer = PieceMemory()
        _live.add(self)
        # On rank 0, to own the store by the time that something is due; on all, since none can be started at the end.
        self._ensure_thread()

    # ---- the vote, on the commit queue's thread -----------------------------------------------------------

    def wanted(self, save: Save) -> bool:
        """Whether this rank would begin to persist this save, if all ranks would."""
        with self._changed:
            # A store that is slow to open has its first version, too: there may be no other one for long.
            ready = self._owns or not self._asked
            idle = self._next is None and (self._task is None or self._collecting)
            every = self.options.persist_every
            return ready and idle and save.step is not None and save.step // every != max(self._last, 0) // every

    @property
    def persisted_vote(self) -> int:
        """What this rank tells the others: rank 0 the newest step that is persisted, -1 if there is none."""
        if self._rank != 0:
            return UNKNOWN_STEP
        return _NEVER if self._persisted is None else self._persisted

    def heard(self, persisted: int) -> None:
        """Take note of what rank 0 has told."""
        if self._rank != 0 and persisted != UNKNOWN_STEP:
            self._persisted = None if persisted < 0 else persisted

    def verified(self, save: Save, *, due: bool) -> None:
        """A save is verified on all ranks. It is ``due`` if all of them would persist it; never raises."""
        with self._changed:
            self._newest = save
            if due and save.step is not None:
                self._last = save.step
            begins = (due or self._hurrying) and not self._closing
        if begins:
            self._give(save)

    def align(self, step: int) -> None:
        """The job goes on from this step, on all ranks. What it has gone back from is not persisted at its end."""
        with self._changed:
            self._last = step
            if self._newest is not None and self._newest.step != step:
                self._newest = None

    def _give(self, save: Save) -> None:
        task: PersistTask | None = None
        error: FlashpointError = CapacityError("its memory was needed for a newer save", step=save.step)
        try:
            task = PersistTask.of(save)
        except OSError as caught:
            error = SaveError(f"its part cannot be opened: {caught.strerror}", step=save.step)
        with self._changed:
            unused = task
            self._gone = save.save_id if task is None else ""
            if task is not None and not self._closing:
                self._next, unused = task, self._next
                if self._task is not None:
                    self._task.superseded.set()
                self._ensure_thread()
            elif task is None:
                self._fail(save.step, error)
            self._changed.notify_all()
        if unused is not None:
            unused.hold.close()  # not under the lock: it wants the store's, whose holder may want this one

    # ---- the thread ---------------------------------------------------------------------------------------

    def _ensure_thread(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="flashpoint-persist", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                _log.warning("nothing is persisted until a thread can be started: %s", error)
            else:
                self._thread = thread

    def _run(self) -> None:
        retry_s = 0.0
        while True:
            with self._changed:
                waits, retry_s = None if self._owns else retry_s, min(self._period_s / 4, _LAST_POLL_S)
                self._changed.wait_for(lambda: self._next is not None or self._closing, waits)
                task, self._next = self._next, None
                if task is None and self._closing:
                    break
                self._task, self._progress = task, time.monotonic()
            step = None if task is None else task.step
            try:
                try:
                    self._own()
                finally:
                    self._asked = True
                if task is not None:
                    self._persist(task)
            except _SupersededError:
                _log.debug("step %s is not persisted: a newer version is, or none any more", step)
            except Exception as error:  # whatever a filesystem's client raises
                self._fail(step, error)
                may_be_dead = self._ownership is not None and self._ownership.owner_may_be_dead
                self._tries_left -= 0.1 if isinstance(error, JobInUseError) and may_be_dead else 1
            finally:
                if task is not None:
                    task.hold.close()
                with self._changed:
                    self._task, self._collecting = None, False
                    self._changed.notify_all()
            self._try_again()
        if self._ownership is not None:
            with contextlib.suppress(Exception):
                self._ownership.release()

    @property
    def _owns(self) -> bool:
        return self._rank != 0 or (self._ownership is not None and self._ownership.taken)

    def _try_again(self) -> None:
        """At the end there is no next version with which to try again what failed."""
        with self._changed:
            newest = self._newest
            if not self._hurrying or newest is None or self._is_done(newest) or self._has_given_up:
                return
            if self._changed.wait_for(lambda: self._next is not None or self._closing, _LAST_POLL_S):
                return
        self._give(newest)

    def _store(self) -> DurableVersions:
        if self._opened is None:
            self._opened = self._open_store(self.options.persist)
        return self._opened

    def _own(self) -> None:
        """Be the one who persists at this URL, and look what there is."""
        if self._owns:
            return
        store = self._store()
        if self._ownership is None:
            self._ownership = Ownership(store.files, period_s=self._period_s)
        self._ownership.take()
        try:
            newest = next((version for version in store.versions() if version.counts), None)
            with self._changed:
                self._persisted = None if newest is None else newest.step
                if self._error is not None and self._task is None:
                    self._error = None
        except BaseException:
            self._ownership.release()
            self._ownership = None
            raise

    def _persist(self, task: PersistTask) -> None:
        store = self._store()
        self._prepare_room(task)
        if self._rank == 0:
            self._remove(store, task)
        self._pace = began = time.monotonic()
        store.write_part(task.manifest, partial(task.content, pause=partial(self._pause, task), buffer=self._buffer))
        task.hold.close()
        size, seconds = task.manifest.total_size, time.monotonic() - began
        events.emit(events.PartPersisted, self._ranks, self._base, task.step, bytes=size, seconds=seconds)
        with self._changed:
            self._written = task.save_id
            self._collecting = True
            if self._rank != 0:
                self._worked(task)
        if self._rank == 0:
            self._collect(store, task)

    def _prepare_room(self, task: PersistTask) -> None:
        """Saves will want an arena in the place of the one that is lent. Once: it stays."""
        arenas, size = task.arenas.arenas, task.manifest.objects[0].size
        if not self._hurrying and not arenas.for_loans:
            arenas.for_loans = 1
            if arenas.is_within_budget(size):
                arenas.prepare_spare(size, beside=1)

    def _pause(self, task: PersistTask, count: int) -> None:
        """Before so many bytes more: as long as the limit on bytes a second asks for."""
        self._go_on(task)
        rate = self.options.persist_bytes_per_s
        if rate is not None:
            while (left := self._pace - time.monotonic()) > 0 and not self._hurrying:
                task.superseded.wait(min(left, _LAST_POLL_S))
                self._go_on(task)
            self._pace += count / rate

    def _go_on(self, task: PersistTask) -> None:
        self._progress = time.monotonic()
        if task.superseded.is_set() or self._closing:
            raise _SupersededError("a newer version is persisted instead, or none any more")

    def _collect(self, store: DurableVersions, task: PersistTask) -> None:
        """On rank 0: complete a version, once the parts of all ranks are there."""
        version, give_up, poll_s = task.part.version, time.monotonic() + collective_deadline_s(), _FIRST_POLL_S
        while True:
            others_are_over = task.superseded.is_set()  # before the look, which they may end in the middle of
            if len(there := store.ranks_there(version, task.save_id)) >= self._world_size:
                break
            missing = sorted(set(range(self._world_size)) - there)[:8]
            if time.monotonic() > give_up:
                raise DeadlineError(f"the parts of ranks {missing} were not written in time", step=task.step)
            if others_are_over and not self._hurrying:
                raise SaveError(f"ranks {missing} could not write their parts; their logs say why", step=task.step)
            if others_are_over or self._closing:
                self._go_on(task)
            self._progress = time.monotonic()
            task.superseded.wait(poll_s)
            poll_s = min(2 * poll_s, _LAST_POLL_S)
        with self._changed:
            self._collecting = False  # from here on, no other one may begin
        assert self._ownership is not None
        self._ownership.check()
        newest = max((each.save_id for each in store.versions() if each.counts), default="")
        if newest > task.save_id:
            raise JobInUseError(
                f"there is a version that counts as newer, {newest}, of another run",
                path=store.path,
                hint="call resume() before the first step, or give each job a URL of its own",
            )
        store.complete(version, task.save_id, self._world_size)
        events.emit(events.VersionPersisted, self._ranks, self._base, task.step, url=self.options.persist)
        with self._changed:
            self._persisted, self._completed = task.step, task.save_id
            self._worked(task)
            self._collecting = True  # what is left to do must not keep the next version from being due
        self._remove(store, task)

    def _remove(self, store: DurableVersions, task: PersistTask) -> None:
        assert self._ownership is not None
        try:
            self._ownership.check()
            store.keep_newest(self.options.persist_keep, task.part.version, task.save_id)
        except FlashpointError as error:
            _log.warning("older versions are not removed yet: %s", error)

    # ---- what became of it --------------------------------------------------------------------------------

    def _worked(self, task: PersistTask) -> None:
        if self._error is not None:
            _log.warning("persisting works again from step %s on", task.step)
        self._error = None

    def _fail(self, step: int | None, error: Exception) -> None:
        text = text_of(error)
        with self._changed:
            loud = self._error is None or (step is not None and self._failures.bit_count() == 1)
            self._error = text
            self._failures += step is not None
        events.emit(events.PersistFailed, self._ranks, self._base, step, error=text)
        what = "nothing can be persisted yet" if step is None else f"step {step} is not persisted"
        _log.log(logging.ERROR if loud else logging.DEBUG, "%s, training goes on: %s", what, text)

    @property
    def health(self) -> PersistHealth:
        """How it goes, now."""
        with self._changed:  # a version that is persisted and the error that it ends are told of at once
            newest, persisted, error = self._newest, self._persisted, self._error
        quiet_s = time.monotonic() - self._progress
        if (self._task is not None or self._next is not None) and quiet_s > transfer_deadline_s():
            error = f"{self.options.persist} has not answered for {quiet_s:.0f} s"
        step = None if newest is None else newest.step
        lag = None if step is None or persisted is None else step - persisted
        return PersistHealth(persisted, error, lag, self._failures)

    # ---- the end ------------------------------------------------------------------------------------------

    @property
    def _has_given_up(self) -> bool:
        return self._hurrying and self._tries_left <= 0

    def _has_ended(self, newest: Save) -> bool:
        return self._is_done(newest) or self._closing or self._has_given_up or self._gone == newest.save_id

    def _is_done(self, newest: Save) -> bool:
        return newest.save_id == (self._completed if self._rank == 0 else self._written)

    def hurry(self) -> None:
        """The job is about to end: persist the newest verified version now, and each one that is verified yet, without
        regard to the limit on bytes a second. Does not wait."""
        with self._changed:
            newest, current = self._newest, self._task or self._next
            if not self._hurrying:
                self._hurrying, self._tries_left = True, _TRIES_AT_END
            known = (
                newest is None or self._is_done(newest) or (current is not None and current.save_id == newest.save_id)
            )
        if newest is not None and not known and not self._closing:
            self._give(newest)

    def finish(self, deadline_s: float) -> bool:
        """`hurry`, and wait until the newest verified version is persisted. Returns whether it is, on rank 0; on
        others, whether this rank's part is written."""
        if os.getpid() != self._process:
            return False
        self.hurry()
        with self._changed:
            newest = self._newest
            if newest is not None:
                self._changed.wait_for(lambda: self._has_ended(newest), deadline_s)
            return newest is None or self._is_done(newest)

    def end(self, deadline_s: float) -> None:
        """`finish`, and `close`. To be called once no save will be verified any more."""
        if os.getpid() == self._process and not self.finish(deadline_s):
            _log.warning("the newest version is not persisted: %s", self.health.error or "there was too little time")
        self.close()

    def close(self) -> None:
        """Stop at once; what is not complete is not. A thread that the store keeps is left to it. Idempotent."""
        if os.getpid() != self._process:
            return
        with self._changed:
            self._closing = True
            if self._task is not None:
                self._task.superseded.set()
            unused, self._next = self._next, None
            self._changed.notify_all()
            thread = self._thread
        if unused is not None:
            unused.hold.close()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_LAST_POLL_S)
        _live.discard(self)


_live: weakref.WeakSet[Persisting] = weakref.WeakSet()


def _finish_all() -> None:
    # After the savers, whose last saves are verified by then: see where `commit_queue` imports this module.
    for persisting in list(_live):
        persisting.end(exit_deadline_s())


at_exit(_finish_all)
os.register_at_fork(after_in_child=_live.clear)
