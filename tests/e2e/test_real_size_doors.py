"""A node killed in jobs of real size through the other doors: 256 MiB a rank, blocks of 16 MiB, two nodes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked import Team
from tests.workers import real_doors as worker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

REAL = {"FLASHPOINT_TEST_BLOCK_BYTES": str(16 << 20)}


def run(function: Callable[..., Any], root: Path, *args: Any) -> list[Any]:
    with Team(function, root, 2, *args, env=REAL) as team:
        return team.results(timeout_s=300)


def test_local_checkpoints_survive_a_node_bit_for_bit(tmpfs: Path) -> None:
    with Team(worker.save_locally, tmpfs, 2, 1, 3, True, env=REAL) as team:
        for child in team.ranks:
            child.next_report("complete", 2, timeout_s=300)
        team[0].kill()
        team[1].kill()
    shutil.rmtree(tmpfs / "node-0")
    found = run(worker.load_locally, tmpfs)
    assert found in ([2, 2], [3, 3])
    run(worker.save_locally, tmpfs, found[0] + 1, found[0] + 2, False)
    assert run(worker.load_locally, tmpfs) == [found[0] + 2] * 2
