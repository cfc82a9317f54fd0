"""The versions in a base container of this node, or in a folder of copies of versions, for whoever is not the job.

Reads while the job runs. The owner of a slot removes the manifest of a part before it uses the slot again, and it does
not use one that a reader has locked. So a reader locks the object (a shared ``flock``), then looks for the manifest
again. Imports no torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.errors import (
    DamagedError,
    FlashpointError,
    ObjectNotFoundError,
    SaveError,
    UnreadableError,
)
from ml_flashpoint.format.files import open_regular
from ml_flashpoint.format.manifest import (
    Manifest,
    manifest_name,
    parse_manifest_name,
    parse_object_name,
)
from ml_flashpoint.format.private_folders import check_folder, check_way
from ml_flashpoint.format.save_id import SaveId
from ml_flashpoint.memory import container
from ml_flashpoint.memory.lineage import RunRecord, read_records
from ml_flashpoint.memory.lock import PRIVATE, locked_out
from ml_flashpoint.stores.directory import Directory
from ml_flashpoint.stores.files import reading
from ml_flashpoint.stores.part import pruned
from ml_flashpoint.stores.version_store import Removed, Version, VersionStore

_LOCK_S: Final = 0.5
_PAUSE_S: Final = 0.01
_STAT_BLOCK: Final = 512


class BaseContainer(VersionStore):
    """Versions in folders ``step-<n>_ckpt``, one beside the other. Thread-safe.

    Args:
        base: the folder.
    """

    durable = False

    def __init__(self, base: str | os.PathLike[str]) -> None:
        self.base = Path(os.path.abspath(base))
        super().__init__(Directory(self.base), str(self.base))

    def folder_of(self, version: str, save_id: str) -> str:
        """See `VersionStore.folder_of`."""
        return version

    def folders(self) -> list[str]:
        """Return the names of the versions' folders; none if there is no base container."""
        entries: list[os.DirEntry[str]] = []
        with reading(self.base), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            entries = [entry for entry in os.scandir(self.base) if entry.is_dir(follow_symlinks=False)]
        is_version = CheckpointContainerId.parse_version_container
        return [entry.name for entry in entries if is_version(entry.name) is not None]

    def versions(self) -> list[Version]:
        """See `VersionStore.versions`. Manifests are not read, but for one of each save."""
        found: list[Version | None] = []
        for name in self.folders():
            saves: dict[str, list[int]] = {}
            for parsed in map(parse_manifest_name, self.files.list(name)):
                if parsed is not None and SaveId.parse(name, parsed[1]) is not None:
                    saves.setdefault(parsed[1], []).append(parsed[0])
            found += [self._version(name, save_id, ranks) for save_id, ranks in saves.items()]
        return sorted(filter(None, found), key=lambda version: version.order, reverse=True)

    def _version(self, name: str, save_id: str, ranks: list[int]) -> Version | None:
        found = Version(CheckpointContainerId.parse_version_container(name) or 0, save_id, name, tuple(ranks), 0, True)
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
        with contextlib.suppress(FlashpointError):  # the job says so
            return read_records(container.BaseContainer(self.base, make=False))
        return []

    def has(self, version: str, rank: int, save_id: str) -> bool:
        """See `VersionStore.has`. The manifest goes first."""
        return os.path.lexists(self.base / version / manifest_name(rank, save_id))

    def exists(self) -> bool:
        """See `VersionStore.exists`."""
        with contextlib.suppress(UnreadableError, OSError):
            return bool(self.folders()) or (self.base / PRIVATE).is_dir()
        return False

    @contextlib.contextmanager
    def hold(self, manifest: Manifest) -> Iterator[None]:
        """See `VersionStore.hold`."""
        part = (manifest.version, manifest.rank, manifest.save_id)
        with contextlib.ExitStack() as locked:
            for record in manifest.objects:
                locked.enter_context(self._locked(self.path_of(manifest, record), part))
            if not self.has(*part):  # only now: an owner that wants the slot removes the manifest under its lock
                raise pruned(*part, self.path)
            yield

    @contextlib.contextmanager
    def _locked(self, path: str, part: tuple[str, int, str]) -> Iterator[None]:
        try:
            with reading(path):
                descriptor = open_regular(Path(path), os.O_RDONLY)
        except ObjectNotFoundError as error:
            raise pruned(*part, self.path) from error
        try:
            give_up = time.monotonic() + _LOCK_S
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    break
                except BlockingIOError:  # the owner looks, for some microseconds, whether anybody reads it
                    if time.monotonic() > give_up:
                        raise pruned(*part, self.path) from None
                    time.sleep(_PAUSE_S)
                except OSError as error:
                    raise UnreadableError(f"it cannot be locked: {error.strerror}", path=path) from error
            yield
        finally:
            os.close(descriptor)

    def remove(self, step: int | None, check: Callable[[], None] = lambda: None) -> Removed:
        """Remove versions with their memory, or all that the job has left; see `VersionStore.remove`.

        Raises:
            JobInUseError: a live process has the base container.
            UnsafePathError: the folder is somebody else's, or others may write to it.
        """
        removed = Removed()
        try:
            root = check_way(self.base)
            if not root.is_dir():
                raise ObjectNotFoundError("there is no such folder", path=self.base)
            check_folder(root)
            wanted = [
                name for name in self.folders() if step in (None, CheckpointContainerId.parse_version_container(name))
            ]
            if not wanted and (step is not None or not (root / PRIVATE).is_dir()):
                what = "nothing of a job" if step is None else f"no version of step {step}"
                raise ObjectNotFoundError(f"there is {what} here", path=self.base)
            before = _memory_below(root)
            if (root / PRIVATE).is_dir():
                with locked_out(root):
                    _remove_from_job(container.BaseContainer(root, make=False), step)
            else:
                for name in wanted:
                    _remove_copies(root / name)
            removed.versions = sorted(wanted)
            removed.left = sorted(
                name for name in (os.listdir(root) if root.exists() else ()) if step is None or name in wanted
            )
            removed.freed_bytes = before - _memory_below(root)
        except OSError as error:
            raise SaveError(
                f"it cannot be removed: {error.strerror or error}", path=error.filename or self.base
            ) from error
        return removed


def _remove_from_job(there: container.BaseContainer, step: int | None) -> None:
    if step is None:
        there.remove_all()
        return
    there.clean()
    for save in there.list_versions():
        if save.step == step:
            there.remove(save)


def _remove_copies(folder: Path) -> None:
    for is_of_a_part in (parse_manifest_name, parse_object_name):
        for name in os.listdir(folder):
            if is_of_a_part(name) is not None and (folder / name).is_file():
                os.unlink(folder / name)
    with contextlib.suppress(OSError):  # something else is in it
        folder.rmdir()


def _memory_below(root: Path) -> int:
    """Return the bytes that all files of a folder take, each file once."""
    found: dict[int, int] = {}
    for folder, _, names in os.walk(root):
        for name in names:
            with contextlib.suppress(OSError):
                status = os.lstat(os.path.join(folder, name))
                found[status.st_ino] = status.st_blocks * _STAT_BLOCK
    return sum(found.values())
