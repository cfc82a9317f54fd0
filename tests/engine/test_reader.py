"""Readers of versions: where bytes come from, that they were checked, and that they stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch

from ml_flashpoint.engine.copying import Copies
from ml_flashpoint.engine.reader import DurableParts, MemoryParts, ObjectReader, VersionReader
from ml_flashpoint.format.errors import (
    DamagedError,
    DigestMismatchError,
    ObjectNotFoundError,
    UnreadableError,
)
from ml_flashpoint.format.knobs import BLOCK_BYTES_VARIABLE
from ml_flashpoint.format.manifest import MAX_BLOCK_SIZE, Manifest, ObjectRecord
from ml_flashpoint.format.names import CheckpointContainerId, SaveId, object_name
from ml_flashpoint.memory.container import BaseContainer, Owner
from ml_flashpoint.memory.pool import Pool, SlotRequest
from ml_flashpoint.stores.durable import DurableVersions
from ml_flashpoint.stores.files import Directory
from tests.memory.support import NUMBERS, commit, layout_of, value_of

SAVE = SaveId(3, 10)
BLOCK = 4096


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BLOCK_BYTES_VARIABLE, str(BLOCK))
    monkeypatch.setenv("FLASHPOINT_RECOVERY_DEADLINE_S", "0.1")


class Node:
    """A base container with the parts of two ranks, opened by one of them."""

    def __init__(self, base: Path, rank: int) -> None:
        self.container = BaseContainer(base)
        owners = [Owner(2, 0), Owner(2, 1)]
        self.pools = [Pool(self.container, owner, keep=1, owners=owners) for owner in owners]
        self.pool = self.pools[rank]

    def save(self, save: SaveId) -> None:
        for pool in self.pools:
            slot = pool.take(layout_of().size, SlotRequest(save, ()))
            assert slot is not None
            commit(pool, slot, save)

    def path(self, rank: int) -> Path:
        return self.container.base / SAVE.version / object_name(rank, SAVE.text)


class Peer:
    """A holder in this process: the side of `Copies` that a reader sees."""

    def __init__(self, container: BaseContainer) -> None:
        self.container = container
        self.blocks: list[tuple[int, int]] = []

    def manifest_of(self, save: SaveId, rank: int, nodes: object) -> Manifest:
        return self.container.read_manifest(save, rank)

    def read_blocks(self, save: SaveId, manifest: Manifest, first: int, buffer: memoryview, nodes: object) -> None:
        self.blocks.append((first, len(buffer)))
        with self.container.open_part(save, manifest.rank) as part:
            buffer[:] = part.buffer[first * BLOCK : first * BLOCK + len(buffer)]


@pytest.fixture
def node(tmpfs: Path) -> Node:
    node = Node(tmpfs / "a", 0)
    node.save(SAVE)
    return node


@pytest.fixture
def peer(tmpfs: Path) -> Peer:
    node = Node(tmpfs / "b", 1)
    node.save(SAVE)
    return Peer(node.container)


def parts_of(node: Node, peer: Peer | None = None) -> MemoryParts:
    holders: list[list[str]] = [[] if peer is None else ["b"]] * 2
    return MemoryParts(SAVE, node.container, node.pool, cast(Copies, peer), holders, set())


def reader_of(parts: Any) -> VersionReader:
    return VersionReader(CheckpointContainerId(f"/base/{SAVE.version}"), 2, parts)


def damage(path: Path) -> None:
    with open(path, "r+b") as file:
        file.seek(30000)
        file.write(b"damaged!")


@pytest.mark.parametrize("rank", [0, 1])
def test_the_slot_of_a_part_that_is_open_is_not_reused(node: Node, rank: int) -> None:
    newer = [SaveId(3, 20), SaveId(3, 30)]
    node.save(newer[0])  # both slots of each rank are taken now
    with reader_of(parts_of(node)) as reader:
        tensor = reader.open(rank).tensor("w")
        slot = node.pools[rank].take(layout_of().size, SlotRequest(newer[1], [newer[0]]))
        assert slot is None
        assert torch.equal(tensor, torch.full((NUMBERS,), value_of(SAVE, rank)))
        assert bytes(reader.open(rank).bytes_of("note")) == b"abc"
    assert node.pools[rank].take(layout_of().size, SlotRequest(newer[1], [newer[0]])) is not None


def test_a_version_says_how_many_parts_it_has(node: Node) -> None:
    with reader_of(parts_of(node)) as reader:
        assert reader.manifest(1).rank == 1
        for rank in (-1, 2):
            with pytest.raises(ObjectNotFoundError, match="saved by 2 ranks"):
                reader.manifest(rank)
        with pytest.raises(ObjectNotFoundError, match="no item 'x'"):
            reader.open(0).entry("x")
        node.container.remove_part(SAVE, 1)
        with pytest.raises(ObjectNotFoundError):
            reader.open(1)


def test_only_the_blocks_of_the_rows_come_from_elsewhere(tmpfs: Path, peer: Peer) -> None:
    with reader_of(parts_of(Node(tmpfs / "empty", 0), peer)) as reader:
        part = reader.open(1)
        assert peer.blocks == []
        begin, count = part.entry("w").begin + 2000 * 4, 100
        peer.blocks.clear()  # those of the header
        assert torch.equal(part.rows("w", [2000], [count]), torch.full((count,), value_of(SAVE, 1)))
        first, last = begin // BLOCK, (begin + 4 * count - 1) // BLOCK
        assert peer.blocks == [(first, (last - first + 1) * BLOCK)]
        part.rows("w", [2000], [count])
        assert len(peer.blocks) == 1, "no block comes twice"
        assert torch.equal(part.tensor("w"), torch.full((NUMBERS,), value_of(SAVE, 1)))
        assert part.rows("w", [5], [0]).numel() == 0


@pytest.mark.damages_on_purpose
@pytest.mark.parametrize("rank", [0, 1])
def test_a_damaged_part_is_read_from_its_holder(node: Node, peer: Peer, rank: int) -> None:
    damage(node.path(rank))
    with reader_of(parts_of(node)) as reader, pytest.raises(DigestMismatchError, match="block 7"):
        reader.open(rank)
    with reader_of(parts_of(node, peer)) as reader:
        assert torch.equal(reader.open(rank).tensor("w"), torch.full((NUMBERS,), value_of(SAVE, rank)))
        assert peer.blocks


@pytest.mark.damages_on_purpose
def test_a_part_of_another_size_is_damaged(node: Node) -> None:
    with open(node.path(1), "r+b") as file:
        file.truncate(8192)
    with reader_of(parts_of(node)) as reader, pytest.raises(DamagedError):
        reader.open(1)


def test_a_remote_object_of_a_size_that_cannot_be_is_a_typed_error() -> None:
    """A manifest that a peer gives may say anything."""
    blocks = 1 << 18
    size = blocks * MAX_BLOCK_SIZE
    record = ObjectRecord(size, size, ("0" * 16,) * blocks, MAX_BLOCK_SIZE)
    manifest = Manifest(SaveId(1, 1), 0, 1, "node", record)
    with pytest.raises(UnreadableError, match="no memory can be had"):
        ObjectReader(manifest, fetch=lambda *_: None)


@pytest.mark.damages_on_purpose
def test_durable_parts_are_read_by_checked_ranges(node: Node, tmpfs: Path) -> None:
    store = DurableVersions(Directory(tmpfs / "durable"))
    for rank in (0, 1):
        with node.container.open_part(SAVE, rank) as part:
            record = part.manifest.record
            rest = bytes(record.file_size - record.size)
            store.write_part(part.manifest, lambda part=part, rest=rest: [part.buffer, rest])  # type: ignore[misc]
    version = store.complete(SAVE, 2)
    with reader_of(DurableParts(store, version)) as reader:
        assert torch.equal(reader.open(1).rows("w", [10], [20]), torch.full((20,), value_of(SAVE, 1)))
    [path] = (tmpfs / "durable").rglob(object_name(1, SAVE.text))
    damage(path)
    with reader_of(DurableParts(store, version)) as reader:
        part = reader.open(1)
        assert torch.equal(part.rows("w", [10], [20]), torch.full((20,), value_of(SAVE, 1))), "its blocks are sound"
        with pytest.raises(DigestMismatchError, match="block 7"):
            part.tensor("w")
        path.unlink()
        with pytest.raises(ObjectNotFoundError):
            reader.open(1).tensor("w")
