"""A base container on one node: a directory on tmpfs that belongs to one job, and a store of versions.

::

    <base>/.flashpoint/job                            locked by all processes of the job; see `JobLock`
    <base>/.flashpoint/runs/00000007.begun            the record of run 7; see `memory.lineage`
    <base>/.flashpoint/slots/00008-00003/0, 1, ...    slots for the parts of rank 3 of 8
    <base>/step-40_ckpt/rank-00003-00000007.safetensors    hard link to a slot
    <base>/step-40_ckpt/rank-00003-00000007.manifest       the commit record

A part appears with its manifest, which comes last and goes first, so that no instant shows a part without its bytes. A
node has at most one part of a rank and a save. Folders have mode 0700 and files 0600; symbolic links are refused.

**The lock.** A digest of the job's id names one byte of the file ``job``, which every process of the job locks for
reading. A new process first locks byte 0 for writing, then looks for a lock on any other byte. POSIX locks end with
their process, forked children do not inherit them, and they need no page of a full filesystem.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import re
import shutil
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import xxhash

from ml_flashpoint.format.errors import (
    CapacityError,
    DamagedError,
    InvalidNameError,
    JobInUseError,
    ObjectNotFoundError,
    PrunedError,
    SaveError,
    UnreadableError,
    UnsafePathError,
)
from ml_flashpoint.format.files import (
    check_folder,
    check_way,
    is_at,
    make_private,
    make_tree,
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
from ml_flashpoint.memory.slot import TEMPORARY, Slot

_log = logging.getLogger(__name__)

PRIVATE: Final = ".flashpoint"
"""Folder of a base container for what is not a version."""
JOB: Final = "job"
SLOTS: Final = "slots"
RUNS: Final = "runs"
STATUS: Final = "status"
_OWNER = re.compile(r"(\d{5,8})-(\d{5,8})")
_NUMBER = re.compile(r"\d{1,18}")
_INDEX = ".sidecars"
_TRIES = 8
_LOCK_S, _PAUSE_S = 5.0, 0.001
_JOB_PAUSE_S = 0.05
_JOB_TRIES = 100
_FLOCK = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length, pid
_EXITING, _SIGKILL_BIT = 0x4, 1 << 8  # PF_EXITING of the kernel; signal 9 in a mask


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
        lock: of the job, where one has the base container open. Every commit checks that it still has.
        make: make what is missing. False for a process that only reads or removes: then a folder that is not there is
            an `ObjectNotFoundError`, and the folder may be of copies.

    Raises:
        UnsafePathError: others could have planted the base container, or may write to it.
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
        """Return the manifest of a part. Raises what `format.manifest.read_manifest` raises."""
        return read_manifest(self.base / save.version / manifest_name(rank, save.text))

    @contextlib.contextmanager
    def open_part(self, save: SaveId, rank: int) -> Iterator[Part]:
        """Read a part, whose slot is not reused before the block is left. Raises what `read_manifest` and `locked_part`
        raise, and a `DamagedError` if the object is not of the size in the manifest."""
        manifest = self.read_manifest(save, rank)
        record = manifest.record
        path = self.base / save.version / manifest.object_name
        with locked_part(self.base, save, rank) as descriptor:
            if os.fstat(descriptor).st_size != record.file_size or not record.size:
                raise DamagedError(f"the object does not have {record.file_size} bytes", path=path)
            try:
                mapping = mmap.mmap(descriptor, record.size, access=mmap.ACCESS_COPY)  # torch warns of read-only ones
            except (OSError, ValueError) as error:
                raise UnreadableError(f"cannot map the object: {error}", path=path) from error
            view = memoryview(mapping)
            try:
                yield Part(manifest, view)
            finally:
                with contextlib.suppress(BufferError):  # views that the caller has kept keep the mapping
                    view.release()
                    mapping.close()

    # ---- writing -------------------------------------------------------------------------------------------

    def commit(self, slot: Slot, manifest: Manifest) -> None:
        """Make the object in a slot a part of a version: link the file under the object's name, write the manifest. If
        that raises (see `JobLock.check`; a `SaveError` if the filesystem refuses), nothing of the part is left."""
        if self._lock is not None:
            self._lock.check()
        save, rank = manifest.save, manifest.rank
        folder = self.base / save.version
        try:
            for tries_left in reversed(range(_TRIES)):
                try:
                    make_private(folder)
                    os.link(slot.path, folder / manifest.object_name)
                    break
                except (FileNotFoundError, FileExistsError) as error:
                    if not tries_left:
                        raise
                    # Another rank has removed the folder, seen empty. Or the part is there, perhaps cut short.
                    if isinstance(error, FileExistsError):
                        self._unlink_part(save, rank)
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
        self._unlink_part(save, rank)
        _remove_folder(self.base / save.version)

    def _unlink_part(self, save: SaveId, rank: int) -> None:
        for name in (manifest_name(rank, save.text), object_name(rank, save.text)):
            (self.base / save.version / name).unlink(missing_ok=True)

    def write_sidecars(self, save: SaveId, files: Mapping[str, bytes]) -> None:
        """Put files into the folder of a version that a framework looks for there. They go with the last part.

        What they hold must be in a part as well: no copy is made of them, and they have no digests.
        """
        folder = self.base / save.version
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
        folder = self.base / save.version
        with writing(folder):
            make_tree(self.base, folder)
            if _INDEX not in os.listdir(folder):  # one that is there may name more files
                replace_file(folder / _INDEX, ["\n".join(names).encode()], fsync=False)

    def reclaim(self, slot: Slot, rank: int) -> bool:
        """Take back a slot of a rank's parts, with the part that it holds. Return False if somebody reads it."""
        if not slot.lock():
            return False
        try:
            if slot.save is not None:
                manifest = self.base / slot.save.version / manifest_name(rank, slot.save.text)
                manifest.unlink(missing_ok=True)
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

    def slot_folder(self, owner: Owner, *, make: bool = True) -> Path:
        """Return the folder of the slots for an owner, which is made if it is missing."""
        folder = self.private / SLOTS / f"{owner.world_size:05d}-{owner.rank:05d}"
        if make:
            make_tree(self.base, folder)
        return folder

    def _slot_folders(self) -> list[Path]:
        return [self.slot_folder(owner, make=False) for owner in self.slot_owners()]

    def slot_owners(self) -> frozenset[Owner]:
        """Return the owners that have a folder for their slots."""
        found = filter(None, map(_OWNER.fullmatch, names_in(self.private / SLOTS)))
        return frozenset(Owner(int(match[1]), int(match[2])) for match in found)

    def slot_paths(self, owner: Owner | None = None) -> list[Path]:
        """Return the slots of one owner, or of all, by number."""
        found: list[Path] = []
        for folder in self._slot_folders() if owner is None else [self.slot_folder(owner, make=False)]:
            found += [folder / name for name in sorted(filter(_NUMBER.fullmatch, names_in(folder)), key=int)]
        return found

    def passing(self) -> int:
        """Return the bytes of slots that are being made or removed just now."""
        found = 0
        for path in _temporary_files(self._slot_folders()):
            with contextlib.suppress(FileNotFoundError):
                found += path.stat().st_blocks * 512
        return found

    def committed(self) -> dict[int, SaveId]:
        """Return the saves of the committed parts, by the inodes of the slots that they lie in."""
        found, manifests = listed(self.base, parse_object_name), self.list_versions()
        return {
            entry.inode(): save
            for save, entries in found.items()
            for rank, entry in entries.items()
            if rank in manifests.get(save, ())
        }

    # ---- what dead processes left -------------------------------------------------------------------------

    def clean(self) -> None:
        """Remove what a crash has cut short: temporary files, objects or manifests without the other, empty folders. To
        be called by one process of a node, while no process of the job commits."""
        objects, manifests = listed(self.base, parse_object_name), listed(self.base, parse_manifest_name)
        for save in objects.keys() | manifests.keys():
            for rank in objects.get(save, {}).keys() ^ manifests.get(save, {}).keys():
                path = self.base / save.version / object_name(rank, save.text)
                _log.warning("removing what is left of a part without its object or its manifest: %s", path)
                self.remove_part(save, rank)
        versions = version_folders(self.base)
        for path in _temporary_files([self.private / RUNS, self.private / STATUS, *self._slot_folders(), *versions]):
            path.unlink(missing_ok=True)
        for folder in versions:
            _remove_folder(folder)

    def remove_all(self) -> None:
        """Remove all versions and slots, and the base container if nothing else is in it. See `remove`."""
        for save in self.list_versions():
            self.remove(save)
        self.clean()
        for folder in (self.private / SLOTS, self.private / RUNS, self.private / STATUS):
            if folder.is_dir():
                shutil.rmtree(folder)
        (self.private / JOB).unlink(missing_ok=True)  # last: who waits for the lock sees then that the file is another
        for folder in (self.private, self.base):
            with contextlib.suppress(OSError):
                folder.rmdir()


def listed(base: Path, parse: Callable[[str], tuple[int, str] | None]) -> dict[SaveId, dict[int, os.DirEntry[str]]]:
    """Return the files of parts that a function knows by name: `parse_manifest_name`, or `parse_object_name`. Raise an
    `UnreadableError` if that cannot be known just now."""
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
    """Lock the object of a part for reading: the job does not reuse the slot meanwhile. Yield its descriptor. Raise a
    `PrunedError` if the part is gone, an `UnreadableError` if it cannot be opened or locked just now."""
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


# ---- the lock of the job ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Held:
    """The one descriptor of a lock's file: closing another descriptor of the file would end this process's locks. The
    byte is of the job that took the lock first."""

    descriptor: int
    byte: int
    users: int = 0


_held: dict[tuple[int, int], _Held] = {}
_mutex = threading.Lock()


def _forget() -> None:
    global _mutex
    _mutex = threading.Lock()
    _held.clear()  # a forked child has none of the locks


os.register_at_fork(after_in_child=_forget)


class JobLock:
    """This process's share in the lock of its job. All openings in one process share it.

    A process that is ending (killed, while its memory is being freed) is waited for, up to ``deadline_s`` seconds.

    Args:
        base: base container; made if it is missing.
        job: id of the job, the same in all its processes, and of no other job or earlier start of it.

    Raises:
        JobInUseError: a process of another job has the base container open.
        UnsafePathError: others could have planted the base container, or may write to it.
    """

    def __init__(self, base: Path, job: str, deadline_s: float) -> None:
        self.base = base
        self._path = base / PRIVATE / JOB
        self._byte = 1 + (xxhash.xxh3_64_intdigest(job.encode()) >> 3)
        self._held: _Held | None = None
        self._file = (0, 0)
        give_up, waited = time.monotonic() + deadline_s, 0
        while (pid := self._take()) is not None:
            if (pid > 0 and not _is_ending(pid)) or time.monotonic() > give_up:
                raise _in_use(base, pid)
            if pid > 0 and pid != waited:
                waited = pid
                _log.warning("waiting for process %d, which has %s open and is ending", pid, base)
            time.sleep(_JOB_PAUSE_S)

    def _take(self) -> int | None:
        """Take the lock. Return None, or the process that has it: -1 for one that is only looking."""
        with _mutex:
            for tries_left in reversed(range(_JOB_TRIES)):
                try:
                    make_tree(self.base, self._path.parent)
                    if (held := _known(self._path)) is None:
                        held = _Held(open_own(self._path, os.O_RDWR | os.O_CREAT), self._byte)
                        pid = _lock(held)
                        if pid is not None or not is_at(held.descriptor, self._path):
                            os.close(held.descriptor)
                            if pid is not None:
                                return pid
                            raise FileNotFoundError(self._path)
                except FileNotFoundError:  # a removal takes the file and the folders in the midst of this
                    if not tries_left:
                        raise
                    continue
                status = os.fstat(held.descriptor)
                self._file = status.st_dev, status.st_ino
                _held[self._file] = held
                held.users += 1
                self._held = held
                return None
        raise AssertionError

    def check(self) -> None:
        """Take the lock again if this process has lost it: POSIX ends the lock as any code of the process closes the
        file, as a copy of the folder does.

        Raises:
            JobInUseError: another job has the lock by now; or somebody has removed the base container, and a folder at
                its path is another job's.
        """
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            status = os.stat(self._path, follow_symlinks=False)
            if (status.st_dev, status.st_ino) == self._file:
                with _mutex:
                    pid = None if self._held is None else _lock(self._held)
                if pid is not None and pid >= 0:  # others that only look, or begin, have it for a moment
                    raise _in_use(self.base, pid)
                return
        raise JobInUseError(
            "this base container was removed while the job had it open",
            path=self.base,
            hint="the job can save nothing any more: end it, and give each job a base container of its own",
        )

    def release(self) -> None:
        """Let go of the share. Safe to call twice."""
        with _mutex:
            held, self._held = self._held, None
            if held is not None:
                held.users -= 1
                if not held.users:
                    _held.pop(self._file, None)
                    os.close(held.descriptor)


@contextlib.contextmanager
def locked_out(base: Path) -> Iterator[None]:
    """Keep every job out of a base container, for a process that removes something in it. Raise a `JobInUseError` if a
    job has it open."""
    path = base / PRIVATE / JOB
    with _mutex:
        if _known(path) is not None:
            raise JobInUseError("this process has it open", path=base, hint="close it first")
        descriptor = open_own(path, os.O_RDWR | os.O_CREAT)
    try:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise _in_use(base, _holder(descriptor, 0, 0) or 0) from None
        yield
    finally:
        os.close(descriptor)


def is_open(base: Path) -> bool:
    """Return True if a process has a base container open. Not for a process of the job: its lock would end."""
    try:
        descriptor = os.open(base / PRIVATE / JOB, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return _holder(descriptor, 0, 0) is not None
    finally:
        os.close(descriptor)


def _known(path: Path) -> _Held | None:
    try:
        status = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return _held.get((status.st_dev, status.st_ino))


def _lock(held: _Held) -> int | None:
    descriptor, byte = held.descriptor, held.byte
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
    except (BlockingIOError, PermissionError):
        return -1
    other = _holder(descriptor, 1, byte - 1) if byte > 1 else None
    other = _holder(descriptor, byte + 1, 0) if other is None else other
    if other is None:
        fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, byte)
    fcntl.lockf(descriptor, fcntl.LOCK_UN, 1, 0)
    return other


def _holder(descriptor: int, start: int, length: int) -> int | None:
    """Return the process that has locked a part of a range, 0 if it runs in another pid namespace; None if none has."""
    wanted = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
    kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, wanted))
    return None if kind == fcntl.F_UNLCK else max(pid, 0)


def _in_use(base: Path, pid: int) -> JobInUseError:
    holder = f"process {pid} on {socket.gethostname()}" if pid > 0 else "process of another container"
    return JobInUseError(
        f"another job has this base container open ({holder})",
        path=base,
        hint="stop that process, or give each job a base container of its own",
    )


def _is_ending(pid: int) -> bool:
    """Return True if a process exits just now, or has been killed and has not noticed yet."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (OSError, ValueError):
        return not os.path.exists(f"/proc/{pid}")  # it has ended since
    pending = [int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd:", "ShdPnd:"))]
    return state in "ZX" or bool(int(fields[5]) & _EXITING) or any(mask & _SIGKILL_BIT for mask in pending)
