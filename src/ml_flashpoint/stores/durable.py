"""Versions of a training job in a directory or behind a URL. They outlive memory.

A part is an object as it is in memory, with the very manifest that it has there, written after it. No collective is
needed: whoever finds the manifests of all ranks may write the marker, which makes the version complete::

    run-00000007/step-40_ckpt/rank-00003-00000007.safetensors     the object of rank 3 of step 40 of run 7
    run-00000007/step-40_ckpt/rank-00003-00000007.manifest        written after it
    run-00000007/step-40_ckpt/complete.json                       step, save id, number of ranks, job; written last

The newest version is that of the greatest `SaveId`. Only what a marker names counts.

One process at a time completes and removes versions, the owner: it has a lock, where files have locks. Elsewhere the
numbers of runs keep jobs apart: one that finds a version of a later run completes none any more, and what it may remove
is older. Two jobs that both begin anew have the same number. So the marker names a job, and a part of another one is no
part of the version: such a version is not completed, nor loaded where a part was replaced later.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from ml_flashpoint.format.errors import (
    DamagedError,
    FlashpointError,
    InvalidArgumentError,
    JobInUseError,
    ObjectNotFoundError,
)
from ml_flashpoint.format.manifest import JOB_LABEL, MAX_RECORD_BYTES, decode_record, encode_record
from ml_flashpoint.format.names import MAX_WORLD_SIZE, RUN_PATTERN, CheckpointContainerId, SaveId, parse_manifest_name
from ml_flashpoint.stores.files import Files
from ml_flashpoint.stores.version_store import UNKNOWN, Version, VersionStore

_log = logging.getLogger(__name__)

MARKER: Final = "complete.json"
RUN_PREFIX: Final = "run-"
_RUN: Final = re.compile(rf"{RUN_PREFIX}{RUN_PATTERN}")
_KIND: Final = "mlflashpoint-version-3"
_FIELDS: Final = ("step", "save_id", "world_size", "job")
_LOCK: Final = "lock"


def is_run_folder(name: str) -> bool:
    """Return True if a folder of this name holds the versions of a run."""
    return bool(_RUN.fullmatch(name))


def folder_of(save: SaveId) -> str:
    """Return the folder of a save."""
    return f"{RUN_PREFIX}{save.text}/{save.version}"


def version_of(fields: Mapping[str, Any]) -> Version:
    """Return the complete version that a marker names: its step, save id, number of ranks, and job if there is one.
    Trusts nothing. Raise an `InvalidArgumentError` if there is no such version."""
    step, save_id, size, job = (fields.get(each, "") for each in _FIELDS)
    if type(step) is int and isinstance(save_id, str) and type(size) is int and isinstance(job, str):
        save = SaveId.parse(CheckpointContainerId.format_version_container(step), save_id)
        if save is not None and 0 < size <= MAX_WORLD_SIZE:
            return Version(save, folder_of(save), range(size), size, True, job=job)
    raise InvalidArgumentError("these name no version", argument="fields", value=dict(fields))


def save_of(version: Version) -> dict[str, Any]:
    """Return the fields of a version's marker, plain JSON."""
    return {name: getattr(version, name) for name in _FIELDS}


class DurableVersions(VersionStore):
    """Versions in files; ``url`` is the user's, for messages. Thread-safe."""

    durable = True

    def __init__(self, files: Files, url: str = "") -> None:
        super().__init__(files, url or files.path_of(""))

    def folder_of(self, save: SaveId) -> str:
        """See `VersionStore.folder_of`."""
        return folder_of(save)

    def ranks_there(self, save: SaveId) -> set[int]:
        """Return the ranks whose parts of a save are there."""
        return _ranks_in(self.files.list(folder_of(save)), save)

    @contextlib.contextmanager
    def owned(self) -> Iterator[None]:
        """Be the owner, where files have locks. Raise a `JobInUseError` if another process is."""
        try:
            lock = self.files.lock(_LOCK, 0.0)
        except JobInUseError as error:
            hint = "wait until that job has ended, or give another URL"
            raise JobInUseError(f"a job persists at this URL: {error.message}", path=error.path, hint=hint) from error
        with lock or contextlib.nullcontext():
            yield

    def complete(self, save: SaveId, world_size: int, moved: Callable[[], None] = lambda: None) -> Version:
        """Make a version exist, after `check_parts`, and raise the errors of that. The version is of the job that has
        written the part of rank 0. If the store fails, the version may exist all the same."""
        job = self._manifest(save, 0).labels.get(JOB_LABEL, "")
        found = Version(save, folder_of(save), range(world_size), world_size, True, job=job)
        self.check_parts(found, moved)
        self.files.write(f"{found.folder}/{MARKER}", [encode_record(_KIND, save_of(found))])
        return found

    def versions(self) -> list[Version]:
        """Return all versions of training jobs, newest first. Parts are not looked at; see `VersionStore.versions`."""
        found: list[Version] = []
        for run in filter(is_run_folder, self.files.list()):
            try:
                names = self.files.list(run)
            except DamagedError as error:
                found.append(Version(UNKNOWN, run, problem=str(error)))
                continue
            for name in names:
                save = SaveId.parse(name, run.removeprefix(RUN_PREFIX))
                if save is not None:
                    with contextlib.suppress(ObjectNotFoundError):  # removed meanwhile
                        found.append(self._version(save))
        return sorted(found, key=lambda version: version.save, reverse=True)

    def _version(self, save: SaveId) -> Version:
        names, problem = list[str](), ""
        try:
            names = self.files.list(folder_of(save))
            if MARKER in names:
                return self._read_marker(save)
        except DamagedError as error:
            problem = str(error)
        return Version(save, folder_of(save), tuple(sorted(_ranks_in(names, save))), problem=problem)

    def _read_marker(self, save: SaveId) -> Version:
        name = f"{folder_of(save)}/{MARKER}"
        path, data = self.files.path_of(name), self.files.read(name, limit=MAX_RECORD_BYTES)
        try:
            version = version_of(decode_record(_KIND, data, path))
        except InvalidArgumentError as error:
            raise DamagedError(f"the marker is not valid: {error}", path=path) from error
        if version.save != save:
            raise DamagedError("the marker is of another version", path=path)
        return version

    def has(self, save: SaveId, rank: int) -> bool:
        """See `VersionStore.has`. The marker goes first."""
        try:
            self.files.size(f"{folder_of(save)}/{MARKER}")
        except FlashpointError as error:
            return not isinstance(error, ObjectNotFoundError)
        return True

    def remove(self, step: int | None, check: Callable[[], None] = lambda: None) -> list[str]:
        """See `VersionStore.remove`."""
        wanted = [each for each in reversed(self.versions()) if each.step >= 0 and step in (None, each.step)]
        if not wanted:
            of = "" if step is None else f" of step {step}"
            raise ObjectNotFoundError(f"there is no version{of} here", path=self.path)
        for version in wanted:
            check()
            self._remove(version)
        return [version.folder for version in wanted]

    def keep_newest(self, count: int, save: SaveId) -> None:
        """Remove all complete versions but the newest ``count``, at least 1, and what was begun before a save and not
        completed: it must not take the room of that one. For the owner.

        A damaged version stays until all that stay are newer. A failure is logged: the next call tries again.
        """
        there = self.versions()
        kept = [version for version in there if version.counts][:count]
        for each in there:
            if each.counts:
                goes = each not in kept
            elif each.problem:
                goes = bool(kept) and each.step >= 0 and each.save < kept[-1].save
            else:
                goes = each.save < save
            try:
                if goes:
                    self._remove(each, needed=save.run)
            except FlashpointError as error:
                _log.warning("old versions cannot be removed: %s", error)

    def _remove(self, version: Version, *, needed: int | None = None) -> None:
        """Remove a version, its marker first, and the folder of its run after the last one, unless that is needed."""
        with contextlib.suppress(DamagedError):  # of a folder that is a link
            self.files.remove(f"{version.folder}/{MARKER}")
        self.files.remove_folder(version.folder)
        run = version.folder.partition("/")[0]
        if version.save.run != needed and not self.files.list(run):
            self.files.remove_folder(run)


def _ranks_in(names: list[str], save: SaveId) -> set[int]:
    """Return the ranks whose manifests of a save are among the names of files."""
    return {found[0] for found in map(parse_manifest_name, names) if found is not None and found[1] == save.text}
