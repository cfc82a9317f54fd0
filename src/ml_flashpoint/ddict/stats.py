"""What a manager tells about itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ManagerStats:
    """One manager, as `DDict.stats` has it.

    Attributes:
        manager: its number.
        node: number of its node.
        keys: keys with any value in the working set.
        used_bytes: of values, those of older checkpoints included.
        limit_bytes: most that they may take.
        oldest: oldest checkpoint of the working set.
        sealed: checkpoints that it could be recovered at.
        frozen: whether it refuses writes.
        persisted: newest checkpoint of the whole dictionary that this run has persisted, or has begun with; -1: none.
        persist_error: why the last one that was due, or asked for, could not be; None: it could.
    """

    manager: int
    node: int
    keys: int
    used_bytes: int
    limit_bytes: int
    oldest: int
    sealed: tuple[int, ...]
    frozen: bool
    persisted: int
    persist_error: str | None
