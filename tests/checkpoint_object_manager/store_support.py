"""Parts for tests of stores: small objects with the right digests."""

from __future__ import annotations

from pathlib import Path

from ml_flashpoint.checkpoint_object_manager.arena import Arena
from ml_flashpoint.checkpoint_object_manager.held_part import HeldPart
from ml_flashpoint.checkpoint_object_manager.rank_store import RankStore
from ml_flashpoint.format.digest import BLOCK_SIZE, digest_block
from ml_flashpoint.format.manifest import Manifest, ObjectRecord, object_name

ARENA = 65536


def content(rank: int, save_id: str, kind: str = "safetensors") -> bytes:
    """The bytes of an object, different for each."""
    return f"rank {rank} {save_id} {kind} ".encode() * 50


def manifest_of(
    step: int, rank: int, save_id: str, *, world_size: int = 4, kinds: tuple[str, ...] = ("safetensors",)
) -> Manifest:
    """The manifest of a part of such objects."""
    records = []
    for kind in kinds:
        data = content(rank, save_id, kind)
        name = object_name(rank, save_id, kind)
        records.append(ObjectRecord(name, len(data), ARENA, (digest_block(data),), BLOCK_SIZE))
    return Manifest(f"step-{step}_ckpt", rank, world_size, save_id, "node", tuple(records))


def write(arena: Arena, rank: int, save_id: str, kind: str = "safetensors") -> Arena:
    """Fill an arena with an object."""
    data = content(rank, save_id, kind)
    arena.buffer[: len(data)] = data
    return arena


def commit(store: RankStore, step: int, save_id: str, *, rank: int | None = None) -> HeldPart:
    """Save a part, or take in another rank's."""
    rank = store.rank if rank is None else rank
    arena = write(store.acquire(ARENA, exact=True), rank, save_id)
    return store.commit(manifest_of(step, rank, save_id), [arena])


def files(base: Path) -> set[str]:
    """Files of versions, below a base container."""
    return {str(p.relative_to(base)) for p in base.glob("step-*/**/*") if p.is_file()}


def arenas(base: Path) -> list[str]:
    """Names of the files of arenas, of all ranks."""
    return sorted(p.name for p in base.glob(".flashpoint/*/arena-*"))
