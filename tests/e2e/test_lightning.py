"""Lightning jobs that are killed and go on from memory, or from what is persisted, bit for bit; and how they end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import warm
from tests.support.cluster import REPOSITORY, Cluster
from tests.support.lives import assert_example_goes_on, assert_undisturbed, last
from tests.support.persisting import lose_all_nodes, persisted_steps

pytestmark = [pytest.mark.slow(90), pytest.mark.timeout(300)]
EXAMPLE = REPOSITORY / "examples" / "lightning" / "train_gpt.py"
# At the step of Lightning's own checkpoint, in the midst of an epoch, at its end.
KILLS = {"single": (7,), "ddp": (5, 14), "fsdp": (9,), "model_parallel": (5,)}


@pytest.mark.parametrize("kind", list(KILLS))
def test_killed_run_is_the_undisturbed_run(tmpfs: Path, tmp_path: Path, kind: str) -> None:
    ranks = 1 if kind == "single" else 2
    with Cluster(
        tmpfs,
        "lightning_training",
        ranks_per_node=ranks,
        args=[kind, tmp_path, "--kill", *KILLS[kind], *(["--leave"] if kind == "fsdp" else [])],
        torchrun=True,
        max_restarts=len(KILLS[kind]),
        preload=warm.LIGHTNING,
    ) as cluster:
        cluster.wait(timeout_s=240)
        for rank in range(ranks):
            reports = cluster.reports(rank)
            own = assert_undisturbed(reports, but={"batches", "restored"})
            lives = [each["resumes"] for each in reports if "life" in each][: len(KILLS[kind]) + 1]
            assert lives[0] is None
            assert all(each.endswith("_ckpt") for each in lives[1:])
            # Every batch of every step, in whichever life it was last trained on.
            batches = {each["step"]: each["batch"] for each in own if "batch" in each}
            expected = [batch for _, batch in last(reports, "undisturbed")["batches"]]
            assert [batches[step] for step in range(len(batches))] == expected
            assert last(reports, "resumed")["restored"], "the module's own part of the checkpoint came back"
            assert last(reports, "health")["failures"] == 0


@pytest.mark.parametrize("kind", ["ddp", pytest.param("model_parallel", marks=pytest.mark.soak)])
def test_all_memory_is_lost_again_and_again(tmpfs: Path, tmp_path: Path, kind: str) -> None:
    """Once after SIGTERM, which Lightning ends the job by, and once after SIGKILL."""
    store = tmpfs / "store"

    def live(*args: object) -> list[list[dict[str, Any]]]:
        arguments = [kind, tmp_path, "--persist", store, *args]
        with Cluster(
            tmpfs, "lightning_training", nodes=2, args=arguments, torchrun=True, preload=warm.LIGHTNING
        ) as cluster:
            cluster.wait(timeout_s=140, check=not args)
            return [cluster.reports(rank) for rank in range(2)]

    live("--kill", 5, "--terminate")
    first = persisted_steps(store)[0]
    assert first >= 5, "the newest version is persisted within the grace"
    lose_all_nodes(tmpfs)
    for reports in live("--kill", 10):
        assert last(reports, "resumes").endswith(f"step-{first}_ckpt")
    second = persisted_steps(store)[0]
    assert second >= 8
    lose_all_nodes(tmpfs)
    for reports in live():
        assert next(each["resumes"] for each in reports if "resumes" in each).endswith(f"step-{second}_ckpt")
        assert last(reports, "source") == "persisted"
        assert last(reports, "health")["failures"] == 0
        assert persisted_steps(store)[0] == last(reports, "last_saved"), "the planned end persists the last version"
        assert_undisturbed(reports, but={"batches", "restored", "files"})
        resumed, undisturbed = (
            [batch for _, batch in last(reports, run)["batches"]] for run in ("resumed", "undisturbed")
        )
        assert resumed == undisturbed[-len(resumed) :]


@pytest.mark.timeout(600)
def test_at_real_size_a_lost_node_gets_its_part_from_the_other(tmpfs: Path, tmp_path: Path) -> None:
    """256 MiB a rank, in blocks of 16 MiB. The first copy of each life breaks off in its midst."""
    with Cluster(
        tmpfs,
        "lightning_training",
        nodes=2,
        args=["real", tmp_path, "--kill", 2, "--lose", "node-1"],
        env={"FLASHPOINT_TEST_BLOCK_BYTES": str(16 << 20)},
        torchrun=True,
        max_restarts=1,
        preload=warm.LIGHTNING,
    ) as cluster:
        cluster.wait(timeout_s=500)
        for rank in range(2):
            reports = cluster.reports(rank)
            lives = [each["resumes"] for each in reports if "life" in each]
            # The agents may have swapped the ranks.
            assert [each and Path(each).name for each in lives] == [None, "step-2_ckpt", None]
            assert_undisturbed(reports, but={"batches", "restored"})
            assert last(reports, "cuts")
        assert sum(last(cluster.reports(rank), "bytes") for rank in range(2)) > 256 << 20


def test_the_example_goes_on_from_the_step_before_the_kill(tmpfs: Path) -> None:
    args = ["--base", tmpfs / "job", "--steps", 24, "--every", 4, "--die-at", 14]
    # Step 12 is committed, or its save was still under way when the rank died.
    says = ["starting anew", r"going on from \S*/step-(8|12)_ckpt", r"[34] saves, 0 failed"]
    assert_example_goes_on(tmpfs, EXAMPLE, *args, says=says, preload=warm.LIGHTNING)


@pytest.mark.parametrize(("how", "code"), [("ends", 0), ("fails", 1)])
def test_no_thread_aborts_the_interpreter_at_its_exit_or_holds_it_up(
    tmpfs: Path, tmp_path: Path, how: str, code: int
) -> None:
    """Started as a user starts it, cold, where it ends well: what a template has imported might end otherwise."""
    with Cluster(
        tmpfs,
        "lightning_training",
        ranks_per_node=2,
        args=["ddp", tmp_path, "--exit", how],
        cold=not code,
        preload=warm.LIGHTNING,
    ) as cluster:
        assert cluster.wait(timeout_s=100, check=False) == [code, code]
        for output in cluster.outputs().values():
            assert "Fatal Python error" not in output
            assert "terminate called" not in output
            assert ("RuntimeError: as asked" in output) == (how == "fails")
        assert list(cluster.base_of(0).glob("step-*_ckpt")), "versions outlive the processes"
