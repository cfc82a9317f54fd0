"""The DCP door on several ranks: real processes over gloo, as a training job has them.

Each run starts its ranks once and does many cases, since starting takes the time. On one rank,
tests/adapter/pytorch does the same.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cases import RUN_TIMEOUT_S, CaseRuns, run_cases
from tests.support.cluster import Cluster

pytestmark = [pytest.mark.slow(120), pytest.mark.timeout(RUN_TIMEOUT_S + 60)]

CASES = [
    "sharded",
    "trained",
    "submesh",
    "cached_plans",
    "lowest_rank",
    "planners_take_turns",
    "others_are_not_staged",
    "a_rank_changes_its_structure",
    "a_planner_fails_on_one_rank",
    "each_rank_for_itself",
    "a_step_saved_twice",
]
ASYNCHRONOUS = ["changes_after_async_save", "without_waiting"]
IN_A_PROCESS = ["planners_take_turns", "a_rank_changes_its_structure", "changes_after_async_save"]
RUNS = {
    (2, "sync"): CASES,
    (2, "thread"): CASES + ASYNCHRONOUS,
    (2, "process"): IN_A_PROCESS,
    (4, "thread"): CASES + ASYNCHRONOUS,
}
SOAK = {
    (2, "process"): [*CASES, ASYNCHRONOUS[0]],
    (4, "sync"): CASES,
    (4, "process"): [*CASES, ASYNCHRONOUS[0]],
}


@pytest.mark.parametrize(
    ("world_size", "mode", "name", "names"),
    [pytest.param(*run, name, names, id=f"{run[0]}-{run[1]}-{name}") for run, names in RUNS.items() for name in names]
    + [
        pytest.param(*run, name, names, id=f"{run[0]}-{run[1]}-{name}-soak", marks=pytest.mark.soak)
        for run, names in SOAK.items()
        for name in names
    ],
)
def test_on_several_ranks(case_runs: CaseRuns, world_size: int, mode: str, name: str, names: list[str]) -> None:
    def make(root: Path) -> Cluster:
        return Cluster(root, "dcp_cases", ranks_per_node=world_size, args=[f"{each}:{mode}" for each in names])

    case_runs.check((world_size, mode, len(names)), make, f"{name}:{mode}")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((0, 0), (0,)),
        ((0, 1, 2, 3), (0, 2)),  # what neither of the two nodes has is on the other one
        ((0, 1), (0, 0, 1, 1)),
        pytest.param((0,), (0, 0), marks=pytest.mark.soak),
        pytest.param((0, 0, 1, 1), (0, 1), marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_other_world_sizes_and_shardings(tmpfs: Path, before: tuple[int, ...], after: tuple[int, ...]) -> None:
    for placement, name in ((before, "save_for_others"), (after, "load_from_others")):
        run_cases(Cluster(tmpfs, "dcp_cases", placement=placement, args=[name]))
