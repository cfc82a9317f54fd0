"""The Megatron-LM door on several ranks: real processes over gloo, as a training job has them.

A run starts its ranks once and does all cases, since importing megatron-core is what takes the time. `make test` has
two releases of megatron-core: the newest one goes through the cases on two ranks, and the other one on four.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

import pytest

from tests.support import tmpfs as tmpfs_folders
from tests.support import warm
from tests.support.cases import RUN_TIMEOUT_S, CaseRuns, run_cases
from tests.support.cluster import Cluster

pytestmark = [
    pytest.mark.slow(120),
    pytest.mark.timeout(RUN_TIMEOUT_S + 60),
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"),
]


def _is_old() -> bool:
    """Return True for a release that Python before 3.12 can have."""
    try:
        major, minor, *_ = importlib.metadata.version("megatron-core").split(".")
    except importlib.metadata.PackageNotFoundError:
        return True
    return (int(major), int(minor)) < (0, 17)


ON_TWO = ["queues"]  # each starts a process a rank
ON_FOUR = ["a_gpt_with_the_distributed_optimizer"]
CASES = [
    "every_layout",
    "fully_parallel",
    "fully_parallel_load",
    "what_megatron_core_reads_by_itself",
    "saved_by_dist_checkpointing_itself",
    "strict_handling",
    "flattened_ranges",
    "the_staged_copies_are_the_object",
    "what_an_optimizer_updates_may_change_after_the_call",
    "a_structure_that_changes_on_one_rank",
    "a_save_that_fails_on_one_rank",
    "common_state_that_cannot_be_saved",
    "a_load_that_fails_on_one_rank",
    "objects_that_could_run_code_are_refused",
    "cut_connections",
]
# On two nodes; four ranks under torchrun, as megatron-core is started.
RUNS = {2: CASES + ON_TWO, 4: CASES + ON_FOUR}


SAMPLED = 4 if _is_old() else 2


@pytest.mark.parametrize(
    ("world_size", "name"),
    [
        pytest.param(size, name, marks=[] if size == SAMPLED else pytest.mark.soak)
        for size, names in RUNS.items()
        for name in names
    ],
)
def test_on_several_ranks(case_runs: CaseRuns, world_size: int, name: str) -> None:
    def make(root: Path) -> Cluster:
        return Cluster(
            root,
            "megatron_cases",
            nodes=2,
            ranks_per_node=world_size // 2,
            args=RUNS[world_size],
            torchrun=world_size == 4,
            preload=warm.MEGATRON,
        )

    case_runs.of(world_size, make).check(name)


def run(tmpfs: Path, placement: tuple[int, ...], name: str) -> None:
    run_cases(Cluster(tmpfs, "megatron_cases", placement=placement, args=[name], preload=warm.MEGATRON))


@pytest.mark.parametrize("saved", [pytest.param("tp2-pp1-dp2", marks=[] if _is_old() else pytest.mark.soak)])
def test_a_lost_node_is_replaced_and_then_all_go_on_with_fewer_ranks(tmpfs: Path, saved: str) -> None:
    """Four ranks on two nodes; one node comes back empty, then the other; TP 2 to TP 1, DP 4 to DP 2, to one rank."""
    run(tmpfs, (0, 0, 1, 1), f"save_for_others:{saved}")
    tmpfs_folders.remove_folder(tmpfs / "node-1")
    run(tmpfs, (0, 0, 1, 1), f"load_and_keep:{saved}")
    tmpfs_folders.remove_folder(tmpfs / "node-0")
    run(tmpfs, (0, 1), f"load_from_others:{saved}")
    run(tmpfs, (1,), f"load_from_fewer:{saved}")
