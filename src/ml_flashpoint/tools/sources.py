"""The version that a tool works on, in one or several stores: the newest that is sound, or the one of a step.

One loop steps back to an older version where one turns out damaged, and begins again where a running job has removed it
meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from ml_flashpoint.format.errors import (
    DamagedError,
    FlashpointError,
    MissingPartsError,
    ObjectNotFoundError,
    PrunedError,
    is_damage,
)
from ml_flashpoint.format.manifest import Manifest
from ml_flashpoint.format.names import SaveId
from ml_flashpoint.memory.lineage import newest_begun
from ml_flashpoint.stores.location import open_store
from ml_flashpoint.stores.version_store import StoredObject, Version, VersionStore

_log = logging.getLogger(__name__)

_TRIES: Final = 5
_MOST_NAMED: Final = 16
_T = TypeVar("_T")

Source = str | os.PathLike[str]
Progress = Callable[[int, int], object]
"""``(done, total)``, in bytes."""


def no_progress(done: int, total: int) -> None:
    """Do nothing."""


@dataclass(frozen=True, slots=True)
class FoundVersion:
    """One save of one step, in one or several stores.

    Attributes:
        save, world_size: as in its manifests.
        holders: for each rank, the stores that hold its part.
    """

    save: SaveId
    world_size: int
    holders: Mapping[int, Sequence[tuple[VersionStore, Version]]]

    @property
    def missing(self) -> list[int]:
        """Ranks whose parts are in none of the stores."""
        return [rank for rank in range(self.world_size) if rank not in self.holders]

    @property
    def is_removed(self) -> bool:
        """True if a store has removed it since it was listed: then nothing about it is damage."""
        held = {store: rank for rank, holders in self.holders.items() for store, _ in holders}
        return not all(store.has(self.save, rank) for store, rank in held.items())

    def parts(self, stack: contextlib.ExitStack) -> dict[int, StoredObject]:
        """Return the parts by rank, held until the stack is closed. Raise if no store has a sound manifest of one."""
        return {rank: self._part(rank, stack) for rank in sorted(self.holders)}

    def _part(self, rank: int, stack: contextlib.ExitStack) -> StoredObject:
        found: list[tuple[VersionStore, Manifest]] = []
        failures: list[FlashpointError] = []
        for store, version in self.holders[rank]:
            try:
                manifest = store.manifest(version, rank)
                store.check_size(manifest)
                stack.enter_context(store.hold(manifest))
                found.append((store, manifest))
            except FlashpointError as error:
                failures.append(error)
        if not found:
            raise next((error for error in failures if not is_damage(error)), failures[0])
        return StoredObject(found[0][1], [store for store, _ in found])


def stores_of(sources: Source | Sequence[Source]) -> list[VersionStore]:
    """Return the stores that a user names: base containers, URLs, folders of durable versions."""
    return [open_store(each) for each in ([sources] if isinstance(sources, (str, os.PathLike)) else sources)]


def find_versions(stores: Sequence[VersionStore], step: int | None, *, partial: bool = False) -> list[FoundVersion]:
    """Return the versions whose parts are all in these stores together, or with ``partial`` some, newest first: at
    least one. Without a step, those that the job has gone back from are left out.

    Raises:
        ObjectNotFoundError, MissingPartsError: there is no version, or of each a part is missing.
        DamagedError: there is nothing but damaged versions.
        LoadError, UnreadableError: a store cannot be read just now.
    """
    there = [(store, version) for store in stores for version in store.versions() if step in (None, version.step)]
    run = None if step is not None else newest_begun(record for store in stores for record in store.records())
    saves: dict[tuple[SaveId, int], dict[int, list[tuple[VersionStore, Version]]]] = {}
    for store, version in there:
        if version.counts and version.world_size and (run is None or run.has(version.save)):
            for rank in version.ranks:
                saves.setdefault((version.save, version.world_size), {}).setdefault(rank, []).append((store, version))
    found = [FoundVersion(*save, holders) for save, holders in sorted(saves.items(), key=lambda each: each[0])][::-1]
    where = ", ".join(store.path for store in stores)
    if not found:
        raise _nothing_found(there, step, where)
    whole = [version for version in found if partial or not version.missing]
    if not whole:
        nearest = min(found, key=lambda version: len(version.missing))
        ranks = ", ".join(map(str, nearest.missing[:_MOST_NAMED]))
        more = f" and {len(nearest.missing) - _MOST_NAMED} more" if len(nearest.missing) > _MOST_NAMED else ""
        raise MissingPartsError(
            f"no version is complete here: of step {nearest.save.step}, the parts of ranks {ranks}{more}"
            f" of {nearest.world_size} are missing",
            path=where,
            hint="also give the base containers of nodes that have these parts, or use flashpoint copy --partial",
        )
    return whole


def _nothing_found(there: Sequence[tuple[VersionStore, Version]], step: int | None, where: str) -> FlashpointError:
    problem = next((version.problem for _, version in there if version.problem), "")
    if problem:
        return DamagedError(problem, path=where)
    unfinished = "; ".join(f"{version.folder} is not complete" for _, version in there[:4])
    text = f"there is no complete version{'' if step is None else f' of step {step}'} here"
    text += f" ({unfinished})" if unfinished else ""
    return ObjectNotFoundError(text, path=where, hint="flashpoint ls lists the versions")


def with_newest(
    stores: Sequence[VersionStore], step: int | None, use: Callable[[FoundVersion], _T], *, partial: bool = False
) -> _T:
    """Return what ``use`` returns for the newest version that it can use, or the one of a step.

    A damaged version is left for an older one. What cannot be read just now is not. If the newest version was removed
    meanwhile, by a running job or by hand, this looks again.

    Raises:
        PrunedError: the version of the step was removed meanwhile, or versions go as fast as they are looked for.
        FlashpointError: see `find_versions`; or what ``use`` raised.
    """
    for tries_left in reversed(range(_TRIES)):
        try:
            versions = find_versions(stores, step, partial=partial)
            for version in versions:
                try:
                    return use(version)
                except FlashpointError as error:
                    if is_damage(error) and version.is_removed:
                        text, hint = "the version was removed while it was read", "read the newest version"
                        raise PrunedError(text, step=version.save.step, path=error.path, hint=hint) from error
                    if not is_damage(error) or version is versions[-1]:
                        raise
                    _log.warning("step %d is not sound, trying an older version: %s", version.save.step, error)
        except PrunedError:
            if step is not None or not tries_left:
                raise
    raise AssertionError
