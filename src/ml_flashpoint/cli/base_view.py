"""What can be seen of a job's checkpoints in one node's base container, without taking part in the job.

Owns the reading of a base container from outside: which versions lie there, whose parts they hold, what is
plainly wrong with them, and which ranks are alive. Takes no lock, writes nothing and imports no torch. The job
may be running: what it prunes during the look is left out, not reported as missing. Whether bytes have their
digests is `cli.verify`'s business, and which version a job would go on from is `ranks.recovery`'s, which knows
all nodes.

Must not be used inside a process of the job itself: closing a file gives up every POSIX lock that the same
process holds on it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from ml_flashpoint.checkpoint_object_manager.base_marks import PRIVATE_DIR
from ml_flashpoint.checkpoint_object_manager.version_files import list_versions
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.errors import ObjectNotFoundError, UnreadableError
from ml_flashpoint.format.lineage import Lineage
from ml_flashpoint.format.manifest import Manifest, manifest_name, parse_object_name
from ml_flashpoint.stores.base_container import BaseContainer
from ml_flashpoint.tools.check import look_at

_RANK_DIR = re.compile(r"rank-(\d{5,8})")
_ARENA = re.compile(r"arena-\d+(-\d+)?")
_STAT_BLOCK = 512
_TRIES = 20
# struct flock: type, whence, start, length, pid.
_FLOCK = struct.Struct("hhqqi4x")


class State(str, Enum):
    """What one node shows of a version. The first that fits, in this order."""

    DAMAGED = "damaged"
    WRITING = "writing"
    REPLICATED = "replicated"
    LOCAL = "local"


class NotABaseContainerError(ObjectNotFoundError):
    """There is nothing at a path that looks like a job's base container."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is not as it was committed.

    Attributes:
        path: the file.
        message: what is wrong with it.
    """

    path: str
    message: str

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {"path": self.path, "message": self.message}


@dataclass(frozen=True, slots=True)
class PartView:
    """One rank's part of a version, as committed on this node.

    Attributes:
        rank: rank whose part it is.
        save_id: the save that it belongs to.
        path: its manifest.
        manifest: content of that; ``None`` if it cannot be read.
        copy: whether this node holds it for another rank than the one whose arena it lies in.
        problems: what is wrong with the manifest or, without reading them, with the objects.
    """

    rank: int
    save_id: str
    path: Path
    manifest: Manifest | None
    copy: bool
    problems: tuple[Problem, ...]

    @property
    def bytes(self) -> int:
        """Bytes of its objects that count."""
        return self.manifest.total_size if self.manifest is not None else 0


@dataclass(frozen=True, slots=True)
class VersionView:
    """One save of one step, as far as it lies on this node.

    Attributes:
        version: name of its directory.
        step: training step.
        save_id: the save; two saves of one step stand side by side.
        world_size: ranks that saved it; ``None`` if no manifest of it can be read.
        state: see `State`.
        parts: parts on this node, by rank.
        writing: ranks of this node whose parts are not committed.
        abandoned: whether the job has gone back behind it, so that it is not the newest whatever its step.
    """

    version: str
    step: int
    save_id: str
    world_size: int | None
    state: State
    parts: tuple[PartView, ...]
    writing: tuple[int, ...]
    abandoned: bool = False

    @property
    def own_ranks(self) -> tuple[int, ...]:
        """Ranks of this node whose parts are here."""
        return tuple(part.rank for part in self.parts if not part.copy)

    @property
    def copied_ranks(self) -> tuple[int, ...]:
        """Ranks of other nodes whose parts are here."""
        return tuple(part.rank for part in self.parts if part.copy)

    @property
    def complete(self) -> bool:
        """Whether this node alone has the parts of all ranks, as far as can be told without reading them."""
        sound = {part.rank for part in self.parts if not part.problems}
        return self.world_size is not None and len(sound) == self.world_size

    @property
    def bytes(self) -> int:
        """Bytes of all parts here."""
        return sum(part.bytes for part in self.parts)

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What is wrong with any part."""
        return tuple(problem for part in self.parts for problem in part.problems)


@dataclass(frozen=True, slots=True)
class BaseView:
    """What lies in a base container.

    Attributes:
        base: its absolute path.
        versions: the saves, newest first.
        live: process id of each rank that is running here.
        resident_bytes: memory that all files of the job take here: parts, and arenas free or being written.
        leftovers: objects without a manifest: being committed or pruned, or left when that was cut short.
    """

    base: Path
    versions: tuple[VersionView, ...]
    live: Mapping[int, int]
    resident_bytes: int
    leftovers: tuple[str, ...]

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What is wrong with any version."""
        return tuple(problem for version in self.versions for problem in version.problems)


@dataclass(slots=True)
class _FoundPart:
    """A part before it is known whose arena its bytes are in."""

    version: str
    rank: int
    save_id: str
    path: Path
    manifest: Manifest | None
    problems: list[Problem]
    files: dict[int, int]  # inode -> bytes of memory
    committed_ns: int


@dataclass(slots=True)
class _Private:
    """What the private directories of the ranks say."""

    owner_of: dict[int, int]  # inode of an arena -> rank
    resident: dict[int, int]  # inode -> bytes of memory
    live: dict[int, tuple[int, int]]  # rank -> (pid, when it took its lock, in ns)


def read_base(path: str | os.PathLike[str]) -> BaseView:
    """Look at a base container.

    Raises:
        NotABaseContainerError: it does not exist, is no directory, or holds nothing of a job.
    """
    try:
        return _read_base(BaseContainer(path))
    except UnreadableError as error:
        raise NotABaseContainerError(f"cannot read it: {error.message}", path=error.path or path) from error
    except PermissionError as error:
        raise NotABaseContainerError(f"cannot read it: {error.strerror}", path=error.filename or path) from error


def _read_base(store: BaseContainer) -> BaseView:
    base = store.base
    for _ in range(_TRIES):
        versions, has_private = _list_base(base)
        found, loose = _read_parts(store)
        # A job that saves every few milliseconds may have pruned all that was listed, and have newer ones. Or a listing
        # met none: it may show neither what was removed nor what was added while it was made.
        if found or not (versions or has_private):
            break
    # After the parts: an arena cannot vanish while a part uses it, but a part may appear in a new one.
    private = _read_private(base / PRIVATE_DIR) if has_private else _Private({}, {}, {})
    saves: dict[tuple[str, str], list[_FoundPart]] = {}
    resident = dict(private.resident)
    for part in found:
        saves.setdefault((part.save_id, part.version), []).append(part)
        resident |= part.files
    newest = max(saves, default=("", ""))
    for path_of_object in loose:
        owner = parse_object_name(path_of_object.name)
        if owner is not None and owner[1] > newest[0]:
            saves.setdefault((owner[1], path_of_object.parent.name), [])
    return BaseView(
        base=base,
        versions=tuple(_judge(saves, private, store.lineage())),
        live={rank: pid for rank, (pid, _) in sorted(private.live.items())},
        resident_bytes=sum(resident.values()),
        leftovers=tuple(sorted(str(path_of_object) for path_of_object in loose)),
    )


def read_ranks(path: str | os.PathLike[str]) -> dict[int, tuple[Path, int | None]]:
    """The ranks that have something in a base container: their directories, and the processes that are running.

    Raises:
        NotABaseContainerError: it is none.
    """
    base = Path(os.path.abspath(path))
    _list_base(base)
    private = base / PRIVATE_DIR
    found = {int(match[1]): private / name for name in _names(private) if (match := _RANK_DIR.fullmatch(name))}
    holders = {rank: _lock_holder(directory / "lock") for rank, directory in found.items()}
    return {rank: (found[rank], None if holder is None else holder[0]) for rank, holder in holders.items()}


def format_ranks(ranks: Iterable[int]) -> str:
    """Return ranks in short: ``0-3,8``; ``-`` for none."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) or "-"


def format_bytes(count: float) -> str:
    """Return a number of bytes for people: ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


def _list_base(base: Path) -> tuple[list[str], bool]:
    try:
        entries = [entry.name for entry in os.scandir(base) if entry.is_dir(follow_symlinks=False)]
    except OSError as error:
        raise NotABaseContainerError(f"cannot read it: {error.strerror}", path=base) from error
    versions = [name for name in entries if CheckpointContainerId.parse_version_container(name) is not None]
    if not versions and PRIVATE_DIR not in entries:
        raise NotABaseContainerError(
            "this is not a base container: it holds neither versions nor the arenas of a rank",
            path=base,
            hint="give the folder that the job was given, on the node whose memory it is in",
        )
    return versions, PRIVATE_DIR in entries


def _read_parts(store: BaseContainer) -> tuple[list[_FoundPart], list[Path]]:
    """Return the committed parts, and the objects that belong to none."""
    parts = []
    for version in store.versions():
        names = _names(store.base / version.folder)
        for found in look_at(store, version):
            path = store.base / version.folder / manifest_name(found.rank, version.save_id)
            objects = [path.parent / name for name in names if parse_object_name(name) == (found.rank, version.save_id)]
            with contextlib.suppress(FileNotFoundError):  # pruned meanwhile
                if not found.removed:
                    committed_ns = os.stat(path).st_mtime_ns
                    problems = [Problem(*problem) for problem in found.problems]
                    files = _memory_of(objects)
                    save = (version.folder, found.rank, version.save_id)
                    parts.append(_FoundPart(*save, path, found.manifest, problems, files, committed_ns))
    committed = {(part.version, part.rank, part.save_id) for part in parts}
    loose = []
    for version_name in list_versions(store.base):
        for name in _names(store.base / version_name):
            owner = parse_object_name(name)
            # Asked again: one that was being committed may have its manifest by now, one being pruned be gone.
            if owner is not None and (version_name, *owner) not in committed and not store.has(version_name, *owner):
                path = store.base / version_name / name
                loose += [path] if os.path.lexists(path) else []
    return parts, loose


def _memory_of(paths: Iterable[Path]) -> dict[int, int]:
    files = {}
    for path in paths:
        with contextlib.suppress(OSError):
            status = os.stat(path, follow_symlinks=False)
            files[status.st_ino] = status.st_blocks * _STAT_BLOCK
    return files


def _read_private(directory: Path) -> _Private:
    private = _Private({}, {}, {})
    for name in _names(directory):
        match = _RANK_DIR.fullmatch(name)
        if match is None:
            continue
        rank = int(match[1])
        for file in _names(directory / name):
            if _ARENA.fullmatch(file) is None:
                continue
            with contextlib.suppress(OSError):
                status = os.stat(directory / name / file, follow_symlinks=False)
                private.owner_of[status.st_ino] = rank
                private.resident[status.st_ino] = status.st_blocks * _STAT_BLOCK
        holder = _lock_holder(directory / name / "lock")
        if holder is not None:
            private.live[rank] = holder
    return private


def _lock_holder(path: Path) -> tuple[int, int] | None:
    """Who holds a rank's lock, and since when; asks the kernel without taking the lock."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        wanted = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, wanted))
        # The file is written right after the lock was taken, and not again.
        return None if kind == fcntl.F_UNLCK else (pid, os.fstat(descriptor).st_mtime_ns)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _judge(
    saves: Mapping[tuple[str, str], list[_FoundPart]], private: _Private, lineage: Lineage
) -> Iterator[VersionView]:
    """The saves, newest first, with their states."""
    own: dict[tuple[str, str], set[int]] = {}
    copied: dict[tuple[str, str], set[int]] = {}
    own_of_run: dict[str, set[int]] = {}
    copied_of_size: dict[int | None, set[int]] = {}
    for save, parts in saves.items():
        own[save] = {part.rank for part in parts if not _is_copy(part, private)}
        copied[save] = {part.rank for part in parts} - own[save]
        own_of_run.setdefault(_run_of(save[0]), set()).update(own[save])
        copied_of_size.setdefault(_world_size(parts), set()).update(copied[save])
    newest = max(saves, default=None)
    for save in sorted(saves, reverse=True):
        parts = saves[save]
        expected = set(own_of_run[_run_of(save[0])])
        # Ranks that run now have to commit the newest save too, if it is of their run: one of them has
        # committed its part of it, or nothing of it is committed yet.
        current = any(part.rank in private.live and part.committed_ns >= private.live[part.rank][1] for part in parts)
        if save == newest and (current or not own[save]):
            expected.update(private.live)
        writing = expected - own[save]
        size = _world_size(parts)
        if any(part.problems for part in parts):
            state = State.DAMAGED
        elif writing or not own[save]:
            state = State.WRITING
        elif copied[save] and copied[save] >= copied_of_size[size]:
            state = State.REPLICATED
        else:
            state = State.LOCAL
        yield VersionView(
            version=save[1],
            step=CheckpointContainerId.parse_version_container(save[1]) or 0,
            save_id=save[0],
            world_size=size,
            state=state,
            parts=tuple(
                PartView(p.rank, p.save_id, p.path, p.manifest, p.rank in copied[save], tuple(p.problems))
                for p in sorted(parts, key=lambda p: p.rank)
            ),
            writing=tuple(sorted(writing)),
            abandoned=not lineage.counts(save[0]),
        )


def _is_copy(part: _FoundPart, private: _Private) -> bool:
    """Whether the bytes lie in an arena of another rank. Unknown (no arenas, no objects) counts as own."""
    owners = {private.owner_of[inode] for inode in part.files if inode in private.owner_of}
    return bool(owners) and part.rank not in owners


def _run_of(save_id: str) -> str:
    # Run id and sequence number; see `core.checkpoint_saver`.
    return save_id.rpartition("-")[0]


def _world_size(parts: Iterable[_FoundPart]) -> int | None:
    return max((part.manifest.world_size for part in parts if part.manifest is not None), default=None)


def _names(directory: Path) -> list[str]:
    """Names in a directory, sorted; none if it was removed meanwhile or is none."""
    try:
        return sorted(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return []
