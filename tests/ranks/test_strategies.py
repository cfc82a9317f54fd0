"""Placement of copies: what every strategy must hold to, and what each one claims, on any topology."""

from __future__ import annotations

import itertools
import pickle
from typing import Any

import pytest
from hypothesis import given, settings
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
replicating = st.one_of(
    st.just(PairwiseReplicationStrategy()),
    st.builds(RingReplicationStrategy, copies=st.integers(1, 7)),
    cliques,
)
any_strategy = replicating | st.just(NoReplicationStrategy())

# Machines that run tests are shared, so how long one example takes says nothing.
unhurried = settings(deadline=None)

PAIRWISE = PairwiseReplicationStrategy()


def homes(rank: int, strategy: ReplicationStrategy, topology: Topology) -> set[str]:
    """All nodes that have the part of `rank`: its own and those of its holders."""
    return {topology.nodes[holder] for holder in (rank, *strategy.copies_of(rank, topology))}


def one_rank_per_node(count: int) -> Topology:
    return Topology(tuple(f"n{index:02d}" for index in range(count)))


class TestTopology:
    def test_nodes_are_ordered_by_their_lowest_rank(self) -> None:
        topology = Topology(("z", "a", "z", "m", "a"))
        assert topology.world_size == 5
        assert topology.node_order == ("z", "a", "m")
        assert [topology.ranks_of(node) for node in "zam"] == [(0, 2), (1, 4), (3,)]
        assert [topology.node_of(rank) for rank in range(5)] == ["z", "a", "z", "m", "a"]
        assert [topology.node_index_of(rank) for rank in range(5)] == [0, 1, 0, 2, 1]
        assert [topology.local_rank_of(rank) for rank in range(5)] == [0, 0, 1, 0, 1]

    def test_is_a_value_whatever_was_asked_of_it_before(self) -> None:
        used, fresh = Topology(("a", "b", "a")), Topology(("a", "b", "a"))
        used.local_rank_of(2)
        used.ranks_of("a")
        assert used == fresh
        assert hash(used) == hash(fresh)
        assert pickle.loads(pickle.dumps(used)) == fresh

    @pytest.mark.parametrize("rank", [-1, 3, True, 1.0, "1", None])
    def test_refuses_ranks_that_do_not_exist(self, rank: int) -> None:
        topology = Topology(("a", "b", "a"))
        for ask in (topology.node_of, topology.node_index_of, topology.local_rank_of):
            with pytest.raises(InvalidArgumentError, match="rank"):
                ask(rank)

    def test_refuses_unknown_nodes(self) -> None:
        with pytest.raises(TopologyError, match="node c"):
            Topology(("a", "b")).ranks_of("c")

    @pytest.mark.parametrize("nodes", [(), ("a", ""), ("a", 3)])
    def test_refuses_nodes_that_are_not_named(self, nodes: tuple[str, ...]) -> None:
        with pytest.raises(InvalidArgumentError, match="nodes"):
            Topology(nodes)


class TestEveryStrategy:
    @unhurried
    @given(any_strategy, topologies)
    def test_copies_are_on_distinct_other_nodes(self, strategy: ReplicationStrategy, topology: Topology) -> None:
        for rank in range(topology.world_size):
            holders = strategy.copies_of(rank, topology)
            assert len(homes(rank, strategy, topology)) == 1 + len(holders)

    @unhurried
    @given(any_strategy, topologies)
    def test_held_by_is_the_inverse_of_copies_of(self, strategy: ReplicationStrategy, topology: Topology) -> None:
        ranks = range(topology.world_size)
        copied = {(owner, holder) for owner in ranks for holder in strategy.copies_of(owner, topology)}
        held = {(owner, holder) for holder in ranks for owner in strategy.held_by(holder, topology)}
        assert held == copied
        assert all(list(strategy.held_by(rank, topology)) == sorted(strategy.held_by(rank, topology)) for rank in ranks)

    @unhurried
    @given(any_strategy, topologies)
    def test_exactly_the_claimed_losses_are_survived_whichever_they_are(
        self, strategy: ReplicationStrategy, topology: Topology
    ) -> None:
        claimed = strategy.survivable_losses(topology)
        parts = [homes(rank, strategy, topology) for rank in range(topology.world_size)]

        def survives(lost: tuple[str, ...]) -> bool:
            return all(nodes - set(lost) for nodes in parts)

        nodes = topology.node_order
        assert claimed < len(nodes)
        assert all(survives(lost) for lost in itertools.combinations(nodes, claimed))
        assert not all(survives(lost) for lost in itertools.combinations(nodes, claimed + 1))

    @unhurried
    @given(any_strategy)
    def test_a_single_node_has_nowhere_to_copy_to(self, strategy: ReplicationStrategy) -> None:
        topology = Topology(("only",) * 4)
        assert strategy.survivable_losses(topology) == 0
        assert all(strategy.copies_of(rank, topology) == () for rank in range(4))

    @unhurried
    @given(any_strategy, topologies)
    def test_refuses_ranks_that_do_not_exist(self, strategy: ReplicationStrategy, topology: Topology) -> None:
        for rank in (-1, topology.world_size):
            with pytest.raises(InvalidArgumentError, match="rank"):
                strategy.copies_of(rank, topology)
            with pytest.raises(InvalidArgumentError, match="rank"):
                strategy.held_by(rank, topology)

    @unhurried
    @given(any_strategy)
    def test_is_a_value(self, strategy: ReplicationStrategy) -> None:
        copy = pickle.loads(pickle.dumps(strategy))
        assert copy == strategy
        assert hash(copy) == hash(strategy)
        assert STRATEGIES.get(strategy.name, type(strategy)) is type(strategy)

    @unhurried
    @given(st.one_of(st.just(PAIRWISE), st.builds(RingReplicationStrategy, copies=st.integers(1, 7))), topologies)
    def test_ranks_of_a_node_hold_equally_many_parts(self, strategy: ReplicationStrategy, topology: Topology) -> None:
        for node in topology.node_order:
            held = [len(strategy.held_by(rank, topology)) for rank in topology.ranks_of(node)]
            assert max(held) - min(held) <= 1


class TestNone:
    @unhurried
    @given(topologies)
    def test_holds_nothing(self, topology: Topology) -> None:
        strategy = NoReplicationStrategy()
        assert strategy.survivable_losses(topology) == 0
        assert all(not strategy.copies_of(rank, topology) for rank in range(topology.world_size))


class TestPairwise:
    def test_pairs_nodes_and_makes_a_ring_of_an_odd_rest(self) -> None:
        def partners(count: int) -> list[int]:
            topology = one_rank_per_node(count)
            return [PAIRWISE.copies_of(rank, topology)[0] for rank in range(count)]

        assert partners(2) == [1, 0]
        assert partners(3) == [1, 2, 0]
        assert partners(4) == [1, 0, 3, 2]
        assert partners(5) == [1, 0, 3, 4, 2]
        assert partners(7) == [1, 0, 3, 2, 5, 6, 4]

    def test_deals_ranks_out_in_turn_when_nodes_differ(self) -> None:
        topology = Topology(("a", "a", "b", "a", "a", "b", "a"))
        assert [PAIRWISE.copies_of(rank, topology) for rank in topology.ranks_of("a")] == [
            (2,), (5,), (2,), (5,), (2,)
        ]  # fmt: skip
        assert [PAIRWISE.copies_of(rank, topology) for rank in topology.ranks_of("b")] == [(0,), (1,)]

    @unhurried
    @given(topologies.filter(lambda topology: len(topology.node_order) > 1))
    def test_every_part_has_one_copy(self, topology: Topology) -> None:
        assert all(len(PAIRWISE.copies_of(rank, topology)) == 1 for rank in range(topology.world_size))

    @unhurried
    @given(st.integers(1, 5), st.data())
    def test_one_loss_in_each_pair_is_survived(self, pairs: int, data: st.DataObject) -> None:
        topology = one_rank_per_node(2 * pairs)
        lost = {
            topology.nodes[2 * pair + data.draw(st.integers(0, 1), label=f"lost of pair {pair}")]
            for pair in range(pairs)
        }
        assert all(homes(rank, PAIRWISE, topology) - lost for rank in range(topology.world_size))


class TestRing:
    def test_copies_go_to_the_next_nodes(self) -> None:
        topology = one_rank_per_node(4)
        strategy = RingReplicationStrategy(copies=2)
        assert [strategy.copies_of(rank, topology) for rank in range(4)] == [(1, 2), (2, 3), (3, 0), (0, 1)]

    def test_one_copy_is_the_default(self) -> None:
        assert RingReplicationStrategy() == RingReplicationStrategy(copies=1)

    @unhurried
    @given(st.integers(1, 9), topologies)
    def test_survives_as_many_losses_as_there_are_copies(self, copies: int, topology: Topology) -> None:
        expected = min(copies, len(topology.node_order) - 1)
        assert RingReplicationStrategy(copies).survivable_losses(topology) == expected

    @pytest.mark.parametrize("copies", [0, -1, True, 1.0, "1", None])
    def test_refuses_less_than_one_copy(self, copies: int) -> None:
        with pytest.raises(InvalidArgumentError, match="copies"):
            RingReplicationStrategy(copies=copies)


class TestClique:
    def test_jump_sets_the_distance_of_members(self) -> None:
        topology = one_rank_per_node(6)
        neighbours = CliqueStrategy(factor=3, jump=1)
        assert [neighbours.members_of(rank, topology) for rank in range(6)] == [(0, 1, 2)] * 3 + [(3, 4, 5)] * 3
        spread = CliqueStrategy(factor=3, jump=2)
        assert [spread.members_of(rank, topology) for rank in range(6)] == [(0, 2, 4), (1, 3, 5)] * 3
        assert [spread.copies_of(rank, topology) for rank in (0, 2, 3)] == [(2, 4), (0, 4), (1, 5)]

    def test_members_on_one_node_hold_nothing_for_each_other(self) -> None:
        topology = Topology(("a", "a", "b", "b"))
        assert CliqueStrategy(factor=2, jump=1).survivable_losses(topology) == 0
        across = CliqueStrategy(factor=2, jump=2)
        assert [across.copies_of(rank, topology) for rank in range(4)] == [(2,), (3,), (0,), (1,)]
        # Each part once on the other node, dealt out over the members there.
        everyone = CliqueStrategy(factor=4, jump=1)
        assert [everyone.copies_of(rank, topology) for rank in range(4)] == [(2,), (3,), (0,), (1,)]

    def test_a_rank_left_alone_joins_the_clique_before(self) -> None:
        topology = one_rank_per_node(7)
        strategy = CliqueStrategy(factor=3, jump=1)
        assert [strategy.members_of(rank, topology) for rank in range(7)] == [(0, 1, 2)] * 3 + [(3, 4, 5, 6)] * 4
        jumping = CliqueStrategy(factor=2, jump=2)
        assert [jumping.members_of(rank, topology) for rank in range(7)] == [
            (0, 2), (1, 3, 5), (0, 2), (1, 3, 5), (4, 6), (1, 3, 5), (4, 6)
        ]  # fmt: skip

    @unhurried
    @given(cliques, topologies)
    def test_cliques_divide_the_world(self, strategy: CliqueStrategy, topology: Topology) -> None:
        world = range(topology.world_size)
        groups = {strategy.members_of(rank, topology) for rank in world}
        assert sorted(rank for group in groups for rank in group) == list(world)
        assert all(rank in strategy.members_of(rank, topology) for rank in world)
        for group in groups:
            assert len(group) <= strategy.factor + 1
            assert {later - earlier for earlier, later in itertools.pairwise(group)} <= {strategy.jump}
            # Alone only where the whole world has no other rank at that distance.
            if len(group) == 1:
                assert group[0] - strategy.jump < 0
                assert group[0] + strategy.jump >= topology.world_size

    @unhurried
    @given(cliques, topologies)
    def test_each_other_node_of_the_clique_holds_a_part_once(
        self, strategy: CliqueStrategy, topology: Topology
    ) -> None:
        for rank in range(topology.world_size):
            members = strategy.members_of(rank, topology)
            assert set(strategy.copies_of(rank, topology)) <= set(members)
            assert homes(rank, strategy, topology) == {topology.nodes[member] for member in members}
            held = [
                len(strategy.held_by(member, topology))
                for member in members
                if topology.nodes[member] == topology.nodes[rank]
            ]
            assert max(held) - min(held) <= 1

    @pytest.mark.parametrize("value", [0, -1, True, 2.0, "2", None])
    def test_refuses_arguments_out_of_range(self, value: int) -> None:
        with pytest.raises(InvalidArgumentError, match="factor"):
            CliqueStrategy(factor=value, jump=1)
        with pytest.raises(InvalidArgumentError, match="jump"):
            CliqueStrategy(factor=2, jump=value)

    def test_refuses_cliques_of_one(self) -> None:
        with pytest.raises(InvalidArgumentError, match="factor"):
            CliqueStrategy(factor=1, jump=1)


def test_any_ranks_may_form_a_clique() -> None:
    topology = Topology(("a", "b", "a", "c", "b"))
    assert copies_within([0, 3, 4], 0, topology) == (3, 4)
    assert copies_within([0, 2, 3], 0, topology) == (3,), "not on its own node"
    assert copies_within([0, 2, 3], 3, topology) in ((0,), (2,)), "once a node"
    assert copies_within([1], 1, topology) == ()
    with pytest.raises(InvalidArgumentError):
        copies_within([0, 9], 9, topology)


class TestCheckedStrategy:
    @pytest.mark.parametrize(
        ("name", "strategy"),
        [("pairwise", PAIRWISE), ("ring", RingReplicationStrategy()), ("none", NoReplicationStrategy())],
    )
    def test_a_name_stands_for_its_strategy(self, name: str, strategy: ReplicationStrategy) -> None:
        assert checked_strategy(name) == strategy
        assert checked_strategy(strategy) is strategy

    def test_none_leaves_the_choice_open(self) -> None:
        assert checked_strategy(None) is None

    @pytest.mark.parametrize("value", ["rings", 3, NoReplicationStrategy])
    def test_anything_else_is_refused(self, value: Any) -> None:
        with pytest.raises(InvalidArgumentError, match=r"repl_strategy .*'pairwise'"):
            checked_strategy(value, "repl_strategy")

    def test_one_that_ranks_cannot_compare_is_refused(self) -> None:
        # Its repr would be its address, which differs between the processes of a launcher.
        class Own(NoReplicationStrategy):
            __repr__ = object.__repr__

        with pytest.raises(InvalidArgumentError, match="frozen dataclass"):
            ReplicationManager(Own())
