"""Local checkpoints of several ranks on several nodes, each in a process of its own: losses, failures, moves."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.forked import Team, call_team
from tests.workers import local_faults


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_rank_may_lose_its_folder_in_every_layout(tmpfs: Path, world_size: int) -> None:
    losses = world_size * len(local_faults.LAYOUTS[world_size])
    assert call_team(local_faults.every_loss, tmpfs, world_size) == [losses] * world_size


@pytest.mark.damages_on_purpose
def test_damage_is_noticed(tmpfs: Path) -> None:
    call_team(local_faults.damage, tmpfs, 2)


def test_a_failing_rank_fails_the_save_on_all(tmpfs: Path) -> None:
    errors = call_team(local_faults.one_rank_fails, tmpfs, 2)
    for rank in (0, 1):
        for mode in ("sync", "async"):
            kind, text = errors[rank][mode]
            assert kind == "CheckpointingException"
            assert "rank 1: the state of" in text
            assert "step 2" in text
        kind, text = errors[rank]["differ"]
        assert (kind, "ranks saved different iterations" in text) == ("CheckpointingException", True)
    assert errors[1]["argument"][0] == "InvalidIterationError"
    assert errors[0]["argument"][0] == "CheckpointingException"
    assert "iteration must be an integer of at least 0, got -1" in errors[0]["argument"][1]
    assert errors[1]["load"][0] == "UnsafeContentError"
    assert errors[0]["load"][0] == "CheckpointingException"
    assert "rank 1 cannot load" in errors[0]["load"][1]


@pytest.mark.parametrize(("mode", "end"), [("sync", "killed"), ("argument", "killed"), ("async", "stopped")])
def test_a_rank_that_is_gone_fails_the_save_of_the_others(tmpfs: Path, mode: str, end: str) -> None:
    env = {"FLASHPOINT_COLLECTIVE_DEADLINE_S": "10", "FLASHPOINT_TRANSFER_DEADLINE_S": "10"}
    with Team(local_faults.rank_dies, tmpfs, 2, mode, env=env) as team:
        for child in team.ranks:
            child.next_report("ready")
        team[1].kill() if end == "killed" else team[1].stop()
        team[0].say("go on")
        _, kind, text = team[0].next_report("told")
        if mode == "argument":
            assert kind == "InvalidIterationError", "its own error comes first"
            return
        assert kind == "CheckpointingException" or (mode, kind) == ("async", "RanksLostError")
        assert "rank 0" in text, "it says whose error it is"


def test_ranks_that_moved_find_their_parts_and_other_world_sizes_are_refused(tmpfs: Path) -> None:
    call_team(local_faults.save_one, tmpfs, 3, 5)
    call_team(local_faults.load_one, tmpfs, 3, 5, placement=[2, 0, 1])
    # With fewer, parts are on nodes that do not take part.
    for world_size, refused, why in (
        (1, "NoReplicasAvailableError", "of 3 are on no node of this job"),
        (2, "NoReplicasAvailableError", "of 3 are on no node of this job"),
        (4, "WorldSizeChangedError", "saved by 3 ranks, and there are 4 now"),
    ):
        for errors in call_team(local_faults.refusals, tmpfs, world_size):
            for kind, text in errors:
                assert kind == refused
                assert why in text
    # Refusing has cost nothing.
    call_team(local_faults.load_one, tmpfs, 3, 5)


def test_a_job_of_fewer_ranks_does_not_start_over_what_they_all_have(tmpfs: Path) -> None:
    """There the parts of the others are on no node of the job: not because they were lost."""
    call_team(local_faults.save_one, tmpfs, 2, 1, "bare", False)
    (errors,) = call_team(local_faults.refusals, tmpfs, 1, "bare")
    assert [kind for kind, _ in errors] == ["NoReplicasAvailableError"] * 2


def test_dtensors_are_copied_and_come_back(tmpfs: Path) -> None:
    call_team(local_faults.dtensors, tmpfs, 2)
