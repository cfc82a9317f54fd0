"""The DCP door on several ranks: real processes over gloo, as a training job has them.

Each run starts its ranks once and does many cases, since starting is what takes the time.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cases import RUN_TIMEOUT_S, CaseRuns, run_cases
from tests.support.cluster import Cluster

pytestmark = [pytest.mark.slow(250), pytest.mark.timeout(RUN_TIMEOUT_S + 60)]

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
    "every_rank_learns_that_a_save_is_complete",
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


@pytest.mark.parametrize(("world_size", "mode", "name"), ALL, ids=lambda value: str(value))
def test_on_several_ranks(case_runs: CaseRuns, world_size: int, mode: str, name: str) -> None:
    def make(root: Path) -> Cluster:
        names = [f"{each}:{mode}" for each in _plan(world_size)[mode]]
        return Cluster(root, "dcp_cases", ranks_per_node=world_size, args=names)

    case_runs.of((world_size, mode), make).check(f"{name}:{mode}")


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
        run_cases(Cluster(tmpfs, "dcp_cases", placement=placement, args=[name]))
