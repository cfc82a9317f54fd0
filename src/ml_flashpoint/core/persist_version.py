"""Persisting by hand: a version from what nodes still hold, in the place and form in which its job would have put it.

Owns that it becomes the version it was, or none: every part is compared with its digests as it is read, parts come
first and the marker last, and nobody else persists there meanwhile. The job may be dead or running. Where a part is
damaged in one base container, a copy in another one is taken; where it is damaged in all, an older version is.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from ml_flashpoint.checkpoint_object_manager.base_marks import PRIVATE_DIR
from ml_flashpoint.core.bounded import Bounded, while_it_moves
from ml_flashpoint.core.gathered_parts import GatheredSave, whole_saves
from ml_flashpoint.core.object_content import object_content
from ml_flashpoint.core.open_version import HeldVersion, if_kept
from ml_flashpoint.format.errors import (
    DamagedError,
    DigestMismatchError,
    FlashpointError,
    InvalidArgumentError,
    JobInUseError,
    ObjectNotFoundError,
    PrunedError,
    SaveError,
    UnreadableError,
)
from ml_flashpoint.format.failure_kinds import is_damage
from ml_flashpoint.format.manifest import Manifest, ObjectRecord
from ml_flashpoint.persist.opening import checked_url, open_store
from ml_flashpoint.persist.ownership import PERIOD_S, Ownership
from ml_flashpoint.persist.store import DurableStore
from ml_flashpoint.persist.versions import (
    PersistedVersion,
    check_parts,
    complete,
    folder_of,
    list_persisted,
    write_part,
)
from ml_flashpoint.persist.watched_store import watched_store

_log = logging.getLogger(__name__)

DEADLINE_S: Final = 600.0
"""For how long a store may do nothing."""

Progress = Callable[[int, int], object]

_PARTS_AT_A_TIME: Final = 4
_PERIODS_TO_WAIT: Final = 6.0
"""A lease is taken over once it has not changed for four."""


@dataclass(frozen=True)
class Persisted:
    """What was persisted.

    Attributes:
        url: where.
        version: as it is there.
        nbytes: bytes of its files.
        was_there: whether it had been there already, whole.
        newer: step of a version there that counts as newer, which a job would resume from; None if there is none.
    """

    url: str
    version: PersistedVersion
    nbytes: int
    was_there: bool
    newer: int | None


def persist_version(
    sources: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    url: str | os.PathLike[str],
    step: int | None = None,
    *,
    progress: Progress = lambda done, total: None,
    deadline_s: float = DEADLINE_S,
    period_s: float = PERIOD_S,
) -> Persisted:
    """Persist a version from the base containers that are on this machine.

    Args:
        sources: the base containers: of several nodes, as far as they are here. Own parts and copies are taken alike.
        url: as a job has it in ``persist=``. Nothing that is there is removed.
        step: which version; by default the newest whose parts are all here, and sound.
        progress: called with how many bytes are written, of how many.
        deadline_s: the store is given up if nothing happens for so long: no piece is taken, no call returns. What hangs
            is left to itself, and keeps the lock there until it goes on or this process ends.
        period_s: see `persist.ownership`; how often a job that may be alive there renews its lease.

    Raises:
        MissingPartsError: parts of some ranks are in none of the base containers.
        ObjectNotFoundError: there is no such version.
        JobInUseError: somebody persists there.
        DamagedError: a part is not what was saved, and no copy of it is here.
        PrunedError: a running job needed the memory.
        DeadlineError: nothing has happened for too long.
        SaveError, CapacityError: it cannot be written.
        UnreadableError, LoadError: memory, or the store, cannot be read just now.
        InvalidArgumentError, UnsafePathError: an argument is unusable.
    """
    checked = durable_url(url)
    bases = [Path(each) for each in ([sources] if isinstance(sources, (str, os.PathLike)) else sources)]
    whole_saves(bases, step)  # before anybody is disturbed
    store = open_store(checked)

    def persist(moved: Callable[[], None]) -> Persisted:
        watched = watched_store(store, moved)
        with owned_store(store, period_s, moved) as ownership:
            return if_kept(
                lambda: _persist_first(watched, checked, ownership, whole_saves(bases, step), progress), step
            )

    return while_it_moves(persist, deadline_s, checked)


def durable_url(url: str | os.PathLike[str]) -> str:
    """A URL to persist at, checked.

    Raises:
        InvalidArgumentError: it is none, or a base container, which jobs have in memory.
    """
    checked = checked_url("url", url)
    if checked.startswith("file://") and os.path.lexists(Path(checked[len("file://") :], PRIVATE_DIR)):
        raise InvalidArgumentError(
            "this is a job's base container", argument="url", value=url, hint="give the URL that a job has as persist="
        )
    return checked


@contextlib.contextmanager
def owned_store(store: DurableStore, period_s: float, moved: Callable[[], None] = lambda: None) -> Iterator[Ownership]:
    """Be the one who persists there. Of a store without locks, who did last may have been killed, or not: wait.

    Args:
        store: not one that is watched: a lease is renewed whether anything else happens or not.
        period_s: see `persist_version`.
        moved: called again and again while it waits.

    Raises:
        JobInUseError: somebody else is.
        FlashpointError: the store failed.
    """
    ownership = Ownership(store, period_s=period_s)
    give_up, told = time.monotonic() + _PERIODS_TO_WAIT * period_s, False
    try:
        while not ownership.taken:
            try:
                ownership.take()
            except JobInUseError as error:
                if not ownership.owner_may_be_dead or time.monotonic() > give_up:
                    raise JobInUseError(
                        f"somebody persists there: {error.message}",
                        path=store.path_of(""),
                        hint="wait until that job has ended, or give another URL",
                    ) from error
                if not told:
                    _log.warning("waiting up to %.0f s: %s", _PERIODS_TO_WAIT * period_s, error.message)
                told = True
                moved()
                time.sleep(period_s / 4)
        yield ownership
    finally:
        ownership.release()


def _persist_first(
    store: DurableStore, url: str, ownership: Ownership, saves: Sequence[GatheredSave], progress: Progress
) -> Persisted:
    """The first of these that is sound."""
    for save in saves:
        try:
            return _persist(store, url, ownership, save, progress)
        except FlashpointError as error:
            if not is_damage(error) or save is saves[-1]:
                raise
            _log.warning("step %d is not sound, trying an older one: %s", save.step, error)
    raise AssertionError


def _persist(store: DurableStore, url: str, ownership: Ownership, save: GatheredSave, progress: Progress) -> Persisted:
    there = list_persisted(store)[0]
    newer = next((version.step for version in there if version.save_id > save.save_id), None)
    nbytes = sum(record.file_size for holders in save.holders.values() for record in holders[0][1].objects)
    for version in there:
        if version.save_id == save.save_id and is_whole(store, version):
            return Persisted(url, version, nbytes, True, newer)
        if version.folder == folder_of(save.version, save.save_id) and version.save_id > save.save_id:
            raise SaveError("a later save of this step is there", step=save.step, path=store.path_of(version.folder))
    with contextlib.ExitStack() as stack:
        held = _hold(stack, save)
        count = _Count(progress, nbytes)
        _write_all([partial(_write, store, held, save.holders[rank], count) for rank in sorted(save.holders)], count)
    ownership.check()
    return Persisted(url, complete(store, save.version, save.save_id, save.world_size), nbytes, False, newer)


def _write_all(writes: Sequence[Callable[[], None]], count: _Count) -> None:
    """Write several parts at a time, on threads that nobody waits for when the process ends: a store may hang."""
    left = iter(writes)
    lock = threading.Lock()
    failures: list[BaseException] = []

    def work() -> None:
        while not count.stopped:
            with lock:
                write = next(left, None)
            if write is None:
                return
            try:
                write()
            except BaseException as error:
                failures.append(error)
                count.stopped = True  # what is left need not be written

    threads = [Bounded(work, "flashpoint-persist") for _ in range(min(_PARTS_AT_A_TIME, len(writes)))]
    for thread in threads:
        thread.wait(None)  # whoever waits for this has a deadline
    for error in sorted(failures, key=lambda error: isinstance(error, _StoppedError)):
        raise error


class _StoppedError(SaveError):
    """Another part could not be written, so this one is of no use."""


class _Count:
    """Bytes that are written, by several threads.

    Attributes:
        stopped: whether they should stop.
    """

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0
        self._lock = threading.Lock()
        self.stopped = False

    def add(self, count: int) -> None:
        """Take note of more bytes, or fewer. Raises a `_StoppedError` if there is no use in more."""
        with self._lock:
            if self.stopped:
                raise _StoppedError("another part could not be written")
            self._done += count
            try:
                self._progress(self._done, self._total)
            except BaseException:
                self.stopped = True
                raise


def is_whole(store: DurableStore, version: PersistedVersion) -> bool:
    """Whether all parts of a version are there, with the sizes and receipts that they should have.

    Raises:
        LoadError: the store cannot be read.
    """
    try:
        check_parts(store, version)
    except (DamagedError, ObjectNotFoundError):
        return False
    return True


def _hold(stack: contextlib.ExitStack, save: GatheredSave) -> Mapping[Path, HeldVersion]:
    """Every part, wherever it is."""
    by_base: dict[Path, list[Manifest]] = {}
    for holders in save.holders.values():
        for base, manifest in holders:
            by_base.setdefault(base, []).append(manifest)
    held = {}
    for base, manifests in by_base.items():
        held[base] = HeldVersion(base, manifests)
        stack.callback(held[base].close)  # bytes are compared as they are read: whether it went since does not matter
    return held


def _write(
    store: DurableStore,
    held: Mapping[Path, HeldVersion],
    holders: Sequence[tuple[Path, Manifest]],
    written: _Count,
) -> None:
    """Write the part of a rank, from the first base container in which it is sound."""
    for base, manifest in holders:
        count = 0
        try:

            def content(record: ObjectRecord, base: Path = base) -> Iterator[memoryview]:
                nonlocal count
                for piece in _content(held[base], record):
                    yield piece
                    written.add(len(piece))
                    count += len(piece)

            write_part(store, manifest, content)
            written.add(manifest.objects[0].file_size - count)  # if it was there
            return
        except (DamagedError, ObjectNotFoundError, PrunedError, UnreadableError) as error:
            written.add(-count)
            if base == holders[-1][0]:
                raise
            _log.warning("rank %d: taking another copy: %s", manifest.rank, error)


def _content(version: HeldVersion, record: ObjectRecord) -> Iterator[memoryview]:
    path = version.path / record.name
    descriptor = version.open_object(record)
    try:
        yield from object_content(descriptor, record, path)
    except DigestMismatchError:
        version.check()  # which says more, if that is why
        raise
    except OSError as error:
        raise UnreadableError(f"the object: {error.strerror}", step=version.step, path=path) from error
    finally:
        os.close(descriptor)
