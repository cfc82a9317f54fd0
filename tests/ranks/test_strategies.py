"""Placement of copies: what every strategy must hold to, and what each one claims, on any topology."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ml_flashpoint.format.errors import InvalidArgumentError, TopologyError
from ml_flashpoint.ranks.strategies import (
    STRATEGIES,
    CliqueStrategy,
    NoReplicationStrategy,
    PairwiseReplicationStrategy,
    ReplicationStrategy,
    RingReplicationStrategy,
    Topology,
    checked_strategy,
    copies_within,
)
from ml_flashpoint.replication.replication_manager import ReplicationManager

# Any placement at all: ranks of a node need not be neighbours, nodes need not be of one size.
topologies = st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=18).map(lambda n: Topology(tuple(n)))
cliques = st.builds(CliqueStrategy, factor=st.integers(2, 5), jump=st.integers(1, 6))
rings = st.builds(RingReplicationStrategy, copies=st.integers(1, 7))
any_strategy = st.one_of(st.sampled_from([PairwiseReplicationStrategy(), NoReplicationStrategy()]), rings, cliques)

PAIRWISE = PairwiseReplicationStrategy()


def homes(rank: int, strategy: ReplicationStrategy, topology: Topology) -> set[str]:
    """All nodes that have the part of `rank`: its own and those of its holders."""
    return {topology.nodes[holder] for holder in (rank, *strategy.copies_of(rank, topology))}


def copies(strategy: ReplicationStrategy, nodes: str) -> list[tuple[int, ...]]:
    """The holders of every rank, where each rank is on the node of that letter."""
    topology = Topology(tuple(nodes))
    return [strategy.copies_of(rank, topology) for rank in range(topology.world_size)]


def test_nodes_are_ordered_by_their_lowest_rank() -> None:
    topology = Topology(("z", "a", "z", "m", "a"))
    assert topology.world_size == 5
    assert topology.node_order == ("z", "a", "m")
    assert [topology.ranks_of(node) for node in "zam"] == [(0, 2), (1, 4), (3,)]
    assert [topology.node_of(rank) for rank in range(5)] == ["z", "a", "z", "m", "a"]
    assert [topology.node_index_of(rank) for rank in range(5)] == [0, 1, 0, 2, 1]
    assert [topology.local_rank_of(rank) for rank in range(5)] == [0, 0, 1, 0, 1]
    fresh = Topology(("z", "a", "z", "m", "a"))
    assert (topology, hash(topology)) == (fresh, hash(fresh)), "a value, whatever it was asked before"
    assert pickle.loads(pickle.dumps(topology)) == fresh


# ---- every strategy ---------------------------------------------------------------------------------------------


@given(any_strategy, topologies)
def test_copies_are_on_distinct_other_nodes_and_held_by_is_the_inverse(
    strategy: ReplicationStrategy, topology: Topology
) -> None:
    ranks = range(topology.world_size)
    for rank in ranks:
        assert len(homes(rank, strategy, topology)) == 1 + len(strategy.copies_of(rank, topology))
    copied = {(owner, holder) for owner in ranks for holder in strategy.copies_of(owner, topology)}
    assert copied == {(owner, holder) for holder in ranks for owner in strategy.held_by(holder, topology)}
    assert all(list(strategy.held_by(rank, topology)) == sorted(strategy.held_by(rank, topology)) for rank in ranks)


@given(any_strategy, topologies)
def test_exactly_the_claimed_losses_are_survived_whichever_they_are(
    strategy: ReplicationStrategy, topology: Topology
) -> None:
    claimed, nodes = strategy.survivable_losses(topology), topology.node_order
    parts = [homes(rank, strategy, topology) for rank in range(topology.world_size)]

    def survives(lost: tuple[str, ...]) -> bool:
        return all(nodes - set(lost) for nodes in parts)

    assert claimed < len(nodes)
    assert all(survives(lost) for lost in itertools.combinations(nodes, claimed))
    assert not all(survives(lost) for lost in itertools.combinations(nodes, claimed + 1))


@given(any_strategy)
def test_a_strategy_is_a_value(strategy: ReplicationStrategy) -> None:
    copy = pickle.loads(pickle.dumps(strategy))
    assert (copy, hash(copy)) == (strategy, hash(strategy))
    assert STRATEGIES.get(strategy.name, type(strategy)) is type(strategy)


@given(st.just(PAIRWISE) | rings, topologies)
def test_ranks_of_a_node_hold_equally_many_parts(strategy: ReplicationStrategy, topology: Topology) -> None:
    for node in topology.node_order:
        held = [len(strategy.held_by(rank, topology)) for rank in topology.ranks_of(node)]
        assert max(held) - min(held) <= 1


# ---- each one ---------------------------------------------------------------------------------------------------


def test_pairs_of_nodes_and_a_ring_of_an_odd_rest() -> None:
    assert copies(PAIRWISE, "ab") == [(1,), (0,)]
    assert copies(PAIRWISE, "abc") == [(1,), (2,), (0,)]
    assert copies(PAIRWISE, "abcd") == [(1,), (0,), (3,), (2,)]
    assert copies(PAIRWISE, "abcdefg") == [(1,), (0,), (3,), (2,), (5,), (6,), (4,)]
    assert copies(PAIRWISE, "aabaaba") == [(2,), (5,), (0,), (2,), (5,), (1,), (2,)], "dealt out where nodes differ"
    assert copies(NoReplicationStrategy(), "abcd") == [()] * 4


@given(st.integers(1, 9), topologies)
def test_a_ring_survives_as_many_losses_as_there_are_copies(count: int, topology: Topology) -> None:
    expected = min(count, len(topology.node_order) - 1)
    assert RingReplicationStrategy(count).survivable_losses(topology) == expected


def test_copies_of_a_ring_go_to_the_next_nodes() -> None:
    assert copies(RingReplicationStrategy(copies=2), "abcd") == [(1, 2), (2, 3), (3, 0), (0, 1)]
    assert RingReplicationStrategy() == RingReplicationStrategy(copies=1)


def members(strategy: CliqueStrategy, count: int) -> list[tuple[int, ...]]:
    topology = Topology(tuple("abcdefg"[:count]))
    return [strategy.members_of(rank, topology) for rank in range(count)]


def test_jump_sets_the_distance_of_members_of_a_clique() -> None:
    assert members(CliqueStrategy(factor=3, jump=1), 6) == [(0, 1, 2)] * 3 + [(3, 4, 5)] * 3
    assert members(CliqueStrategy(factor=3, jump=2), 6) == [(0, 2, 4), (1, 3, 5)] * 3
    assert copies(CliqueStrategy(factor=3, jump=2), "abcdef")[:3] == [(2, 4), (3, 5), (0, 4)]
    # A rank left alone joins the clique before.
    assert members(CliqueStrategy(factor=3, jump=1), 7) == [(0, 1, 2)] * 3 + [(3, 4, 5, 6)] * 4
    alone = [(0, 2), (1, 3, 5), (0, 2), (1, 3, 5), (4, 6), (1, 3, 5), (4, 6)]
    assert members(CliqueStrategy(factor=2, jump=2), 7) == alone


def test_members_of_a_clique_on_one_node_hold_nothing_for_each_other() -> None:
    assert copies(CliqueStrategy(factor=2, jump=1), "aabb") == [()] * 4
    assert copies(CliqueStrategy(factor=2, jump=2), "aabb") == [(2,), (3,), (0,), (1,)]
    # Each part once on the other node, dealt out over the members there.
    assert copies(CliqueStrategy(factor=4, jump=1), "aabb") == [(2,), (3,), (0,), (1,)]
    topology = Topology(("a", "b", "a", "c", "b"))
    assert copies_within([0, 3, 4], 0, topology) == (3, 4)
    assert copies_within([0, 2, 3], 0, topology) == (3,), "not on its own node"
    assert copies_within([0, 2, 3], 3, topology) == (0,), "once a node"
    assert copies_within([1], 1, topology) == ()


@given(cliques, topologies)
def test_cliques_divide_the_world_and_each_other_node_of_one_holds_a_part_once(
    strategy: CliqueStrategy, topology: Topology
) -> None:
    world = range(topology.world_size)
    groups = {strategy.members_of(rank, topology) for rank in world}
    assert sorted(rank for group in groups for rank in group) == list(world)
    for group in groups:
        assert len(group) <= strategy.factor + 1
        assert {later - earlier for earlier, later in itertools.pairwise(group)} <= {strategy.jump}
        # Alone only where the whole world has no other rank at that distance.
        if len(group) == 1:
            assert group[0] - strategy.jump < 0
            assert group[0] + strategy.jump >= topology.world_size
        for rank in group:
            assert strategy.members_of(rank, topology) == group
            assert set(strategy.copies_of(rank, topology)) <= set(group)
            assert homes(rank, strategy, topology) == {topology.nodes[member] for member in group}
            same = [member for member in group if topology.nodes[member] == topology.nodes[rank]]
            held = [len(strategy.held_by(member, topology)) for member in same]
            assert max(held) - min(held) <= 1


# ---- arguments --------------------------------------------------------------------------------------------------


class Own(NoReplicationStrategy):
    """Ranks cannot compare it: its repr would be its address, which differs between processes."""

    __repr__ = object.__repr__


THREE = Topology(("a", "b", "a"))


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: Topology(()), "nodes"),
        (lambda: Topology(("a", "")), "nodes"),
        *((lambda rank=rank: THREE.node_of(rank), "rank") for rank in (-1, 3, True, 1.0)),
        *((lambda rank=rank: THREE.local_rank_of(rank), "rank") for rank in (-1, 3)),
        *((lambda rank=rank: THREE.node_index_of(rank), "rank") for rank in (-1, 3)),
        *((lambda each=each: each.copies_of(3, THREE), "rank") for each in (PAIRWISE, NoReplicationStrategy())),
        *((lambda each=each: each.held_by(-1, THREE), "rank") for each in (PAIRWISE, CliqueStrategy(2, 1))),
        (lambda: copies_within([0, 9], 9, THREE), "rank"),
        *((lambda value=value: RingReplicationStrategy(value), "copies") for value in (0, True, "1")),
        *((lambda value=value: CliqueStrategy(value, 1), "factor") for value in (1, 2.0)),
        *((lambda value=value: CliqueStrategy(2, value), "jump") for value in (0, None)),
        *((lambda value=value: checked_strategy(value, "s"), "s .*'pairwise'") for value in (3, "rings")),
        (lambda: ReplicationManager(Own()), "frozen dataclass"),
    ],
)
def test_what_is_refused(call: Callable[[], object], named: str) -> None:
    with pytest.raises(InvalidArgumentError, match=named):
        call()


def test_names_stand_for_strategies() -> None:
    named = {"pairwise": PAIRWISE, "ring": RingReplicationStrategy(), "none": NoReplicationStrategy()}
    for name, strategy in named.items():
        assert checked_strategy(name) == strategy
        assert checked_strategy(strategy) is strategy
    assert checked_strategy(None) is None, "which leaves the choice open"
    with pytest.raises(TopologyError, match="node c"):
        THREE.ranks_of("c")
