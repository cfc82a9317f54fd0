"""Jobs of Accelerate and of the Trainer that are killed and go on from memory, bit for bit."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from tests.support import warm
from tests.support.cluster import REPOSITORY, Cluster, free_port
from tests.support.lives import assert_example_goes_on, assert_undisturbed, last
from tests.support.processes import OF_RANKS, child_environment

pytestmark = [pytest.mark.slow(90), pytest.mark.timeout(240)]
# Steps after which rank 0 is killed: before the last step of an epoch, after it, and in the midst of one.
KILLS = {
    "accelerate": (22, 23),
    "accelerate-ddp-accumulates": (5,),
    "accelerate-workers": (30,),
    "trainer": (22, 23),
    "trainer-ddp-accumulates": (5,),
    "trainer-workers": (30,),
    "trainer-lora-stops": (3, 14),
    "trainer-fsdp2": (4,),
}


@pytest.mark.parametrize("kind", list(KILLS))
def test_killed_run_is_the_undisturbed_run(tmpfs: Path, kind: str) -> None:
    ranks = 2 if "ddp" in kind or "fsdp2" in kind else 1
    with Cluster(
        tmpfs,
        "hugging_face",
        ranks_per_node=ranks,
        args=[kind, *KILLS[kind]],
        torchrun=True,
        max_restarts=len(KILLS[kind]) + 4,  # a save that was skipped has rank 0 killed once more at its step
        preload=warm.HUGGING_FACE,
    ) as cluster:
        cluster.wait(timeout_s=200)
        for rank in range(ranks):
            reports = cluster.reports(rank)
            assert sum("resumes" in each for each in reports) >= len(KILLS[kind]) + 2
            own = assert_undisturbed(reports, but={"losses"})
            # What was told in whichever life, the last one's where two did.
            losses = {each["step"]: each["value"] for each in own if "step" in each}
            assert losses == last(reports, "undisturbed")["losses"]
            assert last(reports, "resumed")["failures"] == 0


def test_the_trainers_example_goes_on(tmpfs: Path) -> None:
    example = REPOSITORY / "examples" / "transformers" / "train_gpt.py"
    args = ["--base", tmpfs / "job", "--steps", 24, "--die-at", 14]
    says = ["starting anew", r"resumed at step 1[34] from memory", "train_loss"]
    assert_example_goes_on(tmpfs, example, *args, says=says, preload=warm.HUGGING_FACE)


def test_accelerates_example_goes_on_under_its_launcher(tmpfs: Path) -> None:
    example = REPOSITORY / "examples" / "accelerate" / "train_gpt.py"
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    launch += ["--rdzv_backend", "c10d", "--max_restarts", "2", "--main_process_port", str(free_port()), str(example)]
    args = ["--base", str(tmpfs / "job"), "--steps", "24", "--die-at", "14"]
    ours = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "ACCELERATE_USE_CPU": "true", "GLOO_SOCKET_IFNAME": "lo"}
    ended = warm.run([*launch, *args], child_environment(**OF_RANKS, **ours), preload=warm.HUGGING_FACE, timeout_s=220)
    assert ended.returncode == 0, ended.stderr
    assert "starting anew" in ended.stdout
    assert "rank 0 kills itself" in ended.stdout
    assert re.search(r"going on from step 1[34]", ended.stdout)
    assert "step 20: loss" in ended.stdout
