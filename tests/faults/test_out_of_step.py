"""Ranks that lose step: the others go on, and all are in step again with the next save."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.forked import Team, call_team
from tests.workers import out_of_step as worker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def test_a_save_that_fails_on_one_rank_costs_that_save(tmpfs: Path) -> None:
    assert call_team(worker.fails_a_save, tmpfs, 2) == [[1, 1, 3, 4, 5]] * 2


def test_a_save_that_one_rank_makes_alone_costs_no_later_one(tmpfs: Path) -> None:
    for verified in call_team(worker.saves_more_often, tmpfs, 2):
        assert (verified[0], verified[-1]) == (10, 40)


def test_a_rank_that_comes_late_delays_the_verdict_and_nothing_else(tmpfs: Path) -> None:
    with Team(worker.comes_late, tmpfs, 2) as team:
        assert team[0].next_report("saved", timeout_s=120) == ("saved", 2, 1)
        team[1].say("go on")
        assert team.results(120) == [(6, 6)] * 2


def test_a_holder_whose_slot_is_read_delays_the_verdict_and_nothing_else(tmpfs: Path) -> None:
    assert call_team(worker.finds_its_slot_read, tmpfs, 2) == [3, 3]


def test_two_jobs_in_one_process_group_do_not_cross(tmpfs: Path) -> None:
    assert call_team(worker.saves_in_two_jobs, tmpfs, 2, 30) == [[(0, 30)] * 2] * 2
