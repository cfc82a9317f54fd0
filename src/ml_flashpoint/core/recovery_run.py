"""One recovery as a collective: what the nodes have, a plan, this rank's share of it, and the vote.

Owns the loop over plans: a copy that turns out damaged is replaced from another holder, what cannot be read just now
is tried again until a deadline, and a version that some rank cannot have is left for an older one by all. All ranks
come to the same end. What the end means for the caller is the loader's to decide.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from ml_flashpoint import events
from ml_flashpoint.checkpoint_object_manager.base_marks import mark_complete
from ml_flashpoint.checkpoint_object_manager.departed import take_over_departed
from ml_flashpoint.checkpoint_object_manager.held_part import HeldPart
from ml_flashpoint.checkpoint_object_manager.rank_store import RankStore
from ml_flashpoint.core.inventory import NodeReport, gather_reports
from ml_flashpoint.core.loader import RecoveryReport
from ml_flashpoint.core.part_reader import find_local_manifest, open_local
from ml_flashpoint.core.part_source import Failures, PartSource
from ml_flashpoint.core.recovery_plan import (
    CompleteVersion,
    Fetch,
    NodeInventory,
    RecoveryPlan,
    complete_versions,
    plan_recovery,
    superseded,
)
from ml_flashpoint.core.retention import protect, retained_line, spread
from ml_flashpoint.format.errors import FlashpointError, ObjectNotFoundError
from ml_flashpoint.format.failure_kinds import as_ours, is_damage, retrying
from ml_flashpoint.format.knobs import recovery_deadline_s
from ml_flashpoint.format.lineage import merged
from ml_flashpoint.ranks.rank_group import RankGroup

_log = logging.getLogger(__name__)

Damage = tuple[str, str, str, int]
"""``(node, version, save id, rank)`` of a part that is not what it should be."""


Verified = set[tuple[str, str, str]]
"""``(version, save id, object)`` of what this process has verified on this node."""


class RecoveryRun:
    """See the module. Made and run on all ranks, once.

    Args:
        store: of this rank.
        group: who votes.
        source: where parts come from that are not here.
        verified: what need not be verified again; grows.
        discarded: versions (name, save id) that are not wanted.
        finish: called on one rank of each node with the version, once its parts are in their places; may raise.
        wanted: a step: the newest save of it is recovered, or nothing. By default the newest version, beside which
            others are kept.

    Attributes:
        plan: the one that all ranks have carried out; None if there was none.
        reports: what the nodes have, as of the last look.
        given_up: why versions could not be recovered, by name and save id.
        complete: versions of the lineage of which every part was there, newest first.
        lineage: which saves count, as all nodes together know.
    """

    def __init__(
        self,
        store: RankStore,
        group: RankGroup,
        source: PartSource,
        *,
        verified: Verified,
        discarded: Collection[tuple[str, str]],
        finish: Callable[[CompleteVersion], None],
        wanted: int | None = None,
    ) -> None:
        self._store = store
        self._group = group
        self._source = source
        self._verified = verified
        self._finish = finish
        self._wanted = wanted
        self._target: CompleteVersion | None = None
        self._discarded = frozenset(discarded)
        self._excluded: set[tuple[str, str]] = set(discarded)
        self._damaged: set[Damage] = set()
        self._until = time.monotonic() + recovery_deadline_s()
        self._detect_s = self._plan_s = self._fetch_s = 0.0
        self._fetched = self._tries = 0
        self.plan: RecoveryPlan | None = None
        self.reports: list[NodeReport] = []
        self.given_up: dict[tuple[str, str], str] = {}
        self.complete: list[CompleteVersion] = []
        self.lineage = store.retained.lineage

    def run(self) -> CompleteVersion | None:
        """Carry out one plan after the other, until one succeeds on all ranks or there is none. Collective.

        Returns:
            The version that was recovered.
        """
        store, group = self._store, self._group
        tried: CompleteVersion | None = None
        while True:
            began = time.monotonic()
            self.reports = gather_reports(store.base, group, self._until)
            self.lineage = merged(report.lineage for report in self.reports)
            inventories = [report.inventory for report in self.reports]
            gathered = time.monotonic()
            plan = plan_recovery(
                inventories,
                group.topology,
                strategy=self._source.strategy,
                damaged=self._damaged,
                excluded=self._excluded | self._unwanted(inventories),
            )
            self._tries += 1
            planned = time.monotonic()
            self._detect_s += gathered - began
            self._plan_s += planned - gathered
            if tried is not None and (plan is None or plan.version.save_id != tried.save_id):
                error = self.given_up.get((tried.version, tried.save_id), "")
                self._tell(events.SteppedBack, tried, error=error)
            if plan is None:
                return None
            tried = plan.version
            # First, so that there is room for what is fetched; after the look, which shows who has saved where.
            take_over_departed(store, group.topology.ranks_of(group.node), group.gather)
            if self._wanted is None:
                line = retained_line(self.complete, self.lineage, plan.version.save_id, store.retained.keep)
                store.retain(line, self.lineage)
            share = self._carry_out(plan)
            self._fetched += share.count
            done, protected = self._vote(plan, share)
            self._fetch_s += time.monotonic() - planned
            if not done:
                continue
            mark_complete(store.base)
            # What could not be read may be newer than what was found, and sound.
            unread = any(each.transient for report in self.reports for each in report.unread)
            sure = self._excluded <= self._discarded and not unread
            self.plan = plan
            if self._wanted is None:
                self._keep_others(plan.version, inventories, sure=protected and sure)
            self._tell(
                events.VersionRecovered,
                plan.version,
                detect_s=self._detect_s,
                plan_s=self._plan_s,
                fetch_s=self._fetch_s,
                fetched_bytes=self._fetched,
                tries=self._tries,
            )
            return plan.version

    def _tell(self, kind: type[events.Event], version: CompleteVersion, **fields: Any) -> None:
        events.emit(kind, self._group, self._store.base, version.step, **fields)

    def _unwanted(self, inventories: Sequence[NodeInventory]) -> set[tuple[str, str]]:
        """Return versions that are not to be recovered, whatever else there is: those that were gone back from; or all
        but the one that is asked for."""
        complete = complete_versions(inventories, damaged=self._damaged)
        self.complete = [each for each in complete if self.lineage.counts(each.save_id)]
        if self._wanted is None:
            return {(each.version, each.save_id) for each in complete if not self.lineage.counts(each.save_id)}
        if self._target is None:
            self._target = next((each for each in self.complete if each.step == self._wanted), None)
        return {(each.version, each.save_id) for each in complete if each.save_id != self._save_id_wanted}

    @property
    def _save_id_wanted(self) -> str | None:
        return None if self._target is None else self._target.save_id

    def _keep_others(self, version: CompleteVersion, inventories: Sequence[NodeInventory], *, sure: bool) -> None:
        """Go on from a version: what is older and kept is protected again, the rest goes before the next save.

        Args:
            sure: whether the version is what all that is older may go for.
        """
        store, group = self._store, self._group
        spread(self.lineage, self.reports, store, group)
        kept = [each for each in self.complete if store.retained.is_beside(each.save_id)]
        self._fetched += protect(kept, store, group, self._source, inventories, self._damaged)
        # Not at once: what is loaded now may turn out unusable, and be discarded for an older version.
        useless = _useless(store, version, inventories, group.run_id, self._due_here()) if sure else []
        abandoned = [part for part in store.held() if not self.lineage.counts(part.save_id)]
        store.drop_before_next_save(
            part for part in [*useless, *abandoned] if not store.retained.is_beside(part.save_id)
        )

    def _due_here(self) -> set[int] | None:
        """Ranks whose parts belong on this node; None if that is not known."""
        strategy, topology = self._source.strategy, self._group.topology
        if strategy is None:
            return None
        here = topology.ranks_of(self._group.node)
        return {*here, *(peer for rank in here for peer in strategy.held_by(rank, topology))}

    def report(self) -> RecoveryReport:
        """What was done, on this rank."""
        version = None if self.plan is None else self.plan.version
        return RecoveryReport(
            None if version is None else version.version,
            self._detect_s,
            self._plan_s,
            self._fetch_s,
            self._fetched,
            self._tries,
            None if version is None else version.world_size,
        )

    def _carry_out(self, plan: RecoveryPlan) -> _Share:
        """This rank's share of a plan. Nothing is raised: the other ranks wait for the vote."""
        version, share = plan.version, _Share(protected=plan.same_topology)
        try:
            for fetch in plan.fetches:
                if fetch.target_rank == self._store.rank:
                    self._fetch(version, fetch, share)
            if plan.same_topology:
                self._verify_part(version, self._store.rank, share)
                # Where there is nothing older to let go, they are verified when they are needed.
                if any(p.save_id != version.save_id for r in self.reports for p in r.inventory.parts):
                    self._verify_copies(version, share)
            else:
                for rank in self._to_verify(version):
                    self._verify_part(version, rank, share)
            if self._group.is_node_leader:
                retrying(lambda: self._finish(version), self._until, "restoring the files beside the parts")
        except Exception as caught:
            share.error = as_ours(caught)
            unexpected = None if isinstance(caught, (FlashpointError, OSError, MemoryError)) else caught
            _log.warning("%s cannot be recovered here: %s", version.version, share.error, exc_info=unexpected)
        return share

    def _fetch(self, version: CompleteVersion, fetch: Fetch, share: _Share) -> None:
        rank, needed = fetch.part_rank, fetch.part_rank == self._store.rank
        failures: Failures = []
        began = time.monotonic()
        try:
            manifest = self._source.fetch_part(
                version,
                rank,
                self._store,
                self._group,
                first=fetch.source_node,
                until=self._until if needed else 0.0,
                failures=failures,
            )
        except Exception as error:
            share.protected = False
            if needed:
                _log.warning("cannot fetch the part of rank %d", rank)
                raise
            # A copy for the next loss: good to have, and no reason to lose this recovery, or to wait.
            _log.warning("cannot restore the copy of rank %d: %s", rank, error)
            return
        finally:
            share.damage += [
                (node, version.version, version.save_id, rank) for node, error in failures if is_damage(error)
            ]
        size, seconds = manifest.total_size, time.monotonic() - began
        self._tell(events.PartFetched, version, part_rank=rank, bytes=size, seconds=seconds)
        share.count += size
        self._verified.update((version.version, version.save_id, record.name) for record in manifest.objects)

    def _to_verify(self, version: CompleteVersion) -> list[int]:
        """The parts that this rank verifies of a version of another number of ranks, where none is its own. Of each
        part, one copy is looked at: whoever finds another one damaged reads that."""
        chosen = [holders[rank % len(holders)] for rank, holders in enumerate(version.holders)]
        here = [rank for rank, node in enumerate(chosen) if node == self._group.node]
        ranks = self._group.topology.ranks_of(self._group.node)
        return here[ranks.index(self._group.rank) :: len(ranks)]

    def _verify_part(self, version: CompleteVersion, rank: int, share: _Share) -> None:
        try:
            retrying(lambda: self._verify(version, rank), self._until, f"verifying the part of rank {rank}")
        except FlashpointError as error:
            if is_damage(error):
                share.damage.append((self._group.node, version.version, version.save_id, rank))
            raise

    def _verify_copies(self, version: CompleteVersion, share: _Share) -> None:
        """Only what was verified protects, and lets older versions go."""
        for part in self._store.held():
            if part.save_id != version.save_id or part.rank == self._store.rank:
                continue
            try:
                self._verify(version, part.rank)
            except Exception as error:
                _log.warning("the copy of rank %d is no protection, older versions are kept: %s", part.rank, error)
                share.protected = False

    def _verify(self, version: CompleteVersion, rank: int) -> None:
        store = self._store
        manifest = find_local_manifest(store.base, version.version, rank, version.save_id)
        if manifest is None:
            raise ObjectNotFoundError("the manifest is gone", rank=rank, path=store.base / version.version)
        for record in manifest.objects:
            key = (version.version, version.save_id, record.name)
            if key not in self._verified:
                _, stack = open_local(store, manifest, record, verified=False)
                stack.close()
                self._verified.add(key)

    def _vote(self, plan: RecoveryPlan, share: _Share) -> tuple[bool, bool]:
        """Share what was found.

        Returns:
            Whether all ranks go on with the plan's version; if not, what is damaged or excluded has grown, so that the
            next plan differs. And whether every copy of it is in its place, so that it survives what the strategy
            claims.
        """
        version = (plan.version.version, plan.version.save_id)
        group, before = self._group, len(self._damaged)
        blob = b""
        if share.damage or share.error is not None or not share.protected:
            why = None if share.error is None else f"rank {group.rank} on {group.node}: {share.error}"
            blob = json.dumps([why, share.protected, share.damage]).encode()
        unanimous = protected = True
        for reported in group.gather(blob):
            if reported:
                why, all_copies, parts = json.loads(reported)
                protected = protected and bool(all_copies)
                self._damaged.update((str(n), str(v), str(a), int(r)) for n, v, a, r in parts)
                if why is not None:
                    self.given_up.setdefault(version, str(why))
                    unanimous = False
        if unanimous:
            return True, protected
        if len(self._damaged) == before:
            # Nothing to be replaced, so the version itself is out of reach.
            _log.error("version %s cannot be recovered, stepping back: %s", version[0], self.given_up[version])
            self._excluded.add(version)
        return False, False


@dataclass(slots=True)
class _Share:
    """What became of one rank's share of a plan.

    Attributes:
        count: bytes fetched.
        damage: parts found damaged.
        error: why this rank votes no.
        protected: whether this rank has all the copies that the strategy asks of it.
    """

    count: int = 0
    damage: list[Damage] = field(default_factory=list)
    error: FlashpointError | None = None
    protected: bool = True


def _useless(
    store: RankStore,
    version: CompleteVersion,
    inventories: Sequence[NodeInventory],
    run_id: str,
    due_here: Collection[int] | None = None,
) -> list[HeldPart]:
    """Parts that a recovered version, verified on all ranks and with all its copies, makes useless: what is older,
    what an earlier run began and did not complete, and its own parts that belong on other nodes, since only those of
    the ranks ``due_here`` belong on this one. If they stayed, a job that crashes again and again before its first
    verified save would fill the memory, and one whose ranks changed places might have no room."""
    complete = {found.save_id for found in complete_versions(inventories)}
    return [
        part
        for part in store.held()
        if superseded(part.save_id, version.save_id)
        or (part.save_id == version.save_id and due_here is not None and part.rank not in due_here)
        or (part.save_id > version.save_id and part.save_id not in complete and not part.save_id.startswith(run_id))
    ]
