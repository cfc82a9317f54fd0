"""Engines of all kinds that go on in new processes, and what is refused. Killed ones: tests/e2e/test_deepspeed."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("deepspeed is not installed", allow_module_level=True)

from tests.support import forked
from tests.support.forked import call_team
from tests.support.processes import REPOSITORY
from tests.workers import deepspeed_training as worker

pytestmark = pytest.mark.slow(60)
forked.preload("tests.workers.deepspeed_training")

OTHERS = ["stage 1", "stage 1, bf16, fp32 gradients", "stage 2, offloaded", "stage 3, bf16"]  # soak: all


@pytest.mark.parametrize("kind", OTHERS)
def test_an_engine_goes_on_as_if_nothing_had_happened(tmpfs: Path, kind: str) -> None:
    for life, steps in enumerate((4, 9)):
        found = call_team(worker.train, tmpfs, 2, kind, tmpfs, life, steps, steps)
    assert found == [state for state, _ in call_team(worker.undisturbed, tmpfs, 2, kind, 9)]


@pytest.mark.parametrize("kind", ["stage 1", "stage 3"])
def test_another_number_of_ranks_and_another_stage_are_refused(tmpfs: Path, kind: str) -> None:
    call_team(worker.train, tmpfs, 2, kind, tmpfs, 0, 2, 2)
    for options in ({}, {"on_world_size_change": "keep"}):
        ((error, text),) = call_team(worker.resume_error, tmpfs, 1, kind, options)
        assert error == "ReshardError"
        assert "saved by 2 ranks, loaded by 1, and under ZeRO each has a partition of its own" in text
    for error, text in call_team(worker.resume_error, tmpfs, 2, "stage 2", {}) if kind == "stage 1" else ():
        assert error == "LoadError"
        assert "zero_optimization.stage was 1, and is 2" in text


def test_durable_checkpoints_stay_as_they_are(tmpfs: Path) -> None:
    for durable, newest, in_memory, without in call_team(worker.beside_durable, tmpfs, 2, tmpfs / "durable"):
        assert in_memory == (4, 4, newest)
        step, done, state = without
        assert (step, done) == (2, 2)
        for name in ("weights", "optimizer", "scheduler", "rate", "counts"):
            assert state[name] == durable[name]


def test_the_guide(tmpfs: Path) -> None:
    page = (REPOSITORY / "docs" / "deepspeed.md").read_text(encoding="utf-8")
    blocks = [
        each.replace("/dev/shm/mlf-jobs", str(tmpfs))
        for each in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    ]
    for _ in range(2):
        blocks = [each.replace("/data/job-145", str(tmpfs / "durable")) for each in blocks]
        found = call_team(worker.run_blocks, tmpfs, 1, blocks)
    assert found == [(12, 12)]
    assert {"latest", "global_step6", "global_step12"} <= {each.name for each in (tmpfs / "durable").iterdir()}


def test_a_job_that_dies_between_two_epochs_skips_none(tmpfs: Path) -> None:
    lives = [call_team(worker.batches_of_epochs, tmpfs, 2, 3, stop_at) for stop_at in (6, 12, None)]
    assert lives == [[{0: 6}] * 2, [{1: 6}] * 2, [{2: 6}] * 2]


def test_gradients_that_are_accumulated_are_in_no_checkpoint(tmpfs: Path) -> None:
    ((steps, error, saved),) = call_team(worker.save_while_accumulating, tmpfs, 1)
    assert steps == [0, 1, 1, 2]
    assert error == "InvalidArgumentError"
    assert saved == 2


def test_engines_with_state_elsewhere_are_refused(tmpfs: Path) -> None:
    elastic = {"zero_optimization": {"stage": 1, "elastic_checkpoint": True}}
    ((error, text),) = call_team(worker.refused, tmpfs, 1, elastic)
    assert error == "InvalidArgumentError"
    assert "elastic_checkpoint" in text
