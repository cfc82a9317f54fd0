"""A node killed in jobs of real size: 256 MiB a rank, blocks of 16 MiB, two nodes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked import Team
from tests.workers import real_nodes as worker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

REAL = {"FLASHPOINT_TEST_BLOCK_BYTES": str(16 << 20)}


def run(function: Callable[..., Any], root: Path, *args: Any) -> list[Any]:
    with Team(function, root, 2, *args, env=REAL) as team:
        return team.results(timeout_s=300)


def kill_a_node(function: Callable[..., Any], root: Path, told: str, step: int, *args: Any) -> None:
    """Runs until a step is known to be verified, kills both ranks, and loses the memory of node 0."""
    with Team(function, root, 2, *args, env=REAL) as team:
        team[0].next_report(told, step, timeout_s=300)
        team[0].kill()
        team[1].kill()
    shutil.rmtree(root / "node-0")


def test_a_ddp_job_loses_a_node_and_is_the_undisturbed_job(tmpfs: Path) -> None:
    kill_a_node(worker.train, tmpfs, "replicated", 2, 3, True)
    results = run(worker.train, tmpfs, 4, False)
    assert {began for began, *_ in results} in ({2}, {3})
    assert results[0][1] > 100 << 20, "node 0 had to fetch its share"
    assert [failures for _, _, failures, _ in results] == [0, 0]
    expected = run(worker.undisturbed, tmpfs / "reference", 4)
    assert [final for *_, final in results] == expected


def test_raw_dcp_loses_a_node_and_loads_bit_for_bit(tmpfs: Path) -> None:
    kill_a_node(worker.save_by_dcp, tmpfs, "verified", 2, 1, 3, True)
    found = run(worker.load_by_dcp, tmpfs)
    assert found in ([2, 2], [3, 3])
    run(worker.save_by_dcp, tmpfs, found[0] + 1, found[0] + 2, False)
    assert run(worker.load_by_dcp, tmpfs) == [found[0] + 2] * 2
