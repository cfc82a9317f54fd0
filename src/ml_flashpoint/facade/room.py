"""The preflight of a job: room on each node for the versions that its ranks will keep, asked before training starts."""

from __future__ import annotations

import contextlib
import json

from ml_flashpoint.engine.checkpointer import Checkpointer
from ml_flashpoint.format.errors import CapacityError
from ml_flashpoint.memory.capacity import available_bytes
from ml_flashpoint.memory.pool import ROOM, slot_size


def check_room(checkpointer: Checkpointer, expected_bytes: int) -> None:
    """Check that every node has room for the slots of its ranks, and of those whose copies it holds. Collective.

    Args:
        expected_bytes: bytes that this rank saves.

    Raises:
        CapacityError: a node has not. Raised on all ranks.
    """
    ranks, base, kept = checkpointer.ranks, checkpointer.container.base, checkpointer.config.rule.beside_newest
    sizes = [slot_size(json.loads(blob)) for blob in ranks.gather(json.dumps(expected_bytes).encode())]

    def check() -> None:
        here = ranks.topology.ranks_of(ranks.node)
        held = [each for rank in here for each in checkpointer.strategy.held_by(rank, ranks.topology)]
        needed = (2 + kept) * sum(sizes[rank] for rank in (*here, *held))
        available = available_bytes(base) - ROOM
        for path in checkpointer.container.slot_paths():
            with contextlib.suppress(OSError):  # taken over, or replaced, by its rank
                available += path.stat().st_blocks * 512
        if needed > available:
            beside = f", {kept} of them kept beside the newest" if kept else ""
            raise CapacityError(
                f"checkpoints of {len(here)} rank(s) need {needed} bytes in {base} ({2 + kept} own versions{beside}, as"
                f" many of {len(held)} peers), but only {available} bytes are available",
                needed_bytes=needed,
                available_bytes=available,
                path=base,
                hint="enlarge the tmpfs (mount -o remount,size=...) or the container, free memory, "
                + ("keep fewer versions, or replicate less" if kept else "or replicate less"),
            )

    ranks.together(check, CapacityError("another node has too little room; its log says how much", rank=ranks.rank))
