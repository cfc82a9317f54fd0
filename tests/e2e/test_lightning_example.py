"""The Lightning example: killed, and gone on from memory. Started as a user starts it, cold."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.cluster import REPOSITORY, Cluster

EXAMPLE = REPOSITORY / "examples" / "lightning" / "train_gpt.py"


@pytest.mark.timeout(240)
def test_goes_on_from_the_step_before_the_kill(tmpfs: Path) -> None:
    args = ["--base", tmpfs / "job", "--steps", 24, "--every", 4, "--die-at", 14]
    with Cluster(tmpfs, EXAMPLE, ranks_per_node=2, args=args, torchrun=True, max_restarts=2, cold=True) as cluster:
        cluster.wait(timeout_s=200)
        output = cluster.outputs()[0]
    assert "starting anew" in output
    assert "rank 0 kills itself" in output
    # Step 12 is committed, or its save was still under way when the rank died.
    assert re.search(r"going on from \S*/step-(8|12)_ckpt", output)
    assert re.search(r"[34] saves, 0 failed", output)
