"""The versions that a job holds beside the newest one, and going back to one of them.

Owns the calls that all ranks make together, and what a recovery does with these versions: which ones stay, and having
their parts and copies in their places again, as far as there is room. Nothing of the latter fails a recovery. Bringing
a version here is the loader's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from ml_flashpoint.checkpoint_object_manager.base_marks import PRIVATE_DIR
from ml_flashpoint.checkpoint_object_manager.budget import Budget
from ml_flashpoint.checkpoint_object_manager.rank_store import RankStore
from ml_flashpoint.checkpoint_object_manager.reserve import give_up_reserve
from ml_flashpoint.checkpoint_object_manager.retained import VerifiedSave, kept
from ml_flashpoint.core.inventory import NodeReport, gather_reports
from ml_flashpoint.core.part_source import PartSource
from ml_flashpoint.core.recovery_plan import (
    CompleteVersion,
    NodeInventory,
    complete_versions,
    is_protected,
    plan_recovery,
)
from ml_flashpoint.format.errors import CapacityError, DeadlineError, FlashpointError, SaveError
from ml_flashpoint.format.failure_kinds import as_ours
from ml_flashpoint.format.knobs import seal_deadline_s
from ml_flashpoint.format.lineage import Lineage, merged, write_lineage
from ml_flashpoint.ranks.rank_group import RankGroup
from ml_flashpoint.ranks.retention import Keep
from ml_flashpoint.replication.replication_manager import ReplicationManager

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KeptVersion:
    """A version that can be gone back to: every part of it is on some node of the job.

    Attributes:
        step: its step.
        verified: whether it is complete on all ranks, with every copy that the replication strategy asks for.
        bytes: of the parts of all ranks, each counted once, however many copies there are.
        world_size: number of ranks that saved it.
        save_id: the save, since there may be several of one step; later ones compare greater.
    """

    step: int
    verified: bool
    bytes: int
    world_size: int
    save_id: str


class Retention:
    """See the module. All methods are collective.

    Args:
        store: of this rank.
        group: who decides together.
        replication: who holds copies.
        source: where parts come from that are elsewhere.
        settle: waits until no save is under way; whether that was so in time.
    """

    def __init__(
        self,
        store: RankStore,
        group: RankGroup,
        replication: ReplicationManager,
        source: PartSource,
        settle: Callable[[float], bool],
    ) -> None:
        self._store = store
        self._group = group
        self._replication = replication
        self._source = source
        self._settle = settle

    def versions(self) -> list[KeptVersion]:
        """Return what this job holds and can go back to, newest save first. Leave out what could not be read."""
        reports, lineage = self._look()
        sizes: dict[tuple[str, int], int] = {}
        for part in (part for report in reports for part in report.inventory.parts):
            key = (part.save_id, part.rank)
            sizes[key] = max(part.size, sizes.get(key, 0))
        topology, strategy = self._group.topology, self._replication.strategy
        return [
            KeptVersion(
                each.step,
                is_protected(each, topology, strategy),
                sum(sizes[each.save_id, rank] for rank in range(each.world_size)),
                each.world_size,
                each.save_id,
            )
            for each in complete_versions(report.inventory for report in reports)
            if lineage.counts(each.save_id)
        ]

    def settle(self) -> None:
        """Wait until no save is under way on any rank.

        Raises:
            DeadlineError: it took too long. On all ranks.
        """
        late = DeadlineError("a save is still under way", rank=self._group.rank)

        def wait() -> None:
            if not self._settle(seal_deadline_s()):
                raise late

        self._group.together(wait, DeadlineError("a save of another rank is still under way", rank=self._group.rank))

    def leave_newer(self, version: CompleteVersion) -> None:
        """Go on from a version that was brought here. Newer ones do not count any more, and go before the next save.

        Raises:
            SaveError: it cannot be recorded on some node. A later recovery may find the newer versions then.
        """
        reports, lineage = self._look()
        newest = max((part.save_id for report in reports for part in report.inventory.parts), default="")
        lineage = lineage.gone_back_to(version.save_id, self._group.begin_run(max(newest, lineage.newest)))
        self._record(lineage)
        complete = complete_versions(report.inventory for report in reports)
        keep = self._store.retained.keep
        self._store.retain(retained_line(complete, lineage, version.save_id, keep), lineage)
        beside = [each for each in complete if self._store.retained.is_beside(each.save_id)]
        protect(beside, self._store, self._group, self._source, [report.inventory for report in reports], ())
        self._store.drop_before_next_save(part for part in self._store.held() if not lineage.counts(part.save_id))
        if self._group.rank == 0:
            left = ", ".join(str(each.step) for each in complete if each.save_id > version.save_id)
            _log.warning("went back to step %d; newer versions do not count any more: %s", version.step, left or "none")

    def _look(self) -> tuple[list[NodeReport], Lineage]:
        reports = gather_reports(self._store.base, self._group, time.monotonic())
        return reports, merged(report.lineage for report in reports)

    def _record(self, lineage: Lineage) -> None:
        """Write the lineage on all nodes."""

        def write() -> None:
            if not self._group.is_node_leader:
                return
            folder = self._store.base / PRIVATE_DIR
            try:
                write_lineage(folder, lineage)
            except CapacityError:
                if not give_up_reserve(self._store.directory):
                    raise
                write_lineage(folder, lineage)

        text = "another rank could not record that the job went back; its log says why"
        self._group.together(write, SaveError(text, rank=self._group.rank))


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
