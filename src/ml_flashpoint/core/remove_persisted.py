"""Removing versions from a durable store by hand.

Owns which may go: none while somebody persists there, who may be writing them, and not the newest that is whole, which
a job would resume from, unless that is said. Of each version the marker goes first, the oldest goes first, and what is
not a version of a training job stays.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from ml_flashpoint.core.bounded import while_it_moves
from ml_flashpoint.core.persist_version import DEADLINE_S, durable_url, is_whole, owned_store
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.errors import InvalidArgumentError, ObjectNotFoundError
from ml_flashpoint.persist.opening import open_store
from ml_flashpoint.persist.ownership import PERIOD_S
from ml_flashpoint.persist.store import DurableStore
from ml_flashpoint.persist.versions import MARKER, list_persisted
from ml_flashpoint.persist.watched_store import watched_store


@dataclass(frozen=True, slots=True)
class Removable:
    """A version that is to be removed.

    Attributes:
        folder: its name in the store.
        marked: whether it has a marker.
        is_newest: whether a job would resume from it.
    """

    folder: str
    marked: bool
    is_newest: bool = False


def removable(
    url: str | os.PathLike[str], step: int | None = None, *, newest: bool = False, deadline_s: float = DEADLINE_S
) -> list[Removable]:
    """What `remove_persisted` would remove now, oldest first. Raises what that would raise; locks nothing."""
    store = open_store(durable_url(url))
    return while_it_moves(
        lambda moved: _chosen(watched_store(store, moved), step, newest), deadline_s, store.path_of("")
    )


def remove_persisted(
    url: str | os.PathLike[str],
    step: int | None = None,
    *,
    newest: bool = False,
    deadline_s: float = DEADLINE_S,
    period_s: float = PERIOD_S,
) -> list[str]:
    """Remove persisted versions, all or all saves of a step, also those that are not complete.

    Args:
        url: as a job has it in ``persist=``.
        step: of the versions; by default all go.
        newest: whether the newest that is whole may go, too.
        deadline_s, period_s: see `persist_version`.

    Returns:
        The folders that are gone, oldest first.

    Raises:
        ObjectNotFoundError: there is no such version.
        InvalidArgumentError: the newest is among them, and ``newest`` is not given; nothing is removed. Or an argument
            is unusable.
        JobInUseError: somebody persists there.
        DeadlineError: nothing has happened for too long; what was removed by then is gone.
        SaveError, LoadError: the store failed; likewise.
    """
    store = open_store(durable_url(url))

    def remove(moved: Callable[[], None]) -> list[str]:
        watched = watched_store(store, moved)
        _chosen(watched, step, newest)  # before anybody is disturbed, and before a lock is made where there is nothing
        with owned_store(store, period_s, moved) as ownership:
            chosen = _chosen(watched, step, newest)
            for each in chosen:
                ownership.check()
                if each.marked:
                    watched.remove(f"{each.folder}/{MARKER}")
                watched.remove_folder(each.folder)
            for run in {each.folder.partition("/")[0] for each in chosen}:
                if not watched.list(run):
                    watched.remove_folder(run)
            return [each.folder for each in chosen]

    return while_it_moves(remove, deadline_s, store.path_of(""))


def _chosen(store: DurableStore, step: int | None, newest: bool) -> list[Removable]:
    found, unusable = list_persisted(store)
    resumed = next((version.save_id for version in found if is_whole(store, version)), None)
    chosen = [
        (version.save_id, Removable(version.folder, True, version.save_id == resumed))
        for version in found
        if step in (None, version.step)
    ]
    for each in unusable:
        of_step = CheckpointContainerId.parse_version_container(each.folder.rpartition("/")[2])
        if of_step is not None and step in (None, of_step):
            chosen.append((each.newest_save, Removable(each.folder, each.marked)))
    if not chosen:
        what = "no version" if step is None else f"no version of step {step}"
        raise ObjectNotFoundError(f"there is {what} here", path=store.path_of(""))
    if not newest and any(each.is_newest for _, each in chosen):
        what = next(each.folder for _, each in chosen if each.is_newest)
        raise InvalidArgumentError(
            f"{what} is the newest that is whole, which a job resumes from",
            argument="--newest",
            value=False,
            hint="say --newest to remove that, too",
        )
    return [each for _, each in sorted(chosen, key=lambda pair: pair[0])]
