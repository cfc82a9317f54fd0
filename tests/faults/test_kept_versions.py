"""Versions that are kept beside the newest one, in jobs of several nodes.

Every one of them survives what the newest one survives, and is loaded bit for bit or not at all. Which bits these are
is checked on every rank at each load.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from ml_flashpoint import Keep
from tests.support.forked import Team, call_team
from tests.workers.kept_versions import Command, play, play_engine

pytestmark = pytest.mark.slow


class Among:
    """Equal to a list of versions that has these steps, verified. Older ones stay until their slots are used again."""

    def __init__(self, *steps: int) -> None:
        self.steps = {(step,) for step in steps}

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, list) and self.steps <= set(other)


def job(
    root: Path,
    *script: Command,
    ranks: int = 2,
    keep: int | Keep = 3,
    count: int = 5000,
    change: str = "raise",
    persist: str | None = None,
    **named: Any,
) -> list[Any]:
    """What came of a script, the same on all ranks."""
    results = call_team(play, root, ranks, script, keep, count, change, persist, **named)
    assert results == [results[0]] * ranks
    return list(results[0])


def test_every_kept_version_survives_the_loss_of_either_node(tmpfs: Path) -> None:
    assert job(tmpfs, ("resume",), ("save", range(1, 6), 0), ("versions",)) == [(0, [0, 0]), Among(5, 4, 3)]
    shutil.rmtree(tmpfs / "node-0")
    said = job(tmpfs, ("resume",), ("versions",), ("resume", 3), ("versions",))
    assert said == [(5, [5, 0]), Among(5, 4, 3), (3, [3, 0]), Among(3)]
    shutil.rmtree(tmpfs / "node-1")  # the lost node has had them all again
    said = job(tmpfs, ("resume",), ("resume", 5), ("save", [4, 5], 1), ("versions",))
    assert said[0] == (3, [3, 0])
    assert said[1].startswith("LoadError: no version of step 5")
    assert said[2:] == [Among(5, 4, 3)]
    assert job(tmpfs, ("resume",), ("resume", 3)) == [(5, [5, 1]), (3, [3, 0])]


def test_going_back_is_not_undone_by_a_crash(tmpfs: Path) -> None:
    """The job is killed before it has saved anything after it."""
    script: tuple[Command, ...] = (("resume",), ("save", range(1, 5), 0), ("resume", 3), ("hang",))
    with Team(play, tmpfs, 2, script, 3) as team:
        for rank in range(2):
            team[rank].next_report("hangs")
        for rank in range(2):
            team[rank].kill()
    shutil.rmtree(tmpfs / "node-0")
    said = job(tmpfs, ("resume",), ("versions",), ("save", [4], 1), ("versions",))
    assert said == [(3, [3, 0]), Among(3, 2), Among(4, 3, 2)]
    assert job(tmpfs, ("resume",), ("resume", 4)) == [(4, [4, 1])] * 2


def test_a_node_that_was_away_brings_nothing_back_that_was_gone_back_from(tmpfs: Path) -> None:
    """Neither while nothing was saved since, nor later, although it has all parts of what is newer."""
    job(tmpfs, ("resume",), ("save", range(1, 5), 0))
    away = tmpfs / "away"
    shutil.move(tmpfs / "node-1", away)
    assert job(tmpfs, ("resume", 3))[0] == (3, [3, 0])
    shutil.rmtree(tmpfs / "node-1")
    shutil.move(away, tmpfs / "node-1")
    assert job(tmpfs, ("resume",), ("versions",))[0] == (3, [3, 0])
    shutil.rmtree(tmpfs / "node-0")  # the other one has learned of it
    assert job(tmpfs, ("resume",), ("save", [4], 1), ("versions",)) == [(3, [3, 0]), Among(4, 3, 2)]


def test_what_was_gone_back_from_is_not_resumed_from_although_it_is_persisted(
    tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = str(tmpfs / "store")
    for step in (2, 3):  # what is newest at the end is persisted
        job(tmpfs, ("resume",), ("save", [step], 0), persist=store)
    assert job(tmpfs, ("resume",), ("resume", 2), persist=store)[1] == (2, [2, 0])
    # The node of rank 0, who looks at the store, is new, and what the other one has of its parts is gone.
    shutil.rmtree(tmpfs / "node-0")
    for path in (tmpfs / "node-1").glob("**/step-*/rank-00000-*"):
        path.unlink()
    monkeypatch.setenv("FLASHPOINT_RECOVERY_DEADLINE_S", "1")
    assert job(tmpfs, ("resume",), persist=store) == [(2, [2, 0])]


def test_a_version_that_lost_a_part_is_not_there_any_more(tmpfs: Path) -> None:
    job(tmpfs, ("resume",), ("save", range(1, 4), 0))
    for node in range(2):
        for path in (tmpfs / f"node-{node}" / "job" / "step-2_ckpt").glob("rank-00001-*"):
            path.unlink()
    said = job(tmpfs, ("resume",), ("versions",), ("resume", 2), ("resume", 9), ("resume", 1))
    assert said[:2] == [(3, [3, 0]), Among(3, 1)]
    assert all("there are 3, 1" in each and each.startswith("LoadError") for each in said[2:4])
    assert said[4] == (1, [1, 0])


def test_milestones_and_going_back_by_the_engine(tmpfs: Path) -> None:
    said = call_team(play_engine, tmpfs, 2, list(range(1, 10)), 8)
    assert said == [[Among(9, 8, 4), 8, 8]] * 2
