"""`every_n_steps="auto"` on several ranks: all save at the same steps, whatever one of them has missed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cluster import run_ranks


def test_all_ranks_come_to_the_same_steps_and_resume(tmpfs: Path) -> None:
    first = [reports[0] for reports in run_ranks(tmpfs, "auto_interval", 3, nodes=2, args=["--steps", 400])]
    saved, every = first[0]["saved"], first[0]["every"]
    assert [each["saved"] for each in first] == [saved] * 3
    assert [(each["every"], each["failures"], each["verified"]) for each in first] == [(every, 0, saved[-1])] * 3
    assert saved[:11] == list(range(1, 12))
    assert every > 1
    assert len(saved) < 300
    assert "a failure every 1 h" in first[0]["reason"]
    second = [reports[0] for reports in run_ranks(tmpfs, "auto_interval", 3, nodes=2, args=["--steps", 410])]
    assert {each["found"] for each in second} == {saved[-1]}


@pytest.mark.parametrize("deaf", [0, 1])
def test_a_rank_that_misses_a_choice_meets_the_others_again(tmpfs: Path, deaf: int) -> None:
    arguments = ["--steps", 600, "--loses", deaf]
    ranks = [reports[0] for reports in run_ranks(tmpfs, "auto_interval", 2, args=arguments, timeout_s=150)]
    assert max(each["failures"] for each in ranks) > 0, "nothing was missed"
    assert ranks[0]["every"] == ranks[1]["every"] > 1
    last = [each["saved"][-1] for each in ranks]
    assert last[0] == last[1] > 500


@pytest.mark.parametrize("strayed", [0, 1])
def test_ranks_that_differ_by_two_learn_of_it(tmpfs: Path, strayed: int) -> None:
    """Else each save of the one would meet one of the other that is a step ahead, for good."""
    arguments = ["--steps", 60, "--strays", strayed]
    ranks = [reports[0] for reports in run_ranks(tmpfs, "auto_interval", 2, args=arguments, timeout_s=150)]
    assert ranks[0]["every"] == ranks[1]["every"] == (8 if strayed == 0 else 4), "that of rank 0"
    assert sorted(each["failures"] for each in ranks) == [1, 2]
    assert ranks[0]["saved"][-3:] == ranks[1]["saved"][-3:]
