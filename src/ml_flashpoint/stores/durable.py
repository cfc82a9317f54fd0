"""Versions of a training job in a directory or behind a URL. They outlive memory.

A part is an object as it is in memory, with the very manifest that it has there, written after it. No collective is
needed: whoever finds the manifests of all ranks may write the marker, which makes the version complete::

    run-00000007/step-40_ckpt/rank-00003-00000007.safetensors     the object of rank 3 of step 40 of run 7
    run-00000007/step-40_ckpt/rank-00003-00000007.manifest        written after it
    run-00000007/step-40_ckpt/complete.json                       step, save id and number of ranks; written last

The newest version is that of the greatest `SaveId`. Only what a marker names counts.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final

from ml_flashpoint.format.errors import (
    DamagedError,
    FlashpointError,
    InvalidArgumentError,
    ManifestError,
    ObjectNotFoundError,
)
from ml_flashpoint.format.manifest import MAX_RECORD_BYTES, Manifest, decode_record, encode_record
from ml_flashpoint.format.names import MAX_WORLD_SIZE, RUN_PATTERN, CheckpointContainerId, SaveId, parse_manifest_name
from ml_flashpoint.stores.bounded import watched_files
from ml_flashpoint.stores.files import Files
from ml_flashpoint.stores.ownership import PERIOD_S, owned_files
from ml_flashpoint.stores.version_store import UNKNOWN, Version, VersionStore

_log = logging.getLogger(__name__)

MARKER: Final = "complete.json"
RUN_PREFIX: Final = "run-"
_RUN: Final = re.compile(rf"{RUN_PREFIX}{RUN_PATTERN}")
_KIND: Final = "mlflashpoint-version-3"
_FIELDS: Final = ("step", "save_id", "world_size")


def is_run_folder(name: str) -> bool:
    """Return True if a folder of this name holds the versions of a run."""
    return bool(_RUN.fullmatch(name))


def folder_of(save: SaveId) -> str:
    """Return the folder of a save."""
    return f"{RUN_PREFIX}{save.text}/{save.version}"


def version_of(fields: Mapping[str, Any]) -> Version:
    """Return the complete version that a marker names: its step, save id and number of ranks. Trusts nothing.

    Raises:
        InvalidArgumentError: there is no such version.
    """
    step, save_id, size = (fields.get(each) for each in _FIELDS)
    if type(step) is int and isinstance(save_id, str) and type(size) is int:
        save = SaveId.parse(CheckpointContainerId.format_version_container(step), save_id)
        if save is not None and 0 < size <= MAX_WORLD_SIZE:
            return Version(save, folder_of(save), range(size), size, True)
    raise InvalidArgumentError("these name no version", argument="fields", value=dict(fields))


def save_of(version: Version) -> dict[str, Any]:
    """Return the fields of a version's marker, plain JSON."""
    return {name: getattr(version, name) for name in _FIELDS}


class DurableVersions(VersionStore):
    """Versions in files. Thread-safe.

    Args:
        files: in which they are.
        url: of the user, for messages.
    """

    durable = True

    def __init__(self, files: Files, url: str = "") -> None:
        super().__init__(files, url or files.path_of(""))

    def folder_of(self, save: SaveId) -> str:
        """See `VersionStore.folder_of`."""
        return folder_of(save)

    # ---- writing ------------------------------------------------------------------------------------------

    def ranks_there(self, save: SaveId) -> set[int]:
        """Return the ranks whose parts of a save are there."""
        return _ranks_in(self.files.list(folder_of(save)), save.text)

    def complete(self, save: SaveId, world_size: int) -> Version:
        """Make a version exist, after checking that the parts of all ranks are there.

        Raises:
            ObjectNotFoundError: a part is not there.
            DamagedError: one is not what its manifest says.
            FlashpointError: the store failed; then the version may exist all the same.
        """
        found = Version(save, folder_of(save), range(world_size), world_size, True)
        self.check_parts(found)
        self.files.write(f"{found.folder}/{MARKER}", [encode_record(_KIND, save_of(found))])
        return found

    # ---- reading ------------------------------------------------------------------------------------------

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
        folder, names, problem = folder_of(save), list[str](), ""
        try:
            names = self.files.list(folder)
            if MARKER in names:
                return self._read_marker(folder)
        except DamagedError as error:
            problem = str(error)
        return Version(save, folder, tuple(sorted(_ranks_in(names, save.text))), problem=problem)

    def _read_marker(self, folder: str) -> Version:
        name = f"{folder}/{MARKER}"
        path, data = self.files.path_of(name), self.files.read(name, limit=MAX_RECORD_BYTES)
        try:
            version = version_of(decode_record(_KIND, data, path))
        except InvalidArgumentError as error:
            raise DamagedError(f"the marker is not valid: {error}", path=path) from error
        if version.folder != folder:
            raise DamagedError("the marker is of another version", path=path)
        return version

    def manifest(self, version: Version, rank: int) -> Manifest:
        """See `VersionStore.manifest`."""
        manifest = super().manifest(version, rank)
        if manifest.world_size != version.world_size:
            path = self.files.path_of(version.folder)
            raise ManifestError(f"this is a part of {manifest.world_size} ranks", rank=rank, path=path)
        return manifest

    def check_parts(self, version: Version) -> None:
        """Check that all parts of a version are there, with their sizes. Content is not read.

        Raises:
            FlashpointError: see `VersionStore.manifest`.
        """
        for rank in version.ranks:
            self.check_size(self.manifest(version, rank))

    def has(self, save: SaveId, rank: int) -> bool:
        """See `VersionStore.has`. The marker goes first."""
        try:
            self.files.size(f"{folder_of(save)}/{MARKER}")
        except FlashpointError as error:
            return not isinstance(error, ObjectNotFoundError)
        return True

    # ---- removing -----------------------------------------------------------------------------------------

    def remove(self, step: int | None, check: Callable[[], None] = lambda: None) -> list[str]:
        """Remove versions, of each the marker first; see `VersionStore.remove`."""
        wanted = [each.folder for each in reversed(self.versions()) if each.step >= 0 and step in (None, each.step)]
        if not wanted:
            of = "" if step is None else f" of step {step}"
            raise ObjectNotFoundError(f"there is no version{of} here", path=self.path)
        for folder in wanted:
            check()
            with contextlib.suppress(DamagedError):  # of a folder that is a link
                self.files.remove(f"{folder}/{MARKER}")
            self.files.remove_folder(folder)
        for run in {folder.partition("/")[0] for folder in wanted}:
            if not self.files.list(run):
                self.files.remove_folder(run)
        return wanted

    def keep_newest(self, count: int, save: SaveId) -> None:
        """Remove all complete versions but the newest ones, and what was begun before a save and not completed: it must
        not take the room of that one. To be called by the owner.

        A damaged version stays until all that stay are newer. A failure is logged: the next call tries again.

        Args:
            count: how many complete versions stay, at least 1.
            save: about to be written, or written. Ranks may be writing to its folder already.
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
            marker = f"{each.folder}/{MARKER}"
            if goes and (not each.counts or try_to_remove(self.files.remove, marker)):
                try_to_remove(self.files.remove_folder, each.folder)
        for folder in filter(is_run_folder, self.files.list()):
            with contextlib.suppress(DamagedError):
                if folder != f"{RUN_PREFIX}{save.text}" and not self.files.list(folder):
                    try_to_remove(self.files.remove_folder, folder)

    # ---- who writes ---------------------------------------------------------------------------------------

    def watched(self, moved: Callable[[], None]) -> DurableVersions:
        """See `VersionStore.watched`."""
        return DurableVersions(watched_files(self.files, moved), self.path)

    def owned(
        self, period_s: float = PERIOD_S, moved: Callable[[], None] = lambda: None
    ) -> AbstractContextManager[Callable[[], None]]:
        """See `VersionStore.owned`. Not of a watched store: a lease is renewed whatever else happens."""
        return owned_files(self.files, period_s, moved)


def _ranks_in(names: list[str], save_id: str) -> set[int]:
    """Return the ranks whose manifests of a save are among the names of files."""
    return {found[0] for found in map(parse_manifest_name, names) if found is not None and found[1] == save_id}


def try_to_remove(remove: Callable[[str], None], name: str) -> bool:
    """Remove a file or folder by a method of `Files`; return False, and warn, if that fails."""
    try:
        remove(name)
    except FlashpointError as error:
        _log.warning("what is not wanted any more cannot be removed: %s", error)
        return False
    return True
