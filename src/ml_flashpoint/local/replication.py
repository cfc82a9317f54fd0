"""Cliques of ranks that hold one another's parts, by a jump and a factor, or by process groups that exist."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ml_flashpoint.format.errors import InvalidArgumentError, TopologyError
from ml_flashpoint.ranks.rank_group import rank_group
from ml_flashpoint.ranks.strategies import CliqueStrategy, ReplicationStrategy, Topology, copies_within

__all__ = [
    "CliqueReplicationStrategy",
    "GroupWrapper",
    "LazyCliqueReplicationStrategy",
    "ReplicationStrategy",
    "parse_group_sequence",
]


def parse_group_sequence(replication_jump: int, replication_factor: int, world_size: int) -> list[list[int]]:
    """Return the cliques of a job: ranks that are ``replication_jump`` apart, ``replication_factor`` of them each.

    ``parse_group_sequence(2, 2, 8)`` is ``[[0, 2], [1, 3], [4, 6], [5, 7]]``. A world size that is no multiple of
    their product gives smaller cliques at the end, and none of a single rank if that can be helped.

    Raises:
        InvalidArgumentError: the jump or the world size is below 1, the factor below 2.
    """
    strategy = CliqueStrategy(replication_factor, replication_jump)
    if type(world_size) is not int or world_size < 1:
        raise InvalidArgumentError("must be an integer of at least 1", argument="world_size", value=world_size)
    # Which ranks form a clique does not depend on where they run.
    topology = Topology(("anywhere",) * world_size)
    return [list(each) for each in sorted({strategy.members_of(rank, topology) for rank in range(world_size)})]


class GroupWrapper:
    """A process group with the numbers of its ranks, for programs that hand groups over in this form.

    Args:
        group: None for all ranks.

    Attributes:
        group: the same.

    Raises:
        InvalidArgumentError: ``group`` is no process group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise InvalidArgumentError("must be a process group", argument="group", value=group)
        self.group = group

    @staticmethod
    def wrap(group: dist.ProcessGroup | GroupWrapper) -> GroupWrapper:
        """Return the wrapper of a group; a wrapper is returned as it is."""
        return group if isinstance(group, GroupWrapper) else GroupWrapper(group)

    @staticmethod
    def from_list_of_groups(list_of_groups: Sequence[dist.ProcessGroup]) -> GroupWrapper:
        """Return the wrapper of the one group that this rank is in.

        Raises:
            InvalidArgumentError: this rank is in none of them, or in several.
        """
        rank = dist.get_rank()
        # `new_group` returns something else on ranks that are not in the group.
        groups = [each for each in list_of_groups if isinstance(each, dist.ProcessGroup)]
        found = [each for each in groups if rank in dist.get_process_group_ranks(each)]
        if len(found) != 1:
            raise InvalidArgumentError(
                f"must hold this rank in one group, not in {len(found)}",
                argument="list_of_groups",
                value=list_of_groups,
                rank=rank,
            )
        return GroupWrapper(found[0])

    @property
    def ranks(self) -> list[int]:
        """Global ranks of the group, in its order."""
        return list(dist.get_process_group_ranks(self.group or dist.group.WORLD))

    @property
    def world_size(self) -> int:
        """Number of ranks in the group."""
        return len(self.ranks)

    @property
    def my_global_rank(self) -> int:
        """This process's rank in the job."""
        return dist.get_rank()

    @property
    def my_group_rank(self) -> int:
        """This process's rank in the group."""
        return self.ranks.index(dist.get_rank())

    def __repr__(self) -> str:
        return f"GroupWrapper({self.ranks})"


class CliqueReplicationStrategy(ReplicationStrategy):
    """Every member of a clique of ranks holds copies of the others' parts, as far as they are on other nodes.

    Constructing it from a group is collective: ranks tell one another which cliques there are.

    Args:
        local_group: this rank's clique, as a process group, a `GroupWrapper` or ranks. All ranks of a clique give the
            same.
        target_device: accepted for callers that pass it. Copies are kept in the host's memory, and loaded to the
            devices that the tensors came from.

    Raises:
        InvalidArgumentError: an argument is not of these kinds, or this rank is not in the group.
        TopologyError: the groups of the ranks are no cliques: two of them overlap.
    """

    name = "clique"
    _by_node = False

    def __init__(
        self, local_group: dist.ProcessGroup | GroupWrapper | Sequence[int], target_device: Any = "cpu"
    ) -> None:
        try:
            torch.device(target_device)
        except (RuntimeError, TypeError) as caught:
            raise InvalidArgumentError(
                f"must be a device: {caught}", argument="target_device", value=target_device
            ) from caught
        ranks = rank_group()
        members = ranks.together(
            lambda: _members(local_group, ranks.rank, ranks.world_size),
            TopologyError("another rank's group is no clique; its own error says why", rank=ranks.rank),
        )
        # Of every clique the lowest rank speaks; the others are checked against what it says.
        gathered = ranks.gather(json.dumps(members).encode() if members[0] == ranks.rank else b"")
        self._pattern: CliqueStrategy | None = None
        self._cliques: tuple[tuple[int, ...], ...] = tuple(tuple(json.loads(blob)) for blob in gathered if blob)
        self._clique_of = {rank: clique for clique in self._cliques for rank in clique}
        agreed = self._clique_of.get(ranks.rank) == tuple(members)
        if not ranks.all_ok(agreed and sum(map(len, self._cliques)) == len(self._clique_of)):
            raise TopologyError(
                f"the groups of the ranks overlap: {sorted(self._cliques)}",
                rank=ranks.rank,
                hint="every rank must be in one clique, and all its ranks must name the same members",
            )

    @classmethod
    def from_replication_params(
        cls, replication_jump: int | None = None, replication_factor: int = 2
    ) -> CliqueReplicationStrategy:
        """Cliques of ``replication_factor`` ranks that are ``replication_jump`` apart; see `parse_group_sequence`.

        Not collective, and nothing has to be initialized before.

        Args:
            replication_jump: best at least the number of ranks of a node, which it is by default.

        Raises:
            InvalidArgumentError: the jump is below 1, or the factor below 2.
        """
        made = cls.__new__(cls)
        made._set_pattern(replication_jump, replication_factor)
        return made

    def _set_pattern(self, jump: int | None, factor: int) -> None:
        self._pattern = CliqueStrategy(factor, 1 if jump is None else jump)
        self._by_node = jump is None
        self._cliques = ()

    def copies_of(self, rank: int, topology: Topology) -> tuple[int, ...]:
        """Returns a member on each other node of the clique: see `ReplicationStrategy.copies_of`."""
        if self._pattern is not None:
            pattern = self._pattern
            if self._by_node:
                pattern = CliqueStrategy(pattern.factor, max(map(len, map(topology.ranks_of, topology.node_order))))
            return pattern.copies_of(rank, topology)
        topology.node_of(rank)
        return copies_within(self._clique_of.get(rank, (rank,)), rank, topology)

    def __repr__(self) -> str:
        if self._pattern is not None:
            jump = "ranks of a node" if self._by_node else self._pattern.jump
            return f"cliques(replication_jump={jump}, replication_factor={self._pattern.factor})"
        return f"cliques({list(map(list, self._cliques))})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CliqueReplicationStrategy) and repr(other) == repr(self)

    def __hash__(self) -> int:
        return hash(repr(self))


class LazyCliqueReplicationStrategy(CliqueReplicationStrategy):
    """A `CliqueReplicationStrategy.from_replication_params`, by its constructor.

    Args:
        replication_jump: by default the number of ranks of a node, of that with most.
        replication_factor: ranks of a clique.

    Raises:
        InvalidArgumentError: the jump is below 1, or the factor below 2.
    """

    def __init__(self, replication_jump: int | None = None, replication_factor: int = 2) -> None:
        self._set_pattern(replication_jump, replication_factor)


def _members(group: Any, rank: int, world_size: int) -> list[int]:
    if isinstance(group, (dist.ProcessGroup, GroupWrapper)):
        members = sorted(GroupWrapper.wrap(group).ranks)
    elif isinstance(group, (list, tuple, range)) and all(type(each) is int for each in group):
        members = sorted(set(group))
    else:
        raise InvalidArgumentError("must be a process group or ranks", argument="local_group", value=group)
    if rank not in members or members[0] < 0 or members[-1] >= world_size:
        raise InvalidArgumentError(
            f"must hold this rank and others of the {world_size}", argument="local_group", value=members, rank=rank
        )
    return members
