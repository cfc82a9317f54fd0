"""The versions in a base container of this node, or in a folder of copies of versions, for whoever is not the job.

Reads while the job runs: see `memory.container.locked_part`. Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from ml_flashpoint.format.errors import DamagedError, ObjectNotFoundError
from ml_flashpoint.format.files import writing
from ml_flashpoint.format.manifest import Manifest
from ml_flashpoint.format.names import CheckpointContainerId, SaveId, manifest_name, parse_manifest_name
from ml_flashpoint.memory.container import BaseContainer as JobContainer
from ml_flashpoint.memory.container import listed, locked_part, version_folders
from ml_flashpoint.memory.lineage import RunRecord, read_records
from ml_flashpoint.memory.lock import PRIVATE, locked_out
from ml_flashpoint.stores.files import Directory, reading
from ml_flashpoint.stores.version_store import Version, VersionStore


class BaseContainer(VersionStore):
    """Versions in folders ``step-<n>_ckpt``, one beside the other. Thread-safe.

    Args:
        base: the folder.
    """

    durable = False

    def __init__(self, base: str | os.PathLike[str]) -> None:
        self.base = Path(os.path.abspath(base))
        super().__init__(Directory(self.base), str(self.base))

    def folder_of(self, save: SaveId) -> str:
        """See `VersionStore.folder_of`."""
        return save.version

    def folders(self) -> list[str]:
        """Return the names of the versions' folders; none if there is no base container."""
        with reading(self.base), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return [folder.name for folder in version_folders(self.base)]
        return []

    def versions(self) -> list[Version]:
        """See `VersionStore.versions`. Manifests are not read, but for one of each save."""
        found = [self._version(save, sorted(ranks)) for save, ranks in self._listed().items()]
        return sorted(filter(None, found), key=lambda version: version.save, reverse=True)

    def _listed(self) -> dict[SaveId, dict[int, os.DirEntry[str]]]:
        return listed(self.base, parse_manifest_name) if self.base.is_dir() else {}

    def _version(self, save: SaveId, ranks: list[int]) -> Version | None:
        found = Version(save, save.version, tuple(ranks), counts=True)
        for rank in ranks:
            try:
                return replace(found, world_size=self.manifest(found, rank).world_size, problem="")
            except ObjectNotFoundError:
                continue  # removed meanwhile
            except DamagedError as error:
                found = replace(found, problem=str(error))
        return found if found.problem else None

    def records(self) -> list[RunRecord]:
        """See `VersionStore.records`."""
        with contextlib.suppress(DamagedError, ObjectNotFoundError), reading(self.base):  # the job says so
            return read_records(JobContainer(self.base, make=False))
        return []

    def has(self, save: SaveId, rank: int) -> bool:
        """See `VersionStore.has`. The manifest goes first."""
        return os.path.lexists(self.base / save.version / manifest_name(rank, save.text))

    def hold(self, manifest: Manifest) -> AbstractContextManager[object]:
        """See `VersionStore.hold`."""
        return locked_part(self.base, manifest.save, manifest.rank)

    def remove(self, step: int | None, check: Callable[[], None] = lambda: None) -> list[str]:
        """Remove versions with their memory, or all that the job has left; see `VersionStore.remove`.

        Raises:
            JobInUseError: a live process has the base container.
            UnsafePathError: the folder is somebody else's, or others may write to it.
        """
        with writing(self.base), contextlib.ExitStack() as stack:
            there, is_of_a_job = JobContainer(self.base, make=False), (self.base / PRIVATE).is_dir()
            number = CheckpointContainerId.parse_version_container
            wanted = sorted(name for name in self.folders() if step in (None, number(name)))
            if not wanted and (step is not None or not is_of_a_job):
                what = "nothing of a job" if step is None else f"no version of step {step}"
                raise ObjectNotFoundError(f"there is {what} here", path=self.base)
            if is_of_a_job:
                stack.enter_context(locked_out(self.base))
            if step is None:
                there.remove_all()
            else:
                there.clean()
                for save in there.list_versions():
                    if save.step == step:
                        there.remove(save)
        return wanted
