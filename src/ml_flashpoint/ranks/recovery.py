"""Versions that can be recovered from the parts that nodes hold, and the transfers that recovery takes.

Pure functions: inventories in, plan out, the same for 2 ranks in a test and for 16,384 in a simulation. Nothing here
imports torch. Results depend on the content of the inventories alone and not on their order, so all ranks that have the
same inventories compute the same plan. Versions are ordered by their `SaveId`; parts of different saves are never
mixed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from ml_flashpoint.format.checkpoint_id_types import MAX_STEP
from ml_flashpoint.format.errors import FlashpointError, InvalidArgumentError, ProtocolError
from ml_flashpoint.format.manifest import MAX_WORLD_SIZE
from ml_flashpoint.format.save_id import SaveId
from ml_flashpoint.ranks.strategies import ReplicationStrategy, Topology

_MAX_RUN = 10**18 - 1
_MAX_SIZE = 2**63 - 1
_MAX_TEXT = 255


@dataclass(frozen=True, slots=True)
class PartRecord:
    """One rank's committed part of a version, as a node holds it: the rank's own node, or one that has a copy.

    Attributes:
        save: the save.
        rank: the rank that saved the part.
        world_size: number of ranks, and so of parts, of the save.
        size: bytes of the part, for balancing transfers.
        table: name of what the ranks had agreed on about who writes what; "" for nothing. All parts of a version have
            the same one.

    Raises:
        InvalidArgumentError: a field has the wrong type or range.
    """

    save: SaveId
    rank: int
    world_size: int
    size: int
    table: str = ""

    def __post_init__(self) -> None:
        _check_integer("run", self.save.run, 0, _MAX_RUN)
        _check_integer("step", self.save.step, 0, MAX_STEP)
        _check_integer("world_size", self.world_size, 1, MAX_WORLD_SIZE)
        _check_integer("rank", self.rank, 0, self.world_size - 1)
        _check_integer("size", self.size, 0, _MAX_SIZE)
        if not isinstance(self.table, str) or len(self.table) > _MAX_TEXT:
            raise InvalidArgumentError("must be a short string", argument="table", value=self.table)


@dataclass(frozen=True, slots=True)
class NodeInventory:
    """The committed parts on one node, whether its own ranks saved them or it holds them for peers.

    Attributes:
        node: id of the node.
        parts: in any order.

    Raises:
        InvalidArgumentError: `node` is not a printable, non-empty string of at most 255 characters.
    """

    node: str
    parts: tuple[PartRecord, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.node, str) or not 0 < len(self.node) <= _MAX_TEXT or not self.node.isprintable():
            raise InvalidArgumentError("must be a printable string", argument="node", value=self.node)

    def to_fields(self) -> list[object]:
        """Return this inventory as values that JSON can hold."""
        return [self.node, [[*part.save, part.rank, part.world_size, part.size, part.table] for part in self.parts]]

    @classmethod
    def from_fields(cls, fields: object) -> NodeInventory:
        """Return the inventory of `to_fields`, which came from another machine.

        Raises:
            ProtocolError: these are not the fields of an inventory.
        """
        if not isinstance(fields, list) or len(fields) != 2 or not isinstance(fields[1], list):
            raise ProtocolError("an inventory must have a node and a list of parts")
        try:
            return cls(fields[0], tuple(map(_part_from_fields, fields[1])))
        except FlashpointError as error:
            raise ProtocolError(f"an inventory is not valid: {error}") from None


def _part_from_fields(fields: object) -> PartRecord:
    if not isinstance(fields, list) or len(fields) != 6:
        raise InvalidArgumentError("must be a list of six fields", argument="part", value=fields)
    run, step, *others = fields
    return PartRecord(SaveId(run, step), *others)


@dataclass(frozen=True, slots=True)
class CompleteVersion:
    """A version of which every part is on some node.

    Attributes:
        save: the save.
        world_size: number of its parts.
        holders: for each rank, the nodes that hold its part, ascending, at least one.
        sizes: bytes of each rank's part.
    """

    save: SaveId
    world_size: int
    holders: tuple[tuple[str, ...], ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fetch:
    """A part that is to be copied to a node.

    Attributes:
        target: rank that fetches: the part's own rank, or one that holds copies of it.
        rank: rank whose part it is.
        source: node to fetch from; it has the part before any fetch of the plan is done.
        size: bytes to transfer.
    """

    target: int
    rank: int
    source: str
    size: int


Damage = tuple[str, SaveId, int]
"""``(node, save, rank)`` of a part that is not what it should be."""


def complete_versions(
    inventories: Iterable[NodeInventory], *, damaged: Collection[Damage] = ()
) -> list[CompleteVersion]:
    """Return the versions of which the parts of all ranks exist, with the same table, newest first.

    Args:
        inventories: of the reachable nodes. Several of one node count as one.
        damaged: parts that are not to be used, although they are listed.
    """
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
    """Return the fetches after which every rank's part is on the rank's own node, and then those of missing copies.

    All may run at the same time. Sources are chosen among the holders so that the bytes that each sends are balanced.
    There are none where another number of ranks saved the version: then each rank reads the byte ranges that it needs.

    Args:
        version: the version.
        topology: where the ranks run now.
        strategy: if given, the copies that it asks for are fetched too, so that the next loss is survived.
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


def _check_integer(argument: str, value: object, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        raise InvalidArgumentError(f"must be an integer from {least} to {most}", argument=argument, value=value)
