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
from tests.support.lives import assert_example_goes_on
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
            # A node lost before this life has copies is one more than is promised.
            team[victim].next_report("copied" if fault == "node" else "step")
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


@pytest.mark.parametrize("kind", ["stage 1, bf16", "stage 3"])
def test_killed_and_without_a_node(tmpfs: Path, kind: str) -> None:
    live_through(tmpfs, kind, ["rank", "node"])


@pytest.mark.soak
@pytest.mark.parametrize("kind", list(worker.KINDS))
def test_killed_again_and_again(tmpfs: Path, kind: str) -> None:
    live_through(tmpfs, kind, ["rank", "rank", "node", "rank"] * 5)


EXAMPLE = REPOSITORY / "examples" / "deepspeed" / "train_gpt.py"
ON_CPU = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo"}
SAYS = ("starting anew", r"going on from step 1[234]", "step 24: loss")


def test_the_example_goes_on(tmpfs: Path) -> None:
    args = ["--base", tmpfs / "job", "--steps", 24, "--die-at", 14]
    preload = ["tests.workers.deepspeed_training"]
    assert_example_goes_on(tmpfs, EXAMPLE, *args, says=SAYS, preload=preload, **ON_CPU)


@pytest.mark.soak
def test_the_example_goes_on_under_deepspeeds_launcher(tmpfs: Path) -> None:
    """Started as a user starts it, cold, and again when the launcher has ended with the first rank that did."""
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", str(free_port())]
    command += [str(EXAMPLE), "--base", str(tmpfs / "job"), "--steps", "24", "--die-at", "14"]
    lives = [
        subprocess.run(command, env=os.environ | ON_CPU, capture_output=True, text=True, timeout=280) for _ in "ab"
    ]
    assert lives[0].returncode
    assert lives[1].returncode == 0, lives[1].stderr
    output = "".join(each.stdout for each in lives)
    assert all(re.search(pattern, output) for pattern in SAYS), output
