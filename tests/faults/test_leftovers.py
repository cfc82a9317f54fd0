"""What dead processes and departed ranks leave behind: taken over or removed, and never another process's."""

from __future__ import annotations

import os
import random
import re
import time
from pathlib import Path

import pytest

from tests.faults.common import files_of, iterations
from tests.support.forked import Child, Team, call, call_team
from tests.workers import fault_engine as engine
from tests.workers import fault_team


def slots(root: Path) -> list[Path]:
    return sorted(root.glob("**/.flashpoint/slots/*/*"))


def owners(base: Path) -> set[str]:
    """The number of ranks, and the rank, of each that has slots."""
    return {path.parent.name for path in slots(base)}


def versions(base: Path) -> set[str]:
    return {name.split("/")[0] for name in files_of(base)}


def test_a_second_live_process_is_refused_at_once(tmpfs: Path) -> None:
    base = str(tmpfs / "job")
    with Child(engine.hold, base) as holder:
        holder.next_report("open")
        holder.stop()  # it hangs, with its lock
        with Child(engine.open_base, base, env={"FLASHPOINT_LOCK_DEADLINE_S": "1000"}) as second:
            said = second.result()
        assert said.startswith("JobInUseError"), said
        assert f"process {holder.pid} on " in said
        assert base in said
        holder.go_on()
        holder.say("go")
        holder.join()
    assert call(engine.open_base, base) == "open"


class TestDepartedRanks:
    def test_their_memory_is_given_back_once_a_version_is_verified_without_them(self, tmpfs: Path) -> None:
        base = tmpfs / "node-0" / "job"
        call_team(fault_team.team_save, tmpfs, 3, "small", [1, 2], 0, placement=[0, 0, 0])
        assert owners(base) == {"00003-00000", "00003-00001", "00003-00002"}
        assert call_team(fault_team.team_load, tmpfs, 1, "small") == [(2, 0)]
        assert len([name for name in files_of(base) if name.startswith("step-2_ckpt")]) == 6, "nothing is verified yet"
        call_team(fault_team.team_save, tmpfs, 1, "small", [3], 1)
        assert owners(base) == {"00001-00000"}
        assert len(slots(base)) <= 4
        assert versions(base) == {"step-3_ckpt"}
        assert call_team(fault_team.team_load, tmpfs, 1, "small") == [(3, 1)]

    def test_a_job_does_not_begin_while_one_of_them_lives(self, tmpfs: Path) -> None:
        base = tmpfs / "node-0" / "job"
        with Team(fault_team.team_obey, tmpfs, 2, "small", placement=[0, 0]) as team:
            for child in team.ranks:
                child.say("save", 1, 0)
            for child in team.ranks:
                child.next_report("committed")
                child.say("wait", 30)
                child.next_report("settled")
            team[0].kill()
            before = files_of(base)
            assert f"process {team[1].pid} on " in call(engine.open_base, str(base))
            assert files_of(base) == before
        call_team(fault_team.team_save, tmpfs, 1, "small", [4], 2)
        assert owners(base) == {"00001-00000"}
        assert versions(base) == {"step-4_ckpt"}

    @pytest.mark.slow
    def test_any_change_of_ranks_and_nodes(self, tmpfs: Path, rng: random.Random) -> None:
        step, size = 0, "tiny"
        holders = [0, 1]
        for life in iterations(25):
            world = rng.randrange(1, 4)
            # One of the nodes that have the latest version is there still, or it could not be found.
            placement = [rng.choice(holders), *(rng.randrange(2) for _ in range(world - 1))]
            rng.shuffle(placement)
            holders = placement
            steps = [step + 1, step + 2][: rng.randrange(1, 3)]
            found = call_team(fault_team.team_load_and_save, tmpfs, world, size, steps, life, placement=placement)
            assert {each[0] if each else 0 for each in found} == {step}, found
            step = steps[-1]
            for node in set(placement):
                base = tmpfs / f"node-{node}" / "job"
                assert f"step-{step}_ckpt" in versions(base)
                assert owners(base) <= {f"{world:05d}-{rank:05d}" for rank in range(world)}
                assert len(slots(base)) <= 4 * world
        # A node without ranks keeps what it has: it may be needed, and nobody is there to remove it.


def test_a_base_container_without_its_slots_loads(tmpfs: Path) -> None:
    """As a copy of the folder has it: hard links are files of their own there."""
    base = tmpfs / "job"
    call(engine.save_steps, str(base), "small", [1, 2], 3)
    for slot in slots(base):
        slot.unlink()
    assert call(engine.load, str(base), "small") == (2, 3)
    call(engine.save_steps, str(base), "small", [3], 4)
    assert call(engine.load, str(base), "small") == (3, 4)


def test_what_is_not_ours_in_the_base_container_stays(tmpfs: Path) -> None:
    base = tmpfs / "job"
    foreign = [base / "notes.txt", base / "step-1_ckpt" / "notes.txt", base / "step-x" / ".a.tmp"]
    for path in foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    call(engine.save_steps, str(base), "small", [1, 2], 0)
    call(engine.save_steps, str(base), "small", [3], 0)
    assert [path.read_text() for path in foreign] == ["mine"] * 3


@pytest.mark.slow
def test_a_job_that_never_verifies_does_not_fill_the_memory(tmpfs: Path) -> None:
    """It crashes before its first verified save, again and again."""
    call_team(fault_team.team_save, tmpfs, 2, "small", [1, 2], 0)
    counts = []
    for life in range(1, 6):
        with Team(fault_team.team_load_and_commit, tmpfs, 2, "small", [10 * life, 10 * life + 2], life) as team:
            assert [child.next_report("loaded")[1] for child in team.ranks] == [(2, 0), (2, 0)]
            for child in team.ranks:
                child.next_report("committed")
        counts.append(len(slots(tmpfs)))
    assert max(counts) <= counts[0] + 2, counts
    assert call_team(fault_team.team_load_and_save, tmpfs, 2, "small", [100, 101], 9) == [(2, 0), (2, 0)]
    for node in (0, 1):
        assert "step-101_ckpt" in versions(tmpfs / f"node-{node}" / "job")


def test_nothing_stays_in_shared_memory(tmpfs: Path, rng: random.Random) -> None:
    """Whatever is killed, all that is left in memory lies in the base container."""
    before, pids = set(os.listdir("/dev/shm")), set()
    for life in range(5):
        with Child(engine.save_for_ever, str(tmpfs / "job"), "small", 100 * life, life) as child:
            child.next_report("loaded")
            pids.add(str(child.pid))
            time.sleep(rng.random() * 0.05)
    left = set(os.listdir("/dev/shm")) - before
    # Other tests beside this one have memory of torch's, too: it is named after its process.
    assert not [
        name for name in left if "flashpoint" in name or ("torch" in name and pids & {*re.findall(r"\d+", name)})
    ]


def test_an_older_version_is_found_where_the_newer_one_is_of_no_use(tmpfs: Path) -> None:
    """What was loaded may turn out to be of no use, and be discarded."""
    base = tmpfs / "job"
    call(engine.save_steps, str(base), "tiny", [1, 2], 5)
    assert call(engine.discard_and_load, str(base), "tiny") == [(2, 5), (1, 5), None]
    assert call(engine.load, str(base), "tiny") == (2, 5)
