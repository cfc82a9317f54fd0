"""A peer that hangs or vanishes: saves go on at full speed, the log says so once, and copies are made again as soon
as it is back."""

from __future__ import annotations

import shutil
import statistics
from pathlib import Path

import pytest

from tests.faults.common import files_of
from tests.support.forked import Child, Team, call_team, wait_until
from tests.workers import fault_team

DEADLINE_S = 4.0
ENVIRONMENT = {"FLASHPOINT_TRANSFER_DEADLINE_S": str(DEADLINE_S), "FLASHPOINT_COLLECTIVE_DEADLINE_S": "60"}
# A save waits for no peer; what is left is a busy machine, which delays one or another, not half of them.
LATE_S = 30.0


def team(root: Path, **environment: str) -> Team:
    made = Team(fault_team.team_obey, root, 2, "small", env=ENVIRONMENT | environment)
    for child in made.ranks:
        child.next_report("ready")
    return made


def save(child: Child, *steps: int) -> list[float]:
    """Has a rank save; how long it took, each."""
    took = []
    for step in steps:
        child.say("save", step, 0)
        took.append(child.next_report("committed", step)[2])
    assert max(took) < LATE_S, child.failure(f"saves took {took}")
    assert len(took) < 3 or statistics.median_low(took) < DEADLINE_S / 4, child.failure(f"saves took {took}")
    return took


def settle(*children: Child) -> None:
    for child in children:
        child.say("wait", 110)
    for child in children:
        assert child.next_report("settled", timeout_s=120) == ("settled", True), child.failure("saves did not settle")


def status(child: Child) -> dict[str, object]:
    child.say("status")
    return dict(child.next_report("status")[1])


def versions(root: Path, node: int) -> set[str]:
    return {name.split("/")[0] for name in files_of(root / f"node-{node}" / "job")}


@pytest.mark.slow
def test_a_peer_that_hangs_and_comes_back(tmpfs: Path) -> None:
    with team(tmpfs) as ranks:
        one, other = ranks.ranks
        for child in (one, other):
            save(child, 1, 2)
        settle(one, other)
        other.stop()
        save(one, 3, 4)
        wait_until(lambda: "replication fails" in one.log, "an error in the log", LATE_S)
        save(one, *range(5, 15))
        assert status(one)["verified"] == 2
        assert "step-2_ckpt" in versions(tmpfs, 0), "the verified version must stay"
        other.go_on()
        save(other, *range(3, 15))
        settle(one, other)
        for child in (one, other):
            save(child, 15, 16)
        settle(one, other)
        assert [status(child)["verified"] for child in (one, other)] == [16, 16]
        assert status(one)["replication_error"] is None
        assert one.log.count("replication fails") == 1, one.log
        assert one.log.count("replication works again") == 1, one.log
        assert "step-16_ckpt" in versions(tmpfs, 0) & versions(tmpfs, 1)
        assert len(list(tmpfs.glob("node-*/job/.flashpoint/slots/*/*"))) <= 2 * (4 + 3)


@pytest.mark.slow
def test_a_peer_that_vanishes_and_is_replaced(tmpfs: Path) -> None:
    with team(tmpfs, FLASHPOINT_SEAL_DEADLINE_S="20") as ranks:
        one, other = ranks.ranks
        for child in (one, other):
            save(child, 1, 2)
        settle(one, other)
        other.kill()
        shutil.rmtree(tmpfs / "node-1")
        save(one, *range(3, 20))
        settle(one)
        found = status(one)
        assert (found["committed"], found["verified"]) == (19, 2)
        assert "step-2_ckpt" in versions(tmpfs, 0)
        assert one.log.count("replication fails") == 1, one.log
        assert len(list(tmpfs.glob("node-0/job/.flashpoint/slots/*/*"))) <= 4 + 3
    assert call_team(fault_team.team_load, tmpfs, 2, "small") == [(2, 0), (2, 0)]
    with team(tmpfs) as ranks:
        for step in (3, 4):
            for child in ranks.ranks:
                save(child, step)
        settle(*ranks.ranks)
        assert [status(child)["verified"] for child in ranks.ranks] == [4, 4]
        assert "step-4_ckpt" in versions(tmpfs, 0) & versions(tmpfs, 1)


def test_what_ranks_save_at_different_steps_is_not_verified(tmpfs: Path) -> None:
    with team(tmpfs, FLASHPOINT_SEAL_DEADLINE_S="20") as ranks:
        one, other = ranks.ranks
        for child in (one, other):
            save(child, 1, 2)
        settle(one, other)
        save(one, 3)
        save(other, 30)
        settle(one, other)
        assert [status(child)["verified"] for child in (one, other)] == [2, 2]
        assert {"step-2_ckpt"} <= versions(tmpfs, 0) & versions(tmpfs, 1)
    assert call_team(fault_team.team_load, tmpfs, 2, "small") == [(2, 0), (2, 0)]


def test_a_rank_that_is_behind_delays_only_what_is_verified(tmpfs: Path) -> None:
    with team(tmpfs) as ranks:
        one, other = ranks.ranks
        for child in (one, other):
            save(child, 1, 2)
        settle(one, other)
        save(one, *range(3, 9))
        assert "step-2_ckpt" in versions(tmpfs, 0)
        save(other, *range(3, 9))
        settle(one, other)
        assert [status(child)["verified"] for child in (one, other)] == [8, 8]
        assert "step-8_ckpt" in versions(tmpfs, 0) & versions(tmpfs, 1)
