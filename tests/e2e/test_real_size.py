"""States of many blocks of 16 MiB, replicated on two ranks, of which each writes a share that it learns of too late
for its first save. The digests of everything saved are recomputed after each test, as after any other."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked import Team
from tests.support.tmpfs import mounted
from tests.workers import real_size as worker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

REAL = {"FLASHPOINT_TEST_BLOCK_BYTES": str(16 << 20)}
SHAPES = [[(2048, 2048)] * 3, [(2048, 2048), (2048, 2048), (2048, 6000)]]


def run(function: Any, root: Path, *args: Any) -> list[Any]:
    with Team(function, root, 2, *args, placement=(0, 0), env=REAL) as team:
        return team.results(timeout_s=300)


@pytest.mark.parametrize("shapes", SHAPES, ids=["even", "uneven"])
def test_a_replicated_state_survives_a_crash_after_its_first_save(tmpfs: Path, shapes: list[tuple[int, int]]) -> None:
    first = run(worker.train, tmpfs, shapes, 1, 0)
    assert [each[:2] for each in first] == [(0, 0)] * 2
    second = run(worker.train, tmpfs, shapes, 2, 1)
    assert [each[:2] for each in second] == [(1, 0)] * 2
    assert {each[2] for each in second} == {first[0][3]}


@pytest.mark.parametrize("mode", ["sync", "thread", "process"])
def test_every_change_of_structure(tmpfs: Path, mode: str) -> None:
    assert run(worker.change_structures, tmpfs, mode, [0, 1, 2, 0]) == [8, 8]


def test_the_first_save_of_a_replicated_state_takes_the_room_of_its_share(tmp_path: Path) -> None:
    """Four ranks, on a tmpfs with room for two versions of what they save together, as docs/operations.md has it."""
    folder = tmp_path / "node-0"
    folder.mkdir()
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(mounted(folder, 2 * worker.STATE_BYTES * 11 // 10))
        except OSError as error:
            pytest.skip(f"cannot mount a small tmpfs here, which takes root: {error}")
        with Team(worker.save_replicated, tmp_path, 4, placement=(0, 0, 0, 0)) as team:
            for saves, failures, sizes, error in team.results():
                assert (saves, failures) == (5, 0), error
                assert max(sizes) < worker.STATE_BYTES / 4 * 1.1
