"""What a loop and an operator are told of saves and recoveries, and that it is what happened."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from ml_flashpoint import Flashpoint, events
from ml_flashpoint.events import Event, LoopHeld, PartCommitted, PartFetched, PartReplicated, Resumed, VersionVerified
from tests.flashpoint.test_overlap import Job
from tests.support.forked import Report, Team
from tests.workers import training


def _kinds(told: list[Event], step: int | None) -> list[type[Event]]:
    return [type(event) for event in told if event.step == step]


def test_a_loop_is_told_of_each_save_and_health_says_the_same(base: Path) -> None:
    told: list[Event] = []
    job = Job()
    with Flashpoint(base, on_event=told.append) as fp:
        fp.track(**job.tracked)
        assert fp.last_recovery is None
        fp.resume()
        for _ in range(3):
            job.step()
            fp.step()
            assert fp.wait()
        health, shown = fp.health, fp.scalars("ckpt/")
    assert (health.saves, health.failures, health.last_error, health.degraded) == (3, 0, None, False)
    assert 0 < health.blocked_s <= health.blocked_total_s
    assert health.committed_s > 0
    assert health.bytes > sum(p.nbytes * 3 for p in job.model.parameters())
    assert fp.health == health, "after closing, too"
    assert health.scalars("ckpt/").items() <= shown.items()
    assert (shown["ckpt/last_saved"], "ckpt/last_replicated" in shown) == (3.0, False)
    assert {"ckpt/saves": 3.0, "ckpt/failures": 0.0, "ckpt/degraded": 0.0}.items() <= shown.items()
    assert shown["ckpt/bytes"] == health.bytes
    assert shown["ckpt/recovery_s"] > 0
    assert _kinds(told, 0) == [Resumed]
    for step in (1, 2, 3):
        assert set(_kinds(told, step)) == {LoopHeld, PartCommitted, VersionVerified}
    assert {event.bytes for event in told if isinstance(event, PartCommitted)} == {health.bytes}
    held = sum(event.seconds for event in told if isinstance(event, LoopHeld))
    assert held == pytest.approx(health.blocked_total_s)
    assert {(event.rank, event.base) for event in told} == {(0, str(base))}
    for kind in (LoopHeld, PartCommitted, VersionVerified):  # each on a thread of its own
        times = [event.time_s for event in told if isinstance(event, kind)]
        assert times == sorted(times)


def test_a_loop_that_another_one_has_replaced_is_told_of_nothing_more(base: Path) -> None:
    told: list[Event] = []
    told_other: list[Event] = []
    replaced = Flashpoint(base, on_event=told.append).track(**Job().tracked)
    replaced.resume()
    replaced.step()
    with Flashpoint(base, on_event=told_other.append) as fp:
        before = list(told)
        assert fp.track(**Job().tracked).resume() == 1
        fp.step()
        assert fp.wait()
    replaced.close()
    assert {PartCommitted, VersionVerified} <= set(_kinds(told_other, 2))
    assert told == before
    assert set(_kinds(before, 1)) == {LoopHeld, PartCommitted, VersionVerified}


def train(report: Report, rank: int, steps: int) -> None:
    job = training.Job("ddp")
    with Flashpoint(os.environ["FLASHPOINT_TEST_BASE"], deadline_s=60) as fp:
        step = fp.track(**job.tracked).resume()
        for _ in range(step, steps):
            job.step()
            fp.step()
            fp.wait()


def test_copies_and_recoveries_of_nodes_are_told(tmpfs: Path) -> None:
    path = tmpfs / "events.jsonl"

    def told_of(steps: int) -> list[list[Event]]:
        with Team(train, tmpfs, 2, steps, env={"FLASHPOINT_EVENTS": str(path)}) as team:
            team.results()
        assert all(json.loads(line)["schema"] == 1 for line in path.read_text().splitlines())
        told = list(events.read_events(path))
        path.unlink()
        return [[event for event in told if event.rank == rank] for rank in (0, 1)]

    for rank, told in enumerate(told_of(3)):
        copies = [event for event in told if isinstance(event, PartReplicated)]
        assert (copies[-1].step, copies[-1].holders) == (3, (1 - rank,))
        assert [type(event) for event in told].count(VersionVerified) == 3
        assert {event.node for event in told} == {f"node-{rank}"}
        assert not [event for event in told if isinstance(event, events.ReplicationFailed)]
    shutil.rmtree(tmpfs / "node-1")
    both = told_of(4)
    assert {event.part_rank for event in both[1] if isinstance(event, PartFetched)} == {0, 1}
    for told, fetched in zip(both, (False, True), strict=True):
        (recovered,) = [event for event in told if isinstance(event, events.VersionRecovered)]
        assert (recovered.step, bool(recovered.fetched_bytes)) == (3, fetched)
        (resumed,) = [event for event in told if isinstance(event, Resumed)]
        assert (resumed.step, resumed.source) == (3, "memory")
