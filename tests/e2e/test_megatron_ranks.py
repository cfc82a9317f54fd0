"""The Megatron-LM door on several ranks: real processes over gloo, as a training job has them.

A run starts its ranks once and does all cases, since importing megatron-core is what takes the time.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import tmpfs as tmpfs_folders
from tests.support.cluster import Cluster, ClusterError

RUN_TIMEOUT_S = 300.0
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(RUN_TIMEOUT_S + 60),
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"),
]

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
    "plans_are_sent_when_they_change",
    "an_exchange_of_plans_that_breaks_off",
    "a_save_that_fails_on_one_rank",
    "common_state_that_cannot_be_saved",
    "a_load_that_fails_on_one_rank",
    "objects_that_could_run_code_are_refused",
]
# On two nodes; four ranks under torchrun, as megatron-core is started.
RUNS = {2: CASES + ON_TWO, 4: CASES + ON_FOUR}


class _Results:
    """Runs on first use, one run for each world size."""

    def __init__(self) -> None:
        self._folder = tmpfs_folders.make_folder()
        self._done: dict[int, tuple[dict[tuple[int, str], str | None], str]] = {}

    def of(self, world_size: int) -> tuple[dict[tuple[int, str], str | None], str]:
        """How each case ended on each rank, and what was printed."""
        if world_size not in self._done:
            root = self._folder / str(world_size)
            with Cluster(
                root,
                "megatron_cases",
                nodes=2,
                ranks_per_node=world_size // 2,
                args=RUNS[world_size],
                torchrun=world_size == 4,
            ) as cluster:
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
            self._done[world_size] = (found, output)
        return self._done[world_size]

    def close(self) -> None:
        tmpfs_folders.remove_folder(self._folder)


@pytest.fixture(scope="module")
def results() -> Iterator[_Results]:
    made = _Results()
    yield made
    made.close()


@pytest.mark.parametrize(("world_size", "name"), [(size, name) for size, names in RUNS.items() for name in names])
def test_on_several_ranks(results: _Results, world_size: int, name: str) -> None:
    found, output = results.of(world_size)
    errors = {rank: found.get((rank, name), "it was not run") for rank in range(world_size)}
    failed = "\n".join(f"rank {rank}: {error}" for rank, error in errors.items() if error is not None)
    assert not failed, f"{failed}\n{output}"


def run(tmpfs: Path, placement: tuple[int, ...], name: str) -> None:
    with Cluster(tmpfs, "megatron_cases", placement=placement, args=[name]) as cluster:
        cluster.wait(RUN_TIMEOUT_S)
        reports = [report for rank in range(len(placement)) for report in cluster.reports(rank)]
    assert [report["error"] for report in reports] == [None] * len(placement), reports


def test_a_lost_node_is_replaced_and_then_all_go_on_with_fewer_ranks(tmpfs: Path) -> None:
    """Four ranks on two nodes; one node comes back empty, then the other; TP 2 to TP 1, DP 4 to DP 2, to one rank."""
    saved = "tp2-pp1-dp2:tp1-pp1-dp4"
    run(tmpfs, (0, 0, 1, 1), f"save_for_others:{saved}")
    tmpfs_folders.remove_folder(tmpfs / "node-1")
    run(tmpfs, (0, 0, 1, 1), f"load_and_keep:{saved}")
    tmpfs_folders.remove_folder(tmpfs / "node-0")
    run(tmpfs, (0, 1), f"load_from_others:{saved}")
    run(tmpfs, (1,), f"load_from_fewer:{saved}")
