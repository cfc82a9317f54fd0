"""Managers of a dictionary as far as snapshots are concerned: stores on "nodes" of this machine, and what is in them.

Owns making values and entries, and managers of this process that find each other. Those in processes of their own are
`tests.workers.ddict_snapshots`'.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ml_flashpoint.ddict.manager.part_ref import PartRef
from ml_flashpoint.ddict.manager.shard import Entry, InlineValue, StoredValue
from ml_flashpoint.ddict.manager.slots import ValueSlots
from ml_flashpoint.ddict.manager.snapshots import Snapshots
from ml_flashpoint.ddict.manager.store import PartStore
from ml_flashpoint.format.errors import FlashpointError, ReplicationError
from ml_flashpoint.format.object_format import encode_header, plan_layout
from ml_flashpoint.net.transfers import Address
from ml_flashpoint.ranks.strategies import PairwiseReplicationStrategy, ReplicationStrategy, Topology

SECRET = bytes(range(32))

Content = dict[bytes, bytes]
"""What a checkpoint holds: of each key the bytes of its value."""


def make_value(store: PartStore, value_id: str, data: bytes) -> StoredValue:
    """A stored value, as a client leaves it: one tensor in a slot."""
    layout = plan_layout([("value", "uint8", (len(data),))])
    slot = store.take(layout.size)
    (entry,) = layout.tensors
    slot.buffer[entry.begin : entry.end] = data
    slot.buffer[: layout.data_start] = encode_header(layout, slot.size, {"value": value_id})
    return StoredValue(value_id, slot, layout.size)


def content_of(entries: Iterable[Entry]) -> Content:
    """What entries hold. Fails if a key is there twice."""
    found: Content = {}
    for entry in entries:
        assert entry.key not in found
        found[entry.key] = _bytes_of(entry)
    return found


def _bytes_of(entry: Entry) -> bytes:
    assert entry.value is not None
    if isinstance(entry.value, InlineValue):
        return entry.value.data
    import safetensors.torch

    tensors = safetensors.torch.load(bytes(entry.value.slot.buffer))
    return tensors["value"].numpy().tobytes()


class Others(Protocol):
    """The other managers, as one of them sees them.

    Attributes:
        base: folder of the nodes.
        nodes: node of every manager.
    """

    base: Path
    nodes: tuple[str, ...]
    strategy: ReplicationStrategy

    def address_of(self, number: int) -> Address | None: ...

    def reach(self, number: int) -> Reached:
        """What a manager answers. Raises if it cannot be reached."""
        ...


class Reached(Protocol):
    """What managers ask of each other."""

    def drop_copies(self, of: int, keep: Collection[str], before: int) -> None: ...


class Member:
    """A manager of this process, up or down.

    Attributes:
        entries: what its shard holds: the entry of each key.
        slots: of the stored values in it.
        saves: snapshots with verified copies, by checkpoint, as the coordinator knows them.
        failures: of the last recovery.
    """

    def __init__(self, cluster: Others, number: int) -> None:
        self.cluster = cluster
        self.number = number
        self.folder = cluster.base / cluster.nodes[number]
        self.entries: dict[bytes, Entry] = {}
        self.saves: dict[int, PartRef] = {}
        self.failures: dict[int, FlashpointError] = {}
        self.unreachable = False
        self._lives = itertools.count()
        self._values = itertools.count()
        self.up()

    def up(self) -> None:
        self.store = PartStore(self.folder, self.number, len(self.cluster.nodes), lock_deadline_s=5.0)
        self.slots = ValueSlots(self.store, "0" * 16)
        self.incarnation = f"{self.number}x{os.getpid()}x{next(self._lives)}"
        self.snapshots = Snapshots(
            self.store,
            nodes=self.cluster.nodes,
            holders=[
                self.cluster.strategy.copies_of(each, Topology(self.cluster.nodes))
                for each in range(len(self.cluster.nodes))
            ],
            secret=SECRET,
            ask=self._ask,
            values=self.slots,
        )
        self.is_up = True

    def _ask(self, number: int, operation: str, fields: dict[str, Any]) -> dict[str, Any]:
        if operation == "hello":
            return {"transfers": self.cluster.address_of(number)}
        self.cluster.reach(number).drop_copies(fields["of"], fields["keep"], fields["before"])
        return {}

    def down(self, *, lose_node: bool = False) -> None:
        """End it, with the memory of its node if so wished."""
        there = self.snapshots.sealed()
        self.saves = {each: ref for each, ref in self.saves.items() if there.get(each) == ref}
        self.snapshots.close()
        self.store.close()
        self.entries = {}
        self.is_up = False
        if lose_node:
            shutil.rmtree(self.folder)

    def restart(self, *, lose_node: bool = False) -> dict[int, Content]:
        """Down, up and recovered: what there is, by checkpoint. The shard goes on from the newest."""
        self.down(lose_node=lose_node)
        self.up()
        return self.recover()

    def recover(self) -> dict[int, Content]:
        found, self.failures = self.snapshots.recover(self.saves.values())
        if found:
            self.entries = {entry.key: entry for entry in found[max(found)]}
        return {checkpoint_id: content_of(entries) for checkpoint_id, entries in found.items()}

    def put(self, checkpoint_id: int, content: Mapping[bytes, bytes | None], *, stored: bool = False) -> None:
        """New entries in the shard."""
        for key, data in content.items():
            self.take_out(key)
            if data is None:
                continue
            value: InlineValue | StoredValue = InlineValue(data)
            if stored:
                value = make_value(self.store, f"v-{self.incarnation}-{next(self._values):012}", data)
                value.unused = self.slots._unused
                self.slots.hold(value)
            self.entries[key] = Entry(key, checkpoint_id, "w-1", value)

    def take_out(self, key: bytes) -> None:
        """The shard has no more use for an entry."""
        self.entries.pop(key, None)
        self.slots.collect()

    def seal(self, checkpoint_id: int, deadline_s: float = 20.0, *, entries: list[Entry] | None = None) -> Content:
        """Seal what is in the shard, or these entries."""
        entries = list(self.entries.values()) if entries is None else entries
        self.snapshots.seal(checkpoint_id, entries, deadline_s)
        self.saves = self.snapshots.sealed()  # those of earlier ones are verified, too
        return content_of(entries)

    def files(self, of: int) -> set[str]:
        """Files of parts of a manager on the node of this one: ``step-1_ckpt/rank-00000-...``."""
        return {str(p.relative_to(self.folder)) for p in self.folder.glob(f"step-*_ckpt/rank-{of:05d}-*")}


class Cluster:
    """Managers of this process.

    Args:
        base: folder of the nodes.
        nodes: node of every manager.
    """

    def __init__(
        self, base: Path, nodes: Sequence[str] = ("node-0", "node-1"), strategy: ReplicationStrategy | None = None
    ) -> None:
        self.base = base
        self.nodes = tuple(nodes)
        self.strategy = strategy or PairwiseReplicationStrategy()
        self.members: list[Member] = []
        for number in range(len(nodes)):
            self.members.append(Member(self, number))

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.members:
            if member.is_up:
                member.down()

    def __getitem__(self, number: int) -> Member:
        return self.members[number]

    def address_of(self, number: int) -> Address | None:
        member = self.members[number]
        return member.snapshots.address if member.is_up else None

    def reach(self, number: int) -> Snapshots:
        member = self.members[number]
        if not member.is_up or member.unreachable:
            raise ReplicationError("not there", rank=number)
        return member.snapshots
