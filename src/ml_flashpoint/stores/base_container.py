"""The versions in a base container of this node, or in a folder of copies of versions, for whoever is not the job.

Owns reading them while the job runs. A slot is used again as soon as no part is kept in it, after its manifest is gone.
So a reader holds parts (a shared ``flock`` on the manifest), and what it read counts if it has its digests. Imports no
torch.
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

from ml_flashpoint.checkpoint_object_manager.base_marks import PRIVATE_DIR
from ml_flashpoint.checkpoint_object_manager.removal import Removed, remove_from_base
from ml_flashpoint.checkpoint_object_manager.version_files import list_versions
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.errors import (
    DamagedError,
    FlashpointError,
    ObjectNotFoundError,
    SaveError,
    UnreadableError,
)
from ml_flashpoint.format.lineage import Lineage, read_lineage
from ml_flashpoint.format.manifest import (
    Manifest,
    ObjectRecord,
    manifest_name,
    parse_manifest_name,
    read_manifest,
    write_manifest,
)
from ml_flashpoint.stores.directory import Directory, read_fully
from ml_flashpoint.stores.part import pruned, stored_object
from ml_flashpoint.stores.version_store import Content, Version, VersionStore

_TRIES: Final = 5
_LOOK_EVERY_S: Final = 0.01
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

    def versions(self) -> list[Version]:
        """See `VersionStore.versions`. Manifests are not read, but for one of each save."""
        found: list[Version] = []
        with _reading(self.base, "the versions cannot be listed"):
            for name in list_versions(self.base):
                saves: dict[str, list[int]] = {}
                with contextlib.suppress(FileNotFoundError):  # pruned meanwhile
                    for parsed in map(parse_manifest_name, sorted(os.listdir(self.base / name))):
                        if parsed is not None:
                            saves.setdefault(parsed[1], []).append(parsed[0])
                found += filter(None, (self._version(name, save_id, ranks) for save_id, ranks in saves.items()))
        return sorted(found, key=lambda version: version.save_id, reverse=True)

    def _version(self, name: str, save_id: str, ranks: list[int]) -> Version | None:
        step, problem = CheckpointContainerId.parse_version_container(name), ""
        for rank in ranks:
            try:
                size = read_manifest(self.base / name / manifest_name(rank, save_id)).world_size
                return Version(step or 0, save_id, name, tuple(ranks), size, True)
            except ObjectNotFoundError:
                continue  # pruned meanwhile
            except DamagedError as error:
                problem = str(error)
        if not problem:
            return None
        return Version(step or 0, save_id, name, tuple(ranks), counts=True, problem=problem)

    def lineage(self) -> Lineage:
        """See `VersionStore.lineage`."""
        with contextlib.suppress(FlashpointError):  # the job says so
            return read_lineage(self.base / PRIVATE_DIR)
        return Lineage()

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
        try:
            return bool(list_versions(self.base)) or (self.base / PRIVATE_DIR).is_dir()
        except OSError:
            return False

    @contextlib.contextmanager
    def hold(self, manifest: Manifest) -> Iterator[None]:
        """See `VersionStore.hold`."""
        part = (manifest.version, manifest.rank, manifest.save_id)
        path = self._manifest_path(*part)
        try:
            with _reading(path, "the manifest"):
                descriptor = os.open(path, _TO_READ)
        except FileNotFoundError as error:
            raise pruned(*part, self.path) from error
        try:
            for tries_left in reversed(range(_TRIES)):
                try:
                    with _reading(path, "it cannot be held"):
                        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    break
                except BlockingIOError:  # the job asks just now
                    if not tries_left:
                        raise pruned(*part, self.path) from None
                    time.sleep(_LOOK_EVERY_S)
            if not os.fstat(descriptor).st_nlink:
                raise pruned(*part, self.path)
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
        return remove_from_base(self.base, step)


@contextlib.contextmanager
def _reading(path: str | os.PathLike[str], what: str) -> Iterator[None]:
    """Raise an `UnreadableError` for errors of the system but that a file is gone, or locked."""
    try:
        yield
    except (FileNotFoundError, BlockingIOError):
        raise
    except OSError as error:
        raise UnreadableError(f"{what}: {error.strerror}", path=path) from error
