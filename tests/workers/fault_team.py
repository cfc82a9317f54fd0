"""What the ranks of a team do while some of them are killed, hang, or have gone; for `tests.support.forked.Team`."""

from __future__ import annotations

import os
import time
from dataclasses import asdict

import torch
import torch.distributed as dist
from torch import nn

from ml_flashpoint import Flashpoint
from ml_flashpoint.format.errors import NothingLoadableError
from tests.support.forked import Report
from tests.support.worker import base_path
from tests.workers.fault_engine import Rank


def team_load(report: Report, rank: int, size: str) -> tuple[int, int] | None:
    """Load and check the latest version, on all ranks. None also if there are versions and none can be loaded, which is
    an error for whoever would start from nothing then."""
    engine = Rank(base_path(), "pairwise")
    try:
        found = engine.load(size)
    except NothingLoadableError as error:
        print(error)
        found = None
    _train()  # as long as others may still read from here
    engine.close()
    return found


def team_read_all(report: Report, rank: int) -> int | None:
    """Find the latest version and read every part of it, as doors do that reshard; its step, or None as above."""
    engine, found = Rank(base_path(), "pairwise"), None
    try:
        found = engine.checkpointer.latest()
    except NothingLoadableError as error:
        print(error)
    if found is not None:
        with engine.checkpointer.open_version(found) as reader:
            for part in range(reader.world_size):
                opened = reader.open(part)
                opened.ensure(0, opened.record.size)
    _train()
    engine.close()
    return None if found is None else found.step


def team_save(report: Report, rank: int, size: str, steps: list[int], life: int) -> None:
    """Save these steps, and wait for the copies."""
    engine = Rank(base_path(), "pairwise")
    for step in steps:
        _train()
        engine.save(size, step, life)
        if not engine.checkpointer.wait(30):
            raise AssertionError("the copies were not made in time")
    engine.close()


def _train() -> None:
    """What keeps ranks at the same step, as training does; fails when a rank is gone."""
    dist.all_reduce(torch.zeros(1))


def team_obey(report: Report, rank: int, size: str) -> None:
    """Do what the test says, one thing after the other, and report when it is done and how long it took."""
    engine = Rank(base_path(), "pairwise")
    if not engine.checkpointer.run:
        engine.checkpointer.latest()
    report("ready")
    while True:
        match report.listen():
            case ("save", step, life):
                began = time.monotonic()
                engine.save(size, step, life)
                report("committed", step, time.monotonic() - began)
            case ("wait", deadline_s):
                report("settled", engine.checkpointer.wait(deadline_s))
            case ("status",):
                report("status", asdict(engine.checkpointer.status))
            case ("end",):
                break
    # No farewell to peers: some of them may be gone.
    report("result", None)
    os._exit(0)


def saves_in_two_jobs(report: Report, rank: int, steps: int) -> list[tuple[int, int | None]]:
    """Two façades in one process group; ranks call them in different orders."""
    bases = [base_path().with_name(name) for name in ("one", "two")]
    both = [Flashpoint(base, deadline_s=60, handle_sigterm=False) for base in bases]
    for fp in both:
        fp.track(model=nn.Linear(8, 8)).resume()
    for step in range(1, steps + 1):
        # At the first save of each, ranks wait for each other.
        for fp in both if rank == 0 or step == 1 else reversed(both):
            fp.save(step)
    for fp in both:
        assert fp.wait(60)
    _train()
    result = [(fp.health.failures, fp.last_replicated) for fp in both]
    for fp in both:
        fp.close()
    return result
