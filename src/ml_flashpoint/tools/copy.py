"""Copies of versions from stores to a store: `copy_version` to a folder, `persist_version` to durable storage.

A copy is what was saved, or is not there: each block is compared with its digest on its way, parts come first, and only
then does the version get its name, or its marker. Imports no torch.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ml_flashpoint.format.errors import InvalidArgumentError, SaveError
from ml_flashpoint.format.files import check_unplanted, sync_directory
from ml_flashpoint.memory.container import PRIVATE
from ml_flashpoint.stores.bounded import in_background, while_it_moves
from ml_flashpoint.stores.durable import DurableVersions
from ml_flashpoint.stores.location import BaseContainer, checked_url, open_durable
from ml_flashpoint.stores.version_store import StoredObject, Version, VersionStore
from ml_flashpoint.tools.sources import (
    FoundVersion,
    Progress,
    Source,
    find_versions,
    no_progress,
    stores_of,
    with_newest,
)

DEADLINE_S: Final = 600.0
"""For how long a store may do nothing."""

_PARTS_AT_A_TIME: Final = 4


def copy_version(
    sources: Source | Sequence[Source],
    destination: str | os.PathLike[str],
    step: int | None = None,
    *,
    partial: bool = False,
    progress: Progress = no_progress,
) -> Path:
    """Copy a version into a folder. Return the copy, which is durable before it gets its name.

    Args:
        sources: base containers, which a job may be using, URLs, or folders of durable versions.
        destination: the folder in which the version gets one of its own, ``step-<n>_ckpt``; made if need be.
        step: which version; by default the newest that is sound.
        partial: also one of which parts are missing.
        progress: called with the bytes that are copied, and all.

    Raises:
        ObjectNotFoundError, PrunedError: there is no such version, or a running job removed it meanwhile.
        DamagedError: it is not what was saved.
        LoadError, UnreadableError: it cannot be read just now.
        SaveError, UnsafePathError: the copy cannot be written, or is there already, or somebody else has planted it.
    """

    def copy(version: FoundVersion) -> Path:
        name = version.save.version

        def make(hidden: Path) -> Path:
            (hidden / name).mkdir(mode=0o700)
            _write_parts(version, BaseContainer(hidden), progress)
            return hidden / name

        return make_whole(Path(destination) / name, "the copy", make)

    return with_newest(stores_of(sources), step, copy, partial=partial)


def make_whole(target: Path, what: str, make: Callable[[Path], Path]) -> Path:
    """Make a file or folder, which appears under its name whole, and durable, or not at all.

    Args:
        target: its path. The folders above are made if need be.
        what: it is, for errors.
        make: is given an empty, hidden folder, and returns the path in there of what it made, which is durable.
    """
    hidden = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        if os.path.lexists(target):
            raise SaveError(f"{what} is there already", path=target, hint="remove it first")
        check_unplanted(target.parent)
        target.parent.mkdir(parents=True, exist_ok=True)
        check_unplanted(target.parent)  # nobody else can be there first any more
        hidden.mkdir(mode=0o700)
        try:
            os.rename(make(hidden), target)
            sync_directory(target.parent)
        finally:
            shutil.rmtree(hidden, ignore_errors=True)
    except (OSError, RuntimeError) as error:
        cause = error.__context__ if isinstance(error, RuntimeError) else error  # torch's archives raise one after it
        if not isinstance(cause, OSError):
            raise
        raise SaveError(f"{what} cannot be written: {cause.strerror or cause}", path=target) from error
    return target


@dataclass(frozen=True)
class Persisted:
    """The result of `persist_version`.

    Attributes:
        url: of the store.
        version: as it is there.
        nbytes: bytes of its files.
        was_there: True if it had been there already, sound.
        newer: step of a version there that counts as newer, which a job would resume from; None if there is none.
    """

    url: str
    version: Version
    nbytes: int
    was_there: bool
    newer: int | None


def persist_version(
    sources: Source | Sequence[Source],
    url: str | os.PathLike[str],
    step: int | None = None,
    *,
    progress: Progress = no_progress,
    deadline_s: float = DEADLINE_S,
) -> Persisted:
    """Persist a version as its job would have, also when the job is dead.

    Args:
        sources: base containers that are on this machine, of several nodes; or other stores. Own parts and copies are
            taken alike: where one is damaged, another one.
        url: as a job has it in ``persist=``. Nothing there is removed.
        step: which version; by default the newest whose parts are all here, and sound.
        progress: called with the bytes that are written, and all.
        deadline_s: the store is given up if nothing happens for so long. What hangs is left to itself, and keeps the
            lock there until it goes on or this process ends.

    Raises:
        ObjectNotFoundError, MissingPartsError: there is no such version, or not all parts of it.
        DamagedError, PrunedError: no sound copy of a part is here, or a running job needed the memory.
        UnreadableError, LoadError: it cannot be read just now.
        JobInUseError: a job persists at this URL.
        DeadlineError: nothing has happened for too long.
        SaveError, CapacityError: it cannot be written.
        InvalidArgumentError, UnsafePathError: an argument is unusable.
    """
    checked, stores = checked_url("url", url), stores_of(sources)
    find_versions(stores, step)  # before anybody is disturbed
    store = open_durable(checked)

    def persist(moved: Callable[[], None]) -> Persisted:
        if PRIVATE in store.files.list():
            hint = "give the URL of the job's persist="
            raise InvalidArgumentError("this is a job's base container", argument="url", value=url, hint=hint)
        with store.owned():
            return with_newest(stores, step, lambda found: _persist(found, store, moved, progress))

    return while_it_moves(persist, deadline_s, checked)


def _persist(found: FoundVersion, store: DurableVersions, moved: Callable[[], None], progress: Progress) -> Persisted:
    there = [version for version in store.versions() if version.counts]
    marked = next((version for version in there if version.save == found.save), None)
    newer = next((version.step for version in there if version.save > found.save), None)
    nbytes, written = _write_parts(found, store, progress, moved, at_a_time=_PARTS_AT_A_TIME)
    if marked is not None and not written:
        return Persisted(store.path, marked, nbytes, True, newer)
    return Persisted(store.path, store.complete(found.save, found.world_size, moved), nbytes, False, newer)


def _write_parts(
    version: FoundVersion,
    store: VersionStore,
    progress: Progress,
    moved: Callable[[], None] = lambda: None,
    *,
    at_a_time: int = 1,
) -> tuple[int, int]:
    """Write all parts; return the bytes of their files, and the number of parts that were not there yet."""
    failures: list[BaseException] = []
    lock, done, written = threading.Lock(), 0, 0
    with contextlib.ExitStack() as stack:
        parts = version.parts(stack)
        total = sum(part.record.file_size for part in parts.values())
        left = iter(parts.values())

        def advance(nbytes: int) -> None:
            nonlocal done
            with lock:
                if failures:
                    raise SaveError("another part could not be written")
                done += nbytes
                try:
                    moved()
                    progress(done, total)
                except BaseException as error:
                    failures.append(error)
                    raise

        def content(part: StoredObject) -> Iterator[memoryview]:
            for piece in part.file():
                yield piece
                advance(len(piece))

        def work() -> None:
            nonlocal written
            while not failures:
                with lock:
                    part = next(left, None)
                if part is None:
                    return
                try:
                    if store.write_part(part.manifest, functools.partial(content, part), moved):
                        with lock:
                            written += 1
                    else:
                        advance(part.record.file_size)
                except BaseException as error:
                    failures.append(error)  # what is left need not be written

        if at_a_time == 1:
            work()
        else:  # by threads that nobody waits for when the process ends: a store may hang
            wait([in_background(work, "flashpoint-persist") for _ in range(min(at_a_time, len(parts)))])
    if failures:
        raise failures[0]
    return total, written
