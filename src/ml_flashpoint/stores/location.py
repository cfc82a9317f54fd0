"""The versions in a base container or a folder of copies, for whoever is not the job; and what paths and URLs lead to.

A base container is read while the job runs: see `memory.container.locked_part`. Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Final

from ml_flashpoint.format.errors import DamagedError, InvalidArgumentError, ObjectNotFoundError
from ml_flashpoint.format.files import check_unplanted, writing
from ml_flashpoint.format.manifest import Manifest
from ml_flashpoint.format.names import CheckpointContainerId, SaveId, manifest_name, parse_manifest_name
from ml_flashpoint.memory.container import PRIVATE, listed, locked_out, locked_part, version_folders
from ml_flashpoint.memory.container import BaseContainer as JobContainer
from ml_flashpoint.memory.lineage import RunRecord, read_records
from ml_flashpoint.stores.durable import DurableVersions, is_run_folder
from ml_flashpoint.stores.files import Directory, Files, reading
from ml_flashpoint.stores.version_store import Version, VersionStore

_FILE: Final = "file://"


class BaseContainer(VersionStore):
    """Versions in folders ``step-<n>_ckpt``, one beside the other, below ``base``. Thread-safe."""

    durable = False

    def __init__(self, base: str | os.PathLike[str]) -> None:
        self.base = Path(os.path.abspath(base))
        super().__init__(Directory(self.base), str(self.base))

    def folder_of(self, save: SaveId) -> str:
        """See `VersionStore.folder_of`."""
        return save.version

    def folders(self) -> list[str]:
        """Return the names of the versions' folders; none if there is no base container."""
        with contextlib.suppress(ObjectNotFoundError), reading(self.base):
            return [folder.name for folder in version_folders(self.base)]
        return []

    def versions(self) -> list[Version]:
        """See `VersionStore.versions`. Manifests are not read, but for one of each save."""
        there = listed(self.base, parse_manifest_name) if self.base.is_dir() else {}
        found = [self._version(save, sorted(there[save])) for save in sorted(there, reverse=True)]
        return [version for version in found if version is not None]

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
        """Remove versions with their memory, or all that the job has left; see `VersionStore.remove`. Raise a
        `JobInUseError` if a live process has the base container, an `UnsafePathError` if others may write to it."""
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


def checked_url(argument: str, value: object) -> str:
    """Return a URL, with an absolute path on this machine. Raise an `InvalidArgumentError` if it is none."""
    url = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(url, str) or not url:
        raise InvalidArgumentError(
            "must be a URL such as file:///lustre/me/job-145 or s3://bucket/job-145", argument=argument, value=value
        )
    if url.startswith(_FILE) and not os.path.isabs(url[len(_FILE) :]):
        raise InvalidArgumentError("the path of a file:// URL must be absolute", argument=argument, value=value)
    return url if is_url(url) else _FILE + os.path.abspath(os.path.expanduser(url))


def is_url(text: str) -> bool:
    """Return True for a URL, False for a path."""
    return "://" in text or "::" in text


def open_durable(url: str) -> DurableVersions:
    """Return the store behind what `checked_url` returned. Reads and writes nothing of it. Raise an `UnsafePathError`
    if it is a folder, and somebody else has planted something on the way."""
    if not url.startswith(_FILE):
        return DurableVersions(Files(url), url)
    path = url[len(_FILE) :]
    check_unplanted(Path(path))
    return DurableVersions(Directory(path), url)


def open_store(source: str | os.PathLike[str]) -> VersionStore:
    """Return the store that a user points at: a URL, a folder of durable versions, or a base container. Raises what
    `checked_url` and `open_durable` raise."""
    text = os.fspath(source)
    if not is_url(text):
        names: list[str] = []
        with contextlib.suppress(OSError):
            names = os.listdir(text)
        if not any(map(is_run_folder, names)):
            return BaseContainer(text)
    return open_durable(checked_url("SOURCE", text))
