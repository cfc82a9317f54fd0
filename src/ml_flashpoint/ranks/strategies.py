"""Replication strategies: pure functions of the topology that say which ranks hold copies. Without torch.

A *node* is a failure domain: when it is lost, all parts and copies on it are lost. A part survives if the node on which
it was saved, or the node of one of its holders, survives.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from ml_flashpoint.format.arguments import checked_integer
from ml_flashpoint.format.errors import InvalidArgumentError, TopologyError


@dataclass(frozen=True)
class Topology:
    """The node of every rank of a job. Methods raise an `InvalidArgumentError` for a rank that does not exist.

    Args:
        nodes: node id of each rank; the index is the rank. Ranks of a node need not be consecutive, and nodes
            may have different numbers of ranks.

    Raises:
        InvalidArgumentError: ``nodes`` is empty, or an id is not a non-empty string.
    """

    nodes: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "nodes", tuple(self.nodes))
        if not self.nodes or not all(isinstance(node, str) and node for node in self.nodes):
            raise InvalidArgumentError("must be the node ids of one or more ranks", argument="nodes", value=self.nodes)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.nodes)

    @cached_property
    def _ranks_by_node(self) -> dict[str, tuple[int, ...]]:
        ranks: dict[str, list[int]] = {}
        for rank, node in enumerate(self.nodes):
            ranks.setdefault(node, []).append(rank)
        return {node: tuple(of_node) for node, of_node in ranks.items()}

    @cached_property
    def _index_by_node(self) -> dict[str, int]:
        return {node: index for index, node in enumerate(self.node_order)}

    @cached_property
    def _local_ranks(self) -> tuple[int, ...]:
        counters = {node: itertools.count() for node in self._ranks_by_node}
        return tuple(next(counters[node]) for node in self.nodes)

    @cached_property
    def node_order(self) -> tuple[str, ...]:
        """The distinct nodes, ordered by the lowest rank that each has."""
        return tuple(self._ranks_by_node)

    def _check_rank(self, rank: int) -> int:
        # A negative rank would silently index from the end.
        return checked_integer("rank", rank, 0, len(self.nodes) - 1)

    def node_of(self, rank: int) -> str:
        """Return the node that ``rank`` runs on."""
        return self.nodes[self._check_rank(rank)]

    def node_index_of(self, rank: int) -> int:
        """Return the index in `node_order` of the node that ``rank`` runs on."""
        return self._index_by_node[self.node_of(rank)]

    def local_rank_of(self, rank: int) -> int:
        """Return how many lower ranks run on the same node as ``rank``."""
        return self._local_ranks[self._check_rank(rank)]

    def ranks_of(self, node: str) -> tuple[int, ...]:
        """Return the ranks that run on ``node``, ascending, at least one.

        Raises:
            TopologyError: no rank runs on ``node``.
        """
        try:
            return self._ranks_by_node[node]
        except KeyError:
            raise TopologyError("no rank runs on this node", node=node) from None


class ReplicationStrategy(ABC):
    """Base class of strategies, which say which ranks hold copies of a rank's part.

    Subclass it as a frozen dataclass, and define `copies_of`. Equal arguments and topologies must give equal results on
    every rank, and methods may be called from any thread. Ranks compare the ``repr`` of their strategies, so it must
    show all arguments, and nothing else.
    """

    name: ClassVar[str]
    """Name of the strategy in options, if it is in `STRATEGIES`."""

    @abstractmethod
    def copies_of(self, rank: int, topology: Topology) -> tuple[int, ...]:
        """Return the ranks that hold a copy of the part of ``rank``, in order of preference.

        They must be on nodes other than the node of ``rank``, and no two on the same node: a second copy on a node
        would cost memory without surviving more. Empty if the topology has no place for a copy.
        """

    def held_by(self, rank: int, topology: Topology) -> tuple[int, ...]:
        """Return the ranks, ascending, whose copies ``rank`` holds: the inverse of `copies_of`.

        Takes time proportional to the world size: call it once for a topology.
        """
        topology.node_of(rank)
        return tuple(owner for owner in range(topology.world_size) if rank in self.copies_of(owner, topology))

    def survivable_losses(self, topology: Topology) -> int:
        """Return the number of nodes, whichever they are, that may be lost at once so that every part survives.

        Some larger sets of nodes may be lost, too. 0 on a single node, or if some part has no copy: check for 0 if you
        rely on copies.
        """
        return min(len(self.copies_of(rank, topology)) for rank in range(topology.world_size))


@dataclass(frozen=True)
class NoReplicationStrategy(ReplicationStrategy):
    """No copies: survives the death of processes, but not of a node."""

    name: ClassVar[str] = "none"

    def copies_of(self, rank: int, topology: Topology) -> tuple[int, ...]:
        """Return nothing."""
        topology.node_of(rank)
        return ()


@dataclass(frozen=True)
class PairwiseReplicationStrategy(ReplicationStrategy):
    """Pairs of nodes that hold each other's parts. Survives the loss of one node of each pair.

    Pairs follow `Topology.node_order`. With an odd number of nodes, the last three form a ring, in which the next node
    holds the copies. A single node has no copies. The ranks of a node are distributed in turn over the ranks of the
    partner, so that these hold equally many parts, or differ by one.
    """

    name: ClassVar[str] = "pairwise"

    def copies_of(self, rank: int, topology: Topology) -> tuple[int, ...]:
        """Return one rank of the partner node, if there is one."""
        node_count = len(topology.node_order)
        index = topology.node_index_of(rank)
        if node_count == 1:
            return ()
        ring_start = node_count - 3
        in_ring = node_count % 2 == 1 and index >= ring_start
        partner = ring_start + (index - ring_start + 1) % 3 if in_ring else index ^ 1
        holders = topology.ranks_of(topology.node_order[partner])
        return (_deal(topology.local_rank_of(rank), holders),)


@dataclass(frozen=True)
class RingReplicationStrategy(ReplicationStrategy):
    """A ring of nodes, in `Topology.node_order`. The next `copies` nodes hold the copies of each node.

    Survives the loss of any `copies` nodes. With fewer than ``copies + 1`` nodes, there is one copy on each other node.
    The ranks of a node hold equally many parts, or differ by one.

    Args:
        copies: number of copies of every part, in addition to the part itself; at least 1.

    Raises:
        InvalidArgumentError: `copies` is not an integer of at least 1.
    """

    name: ClassVar[str] = "ring"
    copies: int = 1

    def __post_init__(self) -> None:
        checked_integer("copies", self.copies, 1)

    def copies_of(self, rank: int, topology: Topology) -> tuple[int, ...]:
        """Return a rank on each of the next nodes, nearest first."""
        order = topology.node_order
        index = topology.node_index_of(rank)
        # A holder deals out the ranks of its nearest predecessor first, then those of the one before: this is
        # the place of `rank` in that row.
        place = topology.local_rank_of(rank)
        chosen = []
        for distance in range(1, min(self.copies, len(order) - 1) + 1):
            holders = topology.ranks_of(order[(index + distance) % len(order)])
            chosen.append(_deal(place, holders))
            place += len(holders)
        return tuple(chosen)


@dataclass(frozen=True)
class CliqueStrategy(ReplicationStrategy):
    """Cliques of `factor` ranks that are `jump` apart. The members of a clique hold each other's parts.

    With ``jump=1``, ranks 0, 1, 2, ... form a clique; with ``jump=2``, ranks 0, 2, 4, ... and 1, 3, 5, ... do. Ranks
    are divided into blocks of ``factor * jump``, each of which has `jump` cliques. If the world size is not a multiple
    of this, the cliques of the last block have fewer members, and a clique with a single member joins the clique before
    it, if there is one.

    Members on the same node hold nothing for each other, because they would be lost together. If several members share
    a node, this node holds each part of the others once, distributed in turn over its members. To survive
    ``factor - 1`` losses, `jump` must be at least the number of ranks of a node; `survivable_losses` computes the
    number for a topology.

    Args:
        factor: members of a clique; at least 2.
        jump: distance between the ranks of a clique; at least 1.

    Raises:
        InvalidArgumentError: `factor` or `jump` is not an integer in its range.
    """

    name: ClassVar[str] = "clique"
    factor: int
    jump: int

    def __post_init__(self) -> None:
        checked_integer("factor", self.factor, 2)
        checked_integer("jump", self.jump, 1)

    def members_of(self, rank: int, topology: Topology) -> tuple[int, ...]:
        """Return the ranks of the clique of ``rank``, ascending, itself included."""
        topology.node_of(rank)
        block_size = self.factor * self.jump
        start = rank - rank % block_size + rank % self.jump
        end = start + block_size
        if end < topology.world_size <= end + self.jump:
            # The next block starts in the world but its clique of this offset has one member alone.
            end += block_size
        elif start + self.jump >= topology.world_size and start >= block_size:
            start -= block_size
        return tuple(range(start, min(end, topology.world_size), self.jump))

    def copies_of(self, rank: int, topology: Topology) -> tuple[int, ...]:
        """Return a member on each other node of the clique."""
        return copies_within(self.members_of(rank, topology), rank, topology)


STRATEGIES: Mapping[str, type[ReplicationStrategy]] = {
    kind.name: kind for kind in (NoReplicationStrategy, PairwiseReplicationStrategy, RingReplicationStrategy)
}
"""Strategies without arguments, by their names in options."""


def checked_strategy(
    value: ReplicationStrategy | str | None, argument: str = "replication"
) -> ReplicationStrategy | None:
    """Return a strategy, the one of a name, or None for the default. Raise an `InvalidArgumentError` for anything
    else."""
    if isinstance(value, str) and value in STRATEGIES:
        return STRATEGIES[value]()
    if value is not None and not isinstance(value, ReplicationStrategy):
        names = ", ".join(map(repr, STRATEGIES))
        raise InvalidArgumentError(f"must be a ReplicationStrategy, {names}, or None", argument=argument, value=value)
    if type(value).__repr__ is object.__repr__:
        raise InvalidArgumentError(
            "has no repr by which ranks could see that they use the same strategy",
            argument=argument,
            value=value,
            hint="make it a frozen dataclass, or give it a __repr__ that shows all its arguments",
        )
    return value


def copies_within(members: Sequence[int], rank: int, topology: Topology) -> tuple[int, ...]:
    """Return who holds copies of ``rank`` if the ranks ``members``, ascending and itself included, form a clique: one
    of them on each other node, dealt out in turn."""
    own_node = topology.node_of(rank)
    by_node: dict[str, list[int]] = {}
    for member in members:
        by_node.setdefault(topology.node_of(member), []).append(member)
    chosen = []
    for node, holders in by_node.items():
        if node != own_node:
            place = sum(1 for member in members if member < rank and topology.node_of(member) != node)
            chosen.append(_deal(place, holders))
    return tuple(chosen)


def _deal(place: int, holders: Sequence[int]) -> int:
    return holders[place % len(holders)]
