"""Ranks that do not come to a save: rank 0 names them, in its log, its events and its status."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch.distributed as dist

from ml_flashpoint import Flashpoint, events
from ml_flashpoint.local import BasicTensorAwareStateDict, LocalCheckpointManager
from ml_flashpoint.status import Status, read_status
from tests.support.forked import Report, Team, wait_until
from tests.support.loops import Stored

LATE = {"FLASHPOINT_LATE_S": "0.5"}


def train(report: Report, rank: int, steps: int, how: str) -> int:
    """Make one step together where ``steps`` is 1, and then one that a rank comes to only when it is told to."""
    base = os.environ["FLASHPOINT_TEST_BASE"]
    report("resumed")
    if how == "local":
        manager = LocalCheckpointManager(base)
        assert manager.find_latest() == -1
        base, save = str(manager.local_ckpt_dir), lambda step: manager.save(BasicTensorAwareStateDict({"a": 1}), step)
        close = manager.close
    else:
        fp = Flashpoint(base)
        fp.track(value=Stored(1)).resume()
        save, close = fp.save, fp.close
    with events.subscribe(lambda event: isinstance(event, events.RanksMissing) and report("missing", event), base):
        for step in range(steps):
            save(step)
        report("before", base)
        report.listen()
        save(steps)
        report.listen()
        close()
    return dist.get_rank()


def status_of(base: Path, rank: int) -> Status | None:
    return read_status(base / ".flashpoint" / "status" / str(rank))


@pytest.mark.parametrize(("steps", "how"), [(0, "facade"), (1, "local")])
def test_ranks_that_do_not_come_are_named(tmpfs: Path, steps: int, how: str) -> None:
    with Team(train, tmpfs, 3, steps, how, placement=[0, 0, 0], env=LATE) as team:
        bases = [Path(child.next_report("before")[1]) for child in team.ranks]
        team[0].say("go")
        _, event = team[0].next_report("missing")
        assert (event.ranks, event.step, event.rank) == ((1, 2), steps, 0)
        wait_until(lambda: (told := status_of(bases[0], 0)) is not None and told.degraded, "it is in the status")
        told = status_of(bases[0], 0)
        assert told is not None
        assert f"ranks 1, 2 have not come to the save of step {steps}" in (told.agreement_error or "")
        assert "nothing was heard of rank 1, 2" in team[0].log
        for late in team[1], team[2]:
            late.say("go")
        wait_until(lambda: (told := status_of(bases[0], 0)) is not None and told.verified == steps, "it is verified")
        told = status_of(bases[0], 0)
        assert told is not None
        assert not told.degraded
        for child in team.ranks:
            child.say("end")
        assert team.results() == [0, 1, 2]
