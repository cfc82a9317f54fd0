"""The NeMo door with NeMo's real classes, on two ranks of two nodes, in an environment of its own: `make test-nemo`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.support.cluster import Cluster

pytestmark = pytest.mark.skipif(importlib.util.find_spec("nemo") is None, reason="NeMo is not installed")

CASES = [
    "sync",
    "asynchronous",
    "both_asynchronous",
    "callback",
    "auto_resume",
    "context",
    "wrapping_twice",
    "disabled",
    "refusals",
]


@pytest.mark.timeout(300)
def test_all_cases(tmpfs: Path) -> None:
    """One job for all of them: NeMo takes longest to import."""
    with Cluster(tmpfs, "nemo_cases", nodes=2, args=CASES, torchrun=True) as cluster:
        cluster.wait(timeout_s=240)
        for rank in range(2):
            reports = {each["case"]: each for each in cluster.reports(rank)}
            assert list(reports) == CASES
            for case, each in reports.items():
                assert each["error"] is None, f"{case} on rank {rank}:\n{each['error']}"
