"""Cliques as users of local checkpoints describe them. Cliques of process groups are in test_local_faults."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from ml_flashpoint.format.errors import InvalidArgumentError, TopologyError
from ml_flashpoint.local import (
    CliqueReplicationStrategy,
    LazyCliqueReplicationStrategy,
    parse_group_sequence,
)
from ml_flashpoint.local.replication import GroupWrapper
from ml_flashpoint.ranks.strategies import Topology
from tests.support.forked import Report, call_team


@pytest.mark.parametrize(
    ("jump", "factor", "world_size", "expected"),
    [
        (1, 2, 4, [[0, 1], [2, 3]]),
        (2, 2, 8, [[0, 2], [1, 3], [4, 6], [5, 7]]),
        (4, 2, 8, [[0, 4], [1, 5], [2, 6], [3, 7]]),
        (1, 3, 6, [[0, 1, 2], [3, 4, 5]]),
        (1, 2, 5, [[0, 1], [2, 3, 4]]),
        (1, 2, 1, [[0]]),
    ],
)
def test_group_sequences(jump: int, factor: int, world_size: int, expected: list[list[int]]) -> None:
    assert parse_group_sequence(jump, factor, world_size) == expected


@given(st.integers(1, 9), st.integers(2, 5), st.integers(1, 40))
def test_every_rank_is_in_one_group(jump: int, factor: int, world_size: int) -> None:
    groups = parse_group_sequence(jump, factor, world_size)
    assert sorted(rank for group in groups for rank in group) == list(range(world_size))
    for group in groups:
        assert all(b - a == jump for a, b in itertools.pairwise(group))


@given(st.integers(1, 4), st.integers(2, 4), st.integers(1, 5))
def test_any_rank_alone_may_be_lost(jump: int, factor: int, blocks: int) -> None:
    world_size = jump * factor * blocks
    topology = Topology(tuple(f"node-{rank}" for rank in range(world_size)))
    strategy = CliqueReplicationStrategy.from_replication_params(jump, factor)
    for clique in parse_group_sequence(jump, factor, world_size):
        for rank in clique:
            assert set(strategy.copies_of(rank, topology)) == set(clique) - {rank}
    assert strategy.survivable_losses(topology) == factor - 1


@pytest.mark.parametrize("nodes", ["aabb", "aaabbbccc", "aabbccdd", "abcd"])
def test_by_default_the_members_of_a_clique_are_on_different_nodes(nodes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # where each process sees a device of its own
    for strategy in (LazyCliqueReplicationStrategy(), CliqueReplicationStrategy.from_replication_params()):
        topology = Topology(tuple(nodes))
        assert strategy.survivable_losses(topology) >= 1
        for rank, node in enumerate(nodes):
            assert {nodes[other] for other in strategy.copies_of(rank, topology)} - {node}
    # The ranks of a job compare their strategies by these.
    assert repr(LazyCliqueReplicationStrategy(2, 3)) == repr(CliqueReplicationStrategy.from_replication_params(2, 3))
    assert len({repr(LazyCliqueReplicationStrategy(*numbers)) for numbers in ((), (1,), (2, 3), (3, 2))}) == 4


def test_a_wrapped_group_is_as_good_as_the_group() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.new_group([0])
        wrapped = GroupWrapper(group)
        assert (wrapped.group, wrapped.ranks, GroupWrapper().ranks) == (group, [0], [0])
        assert GroupWrapper.wrap(wrapped) is wrapped
        assert repr(CliqueReplicationStrategy(wrapped)) == repr(CliqueReplicationStrategy(group))
        with pytest.raises(InvalidArgumentError, match="group"):
            GroupWrapper.wrap([0])  # type: ignore[arg-type]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("group", [None, "0", [1], [0, 1], [0.0]])
def test_groups_that_are_none_are_refused(group: object) -> None:
    with pytest.raises(InvalidArgumentError, match="local_group"):
        CliqueReplicationStrategy(group)  # type: ignore[arg-type]


def clique_of(report: Report, rank: int, groups: list[list[int]]) -> str:
    try:
        return repr(CliqueReplicationStrategy(groups[rank]))
    except TopologyError as error:
        return str(error)


def test_groups_that_overlap_are_refused_by_all_ranks(tmpfs: Path) -> None:
    for said in call_team(clique_of, tmpfs, 2, [[0, 1], [1]]):
        assert "the groups of the ranks overlap" in said


def test_bad_numbers_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="factor"):
        parse_group_sequence(1, 1, 4)
    with pytest.raises(InvalidArgumentError, match="jump"):
        LazyCliqueReplicationStrategy(0, 2)
    with pytest.raises(InvalidArgumentError, match="world_size"):
        parse_group_sequence(1, 2, 0)
