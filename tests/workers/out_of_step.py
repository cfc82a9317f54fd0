"""Ranks that lose step: one saves more often, comes late, or fails a save. For `tests.support.forked.Team`.

Owns what one rank does. The functions return what the test compares.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import torch.distributed as dist
from torch import nn

from ml_flashpoint import Flashpoint, events
from ml_flashpoint.engine import copying
from ml_flashpoint.format.errors import SaveError, SkippedError
from ml_flashpoint.format.names import SaveId
from tests.support.forked import Report
from tests.workers.fault_engine import Rank


def base(name: str = "job") -> Path:
    """A base container on this rank's node."""
    return Path(os.environ["FLASHPOINT_TEST_BASE"]).with_name(name)


def fails_a_save(report: Report, rank: int) -> list[int | None]:
    """Rank 1 fails the save of step 2, with which the other rank goes on. The newest verified step after each save."""
    engine, verified = Rank(base(), replicate=True), []
    for step in range(1, 6):
        if rank == 1 and step == 2:
            checkpointer = engine.checkpointer
            checkpointer.begin(step, explicit=True).fail(SaveError("given up"))
        else:
            engine.save("tiny", step, 0)
        assert engine.checkpointer.wait(60)
        dist.barrier()
        verified.append(engine.checkpointer.status.verified)
    assert engine.load("tiny") == (5, 0)
    engine.close()
    return verified


def saves_more_often(report: Report, rank: int) -> list[int | None]:
    """Rank 1 saves a step that rank 0 does not. The newest verified step after each step that both save."""
    engine, verified = Rank(base(), replicate=True), []
    for step in (10, 20, 30, 40):
        engine.save("tiny", step, 0)
        if rank == 1 and step == 20:
            engine.save("tiny", 25, 0)
        dist.barrier()
        assert engine.checkpointer.wait(2 if step == 20 else 60) or step == 20  # rank 0 has not come to step 25
        verified.append(engine.checkpointer.status.verified)
        dist.barrier()
    assert engine.load("tiny") == (40, 0)
    engine.close()
    return verified


def comes_late(report: Report, rank: int) -> tuple[int, int | None]:
    """Rank 1 comes to step 2 after rank 0 has come to all its steps. What is found and verified then, and after one
    more step that both save."""
    engine = Rank(base(), replicate=True)
    engine.save("tiny", 1, 0)
    assert engine.checkpointer.wait(60)
    if rank == 1:
        report.listen()
    for step in range(2, 6):
        with contextlib.suppress(SkippedError):
            engine.save("tiny", step, 0, explicit=False)
    report("saved", engine.checkpointer.status.committed, engine.checkpointer.status.verified)
    assert engine.checkpointer.wait(60)
    dist.barrier()
    engine.save("tiny", 6, 0)
    assert engine.checkpointer.wait(60)
    verified = engine.checkpointer.status.verified
    dist.barrier()
    found = engine.load("tiny")
    assert found is not None
    engine.close()
    return found[0], verified


def finds_its_slot_read(report: Report, rank: int) -> int | None:
    """Somebody reads the slot that a holder has for the copy of step 3, until that copy was refused. The newest
    verified step."""
    copying.ROOM_S = 0.2  # type: ignore[misc]
    engine = Rank(base(), replicate=True)
    for step in (1, 2):
        engine.save("tiny", step, 0)
        assert engine.checkpointer.wait(60)
        dist.barrier()
    refused = threading.Event()

    def hear(event: events.Event) -> None:
        if isinstance(event, events.ReplicationFailed):
            refused.set()

    with contextlib.ExitStack() as reading, events.subscribe(hear):
        if rank == 1:
            reading.enter_context(engine.checkpointer.container.open_part(SaveId(engine.checkpointer.run, 1), 0))
        dist.barrier()
        engine.save("tiny", 3, 0)
        assert rank == 1 or refused.wait(60)
        dist.barrier()
    assert engine.checkpointer.wait(60)
    verified = engine.checkpointer.status.verified
    dist.barrier()
    engine.close()
    return verified


def saves_in_two_jobs(report: Report, rank: int, steps: int) -> list[tuple[int, int | None]]:
    """Two façades in one process group; ranks call them in different orders."""
    both = [Flashpoint(base(name), deadline_s=60, handle_sigterm=False) for name in ("one", "two")]
    for fp in both:
        fp.track(model=nn.Linear(8, 8)).resume()
    for step in range(1, steps + 1):
        # At the first save of each, ranks wait for each other.
        for fp in both if rank == 0 or step == 1 else reversed(both):
            fp.save(step)
    for fp in both:
        assert fp.wait(60)
    dist.barrier()
    result = [(fp.health.failures, fp.last_replicated) for fp in both]
    for fp in both:
        fp.close()
    return result
