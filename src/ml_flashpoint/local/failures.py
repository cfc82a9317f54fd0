"""The errors of local checkpoints that more than one rank has a part in. Owns what they say."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ml_flashpoint.checkpoint_object_manager.version_files import list_versions
from ml_flashpoint.core.commit_queue import CommitStats
from ml_flashpoint.core.joint_load import LoadFailure
from ml_flashpoint.core.loader import RecoveryReport
from ml_flashpoint.core.save import Save, SaveState
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.errors import DivergedError, FlashpointError
from ml_flashpoint.local.errors import (
    CallOrderError,
    CheckpointingException,
    NoReplicasAvailableError,
    WorldSizeChangedError,
)
from ml_flashpoint.ranks.rank_group import RankGroup


def check_world_size(
    report: RecoveryReport | None,
    version: CheckpointContainerId | None,
    ranks: RankGroup,
    base: CheckpointContainerId,
) -> None:
    """Raise a `WorldSizeChangedError` if what was found is of another number of ranks."""
    saved = None if report is None else report.world_size
    if saved is None or saved == ranks.world_size:
        return
    raise WorldSizeChangedError(
        f"the newest checkpoint was saved by {saved} ranks, and there are {ranks.world_size} now",
        step=None if version is None else version.step,
        rank=ranks.rank,
        path=base,
        hint=f"go on with {saved} ranks, or begin a new session_id from another checkpoint",
    )


def nothing_to_load(
    failures: Sequence[LoadFailure], ranks: RankGroup, base: CheckpointContainerId
) -> CheckpointingException:
    """Why there is no iteration that all ranks can load. Collective."""
    if not failures and ranks.all_ok(not list_versions(Path(base.path))):
        return CallOrderError(
            "there is no checkpoint to load", rank=ranks.rank, path=base, hint="find_latest() returned -1"
        )
    why = "; ".join(f"{each.version}, rank {each.rank}: {each.text}" for each in failures)
    return NoReplicasAvailableError(
        f"there are checkpoints, and of none the parts of all ranks or sound copies of them{why and f' ({why})'}",
        rank=ranks.rank,
        path=base,
        hint="with a repl_strategy, the loss of a node is survived",
    )


def save_failed(
    save: Save, iteration: int, error: Exception | None, ended: bool, ranks: RankGroup, stats: CommitStats
) -> CheckpointingException:
    """The error of a failed save. Ranks tell one another why, as far as they are still there."""
    mine = error or save.error
    reason = "" if mine is None or isinstance(mine, DivergedError) else str(mine)
    if not ended:
        reason = "the background thread has not ended the save within its deadline"
    elif mine is None and save.state is SaveState.EVICTED:
        reason = "given up for a newer save, which needed its memory, or for a newer version that was found"
    elif mine is None and save.part is not None and stats.replication_error is not None:
        reason = f"committed, but not copied: {stats.replication_error}"
    try:
        gathered = ranks.gather(reason.encode(errors="replace"))
        reasons = {rank: blob.decode(errors="replace") for rank, blob in enumerate(gathered) if blob}
    except FlashpointError as broken:
        reasons = {ranks.rank: reason or str(broken)}
        mine = mine or broken
    listed = "; ".join(f"rank {rank}: {text}" for rank, text in reasons.items())
    failure = CheckpointingException(
        f"the save failed: {listed or 'ranks saved different iterations'}",
        step=iteration if isinstance(iteration, int) else None,
        rank=ranks.rank,
        hint="the newest complete checkpoint can be loaded, and the save can be repeated",
    )
    failure.__cause__ = mine
    return failure
