"""Versions that can be recovered from the parts that nodes hold, and the transfers that recovery takes.

Pure functions: inventories in, plan out, the same for 2 ranks in a test and for 16,384 in a simulation. All ranks that
have the same inventories, in whatever order, compute the same plan. Parts of different saves are never mixed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ml_flashpoint.format.names import SaveId
from ml_flashpoint.ranks.strategies import ReplicationStrategy, Topology


class PartRecord(NamedTuple):
    """One rank's committed part of a version, as a node holds it: the rank's own node, or one that has a copy.

    ``world_size`` is the number of parts of the save. All of them have the same ``table``, the name of what the ranks
    had agreed on about who writes what.
    """

    save: SaveId
    rank: int
    world_size: int
    size: int
    table: str = ""


class NodeInventory(NamedTuple):
    """The committed parts on one node, whether its own ranks saved them or it holds them for peers."""

    node: str
    parts: tuple[PartRecord, ...]


@dataclass(frozen=True, slots=True)
class CompleteVersion:
    """A version of which every part is on some node. ``holders`` are the nodes that hold each rank's part, ascending;
    ``sizes`` are the bytes of each rank's part."""

    save: SaveId
    world_size: int
    holders: tuple[tuple[str, ...], ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fetch:
    """A part that is to be copied to the node of the rank ``target``: the part's own rank, or one that holds copies of
    it. The node ``source`` has the part before any fetch of the plan is done."""

    target: int
    rank: int
    source: str
    size: int


Damage = tuple[str, SaveId, int]
"""``(node, save, rank)`` of a part that is not what it should be."""


def complete_versions(
    inventories: Iterable[NodeInventory], *, damaged: Collection[Damage] = ()
) -> list[CompleteVersion]:
    """Return the versions of which the parts of all ranks exist, with the same table, newest first. Damaged parts are
    not used, although they are listed."""
    damaged = frozenset(damaged)
    # The number of ranks is in the key so that a stray part that claims another one cannot spoil a save.
    saves: dict[tuple[SaveId, int, str], dict[int, dict[str, int]]] = {}
    for inventory in inventories:
        for part in inventory.parts:
            if not damaged or (inventory.node, part.save, part.rank) not in damaged:
                by_rank = saves.setdefault((part.save, part.world_size, part.table), {})
                holders = by_rank.setdefault(part.rank, {})
                holders[inventory.node] = max(part.size, holders.get(inventory.node, 0))
    # Ranks are distinct and below the world size, so counting them is enough; and nothing proportional to a claimed
    # world size is allocated before as many parts have been seen.
    return [
        CompleteVersion(
            save,
            size,
            tuple(tuple(sorted(by_rank[rank])) for rank in range(size)),
            tuple(max(by_rank[rank].values()) for rank in range(size)),
        )
        for (save, size, _), by_rank in sorted(saves.items(), key=lambda item: item[0], reverse=True)
        if len(by_rank) == size
    ]


def plan_fetches(
    version: CompleteVersion, topology: Topology, strategy: ReplicationStrategy | None = None
) -> tuple[Fetch, ...]:
    """Return the fetches after which every rank's part is on the rank's own node, and then those of the copies that a
    strategy asks for.

    All may run at the same time. Sources are chosen among the holders so that the bytes that each sends are balanced.
    There are none where another number of ranks saved the version: then each rank reads the byte ranges that it needs.
    """
    if version.world_size != topology.world_size:
        return ()
    ranks = range(version.world_size)
    own = [(rank, rank) for rank in ranks if topology.nodes[rank] not in version.holders[rank]]
    copies = [
        (holder, rank)
        for rank in ranks
        for holder in (() if strategy is None else strategy.copies_of(rank, topology))
        if topology.nodes[holder] not in version.holders[rank]
    ]
    return tuple(_assign(version, own, copies))


def _assign(version: CompleteVersion, *wanted: Iterable[tuple[int, int]]) -> Iterator[Fetch]:
    sent: dict[str, tuple[int, int]] = {}

    def load(node: str) -> tuple[tuple[int, int], str]:
        # Counting parts spreads those of size zero, too; the name makes every rank decide alike.
        return sent.get(node, (0, 0)), node

    def difficulty(pair: tuple[int, int]) -> tuple[int, int, tuple[int, int]]:
        # Parts with few holders, then large ones, are placed while there is still room to balance around them.
        return len(version.holders[pair[1]]), -version.sizes[pair[1]], pair

    for pairs in wanted:
        for target, rank in sorted(pairs, key=difficulty):
            source = min(version.holders[rank], key=load)
            size, parts = sent.get(source, (0, 0))
            sent[source] = size + version.sizes[rank], parts + 1
            yield Fetch(target, rank, source, version.sizes[rank])


def is_protected(version: CompleteVersion, topology: Topology, strategy: ReplicationStrategy) -> bool:
    """Return True if every part is on its rank's node, and every copy that the strategy asks for is there.

    Of a version of another number of ranks, if as many nodes hold each part.
    """
    homes = [
        {topology.node_of(rank), *map(topology.node_of, strategy.copies_of(rank, topology))}
        for rank in range(topology.world_size)
    ]
    if version.world_size != topology.world_size:
        fewest = min(map(len, homes))
        return all(len(nodes) >= fewest for nodes in version.holders)
    return all(home <= set(nodes) for home, nodes in zip(homes, version.holders, strict=True))


def parts_to_check(version: CompleteVersion, topology: Topology, rank: int) -> tuple[int, ...]:
    """Return the ranks whose parts a rank checks: its own, or a share of all if another number of ranks saved it.

    Then one of the nodes that hold each part is chosen, and the ranks of each node share the work.
    """
    if version.world_size == topology.world_size:
        return (rank,)
    node = topology.node_of(rank)
    here = [part for part, nodes in enumerate(version.holders) if nodes[part % len(nodes)] == node]
    ranks = topology.ranks_of(node)
    return tuple(here[ranks.index(rank) :: len(ranks)])
