"""Writes verified versions to a durable store, in the background, while training and saves go on.

The leader of the board chooses which (`rounds.Verdict.persist`). Each rank then writes its own part, from its slot,
which is not reused before the part is written or given up. Rank 0 waits for the manifests of the others in the store,
writes the marker, and removes what is too old. A rank that cannot write its part publishes that in the job's store, so
that rank 0 waits no longer.

At a planned end, and at SIGTERM, the newest verified version is persisted. Nothing here can fail a save: a durable
store that hangs keeps this thread, and for a while one slot.
"""

from __future__ import annotations

import contextlib
import logging
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

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_FIRST_POLL_S, _LAST_POLL_S = 0.05, 1.0
_SLICE_BYTES: Final = 4 << 20
_ZEROS: Final = bytes(1 << 20)
_MOST_OF_AN_ERROR: Final = 2000
_TRIES_AT_END: Final = 4
"""At the end, a second apart."""


class _SupersededError(FlashpointError):
    """The part is given up."""


@dataclass(eq=False, slots=True)
class _Task:
    """A part to write. Its slot, None if the part has none any more, is not reused before `hold` is closed."""

    save: SaveId
    slot: Slot | None = None
    hold: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    superseded: threading.Event = field(default_factory=threading.Event)

    def give_up(self) -> None:
        """Free the slot. What the thread reads there from now on is of no part: it writes no manifest any more."""
        self.superseded.set()
        self.hold.close()


class Persister:
    """The thread that persists this rank's parts, and on rank 0 completes versions. Thread-safe.

    ``pool`` has the slots of this rank's parts, and is closed after this. ``connect`` returns a client of the job's
    store. Events say how persisting goes. Raises a `SaveError` if no thread can be started.

    Attributes:
        owns_store: True once this process may persist there: on rank 0, no other job does.
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
    ) -> None:
        self.options, self._pool, self._base = options, pool, base
        self._ranks, self._rank = ranks, ranks.rank
        self._connect, self._open_store = connect, open_store
        self._client: SignedStore | None = None
        self._opened: DurableVersions | None = None
        self._owning, self.owns_store = contextlib.ExitStack(), ranks.rank != 0
        self._changed = threading.Condition()
        self._task: _Task | None = None
        self._is_refused = self._hurrying = self._closing = self._is_failing = False
        self._newest: SaveId | None = None
        self._due: SaveId | None = None
        self._done: SaveId | None = None
        self._tries_left = _TRIES_AT_END
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
        """Free the slot of a part if the durable store has not answered for ``FLASHPOINT_TRANSFER_DEADLINE_S``: saves
        may need it. To be called again and again."""
        task, silent_s = self._task, time.monotonic() - self._progress
        if task is not None and silent_s > transfer_deadline_s() and not task.superseded.is_set():
            task.give_up()
            self._report(task.save, f"{self.options.url} has not answered for {silent_s:.0f} s")

    @property
    def is_busy(self) -> bool:
        """True while no other version should become due: asked on rank 0."""
        return self._task is not None or self._is_refused

    def _give(self, save: SaveId) -> None:
        """Have the thread write a part, in place of an earlier one."""
        task = _Task(save)
        with contextlib.suppress(PrunedError):
            task.slot = task.hold.enter_context(self._pool.reading(save))
        with self._changed:
            old, self._task = (task, self._task) if self._closing else (self._task, task)
            if old is None:
                self._progress = time.monotonic()
            self._changed.notify_all()
        if old is not None:
            old.give_up()

    # ---- the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing:
            task, self._progress, has_ended = self._task, time.monotonic(), True
            try:
                self._own()
                if task is not None:
                    self._persist(task)
            except _SupersededError:
                _log.debug("%s is not persisted: a newer version is, or none any more", task and task.save)
                if self._hurrying and not self._closing:
                    self.hurry()
            except Exception as error:  # whatever a filesystem's client raises
                has_ended = self._fail(task, error)
            if task is not None and has_ended:
                task.hold.close()
            with self._changed:
                if has_ended and self._task is task:
                    self._task = None
                self._is_refused = not self.owns_store
                self._changed.notify_all()
                tried = self._task if self._task is task else None
                pause_s = _LAST_POLL_S if not self.owns_store or tried is not None else None
                if self._task is tried and not self._closing:
                    self._changed.wait(pause_s)
        with contextlib.suppress(Exception):
            self._owning.close()

    @property
    def _store(self) -> DurableVersions:
        """The store, opened by this class's thread when it is needed first. That may hang, so no lock is held."""
        if self._opened is None:
            self._opened = self._open_store(self.options.url)
        return self._opened

    def _own(self) -> None:
        """Be the process that completes versions at this URL."""
        if not self.owns_store:
            self._owning.enter_context(self._store.owned())
            if self._is_failing:
                _log.warning("versions can be persisted at %s from now on", self.options.url)
            self.owns_store, self._is_failing = True, False

    def _persist(self, task: _Task) -> None:
        save, slot = task.save, task.slot
        with self._reading(task):
            if slot is None:
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
        if self._is_failing:
            _log.warning("persisting works again from step %d on", save.step)
        with self._changed:
            self._done, self._is_failing = save, False
            if self._task is task:
                self._task = None  # the next one may become due while older versions are removed
            self._changed.notify_all()
        if self._rank == 0:
            self._remove_old(save)

    def _content(self, task: _Task, slot: Slot, record: ObjectRecord) -> Iterator[memoryview]:
        """Yield the bytes of an object, compared with their digests, and zeros for the unused room in its file."""
        piece = max(_SLICE_BYTES // record.block_size, 1) * record.block_size
        for begin in range(0, record.size, piece):
            with self._reading(task):
                content = slot.buffer[begin : min(begin + piece, record.size)]
                record.check(content, begin, path=slot.path)
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
        if self.options.bytes_per_s is not None:
            while (left := self._pace - time.monotonic()) > 0 and not self._hurrying:
                task.superseded.wait(min(left, _LAST_POLL_S))
                self._go_on(task)
            self._pace += count / self.options.bytes_per_s

    @contextlib.contextmanager
    def _reading(self, task: _Task) -> Iterator[None]:
        """Read a part in memory. The errors of one that is given up say nothing: its slot may have other content."""
        self._go_on(task)
        try:
            yield
        except Exception:
            self._go_on(task)
            raise

    def _go_on(self, task: _Task) -> None:
        self._progress = time.monotonic()
        if self._closing or task.superseded.is_set():
            raise _SupersededError("a newer version is persisted instead, or none any more")

    def _complete(self, task: _Task) -> None:
        """Complete a version on rank 0, once the parts of all ranks are there."""
        store, save, size = self._store, task.save, self._ranks.world_size
        give_up, poll_s = time.monotonic() + collective_deadline_s(), _FIRST_POLL_S
        while len(there := store.ranks_there(save)) < size:
            if time.monotonic() > give_up:
                missing = sorted(set(range(size)) - there)[:8]
                raise DeadlineError(f"the parts of ranks {missing} were not written in time", step=save.step)
            if not self._hurrying and (failed := self._ask(lambda job: job.get(_key(save)))):
                raise SaveError(failed.decode(), step=save.step)
            self._go_on(task)
            task.superseded.wait(poll_s)
            poll_s = min(2 * poll_s, _LAST_POLL_S)
        newest = max((each.save for each in store.versions() if each.counts), default=save)
        if newest > save:
            raise JobInUseError(
                f"there is a version that counts as newer, step {newest.step} of run {newest.run}",
                path=store.path,
                hint="give each job a URL of its own",
            )
        store.complete(save, size)
        events.emit(events.VersionPersisted, self._ranks, self._base, save.step, url=self.options.url)

    def _remove_old(self, save: SaveId) -> None:
        try:
            self._store.keep_newest(self.options.keep, save)
        except FlashpointError as error:
            _log.warning("older versions are not removed yet: %s", error)

    def _fail(self, task: _Task | None, error: Exception) -> bool:
        """Report a failure. Return False if the task is to be tried again: at the end of the job, a few times."""
        text = text_of(error)
        self._report(None if task is None else task.save, text)
        if task is None:
            return True
        why = f"rank {self._rank} could not write its part: {text[:_MOST_OF_AN_ERROR]}"
        self._ask(lambda job: job.set(_key(task.save), why))
        self._tries_left -= 1
        return not self._hurrying or self._tries_left <= 0 or task.slot is None

    def _report(self, save: SaveId | None, text: str) -> None:
        """Tell why a version is not persisted, or why none can be."""
        step = None if save is None else save.step
        what = "nothing can be persisted yet" if save is None else f"step {step} is not persisted"
        _log.log(logging.DEBUG if self._is_failing else logging.ERROR, "%s, training goes on: %s", what, text)
        self._is_failing = True
        events.emit(events.PersistFailed, self._ranks, self._base, step, error=text)

    def _ask(self, call: Callable[[SignedStore], _T]) -> _T | None:
        """Return the result of a call of the job's store; None if that fails: then nobody hears of failures."""
        try:
            self._client = self._client or self._connect()
            return call(self._client)
        except (RuntimeError, ValueError) as error:
            _log.debug("the job's store failed: %s", error)
            self._client = None
            return None

    # ---- the end --------------------------------------------------------------------------------------------

    def hurry(self) -> None:
        """Persist the newest verified version now, and each one that is verified yet, without the limit on bytes a
        second: the job is about to end. Does not wait."""
        with self._changed:
            newest, task = self._newest, self._task
            if not self._hurrying:
                self._hurrying, self._tries_left = True, _TRIES_AT_END
        is_under_way = task is not None and task.save == newest and not task.superseded.is_set()
        if newest not in (None, self._done) and not is_under_way:
            assert newest is not None
            self._give(newest)

    def finish(self, deadline_s: float) -> bool:
        """`hurry`, and wait until the newest verified version is persisted. Call `close` then. Return True if it is
        persisted; on other ranks than 0, if this rank's part is written."""
        self.hurry()
        with self._changed:
            self._changed.wait_for(lambda: self._task is None or self._closing, deadline_s)
            return self._newest in (None, self._done)

    def close(self) -> None:
        """Stop at once: a version that is not complete stays incomplete. A thread that the durable store keeps is left
        to it. Safe to call twice."""
        with self._changed:
            self._closing, task = True, self._task
            self._changed.notify_all()
        if task is not None:
            task.give_up()
        if self._thread is not threading.current_thread():
            self._thread.join(_LAST_POLL_S)


def _key(save: SaveId) -> str:
    return f"failed/{save.run}/{save.step}"
