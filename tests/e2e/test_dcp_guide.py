"""The user guide's code on DCP, as it stands there, in a job of several ranks.

The one under torchrun is started as a user starts it, cold.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cluster import Cluster, run_ranks

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("world_size", "nodes"), [(1, 1), (2, 1), (2, 2)])
def test_the_guide_runs_unchanged(tmpfs: Path, world_size: int, nodes: int) -> None:
    reports = run_ranks(tmpfs, "dcp_seed", world_size, nodes=nodes, timeout_s=110)
    for rank, found in enumerate(reports):
        base = tmpfs / f"node-{rank * nodes // world_size}" / "job"
        assert found == [{"step": step, "found": str(base / f"step-{step}_ckpt")} for step in (1, 2, 3)]


def test_the_guide_runs_under_torchrun(tmpfs: Path) -> None:
    with Cluster(tmpfs, "dcp_seed", nodes=2, torchrun=True, cold=True) as cluster:
        cluster.wait(110)
        assert [report["step"] for report in cluster.reports(1)] == [1, 2, 3]
