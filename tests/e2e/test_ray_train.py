"""Jobs of Ray Train that lose workers and nodes, and go on from memory, bit for bit."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
pytest.importorskip("pandas")
pytest.importorskip("pyarrow")

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from tests.support import tmpfs as tmpfs_folders
from tests.support.cluster import REPOSITORY
from tests.support.forked import wait_until
from tests.support.ray_cluster import RayCluster, ray_cluster
from tests.workers import ray_train

pytestmark = [pytest.mark.slow(120), pytest.mark.timeout(600)]

RANKS, DEADLINE_S = 2, 240.0


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    folder = tmpfs_folders.make_folder()
    yield folder
    tmpfs_folders.remove_folder(folder)


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[RayCluster]:
    """Of three nodes, each with memory of its own."""

    def of_node(number: int) -> dict[str, str]:
        return {
            "FLASHPOINT_NODE_ID": f"node-{number}",
            "RAY_TRAIN_TEST_ROOT": str(folder / f"node-{number}"),
            "GLOO_SOCKET_IFNAME": "lo",
            "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "0.5",
        }

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", str(DEADLINE_S))
        with ray_cluster(3, of_node) as cluster:
            yield cluster


class Run:
    """One run, of as many lives as it takes."""

    def __init__(self, folder: Path, name: str, **config: Any) -> None:
        self.told = folder / f"told-{name}"
        self.told.mkdir()
        scaling = ScalingConfig(num_workers=RANKS, placement_strategy="STRICT_SPREAD")
        failures = FailureConfig(max_failures=8)
        self._trainer = TorchTrainer(
            ray_train.train,
            train_loop_config={"told": str(self.told), **config},
            scaling_config=scaling,
            run_config=RunConfig(name=name, storage_path=str(folder / "storage"), failure_config=failures),
        )
        self._executor = ThreadPoolExecutor(1)

    def start(self) -> Run:
        self._ended = self._executor.submit(self._trainer.fit)
        return self

    def end(self) -> Run:
        self.result: Any = self._ended.result(DEADLINE_S)
        return self

    def reports(self, rank: int) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.told / f"{rank}.jsonl").read_text().splitlines()]

    def resumed_at(self) -> list[int]:
        return [each["resumes"] for each in self.reports(0) if "resumes" in each]

    def holds(self) -> int:
        """Wait until all ranks hold. Return after which step."""
        files = [self.told / f"holds-{rank}" for rank in range(RANKS)]
        wait_until(lambda: all(map(_is_written, files)), "all ranks hold", DEADLINE_S)
        (step,) = {int(each.read_text()) for each in files}
        return step

    def places(self) -> list[tuple[str, Path]]:
        """Return the nodes that the ranks are on, and where each keeps its base containers."""
        files = [self.told / f"node-{rank}" for rank in range(RANKS)]
        wait_until(
            lambda: all(each.exists() and each.read_text().endswith("\n") for each in files),
            "the ranks have nodes",
            DEADLINE_S,
        )
        found = [each.read_text().split() for each in files]
        return [(node, Path(root)) for node, root in found]

    def lose(self, cluster: RayCluster) -> None:
        """Lose a node of the run that is not the cluster's head, with all that lies there."""
        node, root = next(place for place in self.places() if place[0] in cluster.others)
        cluster.lose(node)
        shutil.rmtree(root)


def _is_written(path: Path) -> bool:
    return path.exists() and path.read_text().endswith("\n")


def assert_undisturbed(run: Run) -> None:
    """What ranks are told by their life that ends is what they come to without a crash."""
    for rank in range(RANKS):
        reports = run.reports(rank)
        losses = {each["undisturbed"]: each["loss"] for each in reports if "undisturbed" in each}
        assert len(losses) == 12
        # Of a step that two lives did, what the last one did counts.
        assert {each["step"]: each["loss"] for each in reports if "step" in each} == losses
        assert reports[-1]["weights"] == reports[-1]["undisturbed_weights"]
        assert [each["failures"] for each in reports if "failures" in each] == [0]


def test_a_killed_worker(cluster: RayCluster, folder: Path) -> None:
    run = Run(folder, "killed", kills=[7]).start().end()
    assert_undisturbed(run)
    assert len(run.resumed_at()) >= 2
    assert min(run.resumed_at()[1:]) > 0
    assert run.result.metrics == {"epoch": 1}
    with run.result.checkpoint.as_directory() as reported:
        assert json.loads((Path(reported) / "flashpoint.json").read_text())["step"] == 12


def test_a_lost_node(cluster: RayCluster, folder: Path) -> None:
    run = Run(folder, "lost", hold=5).start()
    step = run.holds()
    run.lose(cluster)
    assert_undisturbed(run.end())
    assert run.resumed_at() == [0, step]


@pytest.mark.soak
def test_a_node_that_is_to_be_taken_away(cluster: RayCluster, folder: Path) -> None:
    cluster.fill()
    options = {"every_n_steps": 10_000, "ask_every_n_steps": 1}
    run = Run(folder, "taken", hold="saved", epochs=10_000, options=options).start()
    node = next(node for node, _ in run.places() if node in cluster.others)
    drain = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", cluster.address, "--node-id", node]
    drain += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "test"]
    subprocess.run([*drain, "--deadline-remaining-seconds", "600"], check=True, timeout=60, capture_output=True)
    step = run.holds()
    run.lose(cluster)
    assert run.end().resumed_at() == [0, step]


def test_the_guide(cluster: RayCluster, folder: Path) -> None:
    cluster.fill()
    page = (REPOSITORY / "docs" / "ray-train.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    block = block.replace("/dev/shm/mlf-jobs", str(folder / "guide"))
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(block.replace('name="job-145",', f'name="job-145", storage_path="{folder / "storage"}",'), names)
    assert names["result"].metrics["loss"] < 10
    assert (folder / "guide" / "job-145" / "step-12_ckpt").is_dir()


@pytest.mark.soak
def test_the_example_goes_on(cluster: RayCluster, folder: Path) -> None:
    cluster.fill()
    command = [sys.executable, str(REPOSITORY / "examples" / "ray_train" / "train.py"), "--die-at", "14"]
    command += ["--root", str(folder / "example"), "--storage", str(folder / "storage"), "--steps", "24"]
    environment = os.environ | {"RAY_ADDRESS": cluster.address}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S)
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"step 24: loss \d\.\d+, the last start went on from step \d+", ended.stdout)
    assert "from step 0" not in ended.stdout
