"""Pruning never removes the last recoverable version, however saves, copies and losses interleave."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ml_flashpoint.ranks.recovery import PartRecord, RecoveryPlan, complete_versions, plan_recovery, superseded
from ml_flashpoint.ranks.strategies import NoReplicationStrategy, ReplicationStrategy, Topology
from tests.faults.common import SCALE
from tests.ranks.recovery_support import NODES, Store, carry_out, inventories, part, replicating, topologies


class TestSuperseded:
    def test_only_what_is_strictly_older(self) -> None:
        # Step 6 was saved, then the job went back to step 4 and saved step 5.
        older = [part(3, 1), part(6, 0, save_id="a3"), part(5, 0, save_id="a4"), part(5, 1, save_id="a4")]
        kept = [part(5, 0, save_id="a5"), part(4, 0, save_id="a6")]
        assert [each for each in older + kept if superseded(each.save_id, "a5")] == older


def protects(job: tuple[Topology, ReplicationStrategy]) -> bool:
    topology, strategy = job
    return strategy.survivable_losses(topology) > 0


# Mostly jobs that can lose a node, since there is little to go wrong in others.
jobs_that_protect = st.tuples(topologies, replicating).filter(protects)
any_jobs = st.tuples(topologies, replicating | st.just(NoReplicationStrategy()))
jobs = st.sampled_from([jobs_that_protect] * 5 + [any_jobs]).flatmap(lambda kind: kind)


class Pruning(RuleBasedStateMachine):
    """A job that saves, copies, agrees, prunes and loses nodes, in any order.

    Agreement is modelled as it must be made: over the *sets* of versions whose own part is committed and
    whose copies are acknowledged, one set for each rank. Nodes learn of it, and prune, each in its own time.
    """

    @initialize(job=jobs, saved_before=st.sampled_from([True, True, False]))
    def start(self, job: tuple[Topology, ReplicationStrategy], saved_before: bool) -> None:
        self.topology, self.strategy = job
        self.claim = self.strategy.survivable_losses(self.topology)
        self.store: Store = {node: set() for node in self.topology.node_order}
        self.ranks = range(self.topology.world_size)
        self.save_ids = 0
        self.step = 0
        self.lost: set[str] = set()
        self.bad: set[tuple[str, str]] = set()
        self.restart(None)
        if saved_before:
            self.begin_save(1)
            self.save(self.saves[-1], stopped={})
            self.agree()

    def restart(self, recovered: tuple[int, str] | None) -> None:
        """All processes are new: what they knew, except for the recovered version, is forgotten."""
        self.lost.clear()
        self.verified: tuple[int, str] | None = recovered
        self.known: dict[str, tuple[int, str] | None] = dict.fromkeys(self.store, recovered)
        self.saves: list[tuple[int, str]] = []
        self.acked: dict[int, set[tuple[int, str]]] = {
            rank: set() if recovered is None else {recovered} for rank in self.ranks
        }

    def record(self, rank: int, save: tuple[int, str]) -> PartRecord:
        return part(save[0], rank, self.topology.world_size, save[1])

    def homes(self, rank: int) -> list[str]:
        return [self.topology.nodes[r] for r in (rank, *self.strategy.copies_of(rank, self.topology))]

    @rule(advance=st.sampled_from([0, 1, 1, 2]))
    def begin_save(self, advance: int) -> None:
        """Starts the save of a later step, or of the same one once more."""
        self.step += advance
        self.save_ids += 1
        self.saves.append((self.step, f"run-{self.save_ids:06d}"))

    def deliver(self, rank: int, save: tuple[int, str], node: str) -> None:
        """Commits the part on its own node, or a copy of it on another; nothing where that cannot be."""
        record, homes = self.record(rank, save), self.homes(rank)
        if {homes[0], node} & self.lost or (node != homes[0] and record not in self.store[homes[0]]):
            return
        self.store[node].add(record)
        if all(record in self.store[home] for home in homes):
            self.acked[rank].add(save)

    def save(self, save: tuple[int, str], stopped: Mapping[int, int]) -> None:
        """Commits and copies every part, except that ranks in `stopped` only do their first so many nodes."""
        for rank in self.ranks:
            for node in self.homes(rank)[: stopped.get(rank)]:
                self.deliver(rank, save, node)

    @precondition(lambda self: self.saves)
    @rule(data=st.data())
    def commit_or_copy_one_part(self, data: st.DataObject) -> None:
        rank = data.draw(st.sampled_from(self.ranks), label="rank")
        save = data.draw(st.sampled_from(self.saves[-3:]), label="save")
        self.deliver(rank, save, data.draw(st.sampled_from(self.homes(rank)), label="node"))

    @rule(
        advance=st.sampled_from([0, 1, 1, 2]),
        stopped=st.just({}) | st.dictionaries(st.integers(0, 5), st.integers(0, 2), max_size=3),
        agreed=st.booleans(),
    )
    def save_a_version(self, advance: int, stopped: dict[int, int], agreed: bool) -> None:
        """Many of the small rules in the usual order, since chance alone seldom gets a version that far."""
        self.begin_save(advance)
        self.save(self.saves[-1], stopped)
        if agreed:
            self.agree()

    @rule()
    def agree(self) -> None:
        # Acknowledgements from before a loss count still: nobody may have noticed the loss yet.
        common = set.intersection(*self.acked.values())
        if common:
            known = common if self.verified is None else {*common, self.verified}
            self.verified = max(known, key=lambda save: save[1])

    @rule(nodes=st.sets(st.sampled_from(NODES), min_size=1))
    def learn(self, nodes: set[str]) -> None:
        """Some nodes hear of the agreement."""
        for node in nodes & self.store.keys():
            self.known[node] = self.verified

    @rule(nodes=st.sets(st.sampled_from(NODES), min_size=1), data=st.data())
    def prune(self, nodes: set[str], data: st.DataObject) -> None:
        """Some nodes remove what they may; each may be killed on the way, having removed any part of it."""
        for node in sorted(nodes & self.store.keys()):
            verified = self.known[node]
            removable = {p for p in self.store[node] if verified is not None and superseded(p.save_id, verified[1])}
            if removable:
                everything = st.just(removable)
                self.store[node] -= data.draw(
                    everything | st.sets(st.sampled_from(sorted(removable, key=repr))), label=node
                )

    @precondition(lambda self: len(self.lost) < self.claim)
    @rule(data=st.data())
    def lose_a_node(self, data: st.DataObject) -> None:
        node = data.draw(st.sampled_from(sorted({*self.store} - self.lost)), label="node")
        self.lost.add(node)
        self.store[node] = set()

    @precondition(lambda self: self.lost or self.verified)
    @rule()
    def recover(self) -> None:
        """Every process ends, lost nodes are replaced by empty ones, and the job goes on from the plan."""
        plan = self.plan(self.store)
        if plan is None:
            self.step = 0
            self.restart(None)
            return
        carry_out(plan, self.store, self.topology, self.strategy)
        self.step = plan.version.step
        self.restart((plan.version.step, plan.version.save_id))

    @rule()
    def recover_from_an_older_version(self) -> None:
        """The newest version does not validate, wherever it is fetched from, and the ranks step back."""
        usable = [
            (found.version, found.save_id)
            for found in complete_versions(inventories(self.store))
            if (found.version, found.save_id) not in self.bad
        ]
        if len(usable) > 1:
            self.bad.add(usable[0])
            self.recover()

    def plan(self, store: Store) -> RecoveryPlan | None:
        return plan_recovery(inventories(store), self.topology, strategy=self.strategy, excluded=self.bad)

    @invariant()
    def whatever_else_is_lost_a_version_as_new_as_the_verified_one_is_recoverable(self) -> None:
        if self.verified is None:
            return
        for further in self.further_losses():
            left = {node: set() if node in further else {*records} for node, records in self.store.items()}
            plan = self.plan(left)
            assert plan is not None, f"nothing is left after losing {further}"
            assert plan.version.save_id >= self.verified[1]
            carry_out(plan, left, self.topology, self.strategy)

    def further_losses(self) -> Iterable[tuple[str, ...]]:
        standing = sorted({*self.store} - self.lost)
        return itertools.combinations(standing, self.claim - len(self.lost))


TestPruningUnderAnyInterleaving = pytest.mark.slow(Pruning.TestCase)
TestPruningUnderAnyInterleaving.settings = settings(
    max_examples=round(100 * SCALE), stateful_step_count=50, deadline=None, report_multiple_bugs=False
)
