"""The arenas and committed parts of one rank in one base container on this node.

Owns: the pool of arenas (acquire, release, adopt after a restart, trim), the directory layout, committing a
part (hard links first, manifest last), pruning (manifest first, links last) and the lock that keeps a second
process from using the same arenas. It decides nothing about *which* part may go: the saver does.

::

    <base>/.flashpoint/rank-00003/lock, arena-0, arena-1, ...      faulted in for the life of the job
    <base>/step-7_ckpt/rank-00003-<attempt>.safetensors            hard link to an arena
    <base>/step-7_ckpt/rank-00003-<attempt>.manifest               the commit record
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ml_flashpoint.checkpoint_object_manager.arena import Arena, round_up
from ml_flashpoint.checkpoint_object_manager.capacity import warn_unless_memory
from ml_flashpoint.core.checkpoint_id_types import CheckpointContainerId, validate_segment
from ml_flashpoint.core.errors import FlashpointError, JobInUseError, ObjectNotFoundError, SaveError
from ml_flashpoint.core.manifest import (
    Manifest,
    manifest_name,
    parse_object_name,
    read_manifest,
    write_manifest,
)

_log = logging.getLogger(__name__)

PRIVATE_DIR = ".flashpoint"
_ARENA_NAME = re.compile(r"arena-(\d+)")
# An arena much larger than what is asked for is left for something of its size.
_FIT_FACTOR = 4
_FIT_SLACK = 256 << 10
_MAX_GROWTH_ROOM = 64 << 20
# Advances during which an arena must have been spare before its memory is given back: a job whose
# replication lags now and then must not pay for the page faults of a new arena each time.
_TRIM_AFTER = 20


def with_slack(size: int) -> int:
    """Size of an arena for ``size`` bytes: items that vary in length must not make it grow at every save."""
    return round_up(size + min(size >> 6, _MAX_GROWTH_ROOM), 64 << 10)


@dataclass(slots=True)
class HeldPart:
    """A committed part whose bytes sit in arenas of this store."""

    version: str
    rank: int
    attempt: str
    arenas: list[Arena]
    manifest: Manifest | None
    """``None`` when the manifest on disk could not be read: kept until it is pruned, never recovered from."""
    pins: int = 0
    doomed: bool = False
    names: list[str] = field(default_factory=list)


class RankStore:
    """See the module. Thread-safe.

    Args:
        base: base container of the job; created if missing.
        rank: global rank.
        lock_deadline_s: seconds to wait for a dying earlier process of this rank to let go.

    Raises:
        JobInUseError: another live process uses this rank's arenas.
    """

    def __init__(self, base: Path, rank: int, *, lock_deadline_s: float = 30.0) -> None:
        self.base = base
        self.rank = rank
        self.directory = base / PRIVATE_DIR / f"rank-{rank:05d}"
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        warn_unless_memory(base)
        self._lock = threading.RLock()
        self._lock_fd = self._take_lock(lock_deadline_s)
        self._free: list[Arena] = []
        self._in_use: set[Arena] = set()
        self._parts: dict[tuple[str, int], HeldPart] = {}
        self._next_arena = 0
        self._spare_advances = 0
        self._adopt()

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._lock_fd < 0

    # ---- arenas -------------------------------------------------------------------------------------------

    def acquire(self, size: int, *, exact: bool = False) -> Arena:
        """An arena of at least ``size`` bytes, for the caller alone until committed or released.

        Its content is whatever it held last.

        Args:
            exact: the file must have exactly ``size`` bytes, because it will hold a copy of an object whose
                header accounts for the whole of its file.

        Raises:
            CapacityError: there is none and no room for one.
        """
        with self._lock:
            if exact:
                fitting = [a for a in self._free if a.size == size]
            else:
                fitting = [a for a in self._free if size <= a.size <= _FIT_FACTOR * size + _FIT_SLACK]
            if fitting:
                arena = min(fitting, key=lambda a: a.size)
                self._free.remove(arena)
            else:
                growable = [a for a in self._free if a.size < size <= _FIT_FACTOR * a.size]
                if growable:
                    arena = max(growable, key=lambda a: a.size)
                    arena.grow(size if exact else with_slack(size))
                    self._free.remove(arena)
                else:
                    arena = self._create(size if exact else with_slack(size))
            self._in_use.add(arena)
        arena.join_prefault()
        return arena

    def _create(self, size: int) -> Arena:
        while True:
            path = self.directory / f"arena-{self._next_arena}"
            self._next_arena += 1
            with contextlib.suppress(FileExistsError):
                return Arena.create(path, size)

    def release(self, arena: Arena) -> None:
        """Return an arena that was acquired and not committed."""
        with self._lock:
            if arena in self._in_use:
                self._in_use.remove(arena)
                self._free.append(arena)

    def prepare_spare(self, size: int) -> None:
        """Make sure that one more arena of ``size`` bytes is free and faulted in, in the background."""
        with self._lock:
            if self.has_free(size):
                return
            try:
                arena = self._create(with_slack(size))
            except FlashpointError as error:
                _log.warning("no room for a second arena yet: %s", error)
                return
            arena.prefault_in_background()
            self._free.append(arena)

    def has_free(self, size: int) -> bool:
        """Whether :meth:`acquire` would find a free arena for ``size`` bytes."""
        with self._lock:
            return any(size <= a.size <= _FIT_FACTOR * size + _FIT_SLACK for a in self._free)

    def arena_by_path(self, path: Path) -> Arena:
        """The arena of a file in this store; mapped now if a saving process made it, remapped if it grew."""
        with self._lock:
            arena = next((a for a in (*self._free, *self._in_use) if a.path == path), None)
            if arena is None:
                if path.parent != self.directory:
                    raise SaveError("no arena of this rank", rank=self.rank, path=path)
                arena = Arena.open(path)
                self._in_use.add(arena)
            arena.refresh()
            return arena

    def resident_bytes(self) -> tuple[int, int]:
        """``(bytes of arenas in use, bytes of free arenas)``."""
        with self._lock:
            return sum(a.size for a in self._in_use), sum(a.size for a in self._free)

    def arena_at(self, address: int, nbytes: int) -> Arena | None:
        """The arena in use that holds these addresses."""
        with self._lock:
            return next((a for a in self._in_use if a.contains(address, nbytes)), None)

    # ---- parts --------------------------------------------------------------------------------------------

    def commit(self, manifest: Manifest, arenas: Sequence[Arena]) -> HeldPart:
        """Link the arenas under the names in ``manifest``, then write the manifest: the part exists from then on."""
        publish(self.base, manifest, [arena.path for arena in arenas])
        return self.register(manifest, arenas)

    def register(self, manifest: Manifest, arenas: Sequence[Arena]) -> HeldPart:
        """Take note of a part that was committed from these arenas (by :meth:`commit` or a helper process)."""
        part = HeldPart(
            manifest.version,
            manifest.rank,
            manifest.attempt,
            list(arenas),
            manifest,
            names=[o.name for o in manifest.objects],
        )
        with self._lock:
            replaced = self._parts.pop((part.attempt, part.rank), None)
            self._parts[(part.attempt, part.rank)] = part
            self._in_use.update(arenas)
            if replaced is not None:
                self._retire([a for a in replaced.arenas if a not in arenas])
        return part

    def held(self) -> list[HeldPart]:
        """Parts in this store, own and copies, oldest attempt first."""
        with self._lock:
            return [self._parts[key] for key in sorted(self._parts)]

    def find(self, attempt: str, rank: int) -> HeldPart | None:
        """The part of ``rank`` from ``attempt``, if this store holds it."""
        with self._lock:
            return self._parts.get((attempt, rank))

    def drop(self, part: HeldPart) -> None:
        """Forget a part: manifest, then links; its arenas are free once nobody reads them."""
        with self._lock:
            if self._parts.get((part.attempt, part.rank)) is not part:
                return
            if part.pins:
                part.doomed = True
                return
            del self._parts[(part.attempt, part.rank)]
            unpublish(self.base, part.version, part.rank, part.attempt, part.names)
            self._retire(part.arenas)

    def _retire(self, arenas: Sequence[Arena]) -> None:
        for arena in arenas:
            if arena in self._in_use:
                self._in_use.remove(arena)
                self._free.append(arena)

    def advance(self, attempt: str) -> None:
        """Drop every part older than ``attempt``, which is verified on every rank and copy."""
        for part in self.held():
            if part.attempt < attempt:
                self.drop(part)
        self._trim()

    def _trim(self) -> None:
        with self._lock:
            expected = sum(len(part.arenas) for part in self._parts.values())
            self._spare_advances = self._spare_advances + 1 if len(self._free) > expected else 0
            if self._spare_advances < _TRIM_AFTER:
                return
            self._spare_advances = 0
            spare = min(self._free, key=lambda a: a.size)
            self._free.remove(spare)
        spare.unlink()
        spare.close()

    @contextlib.contextmanager
    def open_object(self, version: str, name: str) -> Iterator[memoryview]:
        """Bytes of a committed object of this store or of any rank on this node, up to its used size.

        A part of this store cannot be pruned while open. One that belongs to another process of the node can;
        the digests tell.

        Raises:
            ObjectNotFoundError: no such object.
        """
        with self._lock:
            part = next((p for p in self._parts.values() if p.version == version and name in p.names), None)
            if part is not None:
                part.pins += 1
        if part is None:
            with map_object(self.base, version, name) as view:
                yield view
            return
        try:
            arena = part.arenas[part.names.index(name)]
            size = arena.size
            if part.manifest is not None:
                size = next(o.size for o in part.manifest.objects if o.name == name)
            yield arena.buffer[: min(size, arena.size)]
        finally:
            with self._lock:
                part.pins -= 1
                if part.doomed and not part.pins:
                    self.drop(part)

    # ---- life ---------------------------------------------------------------------------------------------

    def _take_lock(self, deadline_s: float) -> int:
        # POSIX record locks: released by the kernel on SIGKILL and, unlike flock, not shared with forked children.
        fd = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        give_up = time.monotonic() + deadline_s
        while True:
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > give_up:
                    owner = os.pread(fd, 32, 0).decode(errors="replace").strip()
                    os.close(fd)
                    raise JobInUseError(
                        f"another live process (pid {owner or 'unknown'}) uses the arenas of this rank",
                        rank=self.rank,
                        path=self.directory,
                        hint="stop that process, or give each job a base container of its own",
                    ) from None
                time.sleep(0.05)
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
        return fd

    def _adopt(self) -> None:
        """Take over what an earlier process of this rank left: committed parts stay, the rest is swept."""
        arenas: dict[int, Arena] = {}
        for path in self.directory.iterdir():
            match = _ARENA_NAME.fullmatch(path.name)
            if match is None:
                continue
            self._next_arena = max(self._next_arena, int(match[1]) + 1)
            try:
                arena = Arena.open(path)
            except (FlashpointError, OSError) as error:
                _log.warning("sweeping unusable arena: %s", error)
                path.unlink(missing_ok=True)
                continue
            arenas[arena.inode] = arena
        for version in list_versions(self.base):
            self._adopt_version(version, arenas)
        self._free.extend(a for a in arenas.values() if a not in self._in_use)

    def _adopt_version(self, version: str, arenas: dict[int, Arena]) -> None:
        directory = self.base / version
        found: dict[tuple[int, str], list[tuple[str, Arena]]] = {}
        for entry in os.scandir(directory):
            owner = parse_object_name(entry.name)
            if owner is not None and (arena := arenas.get(entry.inode())) is not None:
                found.setdefault(owner, []).append((entry.name, arena))
        for (rank, attempt), objects in found.items():
            names = [name for name, _ in objects]
            try:
                manifest: Manifest | None = read_manifest(directory / manifest_name(rank, attempt))
            except ObjectNotFoundError:
                unpublish(self.base, version, rank, attempt, names)
                continue
            except FlashpointError as error:
                _log.warning("part of rank %d in %s cannot be recovered from: %s", rank, directory, error)
                manifest = None
            by_name = dict(objects)
            if manifest is not None:
                names = [o.name for o in manifest.objects]
            used = [by_name[name] for name in names if name in by_name]
            if len(used) != len(names):
                manifest, names = None, list(by_name)
            self._parts[(attempt, rank)] = HeldPart(version, rank, attempt, used, manifest, names=names)
            self._in_use.update(used)

    def close(self) -> None:
        """Unmap everything and let go of the lock. Files stay: they are the checkpoint."""
        with self._lock:
            for arena in [*self._free, *self._in_use]:
                arena.close()
            self._free.clear()
            self._in_use.clear()
            self._parts.clear()
            if self._lock_fd >= 0:
                os.close(self._lock_fd)
                self._lock_fd = -1

    def remove_free_arenas(self) -> None:
        """Delete the files of free arenas (of a rank that no longer lives on this node)."""
        with self._lock:
            for arena in self._free:
                arena.unlink()
                arena.close()
            self._free.clear()


class UnlockedStore:
    """Arenas for a process that saves on behalf of the one that holds the store: always new, never reused."""

    def __init__(self, base: Path, rank: int) -> None:
        self.base = base
        self._directory = base / PRIVATE_DIR / f"rank-{rank:05d}"

    def acquire(self, size: int, *, exact: bool = False) -> Arena:
        """A new arena. It is the trainer's from the moment that the save is sealed.

        Raises:
            CapacityError: no room for one.
        """
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        # A name that no pool counts up to, so that the two processes never want the same one.
        path = self._directory / f"arena-{time.time_ns()}"
        return Arena.create(path, size if exact else with_slack(size))

    def release(self, arena: Arena) -> None:
        """Delete an arena that nothing was sealed in."""
        arena.unlink()
        arena.close()


# ---- files of a version: also used by the saving process of DCP, which has no store -------------------------


def list_versions(base: Path) -> list[str]:
    """Names of the version directories in ``base``."""
    try:
        return [
            entry.name
            for entry in os.scandir(base)
            if CheckpointContainerId.parse_version_container(entry.name) is not None
            and entry.is_dir(follow_symlinks=False)
        ]
    except FileNotFoundError:
        return []


def publish(base: Path, manifest: Manifest, paths: Sequence[Path]) -> None:
    """Give the files at ``paths`` the names of the manifest's objects, then write the manifest.

    Raises:
        SaveError: the filesystem refused; nothing of the part is visible then.
    """
    directory = base / validate_segment(manifest.version)
    for attempt in range(8):
        try:
            directory.mkdir(exist_ok=True)
            for record, path in zip(manifest.objects, paths, strict=True):
                link = directory / validate_segment(record.name)
                try:
                    os.link(path, link)
                except FileExistsError:
                    link.unlink(missing_ok=True)
                    os.link(path, link)
            write_manifest(directory, manifest)
            return
        except FileNotFoundError as error:
            # Another rank of this node may remove the directory, seen empty, between two of these calls.
            if attempt == 7:
                raise SaveError(f"cannot commit: {error}", step=manifest.step, rank=manifest.rank) from error
        except OSError as error:
            for record in manifest.objects:
                (directory / record.name).unlink(missing_ok=True)
            raise SaveError(
                f"cannot commit: {error}", step=manifest.step, rank=manifest.rank, path=directory
            ) from error


def unpublish(base: Path, version: str, rank: int, attempt: str, names: Sequence[str]) -> None:
    """Undo :func:`publish`: the manifest goes first, so that no instant shows a part without its bytes."""
    directory = base / version
    (directory / manifest_name(rank, attempt)).unlink(missing_ok=True)
    for name in names:
        (directory / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        directory.rmdir()


@contextlib.contextmanager
def map_object(base: Path, version: str, name: str) -> Iterator[memoryview]:
    """Read-only bytes of an object file of this node.

    Raises:
        ObjectNotFoundError: there is no such object, or it is empty.
    """
    path = base / validate_segment(version) / validate_segment(name)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise ObjectNotFoundError(f"no such object: {error.strerror}", path=path) from error
    try:
        size = os.fstat(fd).st_size
        if size == 0:
            raise ObjectNotFoundError("the object is empty", path=path)
        mapping = mmap.mmap(fd, size, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
    view = memoryview(mapping)
    try:
        yield view
    finally:
        # Views that the caller kept keep the mapping alive; it goes with the last of them.
        with contextlib.suppress(BufferError):
            view.release()
            mapping.close()
