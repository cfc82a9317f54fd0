"""A tmpfs without room: that save fails, with a typed error and at once; everything else goes on."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest

from tests.faults.common import files_of, iterations
from tests.support.forked import call
from tests.support.tmpfs import SMALL_TMPFS_BYTES as SIZE
from tests.workers import fault_engine as engine

PAGES = 1 << 14


def saves(base: Path, leaves: list[int], *, growing: bool) -> list[str]:
    results = call(engine.save_while_full, str(base), leaves, growing)
    slow = [result for result in results if result[1] > 10]
    assert not slow, f"a save that cannot succeed must fail at once: {slow}"
    return [said for said, _ in results]


def test_a_full_tmpfs_is_enough_for_a_state_that_does_not_grow(small_tmpfs: Path) -> None:
    """Slots are there from the saves before. A few pages are for manifests."""
    base = small_tmpfs / "job"
    said = saves(base, [SIZE, SIZE, PAGES, PAGES, PAGES, SIZE, SIZE], growing=False)
    assert said == ["ok"] * 7
    assert "step-7_ckpt" in {name.split("/")[0] for name in files_of(base)}


def test_no_room_for_a_larger_state(small_tmpfs: Path) -> None:
    said = saves(small_tmpfs / "job", [*[SIZE] * 3, *[8192] * 6, SIZE, SIZE], growing=True)
    # The first of them may find their room in slots that have become too small.
    assert (said[:3], said[-2:]) == (["ok"] * 3, ["ok"] * 2)
    assert said[7:9] == ["CapacityError"] * 2


@pytest.mark.parametrize("door", ["dcp", "flashpoint", "lightning"])
def test_a_run_that_cannot_begin_costs_saves_and_no_version(small_tmpfs: Path, door: str) -> None:
    said, there = call(engine.save_again_while_full, str(small_tmpfs / "job"), door)
    assert said == [True, False, True]
    assert there in ([3, 2], [3, 1])  # of DCP, the first attempt of step 2 works


@pytest.mark.slow
@pytest.mark.parametrize("growing", [False, True])
def test_any_room_left(small_tmpfs: Path, rng: random.Random, growing: bool) -> None:
    """Whatever is free: a save works, or fails with a typed error; the process lives, and the last save loads."""
    for _ in iterations(12):
        leaves = [rng.choice([0, 4096, 8192, 65536, rng.randrange(1 << 20), SIZE]) for _ in range(14)]
        base = small_tmpfs / "job"
        said = saves(base, [SIZE, *leaves, SIZE], growing=growing)
        assert set(said) <= {"ok", "CapacityError"}, said
        assert said[0] == said[-1] == "ok", (leaves, said)
        subprocess.run(["rm", "-r", str(base), str(small_tmpfs / "filler")], check=True)
