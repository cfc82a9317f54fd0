"""Engines of DeepSpeed that are killed, lose nodes, and go on from memory, bit for bit."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("deepspeed is not installed", allow_module_level=True)

from tests.support import forked
from tests.support.cluster import REPOSITORY, free_port
from tests.support.forked import Team, call_team
from tests.workers import deepspeed_training as worker

pytestmark = [pytest.mark.slow(80), pytest.mark.timeout(600)]
forked.preload("tests.workers.deepspeed_training")

RANKS, STEPS_A_LIFE = 2, 7


def told(folder: Path, rank: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{rank}.jsonl").read_text().splitlines()]


def live_through(root: Path, kind: str, faults: list[str]) -> None:
    """Kill a rank at a random moment of each life but the last one, or a node with all that lies there."""
    chance, steps = random.Random(os.environ.get("FLASHPOINT_TEST_SEED")), STEPS_A_LIFE * (len(faults) + 1)
    folder = root / "told"
    folder.mkdir()
    for life, fault in enumerate(faults):
        victim = chance.randrange(RANKS)
        with Team(worker.train, root, RANKS, kind, folder, life, STEPS_A_LIFE * (life + 1), steps) as team:
            team[victim].next_report("step")
            time.sleep(chance.random() * 0.2)
            team[victim].kill()
            if fault == "node":
                shutil.rmtree(root / f"node-{victim}")
    found = call_team(worker.train, root, RANKS, kind, folder, len(faults), steps, steps)
    expected = call_team(worker.undisturbed, root, RANKS, kind, steps)
    for rank in range(RANKS):
        reports, (state, losses) = told(folder, rank), expected[rank]
        assert {each["micro"]: each["loss"] for each in reports if "micro" in each} == losses
        assert found[rank] == state
        copied = 0
        for report in reports:
            assert report.get("resumes", copied) >= copied, "a step was lost that all ranks had copies of"
            copied = max(copied, report.get("copied") or 0)
        assert sum("resumes" in each for each in reports) == len(faults) + 1


@pytest.mark.parametrize("kind", ["stage 0", "stage 1, bf16", "stage 3"])
def test_killed_and_without_a_node(tmpfs: Path, kind: str) -> None:
    live_through(tmpfs, kind, ["rank", "node", "rank"])


@pytest.mark.soak
@pytest.mark.parametrize("kind", list(worker.KINDS))
def test_killed_again_and_again(tmpfs: Path, kind: str) -> None:
    live_through(tmpfs, kind, ["rank"] * 10 + ["node"] * 3 + ["rank"] * 10)


@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("deepspeed", marks=pytest.mark.soak)])
def test_the_example_goes_on(tmpfs: Path, launcher: str) -> None:
    """Started as a user starts it, cold. DeepSpeed's launcher ends with the first rank that does: a loop starts it."""
    example = [str(REPOSITORY / "examples" / "deepspeed" / "train_gpt.py"), "--base", str(tmpfs / "job")]
    example += ["--steps", "24", "--die-at", "14"]
    ours = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo"}
    if launcher == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += ["--max-restarts", "2"]
    else:
        command = [
            sys.executable,
            "-m",
            "deepspeed.launcher.runner",
            "--num_gpus",
            "2",
            "--master_port",
            str(free_port()),
        ]
    output = ""
    for _ in range(1 if launcher == "torchrun" else 2):
        ended = subprocess.run([*command, *example], env=os.environ | ours, capture_output=True, text=True, timeout=280)
        output += ended.stdout
    assert ended.returncode == 0, ended.stderr
    assert "starting anew" in output
    assert "rank 0 kills itself" in output
    assert re.search(r"going on from step 1[234]", output)
    assert "step 24: loss" in output
