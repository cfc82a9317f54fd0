"""A node killed in jobs of real size through the other doors: 256 MiB a rank, blocks of 16 MiB, two nodes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import warm
from tests.support.cluster import Cluster
from tests.support.forked import Team
from tests.workers import real_doors as worker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

REAL = {"FLASHPOINT_TEST_BLOCK_BYTES": str(16 << 20)}


def run(function: Callable[..., Any], root: Path, *args: Any) -> list[Any]:
    with Team(function, root, 2, *args, env=REAL) as team:
        return team.results(timeout_s=300)


def test_local_checkpoints_survive_a_node_bit_for_bit(tmpfs: Path) -> None:
    with Team(worker.save_locally, tmpfs, 2, 1, 3, True, env=REAL) as team:
        for child in team.ranks:
            child.next_report("complete", 2, timeout_s=300)
        team[0].kill()
        team[1].kill()
    shutil.rmtree(tmpfs / "node-0")
    found = run(worker.load_locally, tmpfs)
    assert found in ([2, 2], [3, 3])
    run(worker.save_locally, tmpfs, found[0] + 1, found[0] + 2, False)
    assert run(worker.load_locally, tmpfs) == [found[0] + 2] * 2


def test_a_lightning_job_on_two_nodes_is_the_undisturbed_job(tmpfs: Path) -> None:
    with Cluster(
        tmpfs,
        "lightning_real",
        nodes=2,
        ranks_per_node=1,
        env=REAL,
        torchrun=True,
        max_restarts=1,
        preload=warm.LIGHTNING,
    ) as cluster:
        cluster.wait(timeout_s=500)
        found = [{key: value for each in cluster.reports(rank) for key, value in each.items()} for rank in range(2)]
        resumes = [[each["resumes"] for each in cluster.reports(rank) if "resumes" in each] for rank in range(2)]
    # The agents may have swapped the ranks.
    assert [[each and Path(each).name for each in told] for told in resumes] == [[None, "step-2_ckpt", None]] * 2
    assert all(each["cuts"] for each in found)
    assert found[0]["bytes"] + found[1]["bytes"] > 256 << 20
    assert [each["resumed"] for each in found] == [each["undisturbed"] for each in found]
