"""Removing every version of a job, on all nodes, because its user asks for it.

Owns the order: each rank what its store holds, then one rank of each node what is left of ranks that are gone. Nothing
else in this package removes a version without a newer one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ml_flashpoint.checkpoint_object_manager.base_marks import PRIVATE_DIR, forget_complete
from ml_flashpoint.checkpoint_object_manager.departed import sweep_departed
from ml_flashpoint.checkpoint_object_manager.rank_store import RankStore
from ml_flashpoint.checkpoint_object_manager.version_files import list_versions, remove_version_folder
from ml_flashpoint.format.errors import SaveError
from ml_flashpoint.format.lineage import remove_lineage
from ml_flashpoint.format.manifest import parse_manifest_name, parse_object_name
from ml_flashpoint.ranks.rank_group import RankGroup

_log = logging.getLogger(__name__)

_NEWER_THAN_ALL = "~"
_T = TypeVar("_T")


def discard_versions(store: RankStore, group: RankGroup) -> None:
    """Remove every version in the base container of this job. Collective, before anything is saved.

    Raises:
        FlashpointError: a node could not remove its part of them. Raised on all ranks.
    """

    def drop_mine() -> list[str]:
        found = sorted(list_versions(store.base))
        for part in store.held():
            store.drop(part)
        return found

    def drop_the_rest() -> None:
        if not group.is_node_leader:
            return
        if found:
            _log.warning("discarding %s, as asked", ", ".join(found))
        sweep_departed(store, group.topology.ranks_of(group.node), _NEWER_THAN_ALL)
        for version in list_versions(store.base):
            _remove_version(store.base / version)
        forget_complete(store.base)
        remove_lineage(store.base / PRIVATE_DIR)

    # One after the other, else a rank's own parts might be swept from under it.
    found = _together(group, store.base, drop_mine)
    _together(group, store.base, drop_the_rest)


def _together(group: RankGroup, base: Path, action: Callable[[], _T]) -> _T:
    def typed() -> _T:
        try:
            return action()
        except Exception as error:
            raise failure(error) from error

    def failure(why: object) -> SaveError:
        return SaveError(f"the existing versions cannot be removed: {why}", rank=group.rank, path=base)

    return group.together(typed, failure("another rank could not; its error says why"))


def _remove_version(directory: Path) -> None:
    names = os.listdir(directory)
    # Manifests first, so that no instant shows a part without its bytes.
    for is_of_a_part in (parse_manifest_name, parse_object_name):
        for name in names:
            if is_of_a_part(name) is not None:
                (directory / name).unlink(missing_ok=True)
    remove_version_folder(directory)
