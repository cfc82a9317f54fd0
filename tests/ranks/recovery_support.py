"""Parts of versions in dictionaries, and plans carried out on them: for tests of planning and pruning."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from hypothesis import strategies as st

from ml_flashpoint.ranks.recovery import CompleteVersion, NodeInventory, PartRecord, RecoveryPlan
from ml_flashpoint.ranks.strategies import (
    CliqueStrategy,
    PairwiseReplicationStrategy,
    ReplicationStrategy,
    RingReplicationStrategy,
    Topology,
)

Store = dict[str, set[PartRecord]]
Damaged = frozenset[tuple[str, str, str, int]]


def part(step: int, rank: int, world_size: int = 2, save_id: str = "a1", size: int = 10) -> PartRecord:
    return PartRecord(f"step-{step}_ckpt", step, rank, world_size, save_id, size)


def inventories(store: Mapping[str, Collection[PartRecord]]) -> list[NodeInventory]:
    return [NodeInventory(node, tuple(parts)) for node, parts in store.items()]


def is_of(record: PartRecord, version: CompleteVersion) -> bool:
    return (record.version, record.step, record.save_id, record.world_size) == (
        version.version,
        version.step,
        version.save_id,
        version.world_size,
    )


def carry_out(
    plan: RecoveryPlan,
    store: Store,
    topology: Topology,
    strategy: ReplicationStrategy | None,
    damaged: Damaged = frozenset(),
) -> None:
    """Performs the plan's fetches on `store`; fails if one is impossible or useless, or a part is missing."""
    sound = {
        (node, record.rank): record
        for node, records in store.items()
        for record in records
        if is_of(record, plan.version) and (node, record.version, record.save_id, record.rank) not in damaged
    }
    received = {}
    for fetch in plan.fetches:
        target = topology.node_of(fetch.target_rank)
        assert (target, fetch.part_rank) not in sound, "the node has this part already"
        assert (target, fetch.part_rank) not in received, "the node fetches this part twice"
        assert (fetch.source_node, fetch.part_rank) in sound, "the source does not hold this part"
        record = sound[fetch.source_node, fetch.part_rank]
        assert fetch.size == record.size
        if fetch.target_rank != fetch.part_rank:
            assert strategy is not None
            assert fetch.target_rank in strategy.copies_of(fetch.part_rank, topology)
        received[target, fetch.part_rank] = record
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
