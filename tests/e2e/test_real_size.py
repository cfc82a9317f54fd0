"""A node killed in jobs of real size, one through each door: 256 MiB a rank, blocks of 16 MiB, two nodes.

tests/e2e/test_lightning.py and test_nemo_resume.py have those of Lightning and NeMo.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked import Team
from tests.support.tmpfs import mounted
from tests.workers import real_size as worker

pytestmark = [pytest.mark.slow(100), pytest.mark.timeout(600)]

REAL = {"FLASHPOINT_TEST_BLOCK_BYTES": str(16 << 20)}


def run(function: Callable[..., Any], root: Path, *args: Any, placement: Sequence[int] = (0, 1)) -> list[Any]:
    with Team(function, root, len(placement), *args, placement=placement, env=REAL) as team:
        return team.results(timeout_s=300)


def lose_a_node(function: Callable[..., Any], root: Path, told: str, *args: Any) -> None:
    """Run until step 2 is verified, kill both ranks with step 3 under way, and lose the memory of node 0."""
    with Team(function, root, 2, *args, True, env=REAL) as team:
        team[0].next_report(told, 2, timeout_s=300)
        team[0].kill()
        team[1].kill()
    shutil.rmtree(root / "node-0")


def test_a_ddp_job_loses_a_node_and_is_the_undisturbed_job(tmpfs: Path) -> None:
    lose_a_node(worker.train, tmpfs, "replicated", worker.LARGE, 3)
    results = run(worker.train, tmpfs, worker.LARGE, 4, False)
    assert {each["began"] for each in results} in ({2}, {3})
    assert results[0]["fetched"] > 100 << 20, "node 0 had to fetch its share"
    assert [each["failures"] for each in results] == [0, 0]
    expected = run(worker.undisturbed, tmpfs / "reference", worker.LARGE, 4)
    assert [each["final"] for each in results] == expected


@pytest.mark.parametrize(
    ("save", "load"), [(worker.save_by_dcp, worker.load_by_dcp), (worker.save_locally, worker.load_locally)]
)
def test_a_node_is_lost_and_all_is_loaded_bit_for_bit(tmpfs: Path, save: Any, load: Any) -> None:
    lose_a_node(save, tmpfs, "verified", 1, 3)
    found = run(load, tmpfs)
    assert found in ([2, 2], [3, 3])
    run(save, tmpfs, found[0] + 1, found[0] + 1, False)
    assert run(load, tmpfs) == [found[0] + 1] * 2


@pytest.mark.parametrize("mode", ["thread", "process", pytest.param("sync", marks=pytest.mark.soak)])
def test_every_change_of_structure(tmpfs: Path, mode: str) -> None:
    run(worker.change_structures, tmpfs, mode, placement=(0, 0))


def test_a_replicated_state_takes_the_room_of_its_share_and_survives_a_crash_after_its_first_save(
    tmp_path: Path,
) -> None:
    """Four ranks, on a tmpfs with room for two versions of what they save together, as docs/operations.md has it."""
    folder, four = tmp_path / "node-0", (0, 0, 0, 0)
    folder.mkdir()
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(mounted(folder, 2 * worker.SMALL_BYTES * 11 // 10))
        except OSError as error:
            pytest.skip(f"cannot mount a small tmpfs here, which takes root: {error}")
        first = run(worker.train, tmp_path, worker.SMALL, 1, False, placement=four)
        then = run(worker.train, tmp_path, worker.SMALL, 5, False, placement=four)
        assert [(each["began"], each["failures"]) for each in first] == [(0, 0)] * 4
        assert [(each["began"], each["failures"], each["error"]) for each in then] == [(1, 0, None)] * 4
        assert [each["found"] for each in then] == [each["final"] for each in first]
        assert max(size for each in [*first, *then] for size in each["sizes"]) < worker.SMALL_BYTES / 4 * 1.1
