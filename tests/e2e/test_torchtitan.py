"""Jobs of torchtitan that lose ranks and a node, and go on from memory, bit for bit."""

from __future__ import annotations

import os
import random
import shutil
import threading
from pathlib import Path

import pytest

pytest.importorskip("torchtitan")

from tests.support import warm
from tests.support.cluster import REPOSITORY, Cluster
from tests.support.lives import assert_example_goes_on
from tests.workers.training import gate_of

pytestmark = [pytest.mark.slow(90), pytest.mark.timeout(600)]


def job(root: Path, *args: object, max_restarts: int = 0) -> Cluster:
    """Two nodes of one rank each."""
    return Cluster(root, "titan", nodes=2, args=args, torchrun=True, max_restarts=max_restarts, preload=warm.TITAN)


def assert_undisturbed(cluster: Cluster, lives: int) -> None:
    """What ranks come to, and in each step, is what they come to without a crash, and without anything of ours."""
    for rank in range(2):
        reports = cluster.reports(rank)
        (ended,) = [each["ended"] for each in reports if "ended" in each]
        (undisturbed,) = [each["undisturbed"] for each in reports if "undisturbed" in each]
        # Of a step that two lives did, what the last one did counts.
        ended["losses"] = {str(each["step"]): each["loss"] for each in reports if "step" in each}
        for name, expected in undisturbed.items():
            assert ended[name] == expected, name
        resumed = [each["resumed"] for each in reports if "resumed" in each]
        assert len(resumed) >= lives
        assert resumed[0] == 0
        assert all(resumed[1:]), "each life but the first goes on from memory"


@pytest.mark.parametrize("kind", ["fsdp2", *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("hsdp", "tp"))])
def test_killed_ranks_and_a_lost_node(tmpfs: Path, kind: str) -> None:
    args, chance = ("--steps", 16, "--kind", kind), random.Random(os.environ.get("FLASHPOINT_TEST_SEED"))
    with job(tmpfs, *args, "--gates", "8,13", max_restarts=10) as cluster:
        for first, gate in ((3, 8), (9, 13)):
            cluster.wait_for_report(rank=0, step=chance.randrange(first, gate - 2), timeout_s=120)
            if gate == 13:  # a node lost before this life has copies is one more than is promised
                cluster.wait_for_report(rank=0, safe_at=gate, timeout_s=120)
            threading.Event().wait(chance.uniform(0, 0.2))  # at any instant of a step and of its save
            if gate == 13:
                cluster.kill_node(node := chance.randrange(2))
                cluster.start_node(node)
            else:
                cluster.kill_rank(chance.randrange(2))
            gate_of(tmpfs, gate).touch()
        cluster.wait(timeout_s=240, check=False)
        assert_undisturbed(cluster, lives=3)


def test_the_example_goes_on(tmpfs: Path) -> None:
    example = REPOSITORY / "examples" / "torchtitan" / "train.py"
    args = ["--base", tmpfs / "job", "--folder", tmpfs / "own", "--steps", 12, "--die-at", 6]
    says = [r"resumed at step [1-6] from memory", "Training completed"]
    assert_example_goes_on(tmpfs, example, *args, says=says, preload=warm.TITAN)
    shutil.rmtree(tmpfs / "own")
