"""The façade on several ranks and nodes: sharded, replicated, killed, replaced, fewer, more, at odds."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import Cluster
from tests.support.forked import Team, call_team
from tests.workers import distributed_training as worker
from tests.workers.training import gate_of

TWO_NODES = (0, 0, 1, 1)
KINDS = ["fsdp2", "ddp"]


def train(
    root: Path, kind: str, steps: int, placement: tuple[int, ...] = TWO_NODES, **options: Any
) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = call_team(
        worker.train, root, len(placement), steps, {"kind": kind, "strict": True, **options}, placement=placement
    )
    return results


def undisturbed(root: Path, kind: str, steps: int, world_size: int = 4) -> list[dict[str, str]]:
    results: list[dict[str, str]] = call_team(worker.undisturbed, root, world_size, kind, steps)
    return results


# ---- the same run, whatever happens ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_resumed_run_is_the_undisturbed_run_and_a_lost_node_is_replaced_from_its_peer(tmpfs: Path, kind: str) -> None:
    first = train(tmpfs, kind, 5)
    assert [r["recovery"]["step"] for r in first] == [0] * 4
    assert [r["replicated"] for r in first] == [5] * 4
    shutil.rmtree(tmpfs / "node-0")
    second = train(tmpfs, kind, 8, seed=1)
    assert [r["recovery"]["step"] for r in second] == [5] * 4
    assert all(r["recovery"]["fetched_bytes"] > 0 for r in second[:2])
    shutil.rmtree(tmpfs / "node-1")
    third = train(tmpfs, kind, 10, seed=2)
    assert [r["recovery"]["step"] for r in third] == [8] * 4
    assert [r["digests"] for r in third] == undisturbed(tmpfs, kind, 10)


@pytest.mark.slow(150)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["fsdp2", pytest.param("ddp", marks=pytest.mark.soak)])
def test_torchrun_with_ranks_and_nodes_killed(tmpfs: Path, kind: str) -> None:
    # However late a kill comes, it finds the ranks at work, or before the gate that only it opens.
    steps, chance = 48, random.Random(os.environ.get("FLASHPOINT_TEST_SEED"))
    expected = undisturbed(tmpfs / "reference", kind, steps)
    with Cluster(
        tmpfs,
        "training",
        nodes=2,
        ranks_per_node=2,
        args=["--kind", kind, "--steps", steps, "--gates", "16,32"],
        torchrun=True,
        max_restarts=10,
    ) as cluster:
        cluster.wait_for_report(rank=0, step=chance.randrange(4, 12))
        cluster.kill_rank(chance.randrange(4))
        gate_of(tmpfs, 16).touch()
        cluster.wait_for_report(rank=0, step=chance.randrange(20, 28), timeout_s=120)
        node = chance.randrange(2)
        cluster.kill_node(node)
        cluster.start_node(node)
        gate_of(tmpfs, 32).touch()
        cluster.wait(timeout_s=240, check=False)
        for rank in range(4):
            reports = cluster.reports(rank)
            (digests,) = [r["digests"] for r in reports if "digests" in r]
            assert digests == expected[rank]
            resumed = [r["resumed"] for r in reports if "resumed" in r]
            assert len(resumed) >= 3, "killed twice"
            steps_seen = [r["step"] for r in reports if "step" in r]
            assert len(steps_seen) - steps <= 2 * 12, "few steps are done twice"
            replicated = 0
            for report in reports:
                assert report.get("resumed", replicated) >= replicated, "a step was lost that all ranks had copies of"
                replicated = max(replicated, report.get("replicated") or 0)


# ---- another number of ranks ----------------------------------------------------------------------------------
# What ranks have of their own, the data's order here, is kept; tests/e2e/test_world_size_change.py is about that.


@pytest.mark.parametrize("kind", ["fsdp2", pytest.param("ddp", marks=pytest.mark.soak)])
def test_fewer_and_more_ranks_and_a_lost_node_without_a_spare(tmpfs: Path, kind: str) -> None:
    before, steps = train(tmpfs, kind, 3), 3
    for seed, placement in enumerate([(1, 0, 1), (0, 1), TWO_NODES, (0, 0), (0,)], 3):
        if placement == (0, 0):
            shutil.rmtree(tmpfs / "node-1")
        after = train(tmpfs, kind, steps + 2, placement, seed=seed, on_world_size_change="keep")
        assert [r["recovery"]["step"] for r in after] == [steps] * len(placement)
        assert [r["found"] for r in after] == [before[0]["shared"]] * len(placement)
        before, steps = after, steps + 2
        if len(set(placement)) > 1:
            assert [r["replicated"] for r in after] == [steps] * len(placement)


def test_replicated_state_is_shared_out(tmpfs: Path) -> None:
    (alone,) = train(tmpfs / "one", "ddp", 4, (0,), width=4000)
    several = train(tmpfs / "four", "ddp", 4, width=4000)
    assert max(r["bytes"] for r in several) < alone["bytes"] / 2, "each rank stages and saves a share"


def test_shards_that_several_groups_have_alike_come_back(tmpfs: Path) -> None:
    halves = [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert call_team(worker.save_shards_of_groups, tmpfs, 4) == [(0, 1, halves[rank % 2]) for rank in range(4)]


# ---- ranks at odds --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [False, True])
def test_a_rank_that_cannot_save_holds_no_other_up(tmpfs: Path, strict: bool) -> None:
    other, failing = call_team(worker.count, tmpfs, 2, 5, {1: 3}, strict)
    assert (other["failures"], other["saves"], other["raised"]) == (0, 5, [])
    assert (failing["failures"], failing["saves"]) == (1, 4)
    assert "RuntimeError: cannot be saved now" in failing["error"]
    assert [(step, kind) for step, kind, _ in failing["raised"]] == ([(3, "SaveError")] if strict else [])
    assert call_team(worker.recount, tmpfs, 2, {}) == [(5, 5, ())] * 2


def test_rank_that_cannot_load_makes_all_step_back(tmpfs: Path) -> None:
    call_team(worker.count, tmpfs, 2, 1, {}, True)
    for counted in call_team(worker.count, tmpfs, 2, 1, {}, True):
        assert (counted["saves"], counted["raised"]) == (1, [])
    assert call_team(worker.recount, tmpfs, 2, {1: 2}) == [(1, 1, ("step-2_ckpt",))] * 2


@pytest.mark.parametrize(
    ("how", "why"), [("refused", "cannot be restored"), ("another shape", "(8, 9), and had (8, 8)")]
)
def test_a_failed_load_names_the_rank_that_failed_on_all(tmpfs: Path, how: str, why: str) -> None:
    for told in call_team(worker.load_in_vain, tmpfs, 3, 2, how):
        assert [rank for rank, _ in told] == [2, 2, 2]
        assert all(why in text and "rank 2" in text for _, text in told)


def test_structure_that_changes_on_one_rank(tmpfs: Path) -> None:
    for result in call_team(worker.grow_on_one_rank, tmpfs, 2):
        assert result["found"] == result["saved"] == 6, result["error"]
        assert result["values"] == [6.0]
        assert result["failures"] <= 1, result["error"]


def test_arguments_that_differ(tmpfs: Path) -> None:
    for options, values in (
        ({"every_n_steps": 5}, "[1, 5]"),
        ({"on_world_size_change": "keep"}, "['keep', 'raise']"),
    ):
        said = call_team(worker.construct, tmpfs, 2, {1: options})
        assert all(f"InvalidArgumentError: differs between ranks: {values}" in each for each in said)


def test_base_that_one_rank_cannot_use(tmpfs: Path) -> None:
    (tmpfs / "file").write_text("no directory")
    said = call_team(worker.construct, tmpfs, 2, {1: {"base": str(tmpfs / "file")}})
    assert "LoadError: opening " in said[0]
    assert "failed on rank 1" in said[0]
    assert "cannot be used" in said[1]


def test_fallbacks_that_disagree_or_fail_on_one_rank(tmpfs: Path) -> None:
    assert call_team(worker.fall_back, tmpfs, 2, [8, 8]) == ["7", "7"]
    assert all("different steps on different ranks: [7, 8]" in s for s in call_team(worker.fall_back, tmpfs, 2, [8, 7]))
    said = call_team(worker.fall_back, tmpfs, 2, [8, 0])
    assert "LoadError: the fallback failed on rank 1" in said[0]
    assert said[1].startswith("ZeroDivisionError")


def test_batch_normalization_is_that_of_rank_0_whatever_is_compiled_by_itself(tmpfs: Path) -> None:
    assert call_team(worker.norms, tmpfs, 3) == [[[mean] * 2, [1.0] * 2] for mean in (1.0, 2.0, 3.0)]


# ---- peers that die or hang -----------------------------------------------------------------------------------


def test_training_goes_on_without_its_peer(tmpfs: Path) -> None:
    deadline_s = 6.0
    # No other deadline is shortened: neither the ranks' agreement nor a save that waits for its peer holds up others.
    with Team(
        worker.go_on_alone, tmpfs, 2, deadline_s, env={"FLASHPOINT_TRANSFER_DEADLINE_S": str(deadline_s)}
    ) as team:
        team[0].next_report("step", 5)
        team[1].stop()
        (_, before, *_) = team[0].next_report("step")
        slowest, step, failures, degraded = 0.0, before, 0, False
        while not degraded or step < before + 20:
            (_, step, took, failures, degraded) = team[0].next_report("step")
            slowest = max(slowest, took)
        assert failures == 0, "a save that is not copied is no failure"
        assert slowest < 60  # and not the ten minutes that ranks wait for each other


@pytest.mark.parametrize("in_first_save", [False, True])
def test_sigterm_waits_for_a_missing_peer_no_longer_than_its_grace(tmpfs: Path, in_first_save: bool) -> None:
    with Team(worker.terminate_alone, tmpfs, 2, 1.0, in_first_save) as team:
        (_, at) = team[0].next_report("terminating")
        assert team[0].wait() == -signal.SIGTERM
        took = time.monotonic() - at
        assert took < 20  # and not the minute that ranks wait for each other
        assert in_first_save or took > 0.5
