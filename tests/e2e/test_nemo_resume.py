"""NeMo jobs under torchrun, killed by SIGKILL, that go on from memory and from long-term checkpoints, bit for bit.

Trained on the CPU, with what `tests.support.nemo_cpu` lists played.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Set
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.cluster import Cluster
from tests.support.lives import Reports, assert_undisturbed, last
from tests.support.persisting import persisted_steps

pytestmark = [
    pytest.mark.slow(200),
    pytest.mark.skipif(importlib.util.find_spec("nemo") is None, reason="NeMo is not installed"),
]


def check(reports: Reports, but: Set[str] = frozenset(), steps: int = 14) -> list[Path | None]:
    """That the run which was killed came to what the other did; what its lives have gone on from."""
    own = assert_undisturbed(reports, but)
    told = [{each["step"]: each for each in part if "step" in each} for part in (own, reports[len(own) :])]
    assert list(told[1]) == list(range(1, steps + 1))
    assert dict(sorted(told[0].items())) == told[1], "batches and losses of all steps, in their last life"
    paths = [each["resumes"] for each in own if "resumes" in each]
    return [None if path is None else Path(path) for path in paths]


@pytest.mark.timeout(600)
def test_one_rank_without_the_distributed_optimizer(tmpfs: Path, tmp_path: Path) -> None:
    """Synchronous saves. Goes on from memory, and, when that is lost, from the strategy's long-term checkpoint."""
    args = ["plain", tmp_path, "--kill", 4, 9, "--lose", "2:all"]
    with Cluster(tmpfs, "nemo_training", args=args, torchrun=True, max_restarts=2, preload=warm.NEMO) as cluster:
        cluster.wait(timeout_s=500)
        # Lightning 2.4 does not count the batch after which `ModelCheckpoint` saves.
        paths = check(cluster.reports(0), but={"loops"})
        base, committed = cluster.base_of(0), last(cluster.reports(0), "committed")
    assert paths[:2] == [None, base / "step-4_ckpt"]
    assert paths[2] is not None
    assert paths[2].is_relative_to(tmp_path / "resumed")
    assert paths[2].parent.name == "step=5-last"
    assert committed == 3, "after steps 8, 10 and 14; 12 was left to the strategy"


@pytest.mark.timeout(600)
def test_two_nodes_with_the_distributed_optimizer(tmpfs: Path, tmp_path: Path) -> None:
    """Asynchronous saves, of both kinds. One node loses its memory, after a kill at a step that was not saved; then
    both do, and the job goes on from what is persisted. The planned end persists the last version."""
    store = tmpfs / "store"
    args = ["distributed", tmp_path, "--kill", 9, 11, "--lose", "1:1", "2:all", "--persist", store]
    with Cluster(
        tmpfs, "nemo_training", nodes=2, args=args, torchrun=True, max_restarts=2, preload=warm.NEMO
    ) as cluster:
        cluster.wait(timeout_s=500)
        for rank in range(2):
            base, reports = cluster.base_of(rank), cluster.reports(rank)
            assert check(reports) == [None, base / "step-8_ckpt", base / "step-10_ckpt"]
            assert last(reports, "tier") == "persisted"
            assert {"io.json", "model.yaml"} <= set(last(reports, "context"))
            assert (last(reports, "committed"), last(reports, "kept")) == (1, [14])
        assert last(cluster.reports(0), "persisted") == 14
    assert persisted_steps(store)[0] == 14


@pytest.mark.timeout(600)
def test_at_real_size_a_lost_node_gets_its_part_from_the_other(tmpfs: Path, tmp_path: Path) -> None:
    """256 MiB a rank, in blocks of 16 MiB. The first copy breaks off in its midst, and so does the recovery."""
    with Cluster(
        tmpfs,
        "nemo_training",
        nodes=2,
        args=["real", tmp_path, "--kill", 2, "--lose", "1:1", "--cut"],
        env={"FLASHPOINT_TEST_BLOCK_BYTES": str(16 << 20)},
        torchrun=True,
        max_restarts=1,
        preload=warm.NEMO,
    ) as cluster:
        cluster.wait(timeout_s=500)
        for rank in range(2):
            assert check(cluster.reports(rank), steps=3) == [None, cluster.base_of(rank) / "step-2_ckpt"]
            assert last(cluster.reports(rank), "bytes") > 256 << 20
            assert last(cluster.reports(rank), "cuts")


@pytest.mark.timeout(600)
def test_the_example_goes_on_after_a_kill(tmpfs: Path, tmp_path: Path) -> None:
    """In bfloat16, with float32 weights in the optimizer; whichever save was the last when it was killed."""
    base, steps = tmpfs / "job", ["--ckpt-mlf-every-n-steps", 2, "--ckpt-std-every-n-steps", 32]
    args = ["--base", base, "--log-dir", tmp_path, "--steps", 40, *steps]
    with Cluster(tmpfs, "nemo_example", args=args, torchrun=True, max_restarts=1, preload=warm.NEMO) as cluster:
        cluster.wait_for_output(r"iteration 5/39", rank=0, timeout_s=250)
        cluster.kill_rank(0)
        cluster.wait(timeout_s=300)
        output = cluster.outputs()[0]
        said = cluster.agent_output(0) + output
    # It has ended as scripts do, by its last line.
    assert "Fatal Python error" not in said
    assert "terminate called" not in said
    first, _, second = output.partition("Restored all states from the checkpoint at")
    assert re.match(rf" {base}/step-\d+_ckpt", second)
    losses = [float(each) for each in re.findall(r"reduced_train_loss: ([\d.]+)", output)]
    assert "iteration 0/39" in first
    assert "iteration 0/39" not in second
    assert "iteration 39/39" in second
    assert losses[-1] < losses[0] - 1, "it has learned"
    assert [path for path in tmp_path.rglob("weights") if "unfinished" not in str(path)]
