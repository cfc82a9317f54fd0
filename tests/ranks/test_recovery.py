"""Recovery planning, on stores of parts that live in plain dictionaries.

The choice of versions is compared with a brute-force oracle on arbitrary inventories, and plans are carried out.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ml_flashpoint.format.names import SaveId
from ml_flashpoint.ranks.recovery import (
    CompleteVersion,
    Damage,
    Fetch,
    NodeInventory,
    complete_versions,
    is_protected,
    parts_to_check,
    plan_fetches,
)
from ml_flashpoint.ranks.strategies import CliqueStrategy, PairwiseReplicationStrategy, ReplicationStrategy, Topology
from tests.faults.common import SCALE
from tests.ranks.recovery_support import (
    NODES,
    Store,
    carry_out,
    inventories,
    is_of,
    part,
    replicating,
    topologies,
)


@st.composite
def scattered_parts(draw: st.DrawFn) -> Store:
    """Parts of several saves, some of the same step, strewn over the nodes in any way."""
    store: Store = {node: set() for node in draw(st.sets(st.sampled_from(NODES), min_size=1))}
    saves = st.tuples(st.integers(0, 2), st.integers(1, 3), st.integers(1, 4), st.sampled_from(["", "t"]))
    for step, run, world_size, table in draw(st.lists(saves, max_size=5, unique_by=lambda save: save[:3])):
        least_holders = draw(st.sampled_from([0, 1, 1]))
        for rank in range(world_size):
            size = draw(st.integers(0, 5))
            for node in draw(st.sets(st.sampled_from(sorted(store)), min_size=least_holders)):
                store[node].add(part(step, rank, world_size, run, size, table))
    return store


def brute_force_complete(store: Store, damaged: frozenset[Damage]) -> list[SaveId]:
    sound = {
        (record.save, record.world_size, record.table, record.rank)
        for node, records in store.items()
        for record in records
        if (node, record.save, record.rank) not in damaged
    }
    saves = {save[:3] for save in sound}
    return sorted((save[0] for save in saves if all((*save, rank) in sound for rank in range(save[1]))), reverse=True)


def newest(store: Store, damaged: frozenset[Damage] = frozenset()) -> CompleteVersion:
    return complete_versions(inventories(store), damaged=damaged)[0]


@pytest.mark.slow
@settings(max_examples=round(150 * SCALE))
@given(scattered_parts(), topologies, st.none() | replicating, st.data())
def test_complete_versions_are_found_and_their_plans_are_executable(
    store: Store, topology: Topology, strategy: ReplicationStrategy | None, data: st.DataObject
) -> None:
    listed = sorted((node, r.save, r.rank) for node, records in store.items() for r in records)
    damaged = frozenset(data.draw(st.sets(st.sampled_from(listed), max_size=2)) if listed else ())
    found = complete_versions(inventories(store), damaged=damaged)
    assert [version.save for version in found] == brute_force_complete(store, damaged)
    for version in found:
        for rank, holders in enumerate(version.holders):
            assert set(holders) <= {
                node
                for node, records in store.items()
                if any(is_of(r, version) and r.rank == rank for r in records)
                and (node, version.save, rank) not in damaged
            }
            assert list(holders) == sorted(set(holders))
        if version.world_size == topology.world_size:
            carry_out(version, {node: set(parts) for node, parts in store.items()}, topology, strategy, damaged)
        else:
            assert plan_fetches(version, topology) == ()


@pytest.mark.slow
@given(topologies, replicating, st.data())
def test_whatever_is_lost_within_the_claim_the_newest_version_is_recovered(
    topology: Topology, strategy: ReplicationStrategy, data: st.DataObject
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
    version = newest(store)
    assert version.save.step == 2
    whole = all(part(2, rank, world_size) in store[topology.nodes[rank]] for rank in range(world_size))
    assert is_protected(version, topology, strategy) <= whole
    carry_out(version, store, topology, strategy)
    assert plan_fetches(newest(store), topology, strategy) == ()
    assert is_protected(newest(store), topology, strategy)


@pytest.mark.slow
@given(scattered_parts(), topologies, st.data())
def test_every_rank_computes_the_same_plan(store: Store, topology: Topology, data: st.DataObject) -> None:
    # Another rank may have gathered the inventories, and their parts, in another order, or in pieces.
    pieces = [NodeInventory(node, (record,)) for node, records in store.items() for record in records]
    shuffled = complete_versions(data.draw(st.permutations(pieces)))
    ordered = complete_versions(inventories(store))
    assert sorted(shuffled, key=repr) == sorted(ordered, key=repr)
    plans = [[plan_fetches(each, topology) for each in sorted(some, key=repr)] for some in (shuffled, ordered)]
    assert plans[0] == plans[1]


def test_saves_of_one_step_are_never_mixed() -> None:
    store = {"a": {part(3, 0, run=1), part(3, 0, run=2)}, "b": {part(3, 1, run=1)}}
    assert complete_versions(inventories(store)) == [CompleteVersion(SaveId(1, 3), 2, (("a",), ("b",)), (10, 10))]


def test_parts_of_different_tables_are_never_mixed() -> None:
    store = {"a": {part(3, 0, table="x"), part(2, 0, table="x")}, "b": {part(3, 1), part(2, 1, table="x")}}
    assert [version.save.step for version in complete_versions(inventories(store))] == [2]


def test_a_later_run_wins_whatever_its_step() -> None:
    store = {"a": {part(2, 0, 1, 12), part(10, 0, 1, 1), part(10, 0, 1, 2), part(9, 0, 1, 11)}}
    found = [tuple(version.save) for version in complete_versions(inventories(store))]
    assert found == [(12, 2), (11, 9), (2, 10), (1, 10)]


def test_parts_that_claim_another_world_size_spoil_nothing() -> None:
    store = {"a": {part(1, 0), part(1, 0, 2**20)}, "b": {part(1, 1), part(1, 7, 2**20)}}
    assert [v.world_size for v in complete_versions(inventories(store))] == [2]


def test_a_damaged_part_is_replaced_from_a_copy() -> None:
    store = {"a": {part(1, 0), part(1, 1)}, "b": {part(1, 0), part(1, 1)}}
    version = newest(store, frozenset({("a", SaveId(1, 1), 0)}))
    assert version.holders == (("b",), ("a", "b"))
    assert plan_fetches(version, Topology(("a", "b"))) == (Fetch(0, rank=0, source="b", size=10),)
    assert not is_protected(version, Topology(("a", "b")), PairwiseReplicationStrategy())


def test_ranks_that_moved_fetch_their_parts() -> None:
    store = {"a": {part(1, 0)}, "b": {part(1, 1)}}
    assert set(plan_fetches(newest(store), Topology(("b", "a")))) == {Fetch(0, 0, "a", 10), Fetch(1, 1, "b", 10)}


def test_of_another_number_of_ranks_each_part_is_checked_once_by_a_node_that_holds_it() -> None:
    store = {"a": {part(1, rank, 4) for rank in range(4)}, "b": {part(1, 2, 4), part(1, 3, 4)}}
    version, topology = newest(store), Topology(("a", "a", "b"))
    assert plan_fetches(version, topology) == ()
    checked = [parts_to_check(version, topology, rank) for rank in range(3)]
    assert checked == [(0, 2), (1,), (3,)]
    assert parts_to_check(version, Topology(("a", "a", "b", "b")), 2) == (2,)


def test_of_another_number_of_ranks_a_version_is_protected_where_as_many_nodes_hold_each_part() -> None:
    alone, copied = newest({"a": {part(1, 0, 1)}}), newest({"a": {part(1, 0, 1)}, "b": {part(1, 0, 1)}})
    topology = Topology(("a", "a", "b", "c"))
    for strategy, least in (
        (PairwiseReplicationStrategy(), 2),
        (CliqueStrategy(2, 1), 1),
    ):  # ranks 0 and 1 have no copies
        assert [is_protected(each, topology, strategy) for each in (alone, copied)] == [least == 1, True]


def test_what_ranks_need_to_go_on_comes_before_copies() -> None:
    version = newest({"a": {part(1, rank, 4, size=rank) for rank in range(4)}})
    fetches = plan_fetches(version, Topology(("a", "a", "b", "b")), PairwiseReplicationStrategy())
    assert [fetch.target == fetch.rank for fetch in fetches] == [True, True, False, False]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=12), st.integers(1, 4))
def test_sources_send_about_equally_much(sizes: list[int], source_count: int) -> None:
    world_size = len(sizes)
    sources = [f"source{index}" for index in range(source_count)]
    store = {node: {part(1, rank, world_size, size=sizes[rank]) for rank in range(world_size)} for node in sources}
    sent = Counter(dict.fromkeys(sources, 0))
    for fetch in plan_fetches(newest(store), Topology(("new",) * world_size)):
        sent[fetch.source] += fetch.size
    assert max(sent.values()) - min(sent.values()) <= max(sizes)


def test_sources_send_exactly_equally_much_where_that_is_easy() -> None:
    for sizes in ([0, 0, 0, 0], [1, 1, 2], [1, 2, 3, 4]):
        parts = {part(1, rank, len(sizes), size=size) for rank, size in enumerate(sizes)}
        sent: dict[str, list[int]] = {"a": [], "b": []}
        for fetch in plan_fetches(newest({"a": parts, "b": parts}), Topology(("new",) * len(sizes))):
            sent[fetch.source].append(fetch.size)
        assert sum(sent["a"]) == sum(sent["b"])
        assert len(set(sizes)) > 1 or len(sent["a"]) == len(sent["b"])


def test_neither_ties_nor_sizes_depend_on_the_order_of_inventories() -> None:
    pieces = [NodeInventory(node, (part(1, 0, 1, size=size),)) for node, size in (("a", 3), ("b", 5))]
    for ordered in (pieces, pieces[::-1]):
        assert plan_fetches(complete_versions(ordered)[0], Topology(("new",))) == (Fetch(0, 0, "a", 5),)


def test_parts_with_one_holder_are_placed_before_those_with_a_choice() -> None:
    version = newest({"a": {part(1, 0), part(1, 1)}, "b": {part(1, 0)}})
    fetches = plan_fetches(version, Topology(("new", "new")))
    assert {(fetch.rank, fetch.source) for fetch in fetches} == {(0, "b"), (1, "a")}


@pytest.mark.slow
def test_plans_for_sixteen_thousand_ranks() -> None:
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
    survivors = {node: records for node, records in store.items() if node not in lost}
    gathered = inventories(survivors)
    version = complete_versions(gathered)[0]
    fetches = plan_fetches(version, topology, strategy)
    protected = is_protected(version, topology, strategy)
    assert (version.save.step, protected) == (2, False)
    assert len(fetches) == len(lost) * 16, "each lost node gets its 8 parts back, and the 8 copies that it held"
    carry_out(version, survivors, topology, strategy)
    partner = topology.node_order[topology.node_order.index(min(lost)) ^ 1]
    assert complete_versions(each for each in gathered if each.node != partner) == []
