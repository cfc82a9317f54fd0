"""Cliques of ranks that hold one another's parts, by a jump and a factor, or by process groups that exist."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from ml_flashpoint.format.arguments import checked_integer
from ml_flashpoint.format.errors import InvalidArgumentError, TopologyError
from ml_flashpoint.ranks.rank_group import rank_group
from ml_flashpoint.ranks.strategies import CliqueStrategy, ReplicationStrategy, Topology, copies_within


def parse_group_sequence(replication_jump: int, replication_factor: int, world_size: int) -> list[list[int]]:
    """Return the cliques of a job: ranks that are ``replication_jump`` apart, ``replication_factor`` of them each.

    ``parse_group_sequence(2, 2, 8)`` is ``[[0, 2], [1, 3], [4, 6], [5, 7]]``. A world size that is no multiple of
    their product gives smaller cliques at the end, and none of a single rank if that can be helped.
    """
    strategy = CliqueStrategy(replication_factor, replication_jump)
    topology = Topology(("anywhere",) * checked_integer("world_size", world_size, 1))
    return [list(each) for each in sorted({strategy.members_of(rank, topology) for rank in range(world_size)})]


class GroupWrapper:
    """A process group, for programs that hand groups over in this form; of all ranks, if it is None."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise InvalidArgumentError("must be a process group", argument="group", value=group)
        self.group = group

    @staticmethod
    def wrap(group: dist.ProcessGroup | GroupWrapper) -> GroupWrapper:
        """Return the wrapper of a group; a wrapper is returned as it is."""
        return group if isinstance(group, GroupWrapper) else GroupWrapper(group)

    @property
    def ranks(self) -> list[int]:
        """Global ranks of the group, in its order."""
        return list(dist.get_process_group_ranks(self.group or dist.group.WORLD))


class CliqueReplicationStrategy(ReplicationStrategy):
    """Every member of a clique of ranks holds copies of the others' parts, as far as they are on other nodes.

    Members on one node hold nothing for each other, since they would be lost together. Collective to construct.

    Args:
        local_group: the clique that this rank is in: a process group, or the global ranks.
        target_device: accepted, and not used: parts travel from memory to memory.

    Raises:
        InvalidArgumentError: it is no such group, or this rank is not in it.
        TopologyError: the groups of the ranks overlap, or another rank's is none.
    """

    def __init__(
        self, local_group: dist.ProcessGroup | GroupWrapper | Sequence[int], target_device: Any = "cpu"
    ) -> None:
        ranks = rank_group()
        members = ranks.together(
            lambda: _members(local_group, ranks.rank, ranks.world_size), TopologyError, "making a clique"
        )
        self._clique_of = [tuple(json.loads(blob)) for blob in ranks.gather(json.dumps(members).encode())]
        if any(self._clique_of[member] != clique for clique in self._clique_of for member in clique):
            hint = "every rank must be in one clique, and all its ranks must name the same members"
            raise TopologyError(f"the groups of the ranks overlap: {self._clique_of}", rank=ranks.rank, hint=hint)

    @staticmethod
    def from_replication_params(
        replication_jump: int | None = None, replication_factor: int = 2
    ) -> CliqueReplicationStrategy:
        """Return a `LazyCliqueReplicationStrategy`."""
        return LazyCliqueReplicationStrategy(replication_jump, replication_factor)

    def copies_of(self, rank: int, topology: Topology) -> tuple[int, ...]:
        """Return a member on each other node of the clique: see `ReplicationStrategy.copies_of`."""
        return copies_within(self._clique_of[rank], rank, topology)

    def __repr__(self) -> str:
        return f"cliques({sorted(set(self._clique_of))})"


class LazyCliqueReplicationStrategy(CliqueReplicationStrategy):
    """Cliques of ranks that are ``replication_jump`` apart; see `parse_group_sequence`. Not collective to construct.

    Args:
        replication_jump: best at least the number of ranks of a node; by default that of the node with most.
        replication_factor: ranks of a clique.
    """

    def __init__(self, replication_jump: int | None = None, replication_factor: int = 2) -> None:
        self._by_node = replication_jump is None
        self._pattern = CliqueStrategy(replication_factor, 1 if replication_jump is None else replication_jump)

    def copies_of(self, rank: int, topology: Topology) -> tuple[int, ...]:
        """Return a member on each other node of the clique: see `ReplicationStrategy.copies_of`."""
        pattern = self._pattern
        if self._by_node:
            pattern = CliqueStrategy(pattern.factor, max(map(len, map(topology.ranks_of, topology.node_order))))
        return pattern.copies_of(rank, topology)

    def __repr__(self) -> str:
        jump = "ranks of a node" if self._by_node else self._pattern.jump
        return f"cliques(replication_jump={jump}, replication_factor={self._pattern.factor})"


def _members(group: Any, rank: int, world_size: int) -> list[int]:
    if isinstance(group, (dist.ProcessGroup, GroupWrapper)):
        members = sorted(GroupWrapper.wrap(group).ranks)
    elif isinstance(group, (list, tuple, range)) and all(type(each) is int for each in group):
        members = sorted(set(group))
    else:
        raise InvalidArgumentError("must be a process group or ranks", argument="local_group", value=group)
    if rank not in members or members[0] < 0 or members[-1] >= world_size:
        text = f"must hold this rank and others of the {world_size}"
        raise InvalidArgumentError(text, argument="local_group", value=members, rank=rank)
    return members
