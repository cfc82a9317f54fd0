"""Writes verified versions to a durable store, in the background, while training and saves go on.

The leader of the board chooses which (`rounds.Verdict.persist`). Each rank then writes its own part, from its slot,
which is not reused meanwhile. Rank 0 waits for the manifests of the others in the store, writes the marker, and removes
what is too old. A rank that cannot write its part publishes that in the job's store, so that rank 0 waits no longer.

At a planned end, and at SIGTERM, the newest verified version is persisted. Nothing here can fail a save: a durable
store that hangs keeps this thread, and for a while one slot.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, TypeVar

from ml_flashpoint import events
from ml_flashpoint.config import Persist
from ml_flashpoint.engine.rounds import Verdict
from ml_flashpoint.engine.store import SignedStore
from ml_flashpoint.format.errors import DeadlineError, FlashpointError, JobInUseError, PrunedError, SaveError, text_of
from ml_flashpoint.format.knobs import collective_deadline_s, transfer_deadline_s
from ml_flashpoint.format.manifest import ObjectRecord
from ml_flashpoint.format.names import SaveId
from ml_flashpoint.memory.pool import Pool
from ml_flashpoint.memory.slot import Slot
from ml_flashpoint.ranks.rank_group import RankGroup
from ml_flashpoint.stores.durable import DurableVersions
from ml_flashpoint.stores.location import open_durable
from ml_flashpoint.stores.ownership import PERIOD_S, Ownership
from ml_flashpoint.stores.version_store import check_blocks

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_FIRST_POLL_S, _LAST_POLL_S = 0.05, 1.0
_SLICE_BYTES: Final = 4 << 20
_ZEROS: Final = bytes(1 << 20)
_MOST_OF_AN_ERROR: Final = 2000
_TRIES_AT_END: Final = 4.0
"""At the end, a second apart; ten times as many where another process has the store, which may have been killed."""


@dataclass(frozen=True, slots=True)
class PersistHealth:
    """State of persisting on this rank.

    Attributes:
        persisted: step of the newest version that rank 0 has completed in the store; on other ranks, of the newest one
            whose part this rank has written; None for none.
        error: reason why the latest version is not persisted, or no next one can be; None while nothing is amiss.
        lag: steps from there to the newest verified version; None if either is not known.
        failures: versions whose part could not be written here, or that could not be completed here.
    """

    persisted: int | None
    error: str | None
    lag: int | None
    failures: int


class _SupersededError(FlashpointError):
    """A newer version is to be persisted instead, or none any more."""


@dataclass(eq=False, slots=True)
class _Task:
    """A part to write. Its slot, None if the part has none any more, is not reused before `hold` is closed."""

    save: SaveId
    slot: Slot | None = None
    hold: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    superseded: threading.Event = field(default_factory=threading.Event)


class Persister:
    """The thread that persists this rank's parts, and on rank 0 completes versions. Thread-safe.

    ``pool`` has the slots of this rank's parts, and is closed after this. ``connect`` returns a client of the job's
    store. Raises a `SaveError` if no thread can be started.
    """

    def __init__(
        self,
        options: Persist,
        ranks: RankGroup,
        pool: Pool,
        base: object,
        *,
        connect: Callable[[], SignedStore],
        open_store: Callable[[str], DurableVersions] = open_durable,
        period_s: float = PERIOD_S,
    ) -> None:
        self.options = options
        self._ranks, self._rank, self._world_size = ranks, ranks.rank, ranks.world_size
        self._pool, self._base, self._process = pool, base, os.getpid()
        self._failed_parts = _FailedParts(connect)
        self._open_store, self._period_s = open_store, period_s
        self._opened: DurableVersions | None = None
        self._ownership: Ownership | None = None
        self._changed = threading.Condition()
        self._next: _Task | None = None
        self._task: _Task | None = None
        self._is_refused = self._hurrying = self._closing = False
        self._newest: SaveId | None = None
        self._due: SaveId | None = None
        self._done: SaveId | None = None
        self._gone: SaveId | None = None
        self._persisted: int | None = None
        self._error: str | None = None
        self._failures, self._tries_left = 0, _TRIES_AT_END
        self._progress = self._pace = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="flashpoint-persist", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            raise SaveError(f"no thread for persisting can be started: {error}", rank=ranks.rank) from error

    # ---- the board's thread ---------------------------------------------------------------------------------

    def heard(self, verdict: Verdict) -> None:
        """Take note of a verdict; also of the first one of each run, which ends what the job has gone back from."""
        with self._changed:
            self._newest = verdict.newest if verdict.total else None
            due, self._due = self._due, verdict.persist
        if verdict.persist is not None and verdict.persist != due:
            self._give(verdict.persist)
        if self._hurrying:
            self.hurry()

    def look(self) -> None:
        """Free the slots of parts if the durable store has not answered for ``FLASHPOINT_TRANSFER_DEADLINE_S``: saves
        may need these slots. The parts are given up, whatever the store does with them. To be called again and again.
        """
        with contextlib.ExitStack() as holds, self._changed:
            if time.monotonic() - self._progress > transfer_deadline_s():
                for task in filter(None, (self._task, self._next)):
                    task.superseded.set()
                    holds.push(task.hold.pop_all())

    @property
    def is_busy(self) -> bool:
        """True while no other version should become due: asked on rank 0."""
        with self._changed:
            return self._is_refused or self._next is not None or self._task is not None

    def _give(self, save: SaveId) -> None:
        """Have the thread write a part next, in place of the present one."""
        task = _Task(save)
        with contextlib.suppress(PrunedError):
            task.slot = task.hold.enter_context(self._pool.reading(save))
        unused: _Task | None = task
        with self._changed:
            if not self._closing:
                if self._task is None and self._next is None:
                    self._progress = time.monotonic()
                self._next, unused = task, self._next
                if self._task is not None:
                    self._task.superseded.set()
            self._changed.notify_all()
        if unused is not None:
            unused.hold.close()

    # ---- the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause_s: float | None = 0.0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next is not None or self._closing, pause_s)
                task, self._next = self._next, None
                self._task, self._progress = task, time.monotonic()
                newest = self._newest if task is None and not self._has_ended(self._newest) else None
            if self._closing:
                break
            if newest is not None:  # there is no next version with which to try again what failed
                self._give(newest)
            else:
                self._try(task)
            if not self.owns_store:
                pause_s = min(self._period_s / 4, _LAST_POLL_S)
            else:
                pause_s = None if self._has_ended(self._newest) else _LAST_POLL_S
        self._end(task)
        if self._ownership is not None:
            with contextlib.suppress(Exception):
                self._ownership.release()

    def _try(self, task: _Task | None) -> None:
        try:
            self._own()
            if task is not None:
                self._persist(task)
        except _SupersededError:
            _log.debug("%s is not persisted: a newer version is, or none any more", task and task.save)
        except Exception as error:  # whatever a filesystem's client raises
            self._fail(None if task is None else task.save, error)
            may_be_dead = self._ownership is not None and self._ownership.owner_may_be_dead
            self._tries_left -= 0.1 if isinstance(error, JobInUseError) and may_be_dead else 1
        finally:
            self._end(task)

    def _end(self, task: _Task | None) -> None:
        if task is not None:
            task.hold.close()
        with self._changed:
            self._task, self._is_refused = None, not self.owns_store
            self._changed.notify_all()

    @property
    def owns_store(self) -> bool:
        """True once this process may persist there: on rank 0, no other job does."""
        return self._rank != 0 or (self._ownership is not None and self._ownership.taken)

    @property
    def _store(self) -> DurableVersions:
        """The store, opened by this class's thread when it is needed first. That may hang, so no lock is held."""
        if self._opened is None:
            self._opened = self._open_store(self.options.url)
        return self._opened

    def _own(self) -> None:
        """Be the process that completes versions at this URL, and look which there are."""
        if self.owns_store:
            return
        if self._ownership is None:
            self._ownership = Ownership(self._store.files, period_s=self._period_s)
        self._ownership.take()
        try:
            newest = next((version for version in self._store.versions() if version.counts), None)
        except BaseException:
            self._ownership.release()
            self._ownership = None
            raise
        with self._changed:
            self._persisted = None if newest is None else newest.step
            if self._task is None:
                self._error = None

    def _persist(self, task: _Task) -> None:
        save, slot = task.save, task.slot
        self._go_on(task)
        if slot is None:
            self._gone = save  # there is nothing to try again with
            raise PrunedError("the part has no slot any more", step=save.step, rank=self._rank)
        manifest = self._pool.container.read_manifest(save, self._rank)
        if self._rank == 0:
            self._remove_old(save)
        self._pace = began = time.monotonic()
        self._store.write_part(manifest, lambda: self._content(task, slot, manifest.record))
        task.hold.close()
        seconds, size = time.monotonic() - began, manifest.record.size
        events.emit(events.PartPersisted, self._ranks, self._base, save.step, bytes=size, seconds=seconds)
        if self._rank == 0:
            self._complete(task)
        with self._changed:
            if self._error is not None:
                _log.warning("persisting works again from step %d on", save.step)
            self._persisted, self._done, self._task, self._error = save.step, save, None, None
            self._changed.notify_all()
        if self._rank == 0:
            self._remove_old(save)

    def _content(self, task: _Task, slot: Slot, record: ObjectRecord) -> Iterator[memoryview]:
        """Yield the bytes of an object, compared with their digests, and zeros for the unused room in its file."""
        piece = max(_SLICE_BYTES // record.block_size, 1) * record.block_size
        for begin in range(0, record.size, piece):
            content = slot.buffer[begin : min(begin + piece, record.size)]
            check_blocks(record, begin, content, str(slot.path))
            for at in range(0, len(content), _SLICE_BYTES):
                self._pause(task, len(content[at : at + _SLICE_BYTES]))
                yield content[at : at + _SLICE_BYTES]
        for begin in range(record.size, record.file_size, len(_ZEROS)):
            self._go_on(task)
            yield memoryview(_ZEROS)[: record.file_size - begin]
        self._pause(task, 0)

    def _pause(self, task: _Task, count: int) -> None:
        """Wait as long as the limit on bytes a second asks for, before so many bytes more."""
        self._go_on(task)
        rate = self.options.bytes_per_s
        if rate is not None:
            while (left := self._pace - time.monotonic()) > 0 and not self._hurrying:
                task.superseded.wait(min(left, _LAST_POLL_S))
                self._go_on(task)
            self._pace += count / rate

    def _go_on(self, task: _Task) -> None:
        self._progress = time.monotonic()
        if task.superseded.is_set() or self._closing:
            raise _SupersededError("a newer version is persisted instead, or none any more")

    def _complete(self, task: _Task) -> None:
        """Complete a version on rank 0, once the parts of all ranks are there."""
        store, save = self._store, task.save
        give_up, poll_s = time.monotonic() + collective_deadline_s(), _FIRST_POLL_S
        while len(there := store.ranks_there(save)) < self._world_size:
            if time.monotonic() > give_up:
                missing = sorted(set(range(self._world_size)) - there)[:8]
                raise DeadlineError(f"the parts of ranks {missing} were not written in time", step=save.step)
            if not self._hurrying and (failed := self._failed_parts.find(save)):
                raise SaveError(failed, step=save.step)
            self._go_on(task)
            task.superseded.wait(poll_s)
            poll_s = min(2 * poll_s, _LAST_POLL_S)
        assert self._ownership is not None
        self._ownership.check()
        newest = max((each.save for each in store.versions() if each.counts), default=save)
        if newest > save:
            raise JobInUseError(
                f"there is a version that counts as newer, step {newest.step} of run {newest.run}",
                path=store.path,
                hint="give each job a URL of its own",
            )
        store.complete(save, self._world_size)
        events.emit(events.VersionPersisted, self._ranks, self._base, save.step, url=self.options.url)

    def _remove_old(self, save: SaveId) -> None:
        assert self._ownership is not None
        try:
            self._ownership.check()
            self._store.keep_newest(self.options.keep, save)
        except FlashpointError as error:
            _log.warning("older versions are not removed yet: %s", error)

    def _fail(self, save: SaveId | None, error: Exception) -> None:
        text = text_of(error)
        with self._changed:
            loud = self._error is None or (save is not None and self._failures.bit_count() == 1)
            self._error = text
            self._failures += save is not None
        step = None if save is None else save.step
        events.emit(events.PersistFailed, self._ranks, self._base, step, error=text)
        what = "nothing can be persisted yet" if save is None else f"step {step} is not persisted"
        _log.log(logging.ERROR if loud else logging.DEBUG, "%s, training goes on: %s", what, text)
        if save is not None:
            text = f"rank {self._rank} could not write its part: {text[:_MOST_OF_AN_ERROR]}"
            self._failed_parts.publish(save, text)

    @property
    def health(self) -> PersistHealth:
        """State of persisting, now."""
        with self._changed:  # a version that is persisted and the error that it ends are seen at once
            newest, persisted, error = self._newest, self._persisted, self._error
            quiet_s = time.monotonic() - self._progress
            is_at_work = self._task is not None or self._next is not None
        if is_at_work and quiet_s > transfer_deadline_s():
            error = f"{self.options.url} has not answered for {quiet_s:.0f} s"
        lag = None if newest is None or persisted is None else newest.step - persisted
        return PersistHealth(persisted, error, lag, self._failures)

    # ---- the end --------------------------------------------------------------------------------------------

    def _has_ended(self, save: SaveId | None) -> bool:
        """Return True if a version is not tried again at the end of the job; always before the end."""
        has_ended = save in (None, self._done, self._gone)
        return has_ended or self._closing or not self._hurrying or self._tries_left <= 0

    def hurry(self) -> None:
        """Persist the newest verified version now, and each one that is verified yet, without the limit on bytes a
        second: the job is about to end. Does not wait."""
        with self._changed:
            newest, current = self._newest, self._next or self._task
            if not self._hurrying:
                self._hurrying, self._tries_left = True, _TRIES_AT_END
            is_known = newest in (None, self._done) or (current is not None and current.save == newest)
        if newest is not None and not is_known:
            self._give(newest)

    def finish(self, deadline_s: float) -> bool:
        """`hurry`, and wait until the newest verified version is persisted. Call `close` then. Return True if it is
        persisted; on other ranks than 0, if this rank's part is written."""
        if os.getpid() != self._process:
            return False
        self.hurry()
        with self._changed:
            newest = self._newest
            self._changed.wait_for(lambda: self._has_ended(newest), deadline_s)
            return newest in (None, self._done)

    def close(self) -> None:
        """Stop at once: a version that is not complete stays incomplete. A thread that the durable store keeps is left
        to it. Safe to call twice."""
        if os.getpid() != self._process:
            return
        with self._changed:
            self._closing = True
            if self._task is not None:
                self._task.superseded.set()
            unused, self._next = self._next, None
            self._changed.notify_all()
        if unused is not None:
            unused.hold.close()
        if self._thread is not threading.current_thread():
            self._thread.join(_LAST_POLL_S)


class _FailedParts:
    """The parts that ranks could not write, by save, in the job's store. Without that store nobody hears of them."""

    def __init__(self, connect: Callable[[], SignedStore]) -> None:
        self._connect = connect
        self._client: SignedStore | None = None

    def _ask(self, call: Callable[[SignedStore], _T]) -> _T | None:
        """Return the result of a call of the job's store; None if the store fails."""
        try:
            self._client = self._client or self._connect()
            return call(self._client)
        except (RuntimeError, ValueError) as error:
            _log.debug("the job's store failed: %s", error)
            self._client = None
            return None

    def publish(self, save: SaveId, text: str) -> None:
        """Publish the reason why the part of a rank is not there."""
        self._ask(lambda store: store.set(_key(save), text))

    def find(self, save: SaveId) -> str | None:
        """Return the reason why the part of a rank is not there; None if no rank has published one."""
        return self._ask(lambda store: store.get(_key(save)).decode() or None)


def _key(save: SaveId) -> str:
    return f"failed/{save.run}/{save.step}"
