"""What departed ranks and earlier lives leave behind: taken over, removed, or gone on from."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.faults.common import files_of, slots, versions
from tests.support.forked import call, call_team
from tests.workers import fault_engine as engine
from tests.workers import fault_team
from tests.workers.kept_versions import Command, play


def owners(base: Path) -> set[str]:
    """The number of ranks, and the rank, of each that has slots."""
    return {path.parent.name for path in slots(base)}


def test_memory_of_departed_ranks_is_given_back_once_a_version_is_verified_without_them(tmpfs: Path) -> None:
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


def test_a_base_container_without_its_slots_loads(tmpfs: Path) -> None:
    """As a copy of the folder has it: hard links are files of their own there."""
    base = tmpfs / "job"
    call(engine.save_steps, str(base), "small", [1, 2], 3)
    for slot in slots(base):
        slot.unlink()
    assert call(engine.go_on, str(base), "small", [3], 4) == [(2, 3), (3, 4)]


# ---- versions that are kept beside the newest one ---------------------------------------------------------------


class Among:
    """Equal to a list of versions that has these steps, verified. Older ones stay until their slots are used again."""

    def __init__(self, *steps: int) -> None:
        self.steps = {(step,) for step in steps}

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, list) and self.steps <= set(other)


def job(root: Path, *script: Command, store: str | None = None) -> list[Any]:
    """What came of a script, the same on both ranks. Which bits are loaded is checked on every rank at each load."""
    results = call_team(play, root, 2, script, store)
    assert results == [results[0]] * 2
    return list(results[0])


@pytest.mark.slow
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


@pytest.mark.slow
def test_what_was_gone_back_from_is_not_resumed_from_although_it_is_persisted(
    tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = str(tmpfs / "store")
    for step in (2, 3):  # what is newest at the end is persisted
        job(tmpfs, ("resume",), ("save", [step], 0), store=store)
    assert job(tmpfs, ("resume",), ("resume", 2), store=store)[1] == (2, [2, 0])
    # The node of rank 0, who looks at the store, is new, and what the other one has of its parts is gone.
    shutil.rmtree(tmpfs / "node-0")
    for path in (tmpfs / "node-1").glob("**/step-*/rank-00000-*"):
        path.unlink()
    monkeypatch.setenv("FLASHPOINT_RECOVERY_DEADLINE_S", "1")
    assert job(tmpfs, ("resume",), store=store) == [(2, [2, 0])]
