"""Recovery planning and pruning, on stores of parts that live in plain dictionaries.

The planner is compared with a brute-force oracle on arbitrary inventories, and its plans are carried out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ml_flashpoint.format.errors import InvalidArgumentError, InvalidNameError, ProtocolError
from ml_flashpoint.ranks.recovery import (
    MAX_INVENTORY_BYTES,
    CompleteVersion,
    Fetch,
    NodeInventory,
    PartRecord,
    RecoveryPlan,
    complete_versions,
    plan_recovery,
)
from ml_flashpoint.ranks.strategies import PairwiseReplicationStrategy, ReplicationStrategy, Topology
from tests.faults.common import SCALE
from tests.ranks.recovery_support import (
    NODES,
    Damaged,
    Store,
    carry_out,
    inventories,
    is_of,
    part,
    replicating,
    topologies,
)

# Machines that run tests are shared, so how long one example takes says nothing.
unhurried = settings(deadline=None)


@st.composite
def scattered_parts(draw: st.DrawFn) -> Store:
    """Parts of several saves, some of the same step, strewn over the nodes in any way."""
    store: Store = {node: set() for node in draw(st.sets(st.sampled_from(NODES), min_size=1))}
    saves = st.tuples(st.integers(0, 2), st.sampled_from(["a1", "a2", "b1"]), st.integers(1, 4))
    for step, save_id, world_size in draw(st.sets(saves, max_size=5)):
        least_holders = draw(st.sampled_from([0, 1, 1]))
        for rank in range(world_size):
            size = draw(st.integers(0, 5))
            for node in draw(st.sets(st.sampled_from(sorted(store)), min_size=least_holders)):
                store[node].add(part(step, rank, world_size, save_id, size))
    return store


def brute_force_complete(store: Store, damaged: Damaged) -> list[tuple[str, int, int]]:
    sound = {
        (record.save_id, record.step, record.world_size, record.rank)
        for node, records in store.items()
        for record in records
        if (node, record.version, record.save_id, record.rank) not in damaged
    }
    saves = sorted({save[:3] for save in sound}, reverse=True)
    return [save for save in saves if all((*save, rank) in sound for rank in range(save[2]))]


class TestPlanning:
    @pytest.mark.slow
    @settings(unhurried, max_examples=round(150 * SCALE))
    @given(scattered_parts(), topologies, st.none() | replicating, st.data())
    def test_newest_coverable_version_is_chosen_and_the_plan_is_executable(
        self,
        store: Store,
        topology: Topology,
        strategy: ReplicationStrategy | None,
        data: st.DataObject,
    ) -> None:
        listed = sorted((node, r.version, r.save_id, r.rank) for node, records in store.items() for r in records)
        damaged: Damaged = frozenset(data.draw(st.sets(st.sampled_from(listed), max_size=2)) if listed else ())
        complete = brute_force_complete(store, damaged)
        found = complete_versions(inventories(store), damaged=damaged)
        assert [(v.save_id, v.step, v.world_size) for v in found] == complete

        tried = sorted({(v.version, v.save_id) for v in found})
        excluded = data.draw(st.sets(st.sampled_from(tried), max_size=1)) if tried else set()
        left = [v for v in found if (v.version, v.save_id) not in excluded]
        plan = plan_recovery(inventories(store), topology, strategy=strategy, damaged=damaged, excluded=excluded)
        if not left:
            assert plan is None
            return
        assert plan is not None
        assert plan.version == left[0]
        for rank, holders in enumerate(plan.version.holders):
            assert list(holders) == sorted(
                node
                for node, records in store.items()
                if any(is_of(r, plan.version) and r.rank == rank for r in records)
                and (node, plan.version.version, plan.version.save_id, rank) not in damaged
            )
        assert plan.same_topology == (plan.version.world_size == topology.world_size)
        if plan.same_topology:
            carry_out(plan, store, topology, strategy, damaged)
        else:
            assert plan.fetches == ()

    @pytest.mark.slow
    @unhurried
    @given(topologies, replicating, st.data())
    def test_whatever_is_lost_within_the_claim_the_newest_version_is_recovered(
        self, topology: Topology, strategy: ReplicationStrategy, data: st.DataObject
    ) -> None:
        store: Store = {node: set() for node in topology.node_order}
        world_size = topology.world_size
        claim = strategy.survivable_losses(topology)
        for rank in range(world_size):
            homes = [topology.nodes[holder] for holder in (rank, *strategy.copies_of(rank, topology))]
            # Any copies, as many as the claim allows, may be gone for each part on its own.
            gone = data.draw(st.sets(st.sampled_from(homes), max_size=claim), label=f"lost of part {rank}")
            for node in homes:
                store[node].add(part(1, rank, world_size))
                if node not in gone:
                    store[node].add(part(2, rank, world_size))
        plan = plan_recovery(inventories(store), topology, strategy=strategy)
        assert plan is not None
        assert plan.version.step == 2
        carry_out(plan, store, topology, strategy)
        assert plan_recovery(inventories(store), topology, strategy=strategy) == RecoveryPlan(
            complete_versions(inventories(store))[0], same_topology=True, fetches=()
        )

    @pytest.mark.slow
    @unhurried
    @given(scattered_parts(), topologies, st.none() | replicating, st.data())
    def test_every_rank_computes_the_same_plan(
        self, store: Store, topology: Topology, strategy: ReplicationStrategy | None, data: st.DataObject
    ) -> None:
        # Another rank may have gathered the inventories, and their parts, in another order, or in pieces.
        pieces = [NodeInventory(node, (record,)) for node, records in store.items() for record in records]
        shuffled = data.draw(st.permutations(pieces))
        assert plan_recovery(shuffled, topology, strategy=strategy) == plan_recovery(
            inventories(store), topology, strategy=strategy
        )

    def test_no_version_no_plan(self) -> None:
        topology = Topology(("a", "b"))
        assert plan_recovery([], topology) is None
        assert plan_recovery([NodeInventory("a", ())], topology) is None
        assert plan_recovery(inventories({"a": {part(1, 0)}}), topology) is None

    def test_attempts_of_one_step_are_never_mixed(self) -> None:
        store = {"a": {part(3, 0, save_id="a1"), part(3, 0, save_id="a2")}, "b": {part(3, 1, save_id="a1")}}
        plan = plan_recovery(inventories(store), Topology(("a", "b")))
        assert plan is not None
        assert plan.version == CompleteVersion("step-3_ckpt", 3, "a1", 2, (("a",), ("b",)))

    def test_what_was_saved_later_wins_whatever_its_step(self) -> None:
        store = {"a": {part(2, 0, 1, "z"), part(10, 0, 1, "a"), part(10, 0, 1, "b"), part(9, 0, 1, "y")}}
        found = [(v.step, v.save_id) for v in complete_versions(inventories(store))]
        assert found == [(2, "z"), (9, "y"), (10, "b"), (10, "a")]

    def test_parts_that_claim_another_world_size_spoil_nothing(self) -> None:
        store = {"a": {part(1, 0), part(1, 0, 2**20)}, "b": {part(1, 1), part(1, 7, 2**20)}}
        assert [v.world_size for v in complete_versions(inventories(store))] == [2]

    def test_a_damaged_part_is_replaced_from_a_copy(self) -> None:
        store = {"a": {part(1, 0), part(1, 1)}, "b": {part(1, 0), part(1, 1)}}
        plan = plan_recovery(inventories(store), Topology(("a", "b")), damaged={("a", "step-1_ckpt", "a1", 0)})
        assert plan is not None
        assert plan.version.holders == (("b",), ("a", "b"))
        assert plan.fetches == (Fetch(target_rank=0, part_rank=0, source_node="b", size=10),)

    def test_ranks_that_moved_fetch_their_parts(self) -> None:
        store = {"a": {part(1, 0)}, "b": {part(1, 1)}}
        plan = plan_recovery(inventories(store), Topology(("b", "a")))
        assert plan is not None
        assert plan.same_topology
        assert set(plan.fetches) == {Fetch(0, 0, "a", 10), Fetch(1, 1, "b", 10)}

    def test_another_world_size_fetches_nothing(self) -> None:
        store = {"a": {part(1, 0, 4), part(1, 1, 4)}, "b": {part(1, 2, 4), part(1, 3, 4)}}
        plan = plan_recovery(inventories(store), Topology(("a", "c")), strategy=PairwiseReplicationStrategy())
        assert plan is not None
        assert (plan.same_topology, plan.fetches) == (False, ())

    def test_what_ranks_need_to_go_on_comes_before_copies(self) -> None:
        topology = Topology(("a", "a", "b", "b"))
        store = {"a": {part(1, rank, 4, size=rank) for rank in range(4)}}
        plan = plan_recovery(inventories(store), topology, strategy=PairwiseReplicationStrategy())
        assert plan is not None
        assert [fetch.target_rank == fetch.part_rank for fetch in plan.fetches] == [True, True, False, False]

    @unhurried
    @given(st.lists(st.integers(0, 50), min_size=1, max_size=12), st.integers(1, 4))
    def test_sources_send_about_equally_much(self, sizes: list[int], source_count: int) -> None:
        world_size = len(sizes)
        sources = [f"source{index}" for index in range(source_count)]
        store = {node: {part(1, rank, world_size, size=sizes[rank]) for rank in range(world_size)} for node in sources}
        plan = plan_recovery(inventories(store), Topology(("new",) * world_size))
        assert plan is not None
        sent = Counter(dict.fromkeys(sources, 0))
        for fetch in plan.fetches:
            sent[fetch.source_node] += fetch.size
        assert max(sent.values()) - min(sent.values()) <= max(sizes)

    @pytest.mark.parametrize("sizes", [[0, 0, 0, 0], [7, 7, 7, 7], [1, 1, 2], [1, 2, 3, 4]])
    def test_sources_send_exactly_equally_much_where_that_is_easy(self, sizes: list[int]) -> None:
        parts = {part(1, rank, len(sizes), size=size) for rank, size in enumerate(sizes)}
        plan = plan_recovery(inventories({"a": parts, "b": parts}), Topology(("new",) * len(sizes)))
        assert plan is not None
        sent: dict[str, list[int]] = {"a": [], "b": []}
        for fetch in plan.fetches:
            sent[fetch.source_node].append(fetch.size)
        assert sum(sent["a"]) == sum(sent["b"])
        if len(set(sizes)) == 1:
            assert len(sent["a"]) == len(sent["b"])

    @pytest.mark.parametrize("order", [1, -1])
    def test_ties_do_not_depend_on_the_order_of_inventories(self, order: int) -> None:
        holders = [NodeInventory(node, (part(1, 0, 1),)) for node in "ab"][::order]
        plan = plan_recovery(holders, Topology(("new",)))
        assert plan is not None
        assert plan.fetches == (Fetch(0, 0, "a", 10),)

    @pytest.mark.parametrize("order", [1, -1])
    def test_sizes_do_not_depend_on_the_order_of_inventories(self, order: int) -> None:
        pieces = [NodeInventory("a", (part(1, 0, 1, size=size),)) for size in (3, 5)][::order]
        plan = plan_recovery(pieces, Topology(("new",)))
        assert plan is not None
        assert plan.fetches == (Fetch(0, 0, "a", 5),)

    def test_parts_with_one_holder_are_placed_before_those_with_a_choice(self) -> None:
        store = {"a": {part(1, 0), part(1, 1)}, "b": {part(1, 0)}}
        plan = plan_recovery(inventories(store), Topology(("new", "new")))
        assert plan is not None
        assert {(fetch.part_rank, fetch.source_node) for fetch in plan.fetches} == {(0, "b"), (1, "a")}
        assert plan.version.holders == (("a", "b"), ("a",))


class TestScale:
    @pytest.mark.slow
    def test_plans_for_sixteen_thousand_ranks_in_seconds(self) -> None:
        ranks, nodes = 16_384, 2_048
        # Ranks are dealt over nodes, so those of a node are not neighbours.
        topology = Topology(tuple(f"node{rank % nodes:04d}" for rank in range(ranks)))
        strategy = PairwiseReplicationStrategy()
        store: Store = {node: set() for node in topology.node_order}
        for step in (1, 2, 3):
            for rank in range(ranks):
                if step == 3 and rank == 12_345:
                    continue  # killed while it saved
                record = part(step, rank, ranks, size=10**9 + rank)
                for holder in (rank, *strategy.copies_of(rank, topology)):
                    store[topology.nodes[holder]].add(record)
        lost = {topology.node_order[2 * pair + pair % 2] for pair in range(0, nodes // 2, 16)}
        received = [
            NodeInventory(node, tuple(records)).to_json() for node, records in store.items() if node not in lost
        ]
        start = time.process_time()
        gathered = [NodeInventory.from_json(data) for data in received]
        plan = plan_recovery(gathered, topology, strategy=strategy)
        elapsed = time.process_time() - start
        assert plan is not None
        assert plan.version.step == 2
        # Each lost node gets its 8 parts back, and the 8 copies that it held.
        assert len(plan.fetches) == len(lost) * 16
        survivors = {node: records for node, records in store.items() if node not in lost}
        carry_out(plan, survivors, topology, strategy)
        assert elapsed < 20.0, "seconds of the processor"

        partner = topology.node_order[topology.node_order.index(min(lost)) ^ 1]
        assert plan_recovery([i for i in gathered if i.node != partner], topology) is None


@st.composite
def node_inventories(draw: st.DrawFn) -> NodeInventory:
    text = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=20)
    save_ids = text.filter(lambda name: name not in (".", ".."))
    parts = []
    for _ in range(draw(st.integers(0, 4))):
        world_size = draw(st.integers(1, 2**24))
        rank = draw(st.integers(0, world_size - 1))
        parts.append(
            part(
                draw(st.integers(0, 2**63 - 1)),
                rank,
                world_size,
                draw(save_ids),
                draw(st.integers(0, 2**63 - 1)),
            )
        )
    return NodeInventory(draw(text.filter(str.isprintable)), tuple(parts))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)
VALID: dict[str, object] = {"format": 1, "node": "n1", "parts": [[5, 1, 2, "a1", 100]]}


def encoded(**changes: object) -> bytes:
    return json.dumps({**VALID, **changes}).encode()


class TestJson:
    @unhurried
    @given(node_inventories())
    def test_round_trip(self, inventory: NodeInventory) -> None:
        assert NodeInventory.from_json(inventory.to_json()) == inventory

    def test_the_valid_example_is_valid(self) -> None:
        assert NodeInventory.from_json(encoded()) == NodeInventory("n1", (part(5, 1, 2, "a1", 100),))

    @pytest.mark.parametrize(
        "data",
        [
            b"",
            b"\xff\xfe\xfd",
            b"null",
            b"[]",
            b"{}",
            b"[" * 200_000,
            b'{"format":1,"node":"n1","parts":' + b"[" * 900 + b"]" * 900 + b"}",
            b'{"format":1,"node":"n1","parts":[[' + b"9" * 5_000 + b',0,1,"a",0]]}',
            encoded(extra=1),
            encoded(format=2),
            encoded(format=True),
            encoded(format=1.0),
            encoded(node=""),
            encoded(node=7),
            encoded(node="n" * 256),
            encoded(node="a\nb"),
            encoded(node="\ud800"),
            encoded(parts={}),
            encoded(parts=None),
            encoded(parts="part"),
            encoded(parts=[[5, 1, 2, "a1"]]),
            encoded(parts=[[5, 1, 2, "a1", 100, 0]]),
            encoded(parts=["abcde"]),
            encoded(parts=[{"step": 5}]),
        ],
    )
    def test_refuses_what_is_no_inventory(self, data: bytes) -> None:
        with pytest.raises(ProtocolError):
            NodeInventory.from_json(data)

    @pytest.mark.parametrize(
        "fields",
        [
            [-1, 1, 2, "a1", 100],
            [2**63, 1, 2, "a1", 100],
            [True, 1, 2, "a1", 100],
            [5.0, 1, 2, "a1", 100],
            ["5", 1, 2, "a1", 100],
            [None, 1, 2, "a1", 100],
            [5, -1, 2, "a1", 100],
            [5, 2, 2, "a1", 100],
            [5, False, 2, "a1", 100],
            [5, 0, 0, "a1", 100],
            [5, 0, 2**24 + 1, "a1", 100],
            [5, 0, 1e3, "a1", 100],
            [5, 1, 2, "", 100],
            [5, 1, 2, "..", 100],
            [5, 1, 2, "../up", 100],
            [5, 1, 2, "a\0", 100],
            [5, 1, 2, "\ud800", 100],
            [5, 1, 2, "a" * 256, 100],
            [5, 1, 2, 3, 100],
            [5, 1, 2, ["a1"], 100],
            [5, 1, 2, "a1", -1],
            [5, 1, 2, "a1", 2**63],
            [5, 1, 2, "a1", None],
        ],
    )
    def test_refuses_impossible_parts(self, fields: list[object]) -> None:
        with pytest.raises(ProtocolError, match="something invalid"):
            NodeInventory.from_json(encoded(parts=[[5, 0, 2, "a1", 100], fields]))

    def test_refuses_too_much_before_reading_it(self) -> None:
        padded = encoded().ljust(MAX_INVENTORY_BYTES + 1)
        with pytest.raises(ProtocolError, match="limit"):
            NodeInventory.from_json(padded)
        assert NodeInventory.from_json(padded[:-1]).node == "n1"

    @unhurried
    @given(st.one_of(st.binary(max_size=80), json_values.map(lambda value: json.dumps(value).encode())))
    def test_junk_is_refused_with_a_typed_error(self, data: bytes) -> None:
        with pytest.raises(ProtocolError):
            NodeInventory.from_json(data)

    @unhurried
    @given(st.sampled_from(["format", "node", "parts", 0, 1, 2, 3, 4]), json_values)
    def test_a_changed_field_is_refused_or_valid(self, where: str | int, value: object) -> None:
        changed = {where: value} if isinstance(where, str) else {"parts": [[5, 1, 2, "a1", 100]]}
        if isinstance(where, int):
            fields = [5, 1, 2, "a1", 100]
            changed["parts"] = [[*fields[:where], value, *fields[where + 1 :]]]
        try:
            inventory = NodeInventory.from_json(encoded(**changed))
        except ProtocolError:
            return
        assert json.loads(inventory.to_json()) == {**VALID, **changed}


class TestRecords:
    def test_version_must_be_that_of_the_step(self) -> None:
        for version in ("step-6_ckpt", "step-05_ckpt", "step-5_ckpt/", "5"):
            with pytest.raises(InvalidArgumentError, match="version"):
                PartRecord(version, 5, 0, 1, "a1", 0)

    @pytest.mark.parametrize("step", [-1, True, 1.0, 2**63])
    def test_step_must_be_one_that_ranks_can_agree_on(self, step: int) -> None:
        with pytest.raises(InvalidArgumentError, match="step"):
            PartRecord(f"step-{step}_ckpt", step, 0, 1, "a1", 0)

    def test_attempt_must_fit_in_a_file_name(self) -> None:
        with pytest.raises(InvalidNameError):
            part(1, 0, save_id="../a1")

    def test_planning_imports_no_torch(self) -> None:
        code = "import sys, ml_flashpoint.ranks.recovery; sys.exit('torch' in sys.modules)"
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        assert subprocess.run([sys.executable, "-c", code], env=env, check=False).returncode == 0
