"""What can be recovered from what survived, who fetches what from whom, and what may be forgotten.

Owns the choice of the version to go on from, the transfers that it takes, and the rule for pruning, all as
pure
functions: inventories in, plan out. It does the same for 2 ranks in a test and for 16,384 in a simulation.
Reading manifests, moving bytes, checking digests and voting belong to the loader and to replication. Nothing
here imports torch.

Versions are ordered by step, then by save_id: a save id is the string common to all ranks of one save, later
ones compare greater. Parts of different save ids are never mixed. Results depend on the content of the
inventories alone, not on their order, so all ranks that hold the same inventories compute the same plan.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ml_flashpoint.format.checkpoint_id_types import MAX_STEP, CheckpointContainerId, validate_segment
from ml_flashpoint.format.errors import FlashpointError, InvalidArgumentError, ProtocolError
from ml_flashpoint.format.manifest import MAX_WORLD_SIZE
from ml_flashpoint.ranks.strategies import ReplicationStrategy, Topology

MAX_INVENTORY_BYTES = 16 * 1024 * 1024
"""Largest encoded inventory that is accepted: room for about 200,000 parts on one node."""

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class PartRecord:
    """One rank's committed part of a version, as found on some node: its own, or one that holds a copy.

    Args:
        version: directory name of the version, ``step-<n>_ckpt``.
        step: its step.
        rank: rank that saved the part.
        world_size: number of ranks, and so of parts, of the save.
        save_id: the string common to all parts of one save.
        size: bytes of the objects of the part, for balancing transfers.

    Raises:
        InvalidNameError: `save_id` cannot be part of a file name.
        InvalidArgumentError: another field has the wrong type or range, or `version` is not that of `step`.
    """

    version: str
    step: int
    rank: int
    world_size: int
    save_id: str
    size: int

    def __post_init__(self) -> None:
        _check_integer("step", self.step, 0, MAX_STEP)
        if self.version != f"step-{self.step}_ckpt":
            raise InvalidArgumentError(
                "not the version of the step", argument="version", value=self.version, step=self.step
            )
        _check_integer("world_size", self.world_size, 1, MAX_WORLD_SIZE)
        _check_integer("rank", self.rank, 0, self.world_size - 1)
        _check_integer("size", self.size, 0, 2**63 - 1)
        validate_segment(self.save_id)

    @property
    def order(self) -> tuple[str, int]:
        """``(save id, step)``: what versions are ordered by, oldest first.

        In the order in which they were saved, not by step: after going back to an older step, what is saved
        from then on is newer than what the abandoned steps left.
        """
        return self.save_id, self.step


@dataclass(frozen=True, slots=True)
class NodeInventory:
    """The committed parts that one node holds, whether saved there or copies held for peers.

    Args:
        node: id of the node.
        parts: in any order; several save ids of the same part may be among them.

    Raises:
        InvalidArgumentError: `node` is not a printable, non-empty string of at most 255 characters.
    """

    node: str
    parts: tuple[PartRecord, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.node, str) or not 0 < len(self.node) <= 255 or not self.node.isprintable():
            raise InvalidArgumentError(
                "a node id must be a printable string of 1 to 255 characters",
                argument="node",
                value=self.node,
            )

    def to_json(self) -> bytes:
        """Return the inventory as UTF-8 JSON, to be read by `from_json`."""
        parts = [[part.step, part.rank, part.world_size, part.save_id, part.size] for part in self.parts]
        document = {"format": _FORMAT, "node": self.node, "parts": parts}
        return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes) -> NodeInventory:
        """Read what `to_json` wrote. Trusts nothing in ``data``, since it comes from another machine.

        Raises:
            ProtocolError: ``data`` is larger than `MAX_INVENTORY_BYTES` or is not a valid inventory.
        """
        if len(data) > MAX_INVENTORY_BYTES:
            raise ProtocolError(f"an inventory of {len(data):,} bytes is over the limit")
        try:
            document = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"an inventory is not JSON: {error}") from None
        if not isinstance(document, dict) or document.keys() != {"format", "node", "parts"}:
            raise ProtocolError("an inventory must have a format, a node and parts, and nothing else")
        if type(document["format"]) is not int or document["format"] != _FORMAT:
            raise ProtocolError(f"an inventory has a format other than {_FORMAT}")
        if not isinstance(document["parts"], list):
            raise ProtocolError("the parts of an inventory must be a list")
        try:
            return cls(document["node"], tuple(_part_from_json(fields) for fields in document["parts"]))
        except FlashpointError as error:
            raise ProtocolError(f"an inventory holds something invalid: {error}") from None


@dataclass(frozen=True, slots=True)
class CompleteVersion:
    """A version of which every part exists somewhere.

    Args:
        version: its directory name.
        step: its step.
        save_id: the save id that all its parts are of.
        world_size: number of its parts.
        holders: for each rank, the nodes that hold its part, ascending, at least one.
    """

    version: str
    step: int
    save_id: str
    world_size: int
    holders: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Fetch:
    """One part to be copied from one node to another.

    Args:
        target_rank: rank that fetches. Equal to `part_rank` where that rank needs its own part to go on; else
            the part is one that `target_rank` should hold a copy of.
        part_rank: rank whose part it is.
        source_node: node to fetch from; it holds the part before any fetch of the plan is done.
        size: bytes to transfer.
    """

    target_rank: int
    part_rank: int
    source_node: str
    size: int


@dataclass(frozen=True, slots=True)
class RecoveryPlan:
    """The version to go on from, and what it takes to have it where it is needed.

    Args:
        version: the version, with all nodes that hold its parts before any fetch.
        same_topology: whether it was saved by as many ranks as there are now. If so, after the fetches every
            rank finds its own part on its own node. If not, there are no fetches, and the reader asks the
            holders for the byte ranges that it needs.
        fetches: parts that ranks need for themselves come first, then copies for the next loss. All may run
            at the same time: none depends on another.
    """

    version: CompleteVersion
    same_topology: bool
    fetches: tuple[Fetch, ...]


def complete_versions(
    inventories: Iterable[NodeInventory], *, damaged: Collection[tuple[str, str, str, int]] = ()
) -> list[CompleteVersion]:
    """Return the versions of which the parts of all ranks exist with the same save id, newest first.

    Args:
        inventories: what the reachable nodes hold. Several of the same node count as one.
        damaged: ``(node, version, save id, rank)`` of parts that are not to be used, although they are listed.
    """
    saves = _collect(inventories, frozenset(damaged))
    return [version for version, _ in _complete(saves)]


def plan_recovery(
    inventories: Iterable[NodeInventory],
    topology: Topology,
    *,
    strategy: ReplicationStrategy | None = None,
    damaged: Collection[tuple[str, str, str, int]] = (),
    excluded: Collection[tuple[str, str]] = (),
) -> RecoveryPlan | None:
    """Plan how to go on from the newest version of which every part exists somewhere.

    Sources are chosen among the holders so that the bytes that each sends are balanced. No node fetches the
    same part twice, nor one that it holds undamaged.

    Args:
        inventories: what the reachable nodes hold; every node listed is taken to be able to serve what it
            lists.
        topology: where the ranks run now.
        strategy: if given, the copies that it asks for are fetched too, so that the next loss is survived.
        damaged: as for `complete_versions`; a node replaces its damaged parts.
        excluded: ``(version, save id)`` of versions that were tried and found bad, whoever holds them.

    Returns:
        The plan, or ``None`` if no version that is not excluded is complete.
    """
    saves = _collect(inventories, frozenset(damaged))
    forbidden = frozenset(excluded)
    for version, sizes in _complete(saves):
        if (version.version, version.save_id) in forbidden:
            continue
        if version.world_size != topology.world_size:
            return RecoveryPlan(version, same_topology=False, fetches=())
        own = [(rank, rank) for rank in range(version.world_size) if topology.nodes[rank] not in sizes[rank]]
        copies = [] if strategy is None else _missing_copies(sizes, topology, strategy)
        return RecoveryPlan(version, same_topology=True, fetches=tuple(_assign(own, copies, sizes)))
    return None


def is_protected(version: CompleteVersion, topology: Topology, strategy: ReplicationStrategy | None) -> bool:
    """Whether every part of a version is where it belongs, as are all copies that the strategy asks for.

    Where another number of ranks has saved it, whether as many nodes hold each part.
    """
    ranks = range(topology.world_size)
    copies = [() if strategy is None else strategy.copies_of(rank, topology) for rank in ranks]
    if version.world_size != topology.world_size:
        fewest = min((len({topology.node_of(rank) for rank in (rank, *copies[rank])}) for rank in ranks), default=1)
        return all(len(nodes) >= fewest for nodes in version.holders)
    return all(topology.node_of(home) in version.holders[rank] for rank in ranks for home in (rank, *copies[rank]))


def superseded(save_id: str, verified: str) -> bool:
    """Whether parts of a save may be removed: those of saves begun before the verified one.

    Removing nothing else keeps this true at every instant, however the nodes' removals interleave: after any loss that
    the strategy survives, the verified version or a newer one is complete.

    Args:
        verified: save id of a version of which *every* rank's part has been committed and *every* copy that the
            strategy asks for has been acknowledged. A version for which this holds on some ranks only must not be
            given.
    """
    return save_id < verified


# Of one save: for each rank, the nodes that hold its part, with the size that each states.
_Sizes = dict[int, dict[str, int]]
_Saves = dict[tuple[str, int, int], _Sizes]


def _collect(inventories: Iterable[NodeInventory], damaged: frozenset[tuple[str, str, str, int]]) -> _Saves:
    saves: _Saves = {}
    for inventory in inventories:
        node = inventory.node
        for part in inventory.parts:
            if damaged and (node, part.version, part.save_id, part.rank) in damaged:
                continue
            # The world size is part of the key so that a stray part that claims another one cannot spoil a
            # save.
            save = saves.setdefault((*part.order, part.world_size), {})
            holders = save.setdefault(part.rank, {})
            holders[node] = max(part.size, holders.get(node, 0))
    return saves


def _complete(saves: _Saves) -> Iterator[tuple[CompleteVersion, _Sizes]]:
    for save_id, step, world_size in sorted(saves, reverse=True):
        sizes = saves[save_id, step, world_size]
        # Ranks are distinct and below the world size, so counting them is enough; and nothing proportional to
        # a claimed world size is allocated before as many parts have been seen.
        if len(sizes) == world_size:
            holders = tuple(tuple(sorted(sizes[rank])) for rank in range(world_size))
            name = CheckpointContainerId.format_version_container(step)
            yield CompleteVersion(name, step, save_id, world_size, holders), sizes


def _missing_copies(sizes: _Sizes, topology: Topology, strategy: ReplicationStrategy) -> list[tuple[int, int]]:
    missing = []
    for part_rank in range(topology.world_size):
        satisfied = {*sizes[part_rank], topology.nodes[part_rank]}
        for holder in strategy.copies_of(part_rank, topology):
            node = topology.node_of(holder)
            if node not in satisfied:
                satisfied.add(node)
                missing.append((holder, part_rank))
    return missing


def _assign(
    own: Sequence[tuple[int, int]], copies: Sequence[tuple[int, int]], sizes: Mapping[int, Mapping[str, int]]
) -> Iterator[Fetch]:
    sent_bytes: dict[str, int] = {}
    sent_parts: dict[str, int] = {}

    def load(node: str) -> tuple[int, int, str]:
        # Counting parts spreads those of size zero too; the name makes every rank decide alike.
        return sent_bytes.get(node, 0), sent_parts.get(node, 0), node

    def difficulty(wanted: tuple[int, int]) -> tuple[int, int, tuple[int, int]]:
        # Parts with few holders, then large ones, are placed while there is still room to balance around
        # them.
        holders = sizes[wanted[1]]
        return len(holders), -max(holders.values()), wanted

    for wanted in (own, copies):
        for target_rank, part_rank in sorted(wanted, key=difficulty):
            holders = sizes[part_rank]
            source = min(holders, key=load)
            sent_bytes[source] = sent_bytes.get(source, 0) + holders[source]
            sent_parts[source] = sent_parts.get(source, 0) + 1
            yield Fetch(target_rank, part_rank, source, holders[source])


def _part_from_json(fields: object) -> PartRecord:
    if not isinstance(fields, list) or len(fields) != 5:
        raise InvalidArgumentError("a part must be a list of five fields", argument="part", value=fields)
    step, rank, world_size, save_id, size = fields
    version = CheckpointContainerId.format_version_container(step)
    return PartRecord(version, step, rank, world_size, save_id, size)


def _check_integer(argument: str, value: int, minimum: int, maximum: int) -> None:
    if type(value) is not int or not minimum <= value <= maximum:
        raise InvalidArgumentError(f"must be an integer from {minimum} to {maximum}", argument=argument, value=value)
