"""The example: a GPT of megatron-core's on four ranks, killed and resumed, goes on as if nothing had been."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.cluster import REPOSITORY, Cluster
from tests.support.tmpfs import remove_folder

SCRIPT = REPOSITORY / "examples" / "megatron" / "train_gpt.py"
STEPS, DISK_EVERY = 40, 12  # far more steps than can pass between what is read in the output and the kill
DEADLINE_S = 200.0
pytestmark = [
    pytest.mark.timeout(4 * DEADLINE_S),
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"),
]


def training(root: Path, steps: int) -> Cluster:
    """Tensor parallelism within each of two nodes, data parallelism across them."""
    args = ["--base", "$FLASHPOINT_TEST_BASE", "--disk", root / "disk", "--steps", steps, "--disk-every", DISK_EVERY]
    return Cluster(
        root, SCRIPT, nodes=2, ranks_per_node=2, args=args, torchrun=True, max_restarts=3, preload=warm.MEGATRON
    )


def weights(cluster: Cluster) -> dict[int, str]:
    """What each rank says its weights are at the end. Ranks may have moved when they were started again."""
    return {
        int(rank): digest
        for output in cluster.outputs().values()
        for rank, digest in re.findall(r"rank (\d) ends with (\w+)", output)
    }


def losses(cluster: Cluster) -> dict[int, set[str]]:
    """The losses printed for each step: more than one only if it was not the same every time."""
    found: dict[int, set[str]] = {}
    for output in cluster.outputs().values():
        for step, loss in re.findall(r"step (\d+) loss ([\d.]+)", output):
            found.setdefault(int(step), set()).add(loss)
    return found


def test_killed_and_resumed(tmpfs: Path) -> None:
    with training(tmpfs, STEPS) as cluster:
        # Then the saves up to step 18 are committed, and copies of the first half of them were made meanwhile.
        cluster.wait_for_output(r"^step 21 ", timeout_s=DEADLINE_S)
        cluster.kill_node(1)
        cluster.start_node(1)
        found = cluster.wait_for_output(r"going on from memory at step (\d+)", timeout_s=DEADLINE_S)
        assert 10 <= int(found[1]) < STEPS
        cluster.wait(DEADLINE_S, check=False)
        from_memory, printed = weights(cluster), losses(cluster)
        # Steps done twice, before the kill and after it, among them.
        assert printed.keys() == set(range(1, STEPS + 1))
        assert all(len(values) == 1 for values in printed.values()), printed
    assert len(from_memory) == 4
    # With nothing in memory any more, from what megatron-core has saved on disk.
    for node in (0, 1):
        remove_folder(tmpfs / f"node-{node}")
    with training(tmpfs, STEPS) as cluster:
        cluster.wait(DEADLINE_S)
        cluster.wait_for_output(rf"going on from disk at step {STEPS // DISK_EVERY * DISK_EVERY}")
        assert weights(cluster) == from_memory
