"""What a recovery does with the versions that are kept beside the one that it goes on from.

Owns which ones these are, from what the nodes have, and having their parts and copies in their places again, as far as
there is room. Nothing here fails a recovery: what cannot be had is kept with what there is of it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from ml_flashpoint.checkpoint_object_manager.base_marks import PRIVATE_DIR
from ml_flashpoint.checkpoint_object_manager.budget import Budget
from ml_flashpoint.checkpoint_object_manager.rank_store import RankStore
from ml_flashpoint.core.inventory import NodeReport
from ml_flashpoint.core.part_source import PartSource
from ml_flashpoint.format.errors import CapacityError, FlashpointError
from ml_flashpoint.format.failure_kinds import as_ours
from ml_flashpoint.format.lineage import Lineage, write_lineage
from ml_flashpoint.ranks.rank_group import RankGroup
from ml_flashpoint.ranks.recovery import CompleteVersion, NodeInventory, plan_recovery
from ml_flashpoint.ranks.retention import Keep, VerifiedSave, kept

_log = logging.getLogger(__name__)


def retained_line(complete: Sequence[CompleteVersion], lineage: Lineage, newest: str, keep: Keep) -> list[VerifiedSave]:
    """Return the saves that are kept up to the one with the id ``newest``, oldest first. The same on all ranks.

    Args:
        complete: versions of which every part is somewhere, newest first.
    """
    along = [each for each in complete if each.save_id <= newest and lineage.counts(each.save_id)]
    return kept([VerifiedSave(each.save_id, each.step) for each in reversed(along)], keep)


def spread(lineage: Lineage, reports: Sequence[NodeReport], store: RankStore, group: RankGroup) -> None:
    """Write the lineage on this node, if it differs there: a node may be new, or have been away."""
    mine = next((report.lineage for report in reports if report.inventory.node == group.node), None)
    if not group.is_node_leader or mine == lineage:
        return
    try:
        write_lineage(store.base / PRIVATE_DIR, lineage)
    except FlashpointError as error:
        _log.error("what the job has gone back from is not recorded on %s: %s", group.node, error)


def protect(
    versions: Sequence[CompleteVersion],
    store: RankStore,
    group: RankGroup,
    source: PartSource,
    inventories: Sequence[NodeInventory],
    damaged: Collection[tuple[str, str, str, int]],
) -> int:
    """Fetch what this rank lacks of kept versions, own parts and copies, newest version first; what there is no room
    for is left where it is. Returns how many bytes that were."""
    if source.strategy is None:
        return 0
    here = group.topology.ranks_of(group.node)
    copies = len(source.strategy.held_by(store.rank, group.topology))
    budget = Budget(store.directory, [store.directory_of(rank) for rank in here], copies)
    room = budget.left() // len(here)
    everything = {(part.version, part.save_id) for inventory in inventories for part in inventory.parts}
    fetched = 0
    for version in versions:
        plan = plan_recovery(
            inventories,
            group.topology,
            strategy=source.strategy,
            damaged=damaged,
            excluded=everything - {(version.version, version.save_id)},
        )
        for fetch in () if plan is None else plan.fetches:
            if fetch.target_rank != store.rank:
                continue
            try:
                if fetched + fetch.size > room:
                    raise CapacityError("there is no room beside what saves need", path=store.base)
                manifest = source.fetch_part(
                    version,
                    fetch.part_rank,
                    store,
                    group,
                    first=fetch.source_node,
                    until=0.0,
                    failures=[],
                )
            except Exception as error:
                text = "%s is kept, but the part of rank %d is not where it belongs, so it may not survive a loss: %s"
                _log.warning(text, version.version, fetch.part_rank, as_ours(error))
                return fetched
            fetched += manifest.total_size
    return fetched
