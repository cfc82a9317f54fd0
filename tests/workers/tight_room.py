"""Ranks that save one step after the other on a filesystem with little room. See `tests.faults.test_tight_room`."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ml_flashpoint.format.errors import FlashpointError
from ml_flashpoint.format.knobs import BLOCK_BYTES_VARIABLE
from tests.support.forked import Report
from tests.workers.fault_engine import Rank, base_here


def _used(base: Path) -> int:
    stats = os.statvfs(base.parent)
    return (stats.f_blocks - stats.f_bfree) * stats.f_frsize


def save_back_to_back(report: Report, rank: int, sizes: list[int], lag: int) -> dict[str, Any]:
    """Load, then save a state of each of these sizes, without a pause; and what became of it.

    Args:
        lag: after so many saves, all are waited for.

    Returns:
        ``loaded``: the step; ``errors``: saves that raised; ``verified``: the last verified step seen after each save;
        ``at``: when that was, in seconds;
        ``used``: the most bytes used on the filesystem; and the counters of saves.
    """
    base = Path(base_here())
    os.environ[BLOCK_BYTES_VARIABLE] = str(1 << 16)  # states of some MiB stand for large ones, as do their manifests
    engine = Rank(base, replicate=True)
    found = engine.checkpointer.latest()
    loaded = 0 if found is None else found.step or 0
    state = torch.arange(max(sizes) // 8, dtype=torch.int64) + rank
    verified: list[int] = []
    at: list[float] = []
    errors: list[str] = []
    used = 0
    for step, size in enumerate(sizes, loaded + 1):
        dist.all_reduce(torch.zeros(1))  # what keeps ranks at the same step, as training does
        state[:: 64 << 10] = step
        try:
            save = engine.checkpointer.begin(step, explicit=True)
            save.fill([("state", state[: size // 8])], [("step", b"%d" % step)])
            save.commit()
        except FlashpointError as error:
            errors.append(f"{step}: {error}")
        if lag and step % lag == 0:
            engine.checkpointer.wait(30)
        verified.append(engine.checkpointer.status.verified or 0)
        at.append(time.monotonic())
        used = max(used, _used(base))
    settled = engine.checkpointer.wait(60)
    used = max(used, _used(base))
    dist.barrier()
    result = {"loaded": loaded, "errors": errors, "verified": verified, "at": at, "used": used, "settled": settled}
    status = engine.checkpointer.status
    result |= {"last_verified": status.verified, "copy_error": status.replication_error}
    engine.close()
    return result
