"""`make bench`: a peer's failure is a row with its reason, and nothing is left behind, however a run ends."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from benchmarks import loop, peers
from benchmarks.timing import Memcpy, Result, of_peer
from tests.support.forked import Report, call, wait_until
from tests.support.processes import child_environment

TENSORS = 400


def rows_with_few_descriptors(report: Report, folder: Path) -> tuple[list[Result], list[str]]:
    """The rows of peers that save more tensors than the process may open files, and what they leave."""
    limit = len(os.listdir("/proc/self/fd")) + TENSORS // 2
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    state = {str(number): torch.rand(8) for number in range(TENSORS)}
    store = f"file://{folder.parent}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)  # DCP wants it to save later
    rows = list(peers.saves_and_loads("few", state, Memcpy(state), folder))
    torch.distributed.destroy_process_group()
    return rows, os.listdir(folder)


@pytest.mark.slow
def test_a_peer_that_runs_out_of_descriptors_is_a_row_with_the_reason(tmpfs: Path) -> None:
    rows, left = call(rows_with_few_descriptors, tmpfs / "peers")
    measured = [row.case for row in rows if row.runs]
    assert measured == [
        "torch.save",
        "torch.load(mmap=False)",
        "safetensors save_file",
        "dcp.save, FileSystemWriter",
        "dcp.load, FileSystemReader",
    ]
    (row,) = [row for row in rows if not row.runs]
    assert row.case == "dcp.async_save, cached stager, blocked"
    assert row.note.startswith("failed: RuntimeError: ")
    assert "Too many open files" in row.note
    assert left == [], "what the peer held is free, and its files can be removed"


def test_rows_before_a_failure_stay() -> None:
    made = Result("state", "case", 1.0, 1.0, 1.0, None, 5)

    def rows() -> Iterator[Result]:
        yield made
        raise ValueError("no room\nand more")

    failed = Result("state", "other", 0.0, 0.0, 0.0, None, 0, note="failed: ValueError: no room")
    assert list(of_peer("state", "other", rows())) == [made, failed]


def test_a_peer_that_fails_in_a_loop_leaves_the_others_measured(tmpfs: Path) -> None:
    def fail(step: int) -> None:
        raise OSError("no room")

    sound: Any = (lambda step: None, lambda: 0.0, lambda: None)

    def rows_with(failing: str) -> list[Result]:
        kinds = {"no saves": sound, "ours: sound": sound, failing: (fail, lambda: 0.0, lambda: None)}
        return list(loop._compared("short", lambda: loop._Loop(1, 2, 1), tmpfs / "loop", lambda *_: {**kinds}))

    rows = rows_with("peer")
    assert {row.case: bool(row.runs) for row in rows} == {
        "peer: step": False,
        "peer: held": False,
        "no saves: step": True,
        "ours: sound: step": True,
        "ours: sound: held": True,
    }
    with pytest.raises(OSError, match="no room"):
        rows_with("ours: failing")


@pytest.mark.parametrize("how", ["exit", "descriptors", "terminated", "interrupted"])
def test_nothing_is_left_however_it_ends(tmpfs: Path, how: str) -> None:
    script = "import sys; from pathlib import Path; from benchmarks import supervised; "
    script += "sys.exit(supervised.run('tests.workers.benchmark_that_fails', [sys.argv[1]], Path(sys.argv[2])))"
    parent = subprocess.Popen(
        [sys.executable, "-c", script, how, str(tmpfs)], stdout=subprocess.PIPE, text=True, env=child_environment()
    )
    assert parent.stdout is not None
    left = int(parent.stdout.readline())
    ended = {"exit": 7, "descriptors": 1, "terminated": 128 + signal.SIGTERM, "interrupted": -signal.SIGINT}
    if how in ("terminated", "interrupted"):
        parent.send_signal(signal.SIGTERM if how == "terminated" else signal.SIGINT)
    parent.communicate(timeout=60)
    assert parent.returncode == ended[how]
    assert list(tmpfs.iterdir()) == []
    wait_until(lambda: not psutil.pid_exists(left), "the process that it left has ended", 60)
