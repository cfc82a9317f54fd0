"""The usage guide's loop for local checkpoints, in jobs of a real launcher that lose a rank and start again.

The one with the guide's own imports is started as a user starts it, cold.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cluster import Cluster
from tests.workers.local_seed import LAST, LAST_OF_FIRST_LIFE, MODES


def _check(tmpfs: Path, world_size: int, *args: str) -> None:
    modes = [mode for mode, (_, jump) in MODES.items() if jump is None or jump < world_size]
    newest = LAST_OF_FIRST_LIFE - LAST_OF_FIRST_LIFE % 2
    cold = "their-imports" in args
    with Cluster(
        tmpfs, "local_seed", ranks_per_node=world_size, torchrun=True, max_restarts=1, args=args, cold=cold
    ) as cluster:
        cluster.wait(110)
        for rank in range(world_size):
            reports = cluster.reports(rank)
            for mode in modes:
                first = {"mode": mode, "life": 0, "found": None, "latest": newest}
                assert first in reports
                assert {"mode": mode, "life": 1, "found": [newest, rank, ""], "latest": LAST} in reports
                assert {"equal": mode} in reports


def test_one_rank_with_the_guides_own_imports(tmpfs: Path) -> None:
    _check(tmpfs, 1, "their-imports")


@pytest.mark.parametrize("world_size", [2, 4])
def test_several_ranks(tmpfs: Path, world_size: int) -> None:
    _check(tmpfs, world_size)


@pytest.mark.cuda
def test_on_cuda(tmpfs: Path) -> None:
    _check(tmpfs, 2, "cuda")
