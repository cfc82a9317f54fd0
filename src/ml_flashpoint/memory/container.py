"""A base container on one node: a directory on tmpfs that belongs to one job, and a store of versions.

::

    <base>/.flashpoint/job                            locked by all processes of the job; see `memory.lock`
    <base>/.flashpoint/runs/00000007.begun            the record of run 7; see `memory.lineage`
    <base>/.flashpoint/slots/00008-00003/0, 1, ...    slots for the parts of rank 3 of 8
    <base>/step-40_ckpt/rank-00003-00000007.safetensors    hard link to a slot
    <base>/step-40_ckpt/rank-00003-00000007.manifest       the commit record

A part appears with its manifest, which comes last and goes first, so that no instant shows a part without its bytes. A
node has at most one part of a rank and a save. Folders have mode 0700 and files 0600; symbolic links are refused.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from ml_flashpoint.format.errors import (
    CapacityError,
    DamagedError,
    InvalidNameError,
    ObjectNotFoundError,
    PrunedError,
    SaveError,
    UnreadableError,
    UnsafePathError,
)
from ml_flashpoint.format.files import (
    check_folder,
    check_way,
    make_tree,
    open_folder,
    open_own,
    open_regular,
    replace_file,
    writing,
)
from ml_flashpoint.format.manifest import Manifest, read_manifest, write_manifest
from ml_flashpoint.format.names import (
    CheckpointContainerId,
    SaveId,
    manifest_name,
    object_name,
    parse_manifest_name,
    parse_object_name,
    validate_segment,
)
from ml_flashpoint.memory.capacity import is_memory
from ml_flashpoint.memory.lock import JOB, PRIVATE, JobLock
from ml_flashpoint.memory.slot import PAGE, TEMPORARY, Slot

_log = logging.getLogger(__name__)

SLOTS: Final = "slots"
RUNS: Final = "runs"
STATUS: Final = "status"
_OWNER = re.compile(r"(\d{5,8})-(\d{5,8})")
_NUMBER = re.compile(r"\d{1,18}")
_INDEX = ".sidecars"
_TRIES = 8
_LOCK_S, _PAUSE_S = 5.0, 0.001


class Owner(NamedTuple):
    """Rank whose parts some slots are for, and the number of ranks of its job."""

    world_size: int
    rank: int


class Part(NamedTuple):
    """A committed part that is open for reading, and the bytes that count. Writes to them do not reach the file."""

    manifest: Manifest
    buffer: memoryview


class BaseContainer:
    """The versions and slots in one base container on this node. Thread-safe; processes share it.

    Args:
        base: base container.
        lock: of the job, where one has the base container open. Every commit checks that it still has.
        make: make what is missing. False for a process that only reads or removes; the folder may be of copies.

    Raises:
        ObjectNotFoundError: there is no such folder, and none is to be made.
        UnsafePathError: others could have planted the base container, or may write to it.
        FlashpointError: it cannot be made.
    """

    def __init__(self, base: Path, lock: JobLock | None = None, *, make: bool = True) -> None:
        self.base = base
        self.private = base / PRIVATE
        self._lock = lock
        if make:
            make_tree(base, self.private / SLOTS)
            make_tree(base, self.private / RUNS)
        elif not base.is_dir():
            raise ObjectNotFoundError("there is no such folder", path=base)
        check_folder(check_way(base))
        if make and not is_memory(base):
            _log.warning("%s is not on tmpfs: checkpoints work, at the speed of that filesystem", base)

    # ---- reading -------------------------------------------------------------------------------------------

    def list_versions(self) -> dict[SaveId, frozenset[int]]:
        """Return the saves that have committed parts here, and the ranks of those parts; see `listed`."""
        return {save: frozenset(ranks) for save, ranks in listed(self.base, parse_manifest_name).items()}

    def read_manifest(self, save: SaveId, rank: int) -> Manifest:
        """Return the manifest of a part.

        Raises:
            ObjectNotFoundError: there is no such part.
            ManifestError: it is damaged.
            UnreadableError: it cannot be read just now.
        """
        return read_manifest(self._folder(save) / manifest_name(rank, save.text))

    @contextlib.contextmanager
    def open_part(self, save: SaveId, rank: int) -> Iterator[Part]:
        """Read a part. Its slot is not reused before the block is left.

        Raises:
            ObjectNotFoundError: there is no such part.
            PrunedError: the part went while it was being opened.
            DamagedError: the object is not of the size in the manifest.
            UnreadableError: it cannot be read just now.
        """
        manifest = self.read_manifest(save, rank)
        record = manifest.record
        path = self._folder(save) / manifest.object_name
        with locked_part(self.base, save, rank) as descriptor:
            if os.fstat(descriptor).st_size != record.file_size:
                raise DamagedError(f"the object does not have {record.file_size} bytes", path=path)
            with _mapped(descriptor, record.size, path) as buffer:
                yield Part(manifest, buffer)

    def _folder(self, save: SaveId) -> Path:
        return self.base / save.version

    # ---- writing -------------------------------------------------------------------------------------------

    def commit(self, slot: Slot, manifest: Manifest) -> None:
        """Make the object in a slot a part of a version: link the file under the object's name, write the manifest.

        Raises:
            JobInUseError: the base container was removed while the job had it open.
            SaveError, CapacityError: the filesystem refuses. Nothing of the part is left then.
        """
        if self._lock is not None:
            self._lock.check()
        save, rank = manifest.save, manifest.rank
        folder = self._folder(save)
        try:
            for tries_left in reversed(range(_TRIES)):
                try:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(folder, 0o700)
                    os.close(open_folder(folder))
                    _link(slot.path, folder / manifest.object_name)
                    break
                except FileNotFoundError:  # another rank has removed the folder, seen empty
                    if not tries_left:
                        raise
            write_manifest(folder, manifest)
        except UnsafePathError as error:  # nothing in there is touched
            raise SaveError(f"cannot commit: {error.message}", step=save.step, rank=rank, path=folder) from error
        except BaseException as error:
            with contextlib.suppress(OSError):  # the first error says more
                self.remove_part(save, rank)
            if not isinstance(error, OSError):
                raise
            kind = CapacityError if error.errno in (errno.ENOSPC, errno.EDQUOT) else SaveError
            raise kind(f"cannot commit: {error.strerror}", step=save.step, rank=rank, path=folder) from error

    def remove_part(self, save: SaveId, rank: int) -> None:
        """Remove a part, its manifest first, and the folder of its version after the last part. The slot stays."""
        folder = self._folder(save)
        for name in (manifest_name(rank, save.text), object_name(rank, save.text)):
            (folder / name).unlink(missing_ok=True)
        _remove_folder(folder)

    def write_sidecars(self, save: SaveId, files: Mapping[str, bytes]) -> None:
        """Put files into the folder of a version that a framework looks for there. They go with the last part.

        What they hold must be in a part as well: no copy is made of them, and they have no digests.
        """
        folder = self._folder(save)
        for name in files:
            if validate_segment(name).startswith(".") or parse_manifest_name(name) or parse_object_name(name):
                raise InvalidNameError("a file beside the parts must not be called so", path=folder / name)
        with writing(folder):
            make_tree(self.base, folder)
            for name, content in {_INDEX: "\n".join(files).encode(), **files}.items():  # the index first
                replace_file(folder / name, [content], fsync=False)

    def expect_sidecars(self, save: SaveId, names: Iterable[str]) -> None:
        """Make the folder of a version into which a framework itself writes files of these names. They go with the last
        part; if there is none, `clean` removes them."""
        folder = self._folder(save)
        with writing(folder):
            make_tree(self.base, folder)
            if _INDEX not in os.listdir(folder):
                replace_file(folder / _INDEX, ["\n".join(names).encode()], fsync=False)

    def reclaim(self, slot: Slot, rank: int) -> bool:
        """Take back a slot of a rank's parts, with the part that it holds. Return False if somebody reads it."""
        if not slot.lock():
            return False
        try:
            if slot.save is not None:
                (self._folder(slot.save) / manifest_name(rank, slot.save.text)).unlink(missing_ok=True)
        finally:
            slot.unlock()
        if slot.save is not None:
            self.remove_part(slot.save, rank)
        return True

    def remove(self, save: SaveId) -> None:
        """Remove all parts of a save, and their memory. For a base container that no job has open: see `locked_out`."""
        gone = {entry.inode(): rank for rank, entry in listed(self.base, parse_object_name).get(save, {}).items()}
        for rank in self.list_versions().get(save, frozenset()) | frozenset(gone.values()):
            self.remove_part(save, rank)
        for path in self.slot_paths():
            if path.stat().st_ino in gone:
                path.unlink()

    # ---- slots ---------------------------------------------------------------------------------------------

    def slot_folder(self, owner: Owner) -> Path:
        """Return the folder of the slots for an owner, which is made if it is missing."""
        folder = self._folder_of(owner)
        make_tree(self.base, folder)
        return folder

    def _slot_folders(self) -> list[Path]:
        return [self._folder_of(owner) for owner in self.slot_owners()]

    def _folder_of(self, owner: Owner) -> Path:
        return self.private / SLOTS / f"{owner.world_size:05d}-{owner.rank:05d}"

    def slot_owners(self) -> frozenset[Owner]:
        """Return the owners that have a folder for their slots."""
        found = filter(None, map(_OWNER.fullmatch, names_in(self.private / SLOTS)))
        return frozenset(Owner(int(match[1]), int(match[2])) for match in found)

    def slot_paths(self, owner: Owner | None = None) -> list[Path]:
        """Return the slots of one owner, or of all, by number."""
        found: list[Path] = []
        for folder in self._slot_folders() if owner is None else [self._folder_of(owner)]:
            found += [folder / name for name in sorted(filter(_NUMBER.fullmatch, names_in(folder)), key=int)]
        return found

    def passing(self) -> int:
        """Return the bytes of slots that are being made or removed just now."""
        found = 0
        for path in _temporary_files(self._slot_folders()):
            with contextlib.suppress(FileNotFoundError):
                found += path.stat().st_blocks * 512
        return found

    def committed(self) -> dict[int, tuple[SaveId, int]]:
        """Return the saves and ranks of the committed parts, by the inodes of the slots that they lie in."""
        objects = listed(self.base, parse_object_name)
        return {
            objects[save][rank].inode(): (save, rank)
            for save, ranks in self.list_versions().items()
            for rank in ranks
            if rank in objects.get(save, {})
        }

    # ---- what dead processes left -------------------------------------------------------------------------

    def clean(self) -> None:
        """Remove what a crash has cut short: temporary files, objects or manifests without the other, empty folders.

        One process of a node calls this while no process of the job commits.
        """
        objects, manifests = listed(self.base, parse_object_name), listed(self.base, parse_manifest_name)
        for save in objects.keys() | manifests.keys():
            for rank in objects.get(save, {}).keys() ^ manifests.get(save, {}).keys():
                path = self._folder(save) / object_name(rank, save.text)
                _log.warning("removing what is left of a part without its object or its manifest: %s", path)
                self.remove_part(save, rank)
        versions = version_folders(self.base)
        for path in _temporary_files([self.private / RUNS, *self._slot_folders(), *versions]):
            path.unlink(missing_ok=True)
        for folder in versions:
            _remove_folder(folder)
        for path in self.slot_paths():
            if (size := path.stat().st_size) == 0 or size % PAGE:
                _log.warning("removing %s, which is no slot: it has %d bytes", path, size)
                path.unlink(missing_ok=True)

    def remove_all(self) -> None:
        """Remove all versions and slots, and the base container if nothing else is in it. See `remove`."""
        for save in self.list_versions():
            self.remove(save)
        self.clean()
        for path in self.slot_paths():
            path.unlink()
        folders = (self.private / RUNS, self.private / STATUS)
        for path in (folder / name for folder in folders for name in names_in(folder)):
            path.unlink()
        for folder in (*self._slot_folders(), self.private / SLOTS, *folders):
            with contextlib.suppress(OSError):
                folder.rmdir()
        (self.private / JOB).unlink(missing_ok=True)  # last: who waits for the lock sees then that the file is another
        for folder in (self.private, self.base):
            with contextlib.suppress(OSError):
                folder.rmdir()


def listed(base: Path, parse: Callable[[str], tuple[int, str] | None]) -> dict[SaveId, dict[int, os.DirEntry[str]]]:
    """Return the files of parts that a function knows by name: `parse_manifest_name`, or `parse_object_name`.

    Raises:
        UnreadableError: that cannot be known just now.
    """
    found: dict[SaveId, dict[int, os.DirEntry[str]]] = {}
    try:
        for folder in version_folders(base):
            with contextlib.suppress(FileNotFoundError):  # the last part in it was removed meanwhile
                for entry in os.scandir(folder):
                    owner = parse(entry.name)
                    save = None if owner is None else SaveId.parse(folder.name, owner[1])
                    if owner is not None and save is not None:
                        found.setdefault(save, {})[owner[0]] = entry
    except OSError as error:
        raise UnreadableError(f"cannot list the versions: {error.strerror}", path=base) from error
    return found


def version_folders(base: Path) -> list[Path]:
    """Return the folders of versions. Links do not count."""
    is_version = CheckpointContainerId.parse_version_container
    entries = [entry for entry in os.scandir(base) if is_version(entry.name) is not None]
    return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]


def names_in(folder: Path) -> list[str]:
    """Return the names in a folder; none if there is no folder."""
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


@contextlib.contextmanager
def locked_part(base: Path, save: SaveId, rank: int) -> Iterator[int]:
    """Lock the object of a part for reading. Yield its descriptor. The job does not reuse the slot meanwhile.

    Raises:
        PrunedError: the part is not there any more.
        UnsafePathError: no regular file is at its place.
        UnreadableError: it cannot be opened or locked just now.
    """
    folder = base / save.version
    path = folder / object_name(rank, save.text)
    gone = PrunedError("the part was removed while it was being opened", step=save.step, rank=rank, path=path)
    try:
        descriptor = open_regular(path, os.O_RDONLY)
    except FileNotFoundError as error:
        raise gone from error
    except OSError as error:
        raise UnreadableError(f"cannot open the object: {error.strerror}", path=path) from error
    try:
        _lock_shared(descriptor, path)
        # Only now: an owner that wants the slot removes the manifest while it keeps readers out.
        if not os.path.lexists(folder / manifest_name(rank, save.text)):
            raise gone
        yield descriptor
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked child may share the descriptor
        os.close(descriptor)


def _lock_shared(descriptor: int, path: Path) -> None:
    give_up = time.monotonic() + _LOCK_S
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:  # mostly the owner looks whether anybody reads it, for some microseconds
            if not isinstance(error, BlockingIOError) or time.monotonic() > give_up:
                raise UnreadableError(f"the slot cannot be locked: {error.strerror}", path=path) from None
            time.sleep(_PAUSE_S)


@contextlib.contextmanager
def _mapped(descriptor: int, size: int, path: Path) -> Iterator[memoryview]:
    if not size:
        yield memoryview(b"")
        return
    try:
        mapping = mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY)  # not read-only: torch warns of that
    except (OSError, ValueError) as error:
        raise UnreadableError(f"cannot map the object: {error}", path=path) from error
    view = memoryview(mapping)
    try:
        yield view
    finally:
        with contextlib.suppress(BufferError):  # views that the caller has kept keep the mapping
            view.release()
            mapping.close()


def _link(path: Path, link: Path) -> None:
    try:
        os.link(path, link)
    except FileExistsError:  # an object without a manifest, or that is being committed again
        spare = link.with_name(f".{link.name}.{secrets.token_hex(4)}{TEMPORARY}")
        os.link(path, spare)
        os.replace(spare, link)
        spare.unlink(missing_ok=True)  # still there if both were links to one file


def _remove_folder(folder: Path) -> None:
    """Remove a version's folder with its sidecars, unless a part or somebody else's file is in it."""
    with contextlib.suppress(OSError, UnsafePathError):
        names = os.listdir(folder)
        if _INDEX in names and not any(parse_manifest_name(name) or parse_object_name(name) for name in names):
            with open(open_own(folder / _INDEX, os.O_RDONLY), errors="replace") as file:
                ours = file.read().splitlines()
            for name in [name for name in ours if name in names] + [_INDEX]:
                os.unlink(folder / name)
        folder.rmdir()


def _temporary_files(folders: list[Path]) -> list[Path]:
    return [folder / name for folder in folders for name in names_in(folder) if name.endswith(TEMPORARY)]
