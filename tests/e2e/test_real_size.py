"""States of many blocks of 16 MiB, replicated on two ranks, of which each writes a share that it learns of too late
for its first save. The digests of everything saved are recomputed after each test, as after any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.forked import Team
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
