"""The versions in a base container of this node, or in a folder of copies of versions, for whoever is not the job.

Reads while the job runs. The owner of a slot removes the manifest of a part before it uses the slot again, and it does
not use one that a reader has locked. So a reader locks the object (a shared ``flock``), then looks for the manifest
again. Imports no torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator
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
from ml_flashpoint.format.manifest import (
    Manifest,
    ObjectRecord,
    manifest_name,
    parse_manifest_name,
    parse_object_name,
    read_manifest,
    write_manifest,
)
from ml_flashpoint.format.private_folders import check_folder, check_way
from ml_flashpoint.format.save_id import SaveId
from ml_flashpoint.memory import container
from ml_flashpoint.memory.lineage import RunRecord, read_records
from ml_flashpoint.memory.lock import PRIVATE, locked_out
from ml_flashpoint.stores.directory import Directory, read_fully
from ml_flashpoint.stores.part import pruned, stored_object
from ml_flashpoint.stores.version_store import Content, Removed, Version, VersionStore

_TRIES: Final = 50
_LOOK_EVERY_S: Final = 0.01
_STAT_BLOCK: Final = 512
_TO_READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class BaseContainer(VersionStore):
    """Versions in folders ``step-<n>_ckpt``, one beside the other. Thread-safe.

    Args:
        base: the folder.
    """

    durable = False

    def __init__(self, base: str | os.PathLike[str]) -> None:
        self.base = Path(os.path.abspath(base))
        self.path = str(self.base)

    def folders(self) -> list[str]:
        """Return the names of the versions' folders; none if there is no base container."""
        entries: list[os.DirEntry[str]] = []
        with _reading(self.base, "the versions cannot be listed"), contextlib.suppress(FileNotFoundError):
            entries = [entry for entry in os.scandir(self.base) if entry.is_dir(follow_symlinks=False)]
        is_version = CheckpointContainerId.parse_version_container
        return [entry.name for entry in entries if is_version(entry.name) is not None]

    def versions(self) -> list[Version]:
        """See `VersionStore.versions`. Manifests are not read, but for one of each save."""
        found: list[Version] = []
        with _reading(self.base, "the versions cannot be listed"):
            for name in self.folders():
                saves: dict[str, list[int]] = {}
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    for parsed in map(parse_manifest_name, sorted(os.listdir(self.base / name))):
                        if parsed is not None and SaveId.parse(name, parsed[1]) is not None:
                            saves.setdefault(parsed[1], []).append(parsed[0])
                found += filter(None, (self._version(name, save_id, ranks) for save_id, ranks in saves.items()))
        return sorted(found, key=lambda version: version.order, reverse=True)

    def _version(self, name: str, save_id: str, ranks: list[int]) -> Version | None:
        step, problem = CheckpointContainerId.parse_version_container(name), ""
        for rank in ranks:
            try:
                size = read_manifest(self.base / name / manifest_name(rank, save_id)).world_size
                return Version(step or 0, save_id, name, tuple(ranks), size, True)
            except ObjectNotFoundError:
                continue  # removed meanwhile
            except DamagedError as error:
                problem = str(error)
        if not problem:
            return None
        return Version(step or 0, save_id, name, tuple(ranks), counts=True, problem=problem)

    def records(self) -> list[RunRecord]:
        """See `VersionStore.records`."""
        with contextlib.suppress(FlashpointError):  # the job says so
            return read_records(container.BaseContainer(self.base, make=False))
        return []

    def manifest(self, version: Version, rank: int) -> Manifest:
        """See `VersionStore.manifest`."""
        if rank not in version.ranks:
            raise ObjectNotFoundError("this node has no part of it", step=version.step, rank=rank, path=self.path)
        part = (version.folder, rank, version.save_id)
        try:
            return read_manifest(self._manifest_path(*part))
        except (DamagedError, ObjectNotFoundError):
            if not self.has(*part):
                raise pruned(*part, self.path) from None
            raise

    def _manifest_path(self, version: str, rank: int, save_id: str) -> Path:
        return self.base / version / manifest_name(rank, save_id)

    def check_sizes(self, manifest: Manifest) -> None:
        """See `VersionStore.check_sizes`."""
        for record in manifest.objects:
            path = self.path_of(manifest, record)
            wrong = ""
            try:
                with _reading(path, "the object"):
                    status = os.stat(path, follow_symlinks=False)
                if not stat.S_ISREG(status.st_mode):
                    wrong = "the object is not a regular file"
                elif status.st_size != record.file_size:
                    wrong = f"the object has {status.st_size} bytes, and {record.file_size} were committed"
            except FileNotFoundError:
                wrong = "the object is missing"
            if wrong:
                part = (manifest.version, manifest.rank, manifest.save_id)
                error = DamagedError(wrong, rank=manifest.rank, path=path)
                raise error if self.has(*part) else pruned(*part, self.path)

    def path_of(self, manifest: Manifest, record: ObjectRecord) -> str:
        """See `VersionStore.path_of`."""
        return str(self.base / manifest.version / record.name)

    def read_into(self, manifest: Manifest, record: ObjectRecord, begin: int, into: memoryview) -> None:
        """See `VersionStore.read_into`."""
        path = self.path_of(manifest, record)
        try:
            with _reading(path, "the object"):
                descriptor = os.open(path, _TO_READ)
                try:
                    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                        raise DamagedError("the object is not a regular file", step=manifest.step, path=path)
                    if not read_fully(descriptor, into, begin):
                        raise DamagedError("the object is too short", step=manifest.step, path=path)
                finally:
                    os.close(descriptor)
        except FileNotFoundError as error:
            part = (manifest.version, manifest.rank, manifest.save_id)
            if not self.has(*part):
                raise pruned(*part, self.path) from error
            raise ObjectNotFoundError("the object is gone", step=manifest.step, path=path) from error

    def has(self, version: str, rank: int, save_id: str) -> bool:
        """See `VersionStore.has`. The manifest goes first."""
        return os.path.lexists(self._manifest_path(version, rank, save_id))

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
            with _reading(path, "the object"):
                descriptor = os.open(path, _TO_READ)
        except FileNotFoundError as error:
            raise pruned(*part, self.path) from error
        try:
            for tries_left in reversed(range(_TRIES)):
                try:
                    with _reading(path, "it cannot be locked"):
                        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    break
                except BlockingIOError:  # the owner looks, for some microseconds, whether anybody reads it
                    if not tries_left:
                        raise pruned(*part, self.path) from None
                    time.sleep(_LOOK_EVERY_S)
            yield
        finally:
            os.close(descriptor)

    def write_part(self, manifest: Manifest, content: Content) -> bool:
        """See `VersionStore.write_part`. For folders of copies: a job's own parts are in its slots."""
        folder, files = self.base / manifest.version, Directory(self.base)
        with contextlib.suppress(FlashpointError):
            if read_manifest(folder / manifest_name(manifest.rank, manifest.save_id)) == manifest:
                for record in manifest.objects:
                    stored_object(manifest, [self], record).check()
                return False
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise SaveError(f"the folder cannot be made: {error.strerror}", path=folder) from error
        for record in manifest.objects:
            files.write(f"{manifest.version}/{record.name}", content(record))
        write_manifest(folder, manifest, fsync=True)
        return True

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


@contextlib.contextmanager
def _reading(path: str | os.PathLike[str], what: str) -> Iterator[None]:
    """Raise an `UnreadableError` for errors of the system but that a file is gone, or locked."""
    try:
        yield
    except (FileNotFoundError, BlockingIOError):
        raise
    except OSError as error:
        raise UnreadableError(f"{what}: {error.strerror}", path=path) from error
