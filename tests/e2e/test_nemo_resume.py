"""NeMo jobs under torchrun, killed by SIGKILL, that go on from memory and from long-term checkpoints, bit for bit.

Trained on the CPU, with what `tests.support.nemo_cpu` lists played.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import Cluster

pytestmark = pytest.mark.skipif(importlib.util.find_spec("nemo") is None, reason="NeMo is not installed")


def last(reports: list[dict[str, Any]], name: str) -> Any:
    return [each[name] for each in reports if name in each][-1]


def check(reports: list[dict[str, Any]], *but: str) -> list[Path | None]:
    """That the run which was killed came to what the other did; what its lives have gone on from."""
    resumed, undisturbed = last(reports, "resumed"), last(reports, "undisturbed")
    for name in undisturbed.keys() - set(but):
        assert resumed[name] == undisturbed[name], name
    ended = next(number for number, each in enumerate(reports) if "resumed" in each)
    steps = [{each["step"]: each for each in part if "step" in each} for part in (reports[:ended], reports[ended:])]
    assert list(steps[1]) == list(range(1, 15))
    assert dict(sorted(steps[0].items())) == steps[1], "batches and losses of all steps, in their last life"
    paths = [each["resumes"] for each in reports[:ended] if "resumes" in each]
    return [None if path is None else Path(path) for path in paths]


@pytest.mark.timeout(300)
def test_one_rank_without_the_distributed_optimizer(tmpfs: Path, tmp_path: Path) -> None:
    """Synchronous saves; killed at a step that was just saved, and at one that was not."""
    args = ["plain", tmp_path, "--kill", 4, 9]
    with Cluster(tmpfs, "nemo_training", args=args, torchrun=True, max_restarts=2) as cluster:
        cluster.wait(timeout_s=240)
        paths = check(cluster.reports(0))
    base = cluster.base_of(0)
    assert paths == [None, base / "step-4_ckpt", base / "step-8_ckpt"]


@pytest.mark.timeout(300)
def test_two_nodes_with_the_distributed_optimizer(tmpfs: Path, tmp_path: Path) -> None:
    """Asynchronous saves, of both kinds. One node loses its memory, then both do: long-term checkpoints are next."""
    args = ["distributed", tmp_path, "--kill", 5, 11, "--lose", "1:1", "2:all"]
    with Cluster(tmpfs, "nemo_training", nodes=2, args=args, torchrun=True, max_restarts=2) as cluster:
        cluster.wait(timeout_s=240)
        for rank in range(2):
            # Lightning 2.4 does not count the batch after which `ModelCheckpoint` saves.
            paths = check(cluster.reports(rank), "loops")
            assert paths[:2] == [None, cluster.base_of(rank) / "step-4_ckpt"]
            assert paths[2] is not None
            assert paths[2].is_relative_to(tmp_path / "resumed")
            assert {"io.json", "model.yaml"} <= set(last(cluster.reports(rank), "context"))
