"""Recovery: the newest version of the lineage whose parts all exist, brought to where it is needed."""

from __future__ import annotations

from dataclasses import dataclass

from ml_flashpoint.format.save_id import SaveId


@dataclass(frozen=True, slots=True)
class KeptVersion:
    """A version that can be gone back to: every part of it is on some node of the job.

    Attributes:
        step: its step.
        verified: True if it is complete on all ranks, with every copy that the replication strategy asks for.
        bytes: of the parts of all ranks, each counted once.
        world_size: number of ranks that saved it.
        save: the save.
    """

    step: int
    verified: bool
    bytes: int
    world_size: int
    save: SaveId
