"""`every_n_steps="auto"` of the Lightning callback, on two nodes: both save at the same steps, and go on from there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import warm
from tests.support.cluster import Cluster

STEPS_OF_AN_EPOCH = 25


def fit(tmpfs: Path, steps: int) -> list[dict[str, Any]]:
    with Cluster(tmpfs, "lightning_auto_interval", nodes=2, args=[steps], torchrun=True, preload=warm.LIGHTNING) as job:
        job.wait(timeout_s=120)
        return [job.reports(rank)[0] for rank in range(2)]


@pytest.mark.timeout(280)
def test_both_ranks_come_to_the_same_steps_and_resume(tmpfs: Path) -> None:
    first, second = fit(tmpfs, 300)
    assert {**first, "reason": None} == {**second, "reason": None}
    saved, every = first["saved"], first["every"]
    assert saved[:11] == list(range(1, 12))
    assert every > 1
    assert first["failures"] == 0
    assert first["verified"] == saved[-1]
    # Multiples of the interval; those that end an epoch are put off by one.
    assert all(step % 2 == 0 or step % STEPS_OF_AN_EPOCH == 1 for step in saved[-5:]), saved
    assert first["reason"] == second["reason"]
    assert "a failure every 0.001 h is to be expected" in first["reason"]
    again = fit(tmpfs, 310)
    assert {each["found"].rpartition("/")[2] for each in again} == {f"step-{saved[-1]}_ckpt"}
    assert again[0]["saved"] == again[1]["saved"]
