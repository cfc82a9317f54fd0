"""Removing versions by hand, from any store.

Owns which may go: none while somebody writes there, and of a durable store not the newest that is whole, which a job
would resume from, unless that is said. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable

from ml_flashpoint.format.errors import DamagedError, InvalidArgumentError, ObjectNotFoundError
from ml_flashpoint.stores.bounded import while_it_moves
from ml_flashpoint.stores.location import open_store
from ml_flashpoint.stores.ownership import PERIOD_S
from ml_flashpoint.stores.version_store import Removed, Version, VersionStore
from ml_flashpoint.tools.copy import DEADLINE_S
from ml_flashpoint.tools.sources import Source


def removable(
    source: Source, step: int | None = None, *, newest: bool = False, deadline_s: float = DEADLINE_S
) -> tuple[list[Version], str]:
    """Return the versions that `remove_versions` would remove now, oldest first, and the folder of the newest one that
    is whole. Raises what that would raise; locks nothing."""
    store = open_store(source)

    def look(moved: Callable[[], None]) -> tuple[list[Version], str]:
        watched = store.watched(moved)
        _check(watched, step, newest)
        return _chosen(watched, step)

    return while_it_moves(look, deadline_s, store.path)


def remove_versions(
    source: Source,
    step: int | None = None,
    *,
    newest: bool = False,
    deadline_s: float = DEADLINE_S,
    period_s: float = PERIOD_S,
) -> Removed:
    """Remove versions, all or all saves of a step, also those that are not complete.

    Args:
        source: a base container of which no process runs, a URL, or a folder of durable versions.
        step: of the versions; by default all go, and with them what else the job has left in memory.
        newest: True if the newest durable version that is whole may go, too.
        deadline_s, period_s: see `persist_version`.

    Raises:
        ObjectNotFoundError: there is no such version.
        InvalidArgumentError: the newest is among them, and ``newest`` is not given; nothing is removed.
        JobInUseError: somebody writes there.
        DeadlineError: nothing has happened for too long; versions removed by then are gone.
        SaveError, LoadError, UnreadableError: the store failed; likewise.
    """
    store = open_store(source)

    def remove(moved: Callable[[], None]) -> Removed:
        watched = store.watched(moved)
        _check(watched, step, newest)  # before anybody is disturbed, and before a lock is made where there is nothing
        with store.owned(period_s, moved) as check:
            _check(watched, step, newest)
            return watched.remove(step, check)

    return while_it_moves(remove, deadline_s, store.path)


def _check(store: VersionStore, step: int | None, newest: bool) -> None:
    if not store.durable:
        return
    chosen, resumed = _chosen(store, step)
    if not newest and resumed in {version.folder for version in chosen}:
        raise InvalidArgumentError(
            f"{resumed} is the newest that is whole, which a job resumes from",
            argument="--newest",
            value=False,
            hint="say --newest to remove that, too",
        )


def _chosen(store: VersionStore, step: int | None) -> tuple[list[Version], str]:
    there = store.versions()
    chosen = [version for version in there if version.step >= 0 and step in (None, version.step)]
    if not chosen:
        raise ObjectNotFoundError(
            f"there is no version{'' if step is None else f' of step {step}'} here", path=store.path
        )
    return chosen[::-1], next((version.folder for version in there if _is_whole(store, version)), "")


def _is_whole(store: VersionStore, version: Version) -> bool:
    try:
        for rank in version.ranks if version.complete else ():
            store.check_sizes(store.manifest(version, rank))
    except (DamagedError, ObjectNotFoundError):
        return False
    return version.complete
