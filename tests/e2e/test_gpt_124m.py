"""A GPT of 124 M parameters on two nodes, killed at random ten times: the run that nothing disturbed, bit for bit."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import pytest

from tests.support.cluster import Cluster, run_ranks

REAL = {"FLASHPOINT_TEST_BLOCK_BYTES": str(16 << 20)}
KILLS = 10
STEPS = 5 * KILLS


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "lightning"])
def test_ten_kills_leave_no_trace(tmpfs: Path, kind: str) -> None:
    seed = os.environ.get("FLASHPOINT_SOAK_SEED", "1")
    chance = random.Random(f"{kind} {seed}")
    args = ["--kind", kind, "--steps", STEPS]
    undisturbed = run_ranks(tmpfs / "reference", "gpt_124m", 2, nodes=2, args=[*args, "--without"], timeout_s=900)
    expected = [next(r["digest"] for r in reports if "digest" in r) for reports in undisturbed]
    with Cluster(tmpfs, "gpt_124m", nodes=2, args=args, env=REAL, torchrun=True, max_restarts=2 * KILLS) as cluster:
        for kill in range(KILLS):
            # With copies of its own: two nodes lost before that are more than is promised.
            cluster.wait_for_report(rank=0, safe=True, nth=kill + 1, timeout_s=600)
            threading.Event().wait(chance.uniform(0, 5))  # at any instant of a step and of its save
            if chance.random() < 0.5:
                cluster.kill_rank(chance.randrange(2))
            else:
                node = chance.randrange(2)
                cluster.kill_node(node)
                cluster.start_node(node)
        cluster.wait(timeout_s=900, check=False)
        for rank in range(2):
            reports = cluster.reports(rank)
            assert [r["digest"] for r in reports if "digest" in r] == [expected[rank]]
            resumed = [r["resumed"] for r in reports if "resumed" in r]
            replicated = 0
            for report in reports:
                assert report.get("resumed", replicated) >= replicated, "a step was lost that all ranks had copies of"
                replicated = max(replicated, report.get("replicated") or 0)
            print(f"{kind}, seed {seed}, rank {rank}: resumed at {resumed}, expected {expected[rank]}")
