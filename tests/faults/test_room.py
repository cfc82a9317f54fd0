"""A tmpfs without room, or of exactly the size that docs/operations.md states: what cannot be saved fails with a typed
error, everything else goes on, and versions keep being verified."""

from __future__ import annotations

import contextlib
import itertools
import random
import subprocess
from collections.abc import Callable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

from ml_flashpoint.memory.slot import PAGE
from ml_flashpoint.state.tracked import largest_share
from tests.faults.common import iterations, versions
from tests.support import tmpfs as tmpfs_folders
from tests.support.forked import DEADLINE_S, call, call_team, preload
from tests.support.tmpfs import SMALL_TMPFS_BYTES as SIZE
from tests.workers import little_room as worker

preload("tests.workers.little_room")

MIB = 1 << 20

# ---- without room -----------------------------------------------------------------------------------------------


def test_a_full_tmpfs_is_enough_for_a_state_that_does_not_grow(small_tmpfs: Path) -> None:
    """Slots are there from the saves before. A few pages are for manifests."""
    leaves = [SIZE, SIZE, *[4 * PAGE] * 3, SIZE, SIZE]
    assert call(worker.save_while_full, str(small_tmpfs / "job"), leaves, False) == ["ok"] * 7
    assert "step-7_ckpt" in versions(small_tmpfs / "job")


def test_no_room_for_a_larger_state(small_tmpfs: Path) -> None:
    leaves = [*[SIZE] * 3, *[8192] * 6, SIZE, SIZE]
    said = call(worker.save_while_full, str(small_tmpfs / "job"), leaves, True)
    # The first of them may find their room in slots that have become too small.
    assert (said[:3], said[-2:]) == (["ok"] * 3, ["ok"] * 2)
    assert said[7:9] == ["CapacityError"] * 2


@pytest.mark.parametrize("door", ["dcp", "flashpoint", "lightning"])
def test_a_run_that_cannot_begin_costs_saves_and_no_version(small_tmpfs: Path, door: str) -> None:
    said, there = call(worker.save_again_while_full, str(small_tmpfs / "job"), door)
    assert said == [True, False, True]
    assert there == ([3, 2] if door == "dcp" else [3, 1])  # of DCP, the first attempt of step 2 works


@pytest.mark.slow
@pytest.mark.parametrize("growing", [False, True])
def test_any_room_left(small_tmpfs: Path, rng: random.Random, growing: bool) -> None:
    """Whatever is free: a save works, or fails with a typed error; the process lives, and the last save loads."""
    for _ in iterations(5):
        leaves = [rng.choice([0, 4096, 8192, 65536, rng.randrange(1 << 20), SIZE]) for _ in range(14)]
        base = small_tmpfs / "job"
        said = call(worker.save_while_full, str(base), [SIZE, *leaves, SIZE], growing)
        assert set(said) <= {"ok", "CapacityError"}, said
        assert said[0] == said[-1] == "ok", (leaves, said)
        subprocess.run(["rm", "-r", str(base), str(small_tmpfs / "filler")], check=True)


# ---- the room that is documented --------------------------------------------------------------------------------


def documented(states: int, size: int) -> int:
    """The room for so many states of a size: 2 % and 1 MiB a rank more than their bytes, in whole pages."""
    return -(-(states * size * 102 // 100 + MIB) // PAGE) * PAGE


@contextlib.contextmanager
def nodes(root: Path, room: int, count: int = 2) -> Iterator[Path]:
    """A tmpfs of its own for each of some nodes."""
    with contextlib.ExitStack() as stack:
        for index in range(count):
            folder = root / f"node-{index}"
            folder.mkdir()
            try:
                stack.enter_context(tmpfs_folders.mounted(folder, room))
            except OSError as error:
                pytest.skip(f"cannot mount a small tmpfs here, which takes root: {error}")
        yield root


def check(results: list[dict[str, Any]], room: int, *, most_behind: int = 40, longest_s: float = 10.0) -> None:
    """No save failed, and there was never a long time without a newly verified version: many saves, which on a busy
    machine are made in a moment, and seconds."""
    for said in results:
        assert said["errors"] == []
        assert said["settled"]
        assert said["used"] <= room
        for step, group in itertools.groupby(zip(said["verified"], said["at"], strict=True), key=itemgetter(0)):
            times = [at for _, at in group]
            assert len(times) <= most_behind or times[-1] - times[0] <= longest_s, f"{step} for {len(times)}: {times}"
        why = said["copy_error"]
        assert said["last_verified"] == said["loaded"] + len(said["verified"]), f"the last one is not verified: {why}"


def constant(count: int) -> list[int]:
    return [4 * MIB] * count


def changing(count: int) -> list[int]:
    return [MIB + 8 * 4096 * (index * 37 % 100) for index in range(count)]


def growing(count: int) -> list[int]:
    return [MIB + (3 * MIB * index // count & ~7) for index in range(count)]


def job(root: Path, sizes: list[int], states: int, ranks: int) -> None:
    """Ranks of two nodes save states of these sizes, are started anew, and go on."""
    room = ranks * documented(states, max(sizes))
    placement = [rank // ranks for rank in range(2 * ranks)]
    with nodes(root, room):
        for life in range(2):
            here = sizes if life == 0 else sizes[: len(sizes) // 2]
            deadline_s = DEADLINE_S * max(1, len(here) // 100)
            said = call_team(
                worker.save_back_to_back, root, 2 * ranks, here, 0, placement=placement, timeout_s=deadline_s
            )
            assert {each["loaded"] for each in said} == {life * len(sizes)}
            check(said, room)


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "states", "ranks"), [(constant, 4, 1), (growing, 5, 1), (changing, 5, 2)])
def test_versions_are_verified_for_ever(
    tmp_path: Path, sizes: Callable[[int], list[int]], states: int, ranks: int
) -> None:
    job(tmp_path, sizes(60), states, ranks)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("sizes", [constant, changing, growing])
@pytest.mark.parametrize(("states", "ranks"), [(4, 1), (5, 1), (6, 1), (5, 2), (6, 2)])
def test_versions_are_verified_for_ever_many_saves(
    tmp_path: Path, sizes: Callable[[int], list[int]], states: int, ranks: int
) -> None:
    job(tmp_path, sizes(1000), states, ranks)


@pytest.mark.slow
def test_ranks_come_back_on_other_nodes(tmp_path: Path) -> None:
    """What ranks left where they ran makes room for those that run there now."""
    sizes, step = constant(6), 0
    room = 2 * documented(4, max(sizes))
    with nodes(tmp_path, room):
        for placement in ([0, 0, 1, 1], [1, 0, 0, 1], [0, 1, 1, 0], [1, 0]):
            said = call_team(worker.save_back_to_back, tmp_path, len(placement), sizes, 1, placement=placement)
            assert {each["loaded"] for each in said} == {step}
            check(said, room)
            step += len(sizes)


# ---- a replicated structure that changes ------------------------------------------------------------------------


PHASES = [[MIB, MIB // 2], [MIB, MIB, 3 * MIB // 2, MIB // 2], [MIB, MIB // 2, MIB // 2]]
PACKED = 64 << 10
"""Room for what each rank has of its own, such as its generators."""


def room_for(states: int) -> int:
    return documented(states, max(largest_share(sizes, 2) for sizes in PHASES) + PACKED)


@pytest.mark.slow
@pytest.mark.parametrize("hurry", [False, True])
def test_a_change_takes_no_more_room_than_what_is_saved(tmp_path: Path, hurry: bool) -> None:
    room = room_for(5 if hurry else 4)
    with nodes(tmp_path, room):
        said = call_team(worker.save_structures, tmp_path, 2, PHASES, 5, hurry)
    for each in said:
        assert each["errors"] == [None] * 15
        assert hurry or max(each["behind"]) == 0
        assert each["used"] <= room
        assert (each["found"], each["same"]) == (15, True)
