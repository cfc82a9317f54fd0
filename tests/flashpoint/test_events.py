"""What a loop and an operator are told of saves and recoveries, and that it is what happened."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ml_flashpoint import Flashpoint, events
from ml_flashpoint.engine.checkpointer import Checkpointer
from ml_flashpoint.events import (
    Event,
    LoopHeld,
    PartCommitted,
    PartFetched,
    PartReplicated,
    ReplicationFailed,
    Resumed,
    RunBegun,
    SaveFailed,
    SteppedBack,
    VersionRecovered,
    VersionVerified,
)
from ml_flashpoint.format.errors import InvalidArgumentError, SaveError
from tests.flashpoint.test_overlap import Job
from tests.support.cluster import run_ranks


def _kinds(told: list[Event], step: int | None) -> list[type[Event]]:
    return [type(event) for event in told if event.step == step]


def test_a_loop_is_told_of_each_save(base: Path) -> None:
    told: list[Event] = []
    job = Job()
    with Flashpoint(base, on_event=told.append) as fp:
        fp.track(**job.tracked).resume()
        for _ in range(3):
            job.step()
            fp.step()
            assert fp.wait()
        size, held = fp.health.bytes, fp.health.blocked_total_s
    assert _kinds(told, 0) == [Resumed]
    for step in (1, 2, 3):
        assert set(_kinds(told, step)) == {LoopHeld, PartCommitted, VersionVerified}
    assert {event.bytes for event in told if isinstance(event, PartCommitted)} == {size}
    assert sum(event.seconds for event in told if isinstance(event, LoopHeld)) == pytest.approx(held)
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


def test_a_save_that_fails_is_told(base: Path) -> None:
    told: list[Event] = []
    job = Job()
    with Flashpoint(base, on_event=told.append) as fp:
        lock = _Unsaveable()
        fp.track(**job.tracked, lock=lock).resume()
        lock.saves = False
        fp.step()
        fp.wait()
        error = fp.health.last_error
    (failed,) = [event for event in told if isinstance(event, SaveFailed)]
    assert "not today" in failed.error
    assert "not today" in str(error)


class _Unsaveable:
    saves = True

    def state_dict(self) -> dict[str, object]:
        if not self.saves:
            raise ValueError("not today")
        return {}

    def load_state_dict(self, state: dict[str, object]) -> None:
        pass


@pytest.mark.damages_on_purpose
def test_a_step_back_is_told(base: Path) -> None:
    job = Job()
    with Flashpoint(base, keep=2) as fp:
        fp.track(**job.tracked).resume()
        for _ in range(2):
            fp.step()
            assert fp.wait()
    part = next((base / "step-2_ckpt").glob("*.safetensors"))
    with part.open("r+b") as file:
        file.seek(part.stat().st_size // 2)
        file.write(b"\xff" * 100)
    told: list[Event] = []
    with Flashpoint(base, on_event=told.append) as fp:
        assert fp.track(**job.tracked).resume() == 1
    assert _kinds(told, 2) == [SteppedBack]
    assert _kinds(told, 1) == [VersionRecovered, RunBegun, Resumed]


def test_a_save_that_fails_before_its_write_is_told(base: Path) -> None:
    told: list[Event] = []
    with Checkpointer(base) as engine, events.subscribe(told.append, base):
        engine.begin().fail(SaveError("not today"))
        assert engine.wait()
        assert events.flush()
        assert (engine.status.failures, engine.status.error) == (1, "not today")
    assert [(type(event), event.step) for event in told] == [(SaveFailed, None)]


def test_health_in_numbers(base: Path) -> None:
    job = Job()
    with Flashpoint(base) as fp:
        fp.track(**job.tracked).resume()
        fp.step()
        assert fp.wait()
        health = fp.health
        shown = fp.scalars("ckpt/")
    scalars = health.scalars("ckpt/")
    assert scalars.items() <= shown.items()
    assert (shown["ckpt/last_saved"], "ckpt/last_replicated" in shown) == (1.0, False)
    assert shown["ckpt/recovery_s"] > 0
    assert {"ckpt/saves": 1.0, "ckpt/failures": 0.0, "ckpt/degraded": 0.0}.items() <= scalars.items()
    assert scalars["ckpt/bytes"] == health.bytes > 0
    assert all(type(value) is float for value in scalars.values())


def test_what_is_not_to_be_called_is_refused(base: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="on_event"):
        Flashpoint(base, on_event=7)  # type: ignore[arg-type]


def _events(path: Path) -> dict[int, list[Event]]:
    by_rank: dict[int, list[Event]] = {0: [], 1: []}
    for event in events.read_events(path):
        by_rank[event.rank].append(event)
    return by_rank


@pytest.mark.slow
def test_copies_and_recoveries_of_nodes_are_told(tmpfs: Path) -> None:
    path = tmpfs / "events.jsonl"
    env = {"FLASHPOINT_EVENTS": str(path)}
    args = ["--kind", "ddp", "--steps"]
    run_ranks(tmpfs, "training", 2, nodes=2, args=[*args, 3], env=env)
    for rank, told in _events(path).items():
        copies = [event for event in told if isinstance(event, PartReplicated)]
        assert copies[-1].holders == (1 - rank,)
        assert copies[-1].step == 3
        assert [type(event) for event in told].count(VersionVerified) == 3
        assert {event.node for event in told} == {f"node-{rank}"}
        assert not [event for event in told if isinstance(event, ReplicationFailed)]
    path.unlink()
    shutil.rmtree(tmpfs / "node-1")
    run_ranks(tmpfs, "training", 2, nodes=2, args=[*args, 4], env=env)
    told = _events(path)
    assert {event.part_rank for event in told[1] if isinstance(event, PartFetched)} == {0, 1}
    for rank, fetched in ((0, False), (1, True)):
        (recovered,) = [event for event in told[rank] if isinstance(event, VersionRecovered)]
        assert recovered.step == 3
        assert bool(recovered.fetched_bytes) == fetched
        (resumed,) = [event for event in told[rank] if isinstance(event, Resumed)]
        assert (resumed.step, resumed.source) == (3, "memory")
    assert all(json.loads(line)["schema"] == 1 for line in path.read_text().splitlines())
