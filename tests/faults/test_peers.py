"""Peers that hang, vanish, trickle, or cannot be reached just now: saves go on at full speed, copies are made again as
soon as the peer is back, and no recovery takes that for nothing."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults.common import slots, versions
from tests.support.forked import Child, Team, call_team, preload, wait_until
from tests.support.netns import two_namespaces
from tests.support.processes import child_environment
from tests.workers import fault_team
from tests.workers import recovery_faults as faults
from tests.workers.trickling import STEPS

preload("tests.workers.recovery_faults")

# ---- while saving -----------------------------------------------------------------------------------------------

DEADLINE_S = 4.0
ENVIRONMENT = {"FLASHPOINT_TRANSFER_DEADLINE_S": str(DEADLINE_S), "FLASHPOINT_COLLECTIVE_DEADLINE_S": "60"}
# A save waits for no peer; what is left is a busy machine, which delays one or another, not half of them.
LATE_S = 30.0


def team(root: Path, **environment: str) -> Team:
    made = Team(fault_team.team_obey, root, 2, "small", env=ENVIRONMENT | environment)
    for child in made.ranks:
        child.next_report("ready")
    return made


def save(child: Child, *steps: int) -> None:
    """Have a rank save, and wait for no peer."""
    took = []
    for step in steps:
        child.say("save", step, 0)
        took.append(child.next_report("committed", step)[2])
    assert max(took) < LATE_S, child.failure(f"saves took {took}")
    assert len(took) < 3 or statistics.median_low(took) < DEADLINE_S / 4, child.failure(f"saves took {took}")


def settle(*children: Child) -> None:
    for child in children:
        child.say("wait", 110)
    for child in children:
        assert child.next_report("settled", timeout_s=120) == ("settled", True), child.failure("saves did not settle")


def status(child: Child) -> dict[str, object]:
    child.say("status")
    return dict(child.next_report("status")[1])


def held(root: Path, node: int) -> set[str]:
    return versions(root / f"node-{node}" / "job")


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
        assert "step-2_ckpt" in held(tmpfs, 0), "the verified version must stay"
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
        assert "step-16_ckpt" in held(tmpfs, 0) & held(tmpfs, 1)
        assert len(slots(tmpfs)) <= 2 * (4 + 3)


@pytest.mark.slow
def test_a_peer_that_vanishes_and_is_replaced(tmpfs: Path) -> None:
    with team(tmpfs, FLASHPOINT_SEAL_DEADLINE_S="6") as ranks:
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
        assert "step-2_ckpt" in held(tmpfs, 0)
        assert one.log.count("replication fails") == 1, one.log
        assert len(slots(tmpfs)) <= 4 + 3
    assert call_team(fault_team.team_load, tmpfs, 2, "small") == [(2, 0), (2, 0)]
    with team(tmpfs) as ranks:
        for step in (3, 4):
            for child in ranks.ranks:
                save(child, step)
        settle(*ranks.ranks)
        assert [status(child)["verified"] for child in ranks.ranks] == [4, 4]
        assert "step-4_ckpt" in held(tmpfs, 0) & held(tmpfs, 1)


def test_two_jobs_in_one_process_group_do_not_cross(tmpfs: Path) -> None:
    assert call_team(fault_team.saves_in_two_jobs, tmpfs, 2, 20) == [[(0, 20)] * 2] * 2


@pytest.mark.slow
@pytest.mark.netns
@pytest.mark.skipif(shutil.which("tc") is None, reason="needs tc, for a link that trickles")
def test_no_step_waits_for_a_copy_that_trickles(tmpfs: Path) -> None:
    """At 300 kbit/s, a copy of 4 MB takes two minutes."""
    with two_namespaces() as sides, contextlib.ExitStack() as stack:
        ranks: list[Any] = []
        for rank, side in enumerate(sides):
            argv = ["-m", "tests.workers.trickling", str(rank), side.interface, side.address, str(tmpfs)]
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            command = side.command([sys.executable, *argv])
            ranks.append(stack.enter_context(subprocess.Popen(command, env=child_environment(), **pipes)))
            stack.callback(ranks[-1].kill)

        def told() -> list[Any]:
            return [json.loads(process.stdout.readline()) for process in ranks]

        def go_on() -> None:
            for process in ranks:
                process.stdin.write("\n")
                process.stdin.flush()

        assert told() == ["open", "open"]
        for side in sides:
            side.throttle("300kbit")
        go_on()
        for found in told():
            assert found == {"copied": None, "steps": STEPS, "failures": 0}
        for side in sides:
            side.throttle(None)
        go_on()
        first, second = told()
        assert first == second
        assert 1 <= first["copied"] <= STEPS
        go_on()
        assert [process.wait(60) for process in ranks] == [0, 0]


# ---- while recovering -------------------------------------------------------------------------------------------

ALWAYS = 10**6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("outage", "times", "error"),
    [
        ("refused", 3, None),
        ("manifests", 2, None),
        ("silent", ALWAYS, r"NothingLoadableError: .*step-3_ckpt \(rank 1 on node-1.*discard_existing=True"),
        ("manifests", ALWAYS, r"NothingLoadableError: .*node-0.*Too many open files.*discard_existing=True"),
        ("descriptors", ALWAYS, "LoadError: the state of node-0 cannot be known: .*Too many open files"),
    ],
)
def test_what_is_out_of_reach_just_now_is_waited_for_and_never_taken_for_nothing(
    tmpfs: Path, outage: str, times: int, error: str | None
) -> None:
    """Rank 1 has lost its node, and cannot reach the other one; or that one cannot read what it has."""
    call_team(faults.facade_saves, tmpfs, 2, 3)
    shutil.rmtree(tmpfs / "node-1")
    environment = {} if error is None else {"FLASHPOINT_RECOVERY_DEADLINE_S": "0.3"}
    with Team(faults.facade_resumes, tmpfs, 2, outage, times, env=environment) as ranks:
        for first, value, then in ranks.results():
            assert first == 3 if error is None else re.match(error, first), first
            assert (value, then) == (3, 4)


@pytest.mark.slow
def test_a_rank_that_was_late_takes_no_time_from_the_reads_of_others(tmpfs: Path) -> None:
    call_team(faults.facade_saves, tmpfs, 2, 3)
    shutil.rmtree(tmpfs / "node-1")
    environment = {"FLASHPOINT_RECOVERY_DEADLINE_S": "1.5"}
    with Team(faults.facade_resumes, tmpfs, 2, "refused", 1, 2.0, env=environment) as ranks:
        assert ranks.results() == [(3, 3, 4)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("discard", [False, True])
def test_forgetting_resume_is_refused_by_all_ranks_alike_unless_what_exists_may_go(tmpfs: Path, discard: bool) -> None:
    call_team(faults.facade_saves, tmpfs, 2, 2)
    shutil.rmtree(tmpfs / "node-0")
    refused = "call resume() before the first step, or construct with discard_existing=True"
    for stepped, saved, resumed in call_team(faults.facade_forgets, tmpfs, 2, discard):
        assert (stepped, saved) == ("saved", "saved") if discard else (refused in stepped and refused in saved)
        assert resumed == (7 if discard else 2)
