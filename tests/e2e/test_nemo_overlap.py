"""On the CPU a save of NeMo copies before it returns, with overlap, too: what is saved is what it was then.

Trained on the CPU, with what `tests.support.nemo_cpu` lists played.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.cluster import Cluster

pytestmark = pytest.mark.skipif(importlib.util.find_spec("nemo") is None, reason="NeMo is not installed")


@pytest.mark.timeout(400)
def test_each_version_is_the_state_of_its_step_whatever_meddles(tmpfs: Path, tmp_path: Path) -> None:
    with Cluster(tmpfs, "nemo_overlap", args=[tmp_path, "--meddle", 5], torchrun=True, preload=warm.NEMO) as cluster:
        cluster.wait(timeout_s=300)
        reports = cluster.reports(0)
    (late,) = [each["late"] for each in reports if "late" in each]
    checked = {each["checked"]: each["equal"] for each in reports if "checked" in each}
    assert checked == dict.fromkeys(range(1, 8), True)
    assert late == [False] * 8
