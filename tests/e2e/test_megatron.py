"""Jobs of Megatron-LM: cases of the door on several ranks, the user guide's code, local checkpoints, and the example.

A run of cases starts its ranks once, since importing megatron-core takes the time. `make test` has two releases of
megatron-core: the newest one goes through the cases on two ranks, the other one on four, and through the example.
"""

from __future__ import annotations

import re
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support import tmpfs as tmpfs_folders
from tests.support import warm
from tests.support.cases import RUN_TIMEOUT_S, CaseRuns, run_cases
from tests.support.cluster import REPOSITORY, Cluster, run_ranks

if find_spec("megatron") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)

pytestmark = [pytest.mark.slow(150), pytest.mark.timeout(RUN_TIMEOUT_S + 60)]

IS_NEW = tuple(map(int, version("megatron-core").split(".")[:2])) >= (0, 17)  # which Python before 3.12 cannot have
of_new = [] if IS_NEW else [pytest.mark.soak]
of_old = [pytest.mark.soak] if IS_NEW else []

ON_TWO = ["queues"]  # each starts a process a rank
ON_FOUR = ["a_gpt_with_the_distributed_optimizer"]
CASES = [
    "every_layout",
    "fully_parallel",
    "fully_parallel_load",
    "what_megatron_core_reads_by_itself",
    "saved_by_dist_checkpointing_itself",
    "strict_handling",
    "the_staged_copies_are_the_object",
    "a_structure_that_changes_on_one_rank",
    "a_save_that_fails_on_one_rank",
    "common_state_that_cannot_be_saved",
    "a_load_that_fails_on_one_rank",
    "objects_that_could_run_code_are_refused",
    "the_guide",
]
# On two nodes; four ranks under torchrun, as megatron-core is started.
RUNS = {2: CASES + ON_TWO, 4: CASES + ON_FOUR}


@pytest.mark.parametrize(
    ("world_size", "name"),
    [pytest.param(size, name, marks={2: of_new, 4: of_old}[size]) for size, names in RUNS.items() for name in names],
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

    case_runs.check(world_size, make, name)


def run(tmpfs: Path, placement: tuple[int, ...], name: str) -> None:
    run_cases(Cluster(tmpfs, "megatron_cases", placement=placement, args=[name], preload=warm.MEGATRON))


@pytest.mark.parametrize("saved", [pytest.param("tp2-pp1-dp2", marks=of_new)])
def test_a_lost_node_is_replaced_and_then_all_go_on_with_fewer_ranks(tmpfs: Path, saved: str) -> None:
    """Four ranks on two nodes; one node comes back empty, then the other; TP 2 to TP 1, DP 4 to DP 2, to one rank."""
    run(tmpfs, (0, 0, 1, 1), f"save_for_others:{saved}")
    tmpfs_folders.remove_folder(tmpfs / "node-1")
    run(tmpfs, (0, 0, 1, 1), f"load_and_keep:{saved}")
    tmpfs_folders.remove_folder(tmpfs / "node-0")
    run(tmpfs, (0, 1), f"load_from_others:{saved}")
    run(tmpfs, (1,), f"load_from_fewer:{saved}")


def test_megatrons_state_and_queue(tmpfs: Path) -> None:
    for reports in run_ranks(tmpfs, "local_megatron", 2, nodes=2, timeout_s=110):
        assert [report["iteration"] for report in reports] == [1, 2, 3, 4]
        assert reports[1]["queue"].startswith("megatron.core")
        theirs = "ml_flashpoint" if find_spec("nvidia_resiliency_ext") is None else "nvidia_resiliency_ext"
        assert reports[3]["queue"].startswith(theirs)


# -- the example --------------------------------------------------------------------------------------------------

SCRIPT = REPOSITORY / "examples" / "megatron" / "train_gpt.py"
STEPS, DISK_EVERY = 40, 12  # far more steps than can pass between what is read in the output and the kill
DEADLINE_S = 200.0


def training(root: Path, steps: int) -> Cluster:
    """Tensor parallelism within each of two nodes, data parallelism across them."""
    args = ["--base", "$FLASHPOINT_TEST_BASE", "--disk", root / "disk", "--steps", steps, "--disk-every", DISK_EVERY]
    return Cluster(
        root, SCRIPT, nodes=2, ranks_per_node=2, args=args, torchrun=True, max_restarts=3, preload=warm.MEGATRON
    )


def weights(cluster: Cluster) -> dict[int, str]:
    """What each rank says its weights are at the end. Ranks may have moved when they were started again."""
    return {
        int(rank): digest
        for output in cluster.outputs().values()
        for rank, digest in re.findall(r"rank (\d) ends with (\w+)", output)
    }


def losses(cluster: Cluster) -> dict[int, set[str]]:
    """The losses printed for each step: more than one only if it was not the same every time."""
    found: dict[int, set[str]] = {}
    for output in cluster.outputs().values():
        for step, loss in re.findall(r"step (\d+) loss ([\d.]+)", output):
            found.setdefault(int(step), set()).add(loss)
    return found


@pytest.mark.timeout(4 * DEADLINE_S)
@pytest.mark.parametrize("steps", [pytest.param(STEPS, marks=of_old)])
def test_the_example_goes_on_from_memory_and_from_disk(tmpfs: Path, steps: int) -> None:
    with training(tmpfs, steps) as cluster:
        # Then the saves up to step 18 are committed, and copies of the first half of them were made meanwhile.
        cluster.wait_for_output(r"^step 21 ", timeout_s=DEADLINE_S)
        cluster.kill_node(1)
        cluster.start_node(1)
        found = cluster.wait_for_output(r"going on from memory at step (\d+)", timeout_s=DEADLINE_S)
        assert 10 <= int(found[1]) < steps
        cluster.wait(DEADLINE_S, check=False)
        from_memory, printed = weights(cluster), losses(cluster)
        # Steps done twice, before the kill and after it, among them.
        assert printed.keys() == set(range(1, steps + 1))
        assert all(len(values) == 1 for values in printed.values()), printed
    assert len(from_memory) == 4
    # With nothing in memory any more, from what megatron-core has saved on disk.
    for node in (0, 1):
        tmpfs_folders.remove_folder(tmpfs / f"node-{node}")
    with training(tmpfs, steps) as cluster:
        cluster.wait(DEADLINE_S)
        cluster.wait_for_output(rf"going on from disk at step {steps // DISK_EVERY * DISK_EVERY}")
        assert weights(cluster) == from_memory
