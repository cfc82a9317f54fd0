"""What can be seen of a job's checkpoints in one node's base container, without taking part in the job.

Reads a base container from outside: which versions lie there, whose parts they hold, what is plainly wrong with them,
and which ranks are alive. Locks nothing, writes nothing and imports no torch. The job may be running: parts that it
removes during the look are left out, not reported as missing. `cli.verify` compares bytes with their digests, and
`ranks.recovery`, which knows all nodes, chooses the version that a job goes on from.

Must not be used inside a process of the job itself: closing a file gives up every POSIX lock that the same process has
on it.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import psutil

from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.errors import ObjectNotFoundError, UnreadableError
from ml_flashpoint.format.manifest import Manifest, manifest_name, parse_object_name
from ml_flashpoint.format.save_id import SaveId
from ml_flashpoint.memory.container import SLOTS, STATUS
from ml_flashpoint.memory.lineage import newest_begun
from ml_flashpoint.memory.lock import PRIVATE, is_open
from ml_flashpoint.status import Status, read_status
from ml_flashpoint.stores.base_container import BaseContainer
from ml_flashpoint.tools.check import look_at

_RANK = re.compile(r"\d{1,8}")
_STAT_BLOCK = 512
_TRIES = 20


class State(str, Enum):
    """What one node shows of a version. The first that fits, in this order."""

    DAMAGED = "damaged"
    WRITING = "writing"
    PARTIAL = "partial"
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
        save_id: the run that saved it.
        path: its manifest.
        manifest: its content; ``None`` if it cannot be read.
        copy: True if its rank runs on another node.
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
        save_id: the run that saved it.
        world_size: ranks that saved it; ``None`` if no manifest of it can be read.
        state: see `State`.
        parts: parts on this node, by rank.
        writing: ranks of this node whose parts are not committed.
        abandoned: True if it is not in the lineage of the newest run: for the job it does not exist.
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
        resident_bytes: memory that all files of the job take here: slots, whatever they hold.
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
    version: str
    rank: int
    save_id: str
    path: Path
    manifest: Manifest | None
    problems: list[Problem]


_Ranks = Mapping[int, tuple[Status | None, int | None]]


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
        # A job that saves every few milliseconds may have removed all that was listed, and have newer ones.
        if found or not (versions or has_private):
            break
    ranks = read_ranks(base) if has_private else {}
    saves: dict[SaveId, list[_FoundPart]] = {}
    for part in found:
        saves.setdefault(SaveId(int(part.save_id), _step_of(part.version)), []).append(part)
    newest = max(saves, default=SaveId(0, 0))
    for path_of_object in loose:
        owner = parse_object_name(path_of_object.name)
        save = None if owner is None else SaveId.parse(path_of_object.parent.name, owner[1])
        if save is not None and save > newest:
            saves.setdefault(save, [])
    record = newest_begun(store.records())
    copies = {rank for parts in saves.values() for rank in _copied(parts, ranks)}
    views = [
        _judge(save, saves[save], ranks, copies, newest=save == max(saves)) for save in sorted(saves, reverse=True)
    ]
    return BaseView(
        base=base,
        versions=tuple(
            view
            if record is None or record.has(SaveId(int(view.save_id), view.step))
            else replace(view, abandoned=True)
            for view in views
        ),
        live={rank: pid for rank, (_, pid) in sorted(ranks.items()) if pid is not None},
        resident_bytes=memory_of(base),
        leftovers=tuple(sorted(str(path_of_object) for path_of_object in loose)),
    )


def read_ranks(path: str | os.PathLike[str]) -> dict[int, tuple[Status | None, int | None]]:
    """Return the ranks of this node: their status, and the processes that are running.

    Raises:
        NotABaseContainerError: it is none.
    """
    base = Path(os.path.abspath(path))
    _list_base(base)
    folder = base / PRIVATE / STATUS
    told = {int(name): read_status(folder / name) for name in _names(folder) if _RANK.fullmatch(name)}
    running = is_open(base)
    return {
        rank: (status, status.pid if running and status is not None and psutil.pid_exists(status.pid) else None)
        for rank, status in told.items()
    }


def memory_of(base: Path) -> int:
    """Return the bytes of memory that the slots of a base container take, and the parts of a folder of copies."""
    found: dict[int, int] = {}
    for folder, names in _folders_of(base):
        for name in names:
            with contextlib.suppress(OSError):
                status = os.stat(folder / name, follow_symlinks=False)
                found[status.st_ino] = status.st_blocks * _STAT_BLOCK
    return sum(found.values())


def _folders_of(base: Path) -> Iterator[tuple[Path, list[str]]]:
    slots = base / PRIVATE / SLOTS
    for folder in [slots / name for name in _names(slots)] + [base / name for name in _names(base)]:
        if folder.parent == slots or CheckpointContainerId.parse_version_container(folder.name) is not None:
            yield folder, _names(folder)


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
    if not versions and PRIVATE not in entries:
        raise NotABaseContainerError(
            "this is not a base container: it holds neither versions nor slots",
            path=base,
            hint="give the folder that the job was given, on the node whose memory it is in",
        )
    return versions, PRIVATE in entries


def _read_parts(store: BaseContainer) -> tuple[list[_FoundPart], list[Path]]:
    """Return the committed parts, and the objects that belong to none."""
    parts = []
    for version in store.versions():
        for found in look_at(store, version):
            path = store.base / version.folder / manifest_name(found.rank, version.save_id)
            if not found.removed:
                problems = [Problem(*problem) for problem in found.problems]
                part = (version.folder, found.rank, version.save_id)
                parts.append(_FoundPart(*part, path, found.manifest, problems))
    committed = {(part.version, part.rank, part.save_id) for part in parts}
    loose = []
    for version_name in store.folders():
        for name in _names(store.base / version_name):
            owner = parse_object_name(name)
            if owner is None or (version_name, *owner) in committed:
                continue
            # Asked again: one that was being committed may have its manifest by now, one being removed be gone.
            save = SaveId.parse(version_name, owner[1])
            if save is None or not store.has(save, owner[0]):
                path = store.base / version_name / name
                loose += [path] if os.path.lexists(path) else []
    return parts, loose


def _judge(save: SaveId, parts: list[_FoundPart], ranks: _Ranks, copies: set[int], *, newest: bool) -> VersionView:
    """Judge one save by its parts here.

    Args:
        ranks: of this node, from `read_ranks`.
        copies: ranks whose copies this node holds, of any save.
        newest: True if ranks that run have to commit it, too.
    """
    copied = _copied(parts, ranks)
    here = {part.rank for part in parts} - copied
    size = max((part.manifest.world_size for part in parts if part.manifest is not None), default=None)
    missing = set(ranks) - here - copied
    writing = {rank for rank in missing if newest and ranks[rank][1] is not None}
    if any(part.problems for part in parts):
        state = State.DAMAGED
    elif writing:
        state = State.WRITING
    elif missing or not here:
        state = State.PARTIAL
    elif copied and copied >= copies:
        state = State.REPLICATED
    else:
        state = State.LOCAL
    return VersionView(
        version=save.version,
        step=save.step,
        save_id=save.text,
        world_size=size,
        state=state,
        parts=tuple(
            PartView(p.rank, p.save_id, p.path, p.manifest, p.rank in copied, tuple(p.problems))
            for p in sorted(parts, key=lambda p: p.rank)
        ),
        writing=tuple(sorted(writing)),
    )


def _copied(parts: Iterable[_FoundPart], ranks: _Ranks) -> set[int]:
    """Return the ranks whose parts were saved on another node."""
    nodes = {status.node for status, _ in ranks.values() if status is not None}
    return {
        part.rank
        for part in parts
        if nodes and (part.rank not in ranks if part.manifest is None else part.manifest.node not in nodes)
    }


def _step_of(version: str) -> int:
    return CheckpointContainerId.parse_version_container(version) or 0


def _names(directory: Path) -> list[str]:
    """Return the names in a directory, sorted; none if it was removed meanwhile or is none."""
    try:
        return sorted(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return []
