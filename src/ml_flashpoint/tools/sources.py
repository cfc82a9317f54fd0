"""The version that a tool works on, in one or several stores: the newest that is sound, or the one of a step.

Owns the one loop that steps back to an older version where one turns out damaged, and begins again where a running job
has removed it meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.errors import (
    DamagedError,
    FlashpointError,
    MissingPartsError,
    ObjectNotFoundError,
    PrunedError,
)
from ml_flashpoint.format.failure_kinds import is_damage
from ml_flashpoint.format.manifest import Manifest, ObjectRecord
from ml_flashpoint.format.save_id import SaveId
from ml_flashpoint.memory.lineage import newest_begun
from ml_flashpoint.stores.location import open_store
from ml_flashpoint.stores.part import StoredObject, stored_object
from ml_flashpoint.stores.version_store import Version, VersionStore

_log = logging.getLogger(__name__)

_TRIES: Final = 5
_T = TypeVar("_T")

Source = str | os.PathLike[str]
Progress = Callable[[int, int], object]
"""``(done, total)``, in bytes."""


def no_progress(done: int, total: int) -> None:
    """Do nothing."""


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A rank's part.

    Attributes:
        manifest: of the part.
        stores: that hold it.
    """

    manifest: Manifest
    stores: tuple[VersionStore, ...]

    def object(self, record: ObjectRecord | None = None) -> StoredObject:
        """Return an object of the part, by default the first one."""
        return stored_object(self.manifest, self.stores, record)


@dataclass(frozen=True, slots=True)
class FoundVersion:
    """One save of one step, in one or several stores.

    Attributes:
        step, save_id, world_size: as in its manifests.
        holders: for each rank, the stores that hold its part.
    """

    step: int
    save_id: str
    world_size: int
    holders: Mapping[int, tuple[tuple[VersionStore, Version], ...]]

    @property
    def name(self) -> str:
        """Name of its folder: ``step-<n>_ckpt``."""
        return CheckpointContainerId.format_version_container(self.step)

    @property
    def missing(self) -> list[int]:
        """Ranks whose parts are in none of the stores."""
        return [rank for rank in range(self.world_size) if rank not in self.holders]

    @property
    def is_removed(self) -> bool:
        """True if a store has removed it since it was listed: then nothing about it is damage."""
        held = {store: rank for rank, holders in self.holders.items() for store, _ in holders}
        return not all(store.has(self.name, rank, self.save_id) for store, rank in held.items())

    def parts(self, stack: contextlib.ExitStack) -> dict[int, StoredPart]:
        """Return the parts by rank, held until the stack is closed.

        Raises:
            FlashpointError: of a part, no store has a sound manifest.
        """
        return {rank: self._part(rank, stack) for rank in sorted(self.holders)}

    def _part(self, rank: int, stack: contextlib.ExitStack) -> StoredPart:
        found: list[tuple[VersionStore, Manifest]] = []
        failures: list[FlashpointError] = []
        for store, version in self.holders[rank]:
            try:
                manifest = store.manifest(version, rank)
                store.check_sizes(manifest)
                stack.enter_context(store.hold(manifest))
                found.append((store, manifest))
            except FlashpointError as error:
                failures.append(error)
        if not found:
            raise next((error for error in failures if not is_damage(error)), failures[0])
        return StoredPart(found[0][1], tuple(store for store, _ in found))


def stores_of(sources: Source | Sequence[Source]) -> list[VersionStore]:
    """Return the stores that a user names: base containers, URLs, folders of durable versions."""
    return [open_store(each) for each in ([sources] if isinstance(sources, (str, os.PathLike)) else sources)]


def find_versions(stores: Sequence[VersionStore], step: int | None, *, partial: bool = False) -> list[FoundVersion]:
    """Return the versions whose parts are all in these stores together, newest first: at least one. Those that the job
    has gone back from are left out, unless their step is asked for.

    Args:
        stores: where to look.
        step: which version; None for all.
        partial: also those of which parts are missing.

    Raises:
        ObjectNotFoundError: there is no version.
        MissingPartsError: there are some, and of each a part is missing.
        DamagedError: there is nothing but damaged versions.
        LoadError, UnreadableError: a store cannot be read just now.
    """
    there = [(store, version) for store in stores for version in store.versions() if step in (None, version.step)]
    run = None if step is not None else newest_begun(record for store in stores for record in store.records())
    saves: dict[tuple[str, int], dict[int, list[tuple[VersionStore, Version]]]] = {}
    sizes: dict[tuple[str, int], int] = {}
    for store, version in there:
        if (
            version.counts
            and version.world_size
            and (run is None or run.has(SaveId(int(version.save_id), version.step)))
        ):
            key = version.order
            sizes[key] = version.world_size
            for rank in version.ranks:
                saves.setdefault(key, {}).setdefault(rank, []).append((store, version))
    found = [
        FoundVersion(key[1], key[0], sizes[key], {rank: tuple(each) for rank, each in holders.items()})
        for key, holders in sorted(saves.items(), reverse=True)
    ]
    where = ", ".join(store.path for store in stores)
    if not found:
        for _, version in there:
            if version.problem:
                raise DamagedError(version.problem, path=where)
        unfinished = "; ".join(f"{version.folder}: it is not complete" for _, version in there[:4])
        raise ObjectNotFoundError(
            f"there is no{' complete' if unfinished or any(store.durable for store in stores) else ''} version"
            f"{'' if step is None else f' of step {step}'} here{f' ({unfinished})' if unfinished else ''}",
            path=where,
            hint="flashpoint ls shows what there is",
        )
    whole = [version for version in found if partial or not version.missing]
    if not whole:
        nearest = min(found, key=lambda version: len(version.missing))
        ranks = ", ".join(map(str, nearest.missing[:16]))
        more = f" and {len(nearest.missing) - 16} more" if len(nearest.missing) > 16 else ""
        raise MissingPartsError(
            f"there is no version whose parts are all here: of step {nearest.step}, those of ranks {ranks}{more} of"
            f" {nearest.world_size} are missing",
            path=where,
            hint="give the base containers of the nodes that have them, too; or copy what is here with --partial",
        )
    return whole


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
                        raise PrunedError(
                            "the version was removed while it was read",
                            step=version.step,
                            path=error.path,
                            hint="read the newest version",
                        ) from error
                    if not is_damage(error) or version is versions[-1]:
                        raise
                    _log.warning("step %d is not sound, trying an older version: %s", version.step, error)
        except PrunedError:
            if step is not None or not tries_left:
                raise
    raise AssertionError
