"""The interpreter's exit after training with Lightning: no thread is left to abort the process, or to hold it up.

Started cold: what a template has imported and frozen might end otherwise.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cluster import Cluster


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("how", "code"), [("ends", 0), ("fails", 1)])
def test_exit_is_clean(tmpfs: Path, how: str, code: int) -> None:
    with Cluster(tmpfs, "lightning_exit", ranks_per_node=2, args=[how], cold=True) as cluster:
        assert cluster.wait(timeout_s=100, check=False) == [code, code]
        for rank in range(2):
            output = cluster.outputs()[rank]
            assert [each["step"] for each in cluster.reports(rank)] == list(range(6))
            assert "Fatal Python error" not in output
            assert "terminate called" not in output
            assert ("RuntimeError: as asked" in output) == (how == "fails")
        assert list(cluster.base_of(0).glob("step-*_ckpt")), "versions outlive the processes"
