"""What the ranks of a team do while some of them are killed, or meet peers that speak nonsense."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import asdict

import torch
import torch.distributed as dist

from tests.support.forked import Report
from tests.workers.fault_engine import Rank, base_here, die_at


def team_load(report: Report, rank: int, size: str) -> tuple[int, int] | None:
    """Load and check the latest version, on all ranks."""
    engine = Rank(base_here(), replicate=True)
    found = engine.load_if_any(size)
    _train()  # as long as others may still read from here
    engine.close()
    return found


def team_read_all(report: Report, rank: int) -> int | None:
    """Find the latest version and read every part of it, as doors do that reshard; its step."""
    engine = Rank(base_here(), replicate=True)
    found = engine.checkpointer.latest()
    if found is not None:
        with engine.checkpointer.open_version(found) as reader:
            for part in range(reader.world_size):
                opened = reader.open(part)
                opened.ensure(0, opened.record.size)
    _train()
    engine.close()
    return None if found is None else found.step


def team_save(report: Report, rank: int, size: str, steps: list[int], life: int, die: int = 0) -> int:
    """Save these steps, and wait for the copies; the number of changes to files."""
    engine = Rank(base_here(), replicate=True)
    changes = die_at(base_here(), die)
    for step in steps:
        _train()
        report("begins", step)
        engine.save(size, step, life)
        report("committed", step)
        if not engine.checkpointer.wait(30):
            raise AssertionError("the copies were not made in time")
        report("verified", engine.checkpointer.status.verified or 0)
    engine.close()
    return changes()


def team_save_for_ever(report: Report, rank: int, size: str, first: int, life: int) -> None:
    """Load, then save one step after the other, as fast as all ranks can."""
    engine = Rank(base_here(), replicate=True)
    report("loaded", engine.load_if_any(size))
    step = first
    while True:
        _train()
        report("begins", step)
        engine.save(size, step, life)
        report("committed", step)
        report("verified", engine.checkpointer.status.verified or 0)
        step += 1


def _train() -> None:
    """What keeps ranks at the same step, as training does; fails when a rank is gone."""
    dist.all_reduce(torch.zeros(1))


# ---- bad peers ----------------------------------------------------------------------------------------------


def team_obey(report: Report, rank: int, size: str) -> None:
    """Do what the test says, one thing after the other, and report when it is done and how long it took."""
    engine = Rank(base_here(), replicate=True)
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


def team_load_and_save(report: Report, rank: int, size: str, steps: list[int], life: int) -> tuple[int, int] | None:
    """Load, save these steps, and wait until they are verified."""
    engine = Rank(base_here(), replicate=True)
    found = engine.load_if_any(size)
    for step in steps:
        _train()
        engine.save(size, step, life)
        if not engine.checkpointer.wait(30):
            raise AssertionError("the copies were not made in time")
    engine.close()
    return found


def team_load_and_commit(report: Report, rank: int, size: str, steps: list[int], life: int) -> None:
    """Load, and save so that nothing gets verified: the other ranks are told other steps."""
    engine = Rank(base_here(), replicate=True)
    report("loaded", engine.load(size))
    for step in steps:
        engine.save(size, step + rank, life)
    engine.checkpointer.wait(30)
    report("committed")
    threading.Event().wait()
