"""Lightning jobs that are killed and go on from memory, or from what is persisted, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import warm
from tests.support.cluster import Cluster
from tests.support.persisting import lose_all_nodes, persisted_steps

KILLS = {"single": (5, 7, 14), "ddp": (5, 14), "fsdp": (5, 9), "model_parallel": (5, 14)}


def last(reports: list[dict[str, Any]], name: str) -> Any:
    return [each[name] for each in reports if name in each][-1]


@pytest.mark.timeout(300)
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
            resumed, undisturbed = last(reports, "resumed"), last(reports, "undisturbed")
            lives = [each["resumes"] for each in reports if "life" in each][: len(KILLS[kind]) + 1]
            assert lives[0] is None
            assert all(each.endswith("_ckpt") for each in lives[1:])
            # Every batch of every step, in whichever life it was last trained on.
            own = reports[: next(i for i, each in enumerate(reports) if "resumed" in each)]
            batches = {each["step"]: each["batch"] for each in own if "batch" in each}
            assert [batches[step] for step in range(len(batches))] == [batch for _, batch in undisturbed["batches"]]
            # No step is trained twice but the one or two before a kill that had not been saved.
            assert sum("batch" in each for each in own) <= len(batches) + 2 * len(KILLS[kind])
            for name in undisturbed.keys() - {"batches", "restored"}:
                assert resumed[name] == undisturbed[name], name
            assert resumed["restored"], "the module's own part of the checkpoint came back"
            assert last(reports, "health")["failures"] == 0


@pytest.mark.timeout(300)
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
        resumed, undisturbed = last(reports, "resumed"), last(reports, "undisturbed")
        trained = [batch for _, batch in undisturbed["batches"][-len(resumed["batches"]) :]]
        assert [batch for _, batch in resumed["batches"]] == trained
        for name in undisturbed.keys() - {"batches", "restored", "files"}:
            assert resumed[name] == undisturbed[name], name
