"""Recovery while something is out of reach just now: it waits, it raises, and it never takes that for nothing."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.faults.common import part_files
from tests.support.forked import Team, preload
from tests.workers import fault_team
from tests.workers import recovery_faults as faults

preload("tests.workers.recovery_faults")

SOON = {"FLASHPOINT_RECOVERY_DEADLINE_S": "0.3"}


def team(function: Any, root: Path, world: int, *args: Any, env: Mapping[str, str] | None = None) -> list[Any]:
    with Team(function, root, world, *args, env=env) as ranks:
        return ranks.results()


@pytest.fixture
def job(tmpfs: Path) -> Path:
    """Two nodes that hold step 2 of both ranks."""
    team(fault_team.team_save, tmpfs, 2, "small", [1, 2], 0)
    return tmpfs


# ---- peers ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 8])
def test_a_peer_that_refuses_and_then_answers(job: Path, times: int) -> None:
    shutil.rmtree(job / "node-1")
    assert team(faults.refused_at_first, job, 2, times) == [(2, 0), (2, 0)]


@pytest.mark.slow
def test_a_rank_that_was_late_takes_no_time_from_the_reads_of_others(job: Path) -> None:
    shutil.rmtree(job / "node-1")
    env = {"FLASHPOINT_RECOVERY_DEADLINE_S": "1.5"}
    assert team(faults.refused_at_first, job, 2, 1, 2.0, env=env) == [(2, 0), (2, 0)]


@pytest.mark.slow
def test_a_peer_that_never_answers_is_an_error_and_tried_again_on_demand(job: Path) -> None:
    shutil.rmtree(job / "node-1")
    found = team(faults.never_answered, job, 2, env=SOON)
    for first, _, second in found:
        assert first.startswith("NothingLoadableError"), first
        assert "step-2_ckpt (rank 1 on node-1" in first
        assert "handshake" in first
        assert "discard_existing=True" in first
        assert second == (2, 0)
    assert "step-2_ckpt" in found[0][1]


@pytest.mark.damages_on_purpose
def test_a_damaged_copy_and_a_second_good_one(tmpfs: Path) -> None:
    team(faults.save_as, tmpfs, 3, "ring", [1])
    shutil.rmtree(tmpfs / "node-0")
    base = tmpfs / "node-1" / "job"
    path = base / part_files(base, 1, 0)[0]
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    with path.open("r+b") as file:
        file.write(data)
    assert team(faults.load_as, tmpfs, 3, "ring") == [(1, 0)] * 3


@pytest.mark.slow
@pytest.mark.damages_on_purpose
def test_a_damaged_copy_and_no_other_is_an_error_that_names_it(tmpfs: Path) -> None:
    team(fault_team.team_save, tmpfs, 2, "small", [2], 0)
    shutil.rmtree(tmpfs / "node-1")
    base = tmpfs / "node-0" / "job"
    path = base / part_files(base, 2, 1)[0]
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    with path.open("r+b") as file:
        file.write(data)
    for said in team(faults.load_as, tmpfs, 2, "ring"):
        assert said.startswith("NothingLoadableError"), said
        assert "step-2_ckpt (rank 1 on node-1: block " in said


# ---- descriptors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["descriptors", "manifests"])
def test_descriptors_that_come_back_are_waited_for(job: Path, kind: str) -> None:
    assert team(faults.short_of_descriptors, job, 2, kind, True) == [[(2, 0), (2, 0)]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["descriptors", "manifests"])
def test_descriptors_that_do_not_come_back_are_no_reason_to_find_nothing(job: Path, kind: str) -> None:
    """The only holder cannot read what it has: an error on all ranks, and no memory of it."""
    shutil.rmtree(job / "node-1")
    for first, second in team(faults.short_of_descriptors, job, 2, kind, False, env=SOON):
        assert first.startswith(("NothingLoadableError", "LoadError")), first
        assert "node-0" in first
        assert "Too many open files" in first
        assert second == (2, 0)


# ---- what was lost, and what never was ------------------------------------------------------------------------


def test_a_node_lost_for_good_without_copies_is_an_error(tmpfs: Path) -> None:
    team(faults.save_as, tmpfs, 2, "none", [1])
    shutil.rmtree(tmpfs / "node-1")
    for said in team(faults.load_as, tmpfs, 2, "none"):
        assert said.startswith("NothingLoadableError"), said
        assert "step-1_ckpt (the parts of ranks 1 of 2 are on no node of this job)" in said


def test_what_a_first_save_left_that_was_cut_short_lets_a_job_start(tmpfs: Path) -> None:
    with Team(fault_team.team_obey, tmpfs, 2, "small") as ranks:
        for child in ranks.ranks:
            child.next_report("ready")
        ranks[0].say("save", 1, 0)
        ranks[0].next_report("committed")
    assert part_files(tmpfs / "node-0" / "job", 1)
    assert team(faults.load_as, tmpfs, 2, "none") == [None, None]


def test_saves_of_one_rank_only_let_a_job_start_where_the_other_is_seen_not_to_have_any(tmpfs: Path) -> None:
    with Team(fault_team.team_obey, tmpfs, 2, "small") as ranks:
        for child in ranks.ranks:
            child.next_report("ready")
        ranks[0].say("save", 1, 0)
        ranks[0].next_report("committed")
        ranks[0].say("save", 2, 0)
        ranks[0].next_report("committed")
    # Rank 1 has nothing at all: it may as well have been lost with its node.
    for said in team(faults.load_as, tmpfs, 2, "none"):
        assert said.startswith("NothingLoadableError"), said


# ---- the façade -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("peers", [True, False])
def test_resume_raises_and_does_not_start_at_0(tmpfs: Path, peers: bool) -> None:
    team(faults.facade_saves, tmpfs, 2, 3)
    shutil.rmtree(tmpfs / "node-1")
    for first, second, value, then in team(faults.facade_resumes, tmpfs, 2, peers, env=SOON):
        assert first.startswith("NothingLoadableError"), first
        assert ("step-3_ckpt (rank 1 on node-1" in first) if peers else ("Too many open files" in first)
        assert (second, value, then) == (3, 3, 4)


@pytest.mark.slow
def test_forgetting_resume_is_refused_by_all_ranks_alike(tmpfs: Path) -> None:
    team(faults.facade_saves, tmpfs, 2, 2)
    shutil.rmtree(tmpfs / "node-0")
    found = team(faults.facade_forgets, tmpfs, 2, False)
    assert [("step-2_ckpt" in each[0]) for each in found] == [False, True]
    for _, stepped, saved, resumed in found:
        for refused in (stepped, saved):
            assert "call resume() before the first step, or construct with discard_existing=True" in refused
        assert resumed == 2


@pytest.mark.slow
def test_what_exists_is_discarded_on_request(tmpfs: Path) -> None:
    team(faults.facade_saves, tmpfs, 2, 2)
    found = team(faults.facade_forgets, tmpfs, 2, True)
    assert found == [[[], "saved", "saved", 7]] * 2
