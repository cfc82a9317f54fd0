"""Opening a base container on all ranks or on none."""

from __future__ import annotations

import os

from ml_flashpoint.checkpoint_object_manager.checkpoint_object_manager import CheckpointObjectManager
from ml_flashpoint.checkpoint_object_manager.rank_store import RankStore
from ml_flashpoint.core.errors import FlashpointError, LoadError
from ml_flashpoint.core.rank_group import RankGroup


def open_together(
    objects: CheckpointObjectManager, base: str | os.PathLike[str], rank: int, group: RankGroup
) -> RankStore:
    """The store of this rank in a base container. Collective.

    Raises:
        JobInUseError: another process uses it.
        FlashpointError: this rank, or another one, cannot use it. Raised on all ranks.
    """
    store: RankStore | None = None
    error: FlashpointError | None = None
    try:
        store = objects.open(base, rank)
    except FlashpointError as caught:
        error = caught
    except OSError as caught:
        why = f"{type(caught).__name__}: {caught}"
        error = LoadError(f"the base container cannot be used: {why}", rank=rank, node=group.node, path=str(base))
    # A vote, so that one rank's unusable folder is an error everywhere and not a hang of the others.
    if not group.all_ok(error is None):
        raise error or LoadError(
            "another rank cannot use its base container; its log says why", rank=rank, node=group.node, path=str(base)
        )
    assert store is not None
    return store
