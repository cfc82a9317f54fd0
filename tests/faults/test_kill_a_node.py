"""SIGKILL of one of two ranks on two nodes, at any moment, with or without the memory of its node.

What must load then, bit-equal on all ranks: where no memory was lost, the newest version that every rank has
committed, or a newer one; where a node's memory was lost, the newest that any rank knew to be verified.
"""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path

import pytest

from tests.faults.common import await_more, files_of, iterations, last, lives
from tests.support.forked import Team, call_team
from tests.workers import fault_team


@pytest.mark.slow
@pytest.mark.parametrize(("size", "count", "longest_s"), [("small", 24, 0.3), ("mid", 12, 0.8)])
@pytest.mark.parametrize("lose_memory", [False, True])
def test_kill_a_rank(
    tmpfs: Path, rng: random.Random, size: str, count: int, longest_s: float, lose_memory: bool
) -> None:
    least = most = 0
    for life, gets_on in lives(count):
        with Team(fault_team.team_save_for_ever, tmpfs, 2, size, most + 1, life) as team:
            loaded = {child.next_report("loaded")[1] for child in team.ranks}
            assert len(loaded) == 1, loaded
            found = loaded.pop()
            step = found[0] if found else 0
            assert least <= step <= most, team[0].failure(f"loaded {found}, not {least} to {most}")
            if gets_on:
                await_more("verified", least, team.ranks, of_all=False)
            time.sleep(rng.random() ** 2 * longest_s)
            victim = rng.randrange(2)
            team[victim].kill()
            if lose_memory:
                shutil.rmtree(tmpfs / f"node-{victim}")
            time.sleep(rng.choice([0.0, 0.02]))
            team[1 - victim].kill()
            verified = max(last(child, "verified") for child in team.ranks)
            least = max(step, verified)
            most = max(most, *(last(child, "begins") for child in team.ranks))
    assert least >= len(iterations(count)) // 2


@pytest.mark.slow
@pytest.mark.parametrize("lose_memory", [False, True])
def test_kill_before_a_change_to_files(tmpfs: Path, rng: random.Random, lose_memory: bool) -> None:
    """At points of the protocol of commit, copy and prune, on either rank."""
    steps = [1, 2, 3]
    totals = call_team(fault_team.team_save, tmpfs / "count", 2, "tiny", steps, 0)
    points = [(victim, nth) for victim in (0, 1) for nth in range(1, totals[victim] + 1)]
    for victim, nth in rng.sample(points, min(len(points), len(iterations(10)))):
        root = tmpfs / f"{victim}-{nth}"

        def args_of(rank: int, victim: int = victim, nth: int = nth) -> tuple[object, ...]:
            return "tiny", steps, 0, nth if rank == victim else 0

        with Team(fault_team.team_save, root, 2, args_of=args_of) as team:
            if team[victim].wait() != -9:
                continue  # how many changes there are depends on how the ranks meet
            team[1 - victim].kill()
            verified = max(last(child, "verified") for child in team.ranks)
            begun = max(last(child, "begins") for child in team.ranks)
        if lose_memory:
            shutil.rmtree(root / f"node-{victim}")
        found = call_team(fault_team.team_load, root, 2, "tiny")
        assert found[0] == found[1], (victim, nth, found)
        step = found[0][0] if found[0] else 0
        assert verified <= step <= begun, (victim, nth, found)
        call_team(fault_team.team_save, root, 2, "tiny", [7, 8], 1)
        assert call_team(fault_team.team_load, root, 2, "tiny") == [(8, 1), (8, 1)]
        for node in (0, 1):
            left = files_of(root / f"node-{node}" / "job")
            assert len([name for name in left if name.startswith("step-8_ckpt/")]) == 4, (victim, nth, left)
            assert len(list((root / f"node-{node}").glob("job/.flashpoint/slots/*/*"))) <= 4 + 2, (victim, nth)
        shutil.rmtree(root)
