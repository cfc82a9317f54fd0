"""Ranks that lose step are in step again with the next save, and say so meanwhile."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.forked import Team, call, call_team
from tests.workers import out_of_step as worker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def test_where_no_thread_can_be_started_the_loop_waits_and_nothing_is_lost(tmpfs: Path) -> None:
    for found in call_team(worker.cannot_start_a_thread, tmpfs, 2):
        assert (found["failures"], found["error"]) == (0, None)
        assert not found["degraded"]
        assert found["saved"] == [1, 2, 3, 4]
        assert (found["replicated"], found["found"], found["value"]) == (4, 4, 4.0)
        assert found["blocked"] < 30, "step() waited for a deadline"


def test_a_thread_that_dcp_cannot_start_costs_the_saves_until_ranks_meet(tmpfs: Path) -> None:
    behind, ahead = call_team(worker.cannot_start_a_thread_for_dcp, tmpfs, 2)
    assert sorted(behind["failed"]) == sorted(ahead["failed"]) == [2, 3]
    assert "rank 1 step 3, rank 0 step 2" in behind["failed"][2]
    assert "gone on to step 3 without this save" in behind["failed"][3]
    assert "start new thread" in ahead["failed"][2]
    for found in (behind, ahead):
        assert (found["verified"], found["loaded"]) == (5, [5.0] * 4)


def test_nothing_waits_for_the_coordinators_part_of_a_save_that_failed(tmpfs: Path) -> None:
    env = {"FLASHPOINT_SEAL_DEADLINE_S": "100"}
    with Team(worker.has_no_room, tmpfs, 2, env=env) as team:
        for found in team.results(90):
            assert "no room" in found["failed"]
            assert found["settled"]
            assert found["waited"] < 50, "the deadline was waited for"


@pytest.mark.parametrize("how", ["dcp", "local"])
def test_a_save_that_one_rank_begins_alone_costs_nothing(tmpfs: Path, how: str) -> None:
    assert call_team(worker.begins_one_more, tmpfs, 2, how) == [[1, 2, 3, 4, 5]] * 2


def test_ranks_that_count_alone_are_in_step_again_after_two_saves(tmpfs: Path) -> None:
    for verified in call_team(worker.begins_one_more, tmpfs, 2, "engine"):
        assert verified == [1, 1, 1, 4, 5], verified


def test_a_late_rank_costs_one_save(tmpfs: Path) -> None:
    with Team(worker.comes_late, tmpfs, 2) as team:
        (_, error) = team[0].next_report("given up", timeout_s=120)
        assert "rank 1 of 2 did not come" in error
        team[1].say("go on")
        for rank in range(2):
            assert team[rank].next_report("saved", 3, timeout_s=120) == ("saved", 3, 3)
        for found in team.results(120):
            assert found == {"failures": 1, "degraded": False, "replicated": 4}


def test_an_agreement_that_comes_late_costs_one_verdict(tmpfs: Path) -> None:
    env = {"FLASHPOINT_COLLECTIVE_DEADLINE_S": "3"}
    with Team(worker.agrees_late, tmpfs, 2, env=env) as team:
        (_, error) = team[0].next_report("given up", timeout_s=120)
        assert error is not None
        team[1].say("go on")
        for seen in team.results(120):
            assert seen == [1, 1, 3, 4]


def test_a_rank_that_does_not_call_is_named(tmpfs: Path) -> None:
    with Team(worker.saves_alone, tmpfs, 2) as team:
        team[0].next_report("failed", timeout_s=120)
        team[1].say("go on")
        said, _ = team.results(120)
    assert said is not None
    assert "rank 1 of 2 did not come" in said
    assert "to call step() or save()" in said


def test_two_jobs_in_one_process_group_do_not_cross(tmpfs: Path) -> None:
    assert call_team(worker.saves_in_two_jobs, tmpfs, 2, 30) == [[(30, 0, 30)] * 2] * 2


@pytest.mark.parametrize("how", ["sync", "thread", "process", "engine"])
def test_what_is_saved_is_newest_although_the_clock_is_behind(tmpfs: Path, how: str) -> None:
    day = 24 * 3600
    assert call_team(worker.saves_with_a_clock, tmpfs, 2, 100, day, "sync") == [(100, 100)] * 2
    shutil.rmtree(tmpfs / "node-0")  # only rank 1 sees what there is
    assert call_team(worker.saves_with_a_clock, tmpfs, 2, 7, 0, how) == [(7, 7)] * 2


def test_names_of_many_savers_sort_as_they_were_made() -> None:
    names = call(worker.names_of_many_savers, 0)
    assert names == sorted(names)
