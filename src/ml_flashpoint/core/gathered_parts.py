"""The parts of one save, from what the base containers of several nodes hold.

Owns which saves there are, newest first, and of which every part is in one of them, whatever else each of them has. The
job may be dead. Holds on what was chosen are `core.open_version`'s.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ml_flashpoint.checkpoint_object_manager.base_marks import PRIVATE_DIR
from ml_flashpoint.checkpoint_object_manager.version_files import list_versions
from ml_flashpoint.core.part_reader import read_local_manifests
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.errors import FlashpointError, MissingPartsError, ObjectNotFoundError, UnreadableError
from ml_flashpoint.format.failure_kinds import is_transient
from ml_flashpoint.format.lineage import Lineage, merged, read_lineage
from ml_flashpoint.format.manifest import Manifest


@dataclass(frozen=True)
class GatheredSave:
    """A save, and where its parts are.

    Attributes:
        version: name of its folder. step, save_id, world_size: as in its manifests.
        holders: base containers that have the part of a rank, own parts and copies alike, in the order given.
    """

    version: str
    step: int
    save_id: str
    world_size: int
    holders: Mapping[int, tuple[tuple[Path, Manifest], ...]]

    @property
    def missing(self) -> list[int]:
        """Ranks whose parts are nowhere."""
        return [rank for rank in range(self.world_size) if rank not in self.holders]


def gathered_saves(bases: Sequence[Path], step: int | None = None) -> list[GatheredSave]:
    """The saves in these base containers, newest first, whole or not. What was gone back from is left out, unless its
    step is asked for.

    Raises:
        UnreadableError: that cannot be known just now: one that cannot be read may be the one that is meant.
        ObjectNotFoundError: there is none.
        DamagedError: there is nothing but what cannot be read for good.
    """
    found: dict[tuple[str, int, int], dict[int, list[tuple[Path, Manifest]]]] = {}
    problems: list[FlashpointError] = []
    for base in bases:
        for manifest in _manifests(base, step, problems):
            save = found.setdefault((manifest.save_id, manifest.step, manifest.world_size), {})
            save.setdefault(manifest.rank, []).append((base, manifest))
    if problems := [each for each in problems if is_transient(each) or not found]:
        raise problems[0]
    lineage = Lineage() if step is not None else _lineage(bases)
    saves = [
        GatheredSave(
            CheckpointContainerId.format_version_container(of), of, save_id, world_size,
            {rank: tuple(each) for rank, each in holders.items()},
        )
        for (save_id, of, world_size), holders in sorted(found.items(), key=lambda item: item[0], reverse=True)
        if lineage.counts(save_id)
    ]  # fmt: skip
    if not saves:
        wanted = "version" if step is None else f"version of step {step}"
        raise ObjectNotFoundError(
            f"there is no {wanted} here",
            path=", ".join(map(str, bases)),
            hint="flashpoint ls shows what there is",
        )
    return saves


def whole_saves(bases: Sequence[Path], step: int | None = None) -> list[GatheredSave]:
    """Those of which all parts are here, newest first: at least one.

    Raises:
        MissingPartsError: there are some, and of each a part is missing.
        FlashpointError: see `gathered_saves`.
    """
    saves = gathered_saves(bases, step)
    whole = [save for save in saves if not save.missing]
    if not whole:
        nearest = min(saves, key=lambda save: len(save.missing))
        missing = nearest.missing
        more = f" and {len(missing) - 16} more" if len(missing) > 16 else ""
        raise MissingPartsError(
            f"there is no version whose parts are all here: of step {nearest.step}, those of ranks"
            f" {', '.join(map(str, missing[:16]))}{more} of {nearest.world_size} are missing",
            path=", ".join(map(str, bases)),
            hint="give the base containers of the nodes that have them, too",
        )
    return whole


def _manifests(base: Path, step: int | None, problems: list[FlashpointError]) -> list[Manifest]:
    found: list[Manifest] = []
    try:
        for version in list_versions(base):
            if step is None or CheckpointContainerId.parse_version_container(version) == step:
                manifests, errors = read_local_manifests(base, version)
                found += [each for each in manifests if each.version == version]
                problems += errors
    except OSError as error:
        raise UnreadableError(f"the versions cannot be listed: {error.strerror}", path=base) from error
    return found


def _lineage(bases: Sequence[Path]) -> Lineage:
    found = []
    for base in bases:
        with contextlib.suppress(FlashpointError):  # the job says so
            found.append(read_lineage(base / PRIVATE_DIR))
    return merged(found)
