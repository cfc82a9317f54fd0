"""Workers of a loader whose rank is killed: they end, as those of a plain loop do."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import psutil
import pytest
import torch
from torch.utils.data import DataLoader

from ml_flashpoint import Flashpoint
from tests.support.forked import Child, Report, wait_until

WORKERS = 4


def loop_and_wait(report: Report, base: Path) -> None:
    """Take a batch of a tracked loader, and have workers fetch all that they may ahead."""
    loader = DataLoader(list(torch.zeros(64)), num_workers=WORKERS, prefetch_factor=4, multiprocessing_context="fork")  # type: ignore[arg-type]
    with Flashpoint(base) as fp:
        fp.track(loader=loader).resume()
        for _ in fp.batches(loader):
            report("workers", [each.pid for each in multiprocessing.active_children()])
            report.listen()


@pytest.mark.slow
def test_workers_of_a_killed_rank_end(tmpfs: Path) -> None:
    with Child(loop_and_wait, tmpfs / "job") as child:
        (_, pids) = child.next_report("workers")
        assert len(pids) == WORKERS
        os.kill(child.pid, signal.SIGKILL)
        wait_until(lambda: not any(map(_lives, pids)), "the workers have ended")


def _lives(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
