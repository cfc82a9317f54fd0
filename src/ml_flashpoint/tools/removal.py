"""Removing versions by hand, from any store. Imports no torch.

None goes while somebody writes there, and of a durable store not the newest that is whole, which a job would resume
from, unless that is said.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from ml_flashpoint.format.errors import DamagedError, InvalidArgumentError, ObjectNotFoundError
from ml_flashpoint.stores.bounded import while_it_moves
from ml_flashpoint.stores.durable import DurableVersions
from ml_flashpoint.stores.location import open_store
from ml_flashpoint.stores.version_store import Version, VersionStore
from ml_flashpoint.tools.copy import DEADLINE_S
from ml_flashpoint.tools.sources import Source


def removable(
    source: Source, step: int | None = None, *, newest: bool = False, deadline_s: float = DEADLINE_S
) -> tuple[list[Version], str]:
    """Return the versions that `remove_versions` would remove now from a durable store, oldest first, and the folder of
    the newest one that is whole. Raises what that would raise; locks nothing."""
    store = open_store(source)
    return while_it_moves(lambda moved: _chosen(store, step, newest, moved), deadline_s, store.path)


def remove_versions(
    source: Source, step: int | None = None, *, newest: bool = False, deadline_s: float = DEADLINE_S
) -> list[str]:
    """Remove versions, all or all saves of a step, also those that are not complete. Return their folders.

    Args:
        source: a base container of which no process runs, a URL, or a folder of durable versions.
        step: of the versions; by default all go, and with them what else the job has left in memory.
        newest: True if the newest durable version that is whole may go, too.
        deadline_s: see `persist_version`.

    Raises:
        ObjectNotFoundError: there is no such version.
        InvalidArgumentError: the newest is among them, and ``newest`` is not given; nothing is removed.
        JobInUseError: somebody writes there.
        DeadlineError: nothing has happened for too long; versions removed by then are gone.
        SaveError, LoadError, UnreadableError: the store failed; likewise.
    """
    store = open_store(source)

    def remove(moved: Callable[[], None]) -> list[str]:
        if not isinstance(store, DurableVersions):
            return store.remove(step, moved)
        _chosen(store, step, newest, moved)  # before anybody is disturbed, and a lock made where there is nothing
        with store.owned():
            _chosen(store, step, newest, moved)
            return store.remove(step, moved)

    return while_it_moves(remove, deadline_s, store.path)


def _chosen(
    store: VersionStore, step: int | None, newest: bool, moved: Callable[[], None]
) -> tuple[list[Version], str]:
    there = store.versions()
    chosen = [version for version in there if version.step >= 0 and step in (None, version.step)]
    if not chosen:
        of = "" if step is None else f" of step {step}"
        raise ObjectNotFoundError(f"there is no version{of} here", path=store.path)
    resumed = next((version.folder for version in there if _is_whole(store, version, moved)), "")
    if not newest and resumed in {version.folder for version in chosen}:
        raise InvalidArgumentError(
            f"{resumed} is the newest complete version, from which a job would resume",
            argument="--newest",
            value=False,
            hint="pass --newest to remove it, too",
        )
    return chosen[::-1], resumed


def _is_whole(store: VersionStore, version: Version, moved: Callable[[], None]) -> bool:
    if version.complete:
        with contextlib.suppress(DamagedError, ObjectNotFoundError):
            store.check_parts(version, moved)
            return True
    return False
