"""The user guide's code on Megatron-LM, as it stands there, in a job under torchrun."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.cluster import Cluster

pytestmark = [
    pytest.mark.timeout(200),
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"),
]


def test_the_guide_runs_unchanged(tmpfs: Path) -> None:
    with Cluster(tmpfs, "megatron_seed", nodes=2, torchrun=True, preload=warm.MEGATRON) as cluster:
        cluster.wait(180)
        for rank in range(cluster.world_size):
            assert cluster.reports(rank) == [
                {"step": 50, "found": None},
                *({"step": step, "found": f"step-{step}_ckpt"} for step in (1, 2, 3)),
            ]
