"""The DCP door on several ranks: real processes over gloo, as a training job has them.

Each run starts its ranks once and does many cases, since starting is what takes the time. `make soak` does every case
in every mode on each number of ranks, of which `make test` leaves some out.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cases import RUN_TIMEOUT_S, CaseRuns, run_cases
from tests.support.cluster import Cluster

pytestmark = [pytest.mark.slow(250), pytest.mark.timeout(RUN_TIMEOUT_S + 60)]

EVERYWHERE = [
    "sharded",
    "hsdp",
    "submesh",
    "cached_plans",
    "lowest_rank",
    "planners_take_turns",
    "others_are_not_staged",
    "a_rank_changes_its_structure",
    "a_planner_fails_on_one_rank",
    "each_rank_for_itself",
    "a_step_saved_twice",
    "everything_in_turn",
]
ASYNCHRONOUS = ["changes_after_async_save"]
ON_FOUR = ["fsdp_and_tensor_parallel"]
IN_A_PROCESS = [name for name in EVERYWHERE if name != "everything_in_turn"] + ["changes_after_async_save"]


def _plan(world_size: int) -> dict[str, list[str]]:
    """Cases by mode."""
    names = EVERYWHERE + (ON_FOUR if world_size == 4 else [])
    names = [name for name in names if world_size > 1 or name != "hsdp"]
    in_a_process = IN_A_PROCESS if world_size == 2 else ["sharded", "cached_plans", "changes_after_async_save"]
    return {"sync": names, "thread": names + ASYNCHRONOUS, "process": in_a_process}


def _sampled(world_size: int) -> list[tuple[str, str]]:
    """What `make test` does: each case in each mode on two ranks, and in one mode on one and on four."""
    plan = _plan(world_size)
    if world_size == 2:
        return [(mode, name) for mode, names in plan.items() for name in names]
    chosen: dict[str, str] = {}
    for number, name in enumerate(plan["thread"]):
        # Other modes on one rank than on four.
        modes = [mode for mode in ("thread", "sync", "process") if name in plan[mode]]
        chosen[name] = modes[(number + (world_size == 4)) % len(modes)]
    return [(mode, name) for name, mode in chosen.items()]


WORLD_SIZES = (1, 2, 4)
SAMPLED = {(size, mode, name) for size in WORLD_SIZES for mode, name in _sampled(size)}
ALL = [(size, mode, name) for size in WORLD_SIZES for mode, names in _plan(size).items() for name in names]


def _run_of(world_size: int, mode: str, name: str) -> tuple[object, ...]:
    """The key of the run that a case is part of. Two ranks have so much to do that each mode is a run of its own."""
    sampled = (world_size, mode, name) in SAMPLED
    return (world_size, None if sampled and world_size != 2 else mode, sampled)


@pytest.mark.parametrize(
    ("world_size", "mode", "name"),
    [
        pytest.param(*each, id="-".join(map(str, each)), marks=[] if each in SAMPLED else pytest.mark.soak)
        for each in ALL
    ],
)
def test_on_several_ranks(case_runs: CaseRuns, world_size: int, mode: str, name: str) -> None:
    key = _run_of(world_size, mode, name)

    def make(root: Path) -> Cluster:
        names = [
            f"{its_name}:{its_mode}" for size, its_mode, its_name in ALL if _run_of(size, its_mode, its_name) == key
        ]
        return Cluster(root, "dcp_cases", ranks_per_node=world_size, args=names)

    case_runs.of(key, make).check(f"{name}:{mode}")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((0, 0, 0, 0), (0, 0)),
        ((0, 0), (0, 0, 0, 0)),
        ((0, 0), (0,)),
        ((0,), (0, 0)),
        ((0, 1, 2, 3), (0, 2)),  # what neither of the two nodes has is on the other one
        pytest.param((0, 0, 1, 1), (0, 1), marks=pytest.mark.soak),
        ((0, 1), (0, 0, 1, 1)),
    ],
    ids=str,
)
def test_other_world_sizes_and_shardings(tmpfs: Path, before: tuple[int, ...], after: tuple[int, ...]) -> None:
    for placement, name in ((before, "save_for_others"), (after, "load_from_others")):
        run_cases(Cluster(tmpfs, "dcp_cases", placement=placement, args=[name]))
