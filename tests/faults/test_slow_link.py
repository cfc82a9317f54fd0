"""A copy that takes very long, because its link trickles: the loop waits for it no longer than its deadline."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch

from ml_flashpoint import Flashpoint
from ml_flashpoint.replication.replication_manager import ReplicationManager
from tests.faults.test_tight_room import MIB, documented, nodes
from tests.support.forked import Report, Team
from tests.support.loops import Stored
from tests.workers.fault_engine import base_here


def train(report: Report, rank: int) -> tuple[int, int | None, str | None]:
    """Save while a copy goes on, which ends when the loop has come through; failed saves, and what is verified then."""
    ended, replicate = threading.Event(), ReplicationManager.replicate

    def trickling(self: ReplicationManager, *args: Any, **kwargs: Any) -> None:
        report("pushes")
        ended.wait()
        replicate(self, *args, **kwargs)

    with Flashpoint(base_here(), deadline_s=1.0) as fp:
        fp.track(value=Stored(torch.full((MIB,), float(rank)))).resume()  # of each rank, so all of it is written here
        fp.save(1)
        assert fp.wait(60)
        ReplicationManager.replicate = trickling  # type: ignore[method-assign]
        for step in range(2, 6):
            fp.save(step)
        failures, error = fp.health.failures, fp.health.last_error
        report("through")
        ended.set()
        report.listen()
        assert fp.wait(60)
        fp.save(6)
        assert fp.wait(60)
        return failures, fp.last_replicated, error


def test_a_save_waits_for_a_copy_no_longer_than_its_deadline(tmp_path: Path) -> None:
    room = documented(4, 4 * MIB)
    with nodes(tmp_path, room) as root, Team(train, root, 2) as team:
        for child in team.ranks:
            child.next_report("pushes")
            child.next_report("through")
        for child in team.ranks:
            child.say("go on")
        for failures, verified, error in team.results():
            assert failures >= 1, "no save had to wait for the copy"
            assert "CapacityError" in str(error) or "room" in str(error)
            assert verified == 6
