"""Parts of versions in dictionaries, and plans carried out on them: for tests of planning."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from hypothesis import strategies as st

from ml_flashpoint.format.names import SaveId
from ml_flashpoint.ranks.recovery import CompleteVersion, Damage, NodeInventory, PartRecord, plan_fetches
from ml_flashpoint.ranks.strategies import (
    CliqueStrategy,
    PairwiseReplicationStrategy,
    ReplicationStrategy,
    RingReplicationStrategy,
    Topology,
)

Store = dict[str, set[PartRecord]]


def part(step: int, rank: int, world_size: int = 2, run: int = 1, size: int = 10, table: str = "") -> PartRecord:
    return PartRecord(SaveId(run, step), rank, world_size, size, table)


def inventories(store: Mapping[str, Collection[PartRecord]]) -> list[NodeInventory]:
    return [NodeInventory(node, tuple(parts)) for node, parts in store.items()]


def is_of(record: PartRecord, version: CompleteVersion) -> bool:
    return (record.save, record.world_size) == (version.save, version.world_size)


def carry_out(
    version: CompleteVersion,
    store: Store,
    topology: Topology,
    strategy: ReplicationStrategy | None = None,
    damaged: Collection[Damage] = frozenset(),
) -> None:
    """Performs the plan's fetches on `store`; fails if one is impossible or useless, or a part is missing."""
    sound = {
        (node, record.rank): record
        for node, records in store.items()
        for record in records
        if is_of(record, version) and (node, record.save, record.rank) not in damaged
    }
    received = {}
    for fetch in plan_fetches(version, topology, strategy):
        target = topology.node_of(fetch.target)
        assert fetch.target == fetch.rank or fetch.target in strategy.copies_of(fetch.rank, topology)  # type: ignore[union-attr]
        assert (target, fetch.rank) not in sound, "the node has this part already"
        assert (target, fetch.rank) not in received, "the node fetches this part twice"
        assert (fetch.source, fetch.rank) in sound, "the source does not hold this part"
        received[target, fetch.rank] = sound[fetch.source, fetch.rank]
        assert fetch.size >= received[target, fetch.rank].size
    for (node, _), record in received.items():
        store.setdefault(node, set()).add(record)
    for rank in range(topology.world_size):
        holders = () if strategy is None else strategy.copies_of(rank, topology)
        for node in (topology.nodes[rank], *(topology.nodes[holder] for holder in holders)):
            assert (node, rank) in sound or (node, rank) in received, f"{node} lacks the part of rank {rank}"


NODES = "abcd"
topologies = st.lists(st.sampled_from(NODES), min_size=1, max_size=6).map(lambda n: Topology(tuple(n)))
replicating = st.one_of(
    st.just(PairwiseReplicationStrategy()),
    st.builds(RingReplicationStrategy, copies=st.integers(1, 3)),
    st.builds(CliqueStrategy, factor=st.integers(2, 3), jump=st.integers(1, 3)),
)
