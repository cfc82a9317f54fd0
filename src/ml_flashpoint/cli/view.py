"""Base containers and stores of persisted versions as they look from outside, without taking part in a job.

Nothing is locked or changed, no bytes of objects are read, and torch is not imported. The job may be running: parts
that it removes during the look are left out. Must not be used inside a process of the job: closing a file gives up
every POSIX lock that the same process has on it.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import psutil

from ml_flashpoint.format.errors import InvalidArgumentError, ObjectNotFoundError
from ml_flashpoint.format.names import CheckpointContainerId
from ml_flashpoint.memory.container import PRIVATE, SLOTS, STATUS, is_open
from ml_flashpoint.memory.lineage import newest_begun
from ml_flashpoint.status import Status, read_status
from ml_flashpoint.stores.location import BaseContainer, is_url, open_store
from ml_flashpoint.stores.version_store import Version, VersionStore
from ml_flashpoint.tools.check import CheckedPart, look_at

_RANK: Final = re.compile(r"\d{1,8}")
_STAT_BLOCK: Final = 512
_TRIES: Final = 20
_IN_MEMORY: Final = ("tmpfs", "ramfs", "hugetlbfs")
_DEPTH: Final = 5  # folders below a mount: /dev/shm/<user>/<jobs>/<job> is three
_HINT: Final = "give the base container of a job on this node (flashpoint ls lists them), or the URL of its persist="


# ---- sources --------------------------------------------------------------------------------------------------------


def existing(path: str | os.PathLike[str]) -> VersionStore:
    """Return the store at a path or URL. Raise an `ObjectNotFoundError` if there is nothing of a job."""
    text = os.fspath(path)
    if not is_url(text):
        try:
            os.listdir(text)
        except OSError as error:
            raise ObjectNotFoundError(f"cannot be read: {error.strerror}", path=text, hint=_HINT) from error
    store = open_store(text)
    if isinstance(store, BaseContainer):
        is_there = bool(store.folders()) or (store.base / PRIVATE).is_dir()
    else:
        is_there = bool(store.files.list())
    if not is_there:
        raise ObjectNotFoundError("no job has saved here", path=text, hint=_HINT)
    return store


def split(source: str) -> tuple[str, int | None]:
    """Return the path or URL and the step of ``SOURCE@STEP``, or of ``SOURCE``, which may be called like that."""
    base, at, text = source.rpartition("@")
    named = at and text.isascii() and text.isdecimal() and not os.path.lexists(source)
    return (base, int(text)) if named else (source, None)


def split_all(sources: Sequence[str]) -> tuple[list[str], int | None]:
    """Return existing paths and URLs, and the one step that they name, if any.

    Raises:
        ObjectNotFoundError: at one, there is nothing of a job.
        InvalidArgumentError: they name several steps.
    """
    found = [split(source) for source in sources]
    for path, _ in found:
        existing(path)
    steps = {step for _, step in found if step is not None}
    if len(steps) > 1:
        raise InvalidArgumentError("the sources name different steps", argument="SOURCE", value=", ".join(sources))
    return [path for path, _ in found], next(iter(steps), None)


def find_bases() -> list[Path]:
    """Return all base containers in the memory of this node that this user may look at, by path."""
    mounts = {each.mountpoint for each in psutil.disk_partitions(all=True) if each.fstype in _IN_MEMORY}
    return sorted({base for mount in mounts for base in _bases_in(Path(mount), _DEPTH)})


def _bases_in(folder: Path, depth: int) -> Iterator[Path]:
    """Yield those in a folder and in folders on the same filesystem below it; none inside a base container."""
    try:
        device = os.stat(folder).st_dev
        with os.scandir(folder) as entries:
            below = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return
    if PRIVATE in below:
        yield folder
        return
    for name in below if depth else ():
        with contextlib.suppress(OSError):
            if os.stat(folder / name, follow_symlinks=False).st_dev == device:
                yield from _bases_in(folder / name, depth - 1)


def base_named(name: str) -> str:
    """Return the base container that a user names by its path, or by its last folder, the name of the job.

    Raises:
        ObjectNotFoundError: no job is called so on this node.
        InvalidArgumentError: several are.
    """
    if os.sep in name or os.path.lexists(name):
        return name
    found = [base for base in find_bases() if base.name == name]
    if len(found) > 1:
        text = f"several jobs on this node have this name: {', '.join(map(str, found))}"
        raise InvalidArgumentError(text, argument="BASE", value=name)
    if not found:
        raise ObjectNotFoundError(
            "no job in the memory of this node has this name", path=name, hint="flashpoint ls lists the jobs"
        )
    return str(found[0])


# ---- ranks ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankView:
    """A rank of this node.

    Attributes:
        rank: its number.
        node: its node; "" if it has never said so.
        pid: its process; None if it is not running.
        status: its newest status; None if it has saved nothing yet.
    """

    rank: int
    node: str
    pid: int | None
    status: Status | None

    @property
    def state(self) -> str:
        """State in a word: ``ended``, ``silent``, ``degraded`` or ``ok``."""
        if self.pid is None:
            return "ended"
        if self.status is None:
            return "silent"
        return "degraded" if self.status.degraded else "ok"

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        status = None if self.status is None else asdict(self.status)
        return {"rank": self.rank, "pid": self.pid, "state": self.state, "status": status}


def read_ranks(base: str | os.PathLike[str]) -> list[RankView]:
    """Return the ranks of this node that have opened a base container, by rank. Raises what `existing` raises."""
    root = Path(os.path.abspath(base))
    existing(root)
    folder = root / PRIVATE / STATUS
    running, found = is_open(root), []
    for rank in sorted(int(name) for name in _names(folder) if _RANK.fullmatch(name)):
        status = read_status(folder / str(rank))
        runs = running and status is not None and psutil.pid_exists(status.pid)
        node, pid = ("", None) if status is None else (status.node, status.pid if runs else None)
        found.append(RankView(rank, node, pid, status if status is not None and status.updated_s else None))
    return found


# ---- versions -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class VersionView:
    """One save of one step, as far as it is in one store.

    Attributes:
        version: the version, as the store lists it.
        state: in a base container ``damaged``, ``writing``, ``partial``, ``replicated`` or ``local``: the first that
            fits. In a durable store ``damaged``, ``removed``, ``complete`` or ``incomplete``.
        parts: parts in the store.
        copied: ranks of other nodes whose parts are here.
        writing: ranks of this node whose parts are not committed.
        abandoned: True if it is not in the lineage of the newest run: for the job it does not exist.
    """

    version: Version
    state: str
    parts: tuple[CheckedPart, ...]
    copied: tuple[int, ...] = ()
    writing: tuple[int, ...] = ()
    abandoned: bool = False

    @property
    def step(self) -> int:
        """Training step."""
        return self.version.step

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.version.folder.rpartition("/")[2]

    @property
    def own(self) -> tuple[int, ...]:
        """Ranks whose parts are here and are no copies."""
        ranks = (part.rank for part in self.parts) if self.parts else self.version.ranks
        return tuple(rank for rank in ranks if rank not in self.copied)

    @property
    def problems(self) -> list[tuple[str, str]]:
        """Damage: paths and messages."""
        return problems_of(self.version, self.parts)

    @property
    def complete(self) -> bool:
        """True if the store alone has the parts of all ranks, as far as can be told without reading them."""
        sound = {part.rank for part in self.parts if not part.problems and not part.removed}
        return self.version.counts and len(sound) == self.version.world_size > 0

    @property
    def bytes(self) -> int:
        """Bytes of all parts here."""
        return sum(part.bytes for part in self.parts if not part.removed)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "version": self.name,
            "step": self.step,
            "save_id": self.version.save_id,
            "folder": self.version.folder,
            "state": self.state,
            "world_size": self.version.world_size or None,
            "complete": self.complete,
            "own_ranks": list(self.own),
            "copied_ranks": list(self.copied),
            "writing_ranks": list(self.writing),
            "abandoned": self.abandoned,
            "bytes": self.bytes,
            "problems": [{"path": path, "message": message} for path, message in self.problems],
            "parts": [
                {
                    "rank": part.rank,
                    "node": None if part.manifest is None else part.manifest.node,
                    "bytes": part.bytes,
                    "result": "removed" if part.removed else "damaged" if part.problems else "ok",
                    "labels": {} if part.manifest is None else dict(part.manifest.labels),
                }
                for part in self.parts
            ],
        }


def problems_of(version: Version, parts: Iterable[CheckedPart]) -> list[tuple[str, str]]:
    """Return the damage of a version: paths and messages."""
    found = [problem for part in parts for problem in part.problems]
    return found or ([(version.folder, version.problem)] if version.problem else [])


@dataclass(frozen=True, slots=True)
class View:
    """A base container, or a store of persisted versions.

    Attributes:
        path: its path or URL.
        durable: True for persisted versions.
        versions: the saves, newest first.
        ranks: ranks of this node.
        resident_bytes: memory that all files of the job take here: slots, whatever they hold.
    """

    path: str
    durable: bool
    versions: tuple[VersionView, ...]
    ranks: tuple[RankView, ...] = ()
    resident_bytes: int = 0

    @property
    def live(self) -> dict[int, int]:
        """Process of each rank that is running here."""
        return {each.rank: each.pid for each in self.ranks if each.pid is not None}

    @property
    def problems(self) -> list[tuple[str, str]]:
        """Damage of all versions: paths and messages."""
        return [problem for version in self.versions for problem in version.problems]


def read(source: str | os.PathLike[str]) -> View:
    """Look at a base container, or at persisted versions. Raises what `existing` raises."""
    store = existing(source)
    if isinstance(store, BaseContainer):
        return _read_base(store)
    views = []
    for version in store.versions():
        parts = tuple(look_at(store, version))
        state = durable_state(version, parts)
        if state != "removed" and (version.save_id or problems_of(version, parts)):
            views.append(VersionView(version, state, parts))
    return View(store.path, True, tuple(views))


def durable_state(version: Version, parts: Sequence[CheckedPart]) -> str:
    """Return the state of a persisted version, from a look at its parts."""
    if problems_of(version, parts):
        return "damaged"
    if parts and all(part.removed for part in parts):
        return "removed"
    return "complete" if version.counts else "incomplete"


def _read_base(store: BaseContainer) -> View:
    for _ in range(_TRIES):
        listed = store.versions()
        looked = [(each, tuple(part for part in look_at(store, each) if not part.removed)) for each in listed]
        found = [(version, parts) for version, parts in looked if parts]
        # A job that saves every few milliseconds may have removed all that was listed, and have newer ones.
        if found:
            break
    ranks = {each.rank: each for each in read_ranks(store.base)}
    record = newest_begun(store.records())
    copies = {rank for _, parts in found for rank in _copied(parts, ranks)}
    views = [_judged(*each, ranks, copies, newest=number == 0) for number, each in enumerate(found)]
    views = [replace(each, abandoned=record is not None and not record.has(each.version.save)) for each in views]
    return View(str(store.base), False, tuple(views), tuple(ranks.values()), memory_of(store.base))


def _judged(
    version: Version,
    parts: tuple[CheckedPart, ...],
    ranks: Mapping[int, RankView],
    copies: set[int],
    *,
    newest: bool,
) -> VersionView:
    """Judge one save by its parts here. ``copies``: ranks whose copies this node holds, of any save. Ranks that run
    have to commit the ``newest`` one, too."""
    copied = _copied(parts, ranks)
    here = {part.rank for part in parts} - copied
    missing = ranks.keys() - here - copied
    writing = {rank for rank in missing if newest and ranks[rank].pid is not None}
    if problems_of(version, parts):
        state = "damaged"
    elif writing:
        state = "writing"
    elif missing or not here:
        state = "partial"
    else:
        state = "replicated" if copied and copied >= copies else "local"
    ordered = tuple(sorted(parts, key=lambda part: part.rank))
    return VersionView(version, state, ordered, tuple(sorted(copied)), tuple(sorted(writing)))


def _copied(parts: Iterable[CheckedPart], ranks: Mapping[int, RankView]) -> set[int]:
    """Return the ranks whose parts were saved on another node."""
    nodes = {each.node for each in ranks.values() if each.node}
    return {
        part.rank
        for part in parts
        if nodes and (part.rank not in ranks if part.manifest is None else part.manifest.node not in nodes)
    }


def memory_of(base: Path) -> int:
    """Return the bytes of memory that the slots of a base container take, and the parts of a folder of copies."""
    slots, found = base / PRIVATE / SLOTS, dict[int, int]()
    folders = [slots / name for name in _names(slots)]
    folders += [base / name for name in _names(base) if CheckpointContainerId.parse_version_container(name) is not None]
    for path in (folder / name for folder in folders for name in _names(folder)):
        with contextlib.suppress(OSError):
            status = os.stat(path, follow_symlinks=False)
            found[status.st_ino] = status.st_blocks * _STAT_BLOCK
    return sum(found.values())


def _names(directory: Path) -> list[str]:
    """Return the names in a directory, sorted; none if it was removed meanwhile or is none."""
    try:
        return sorted(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return []
