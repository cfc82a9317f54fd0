"""Parts for the tests of memory: real objects of a few pages."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

from ml_flashpoint.format.manifest import JOB_LABEL, Manifest
from ml_flashpoint.format.names import SaveId
from ml_flashpoint.format.object_format import Layout, plan_layout
from ml_flashpoint.memory.container import BaseContainer
from ml_flashpoint.memory.pool import Pool, SlotRequest
from ml_flashpoint.memory.slot import Slot

NUMBERS = 5000


def layout_of(numbers: int = NUMBERS) -> Layout:
    return plan_layout([("w", "float32", (numbers,))], [("note", 3)])


def fill(
    slot: Slot, save: SaveId, rank: int = 0, world_size: int = 4, numbers: int = NUMBERS, job: str = "job"
) -> Manifest:
    """Write an object whose numbers say which save and rank it is of; return the manifest to commit it by."""
    layout = layout_of(numbers)
    entry = layout.by_key["w"]
    slot.view(entry.begin, entry.end, torch.float32, entry.shape).fill_(value_of(save, rank))
    record = slot.seal(layout, [b"abc"])
    return Manifest(save, rank, world_size, "node-0", record, {JOB_LABEL: job})


def value_of(save: SaveId, rank: int = 0) -> float:
    return save.run * 10000 + save.step * 10 + rank


def value_in(container: BaseContainer, save: SaveId, rank: int = 0, numbers: int = NUMBERS) -> float:
    """Read a part, and return the one value that all its numbers have."""
    entry = layout_of(numbers).by_key["w"]
    with container.open_part(save, rank) as part:
        found = torch.frombuffer(bytearray(part.buffer[entry.begin : entry.end]), dtype=torch.float32)
    assert (found == found[0]).all()
    return float(found[0])


def taken(pool: Pool, size: int, request: SlotRequest, **how: bool) -> Slot:
    """Return a slot that a pool has for a save."""
    slot = pool.take(size, request, **how)
    assert slot is not None
    return slot


def commit(pool: Pool, slot: Slot, save: SaveId, numbers: int = NUMBERS, job: str = "job") -> None:
    pool.commit(slot, fill(slot, save, pool.owner.rank, pool.owner.world_size, numbers, job))


def fill_up(folder: Path) -> Path:
    """Take the last page of a filesystem; return the file that has it."""
    with contextlib.suppress(OSError), open(folder / "others", "wb", buffering=0) as file:
        while file.write(b"x" * 4096):
            pass
    return folder / "others"


def slot_files(base: Path) -> list[str]:
    return sorted(f"{path.parent.name}/{path.name}" for path in base.glob(".flashpoint/slots/*/*"))
