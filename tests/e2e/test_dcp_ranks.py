"""The DCP door on several ranks: real processes over gloo, as a training job has them.

Each run starts its ranks once and does many cases, since starting is what takes the time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import tmpfs as tmpfs_folders
from tests.support.cluster import Cluster, ClusterError

RUN_TIMEOUT_S = 300.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(RUN_TIMEOUT_S + 60)]

EVERYWHERE = [
    "sharded",
    "ddp",
    "fsdp",
    "hsdp",
    "tensor_parallel",
    "submesh",
    "cached_plans",
    "lowest_rank",
    "planners_take_turns",
    "others_are_not_staged",
    "a_rank_changes_its_structure",
    "all_ranks_change_their_structure",
    "memory_stays_at_two_versions",
    "a_planner_fails_on_one_rank",
    "without_collectives",
    "each_rank_for_itself",
    "a_step_saved_twice",
    "everything_in_turn",
]
ASYNCHRONOUS = ["changes_after_async_save", "without_waiting"]
ON_FOUR = ["fsdp_and_tensor_parallel"]
IN_A_PROCESS = [name for name in EVERYWHERE if name != "everything_in_turn"] + ["changes_after_async_save"]


def _plan(world_size: int) -> dict[str, list[str]]:
    """Cases by mode."""
    names = EVERYWHERE + (ON_FOUR if world_size == 4 else [])
    names = [name for name in names if world_size > 1 or name != "hsdp"]
    in_a_process = IN_A_PROCESS if world_size == 2 else ["sharded", "fsdp", "cached_plans", "changes_after_async_save"]
    return {"sync": names, "thread": names + ASYNCHRONOUS, "process": in_a_process}


RUNS = [(world_size, mode) for world_size in (1, 2, 4) for mode in ("sync", "thread", "process")]
ALL = [(world_size, mode, name) for world_size, mode in RUNS for name in _plan(world_size)[mode]]


class _Results:
    """Runs on first use, one run for each world size and mode."""

    def __init__(self) -> None:
        self._folder = tmpfs_folders.make_folder()
        self._done: dict[tuple[int, str], tuple[dict[tuple[int, str], str | None], str]] = {}

    def of(self, world_size: int, mode: str) -> tuple[dict[tuple[int, str], str | None], str]:
        """How each case ended on each rank, and what was printed."""
        key = (world_size, mode)
        if key not in self._done:
            names = [f"{name}:{mode}" for name in _plan(world_size)[mode]]
            root = self._folder / f"{world_size}-{mode}"
            with Cluster(root, "dcp_cases", ranks_per_node=world_size, args=names) as cluster:
                output = ""
                try:
                    cluster.wait(RUN_TIMEOUT_S)
                except ClusterError as error:
                    output = str(error)
                found = {
                    (rank, report["case"]): report["error"]
                    for rank in range(world_size)
                    for report in cluster.reports(rank)
                }
            tmpfs_folders.remove_folder(root)
            self._done[key] = (found, output)
        return self._done[key]

    def close(self) -> None:
        tmpfs_folders.remove_folder(self._folder)


@pytest.fixture(scope="module")
def results() -> Iterator[_Results]:
    made = _Results()
    yield made
    made.close()


@pytest.mark.parametrize(("world_size", "mode", "name"), ALL, ids=lambda value: str(value))
def test_on_several_ranks(results: _Results, world_size: int, mode: str, name: str) -> None:
    found, output = results.of(world_size, mode)
    errors = {rank: found.get((rank, f"{name}:{mode}"), "it was not run") for rank in range(world_size)}
    failed = "\n".join(f"rank {rank}: {error}" for rank, error in errors.items() if error is not None)
    assert not failed, f"{failed}\n{output}"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((0, 0, 0, 0), (0, 0)),
        ((0, 0), (0, 0, 0, 0)),
        ((0, 0), (0,)),
        ((0,), (0, 0)),
        ((0, 1, 2, 3), (0, 2)),  # what neither of the two nodes has is on the other one
        ((0, 0, 1, 1), (0, 1)),
        ((0, 1), (0, 0, 1, 1)),
    ],
    ids=str,
)
def test_other_world_sizes_and_shardings(tmpfs: Path, before: tuple[int, ...], after: tuple[int, ...]) -> None:
    for placement, name in ((before, "save_for_others"), (after, "load_from_others")):
        with Cluster(tmpfs, "dcp_cases", placement=placement, args=[name]) as cluster:
            cluster.wait(RUN_TIMEOUT_S)
            reports = [report for rank in range(len(placement)) for report in cluster.reports(rank)]
        assert [report["error"] for report in reports] == [None] * len(placement), reports
