"""``dcp.async_save`` returns before what watched optimizers update is copied: what is saved is what it was then."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlan

from ml_flashpoint import Engine
from ml_flashpoint.core.overlap import Overlap
from ml_flashpoint.format.errors import InvalidArgumentError
from tests.support.copied_bytes import CopiedBytes, nbytes_of
from tests.support.dcp import RESULT_TIMEOUT_S, Door, checkpointer
from tests.support.tensors import assert_same, blank, clones


@pytest.fixture
def nobody_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that copies gets no processor time before a step waits for it."""
    monkeypatch.setattr(Overlap, "_start", lambda self, late: None)


class Job:
    def __init__(self) -> None:
        self.first = torch.nn.Linear(64, 64)
        self.model = torch.nn.Sequential(self.first, torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 8))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(16, 64)).square().mean().backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "note": "n"}


def _check_saves(door: Door, count: int, **options: Any) -> None:
    job = Job()
    door.writer.watch(job.optimizer)
    for step in range(1, count + 1):
        job.step()
        expected = clones(job.state())
        future = door.async_save(job.state(), step, **options)
        job.step()
        future.result(RESULT_TIMEOUT_S)
        assert_same(door.load(blank(expected), step), expected)


def test_each_version_is_the_state_at_the_call(door: Door) -> None:
    _check_saves(door, 15)


def test_the_same_if_nothing_is_copied_before_the_step_waits(door: Door, nobody_copies: None) -> None:
    _check_saves(door, 15)


@pytest.mark.slow
def test_the_same_in_a_process(door: Door, process_group: None) -> None:
    _check_saves(door, 4, **checkpointer("process"))


def test_a_save_returns_before_the_copy_and_plans_nothing_before_it_is_there(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planners may look at what they are given."""
    go_on, seen = threading.Event(), list[float]()
    copying = Overlap._start

    def held(self: Overlap, late: Any) -> None:
        self._thread.run(lambda: go_on.wait(RESULT_TIMEOUT_S))
        copying(self, late)

    class Looking(DefaultSavePlanner):
        def create_local_plan(self) -> SavePlan:
            seen.append(float(self.state_dict["w"].sum()))
            return super().create_local_plan()

    monkeypatch.setattr(Overlap, "_start", held)
    weight = torch.nn.Parameter(torch.ones(1000))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    door.save({"w": weight}, 1)  # the base container is known from now on
    door.writer.watch(optimizer)
    future = door.async_save({"w": weight}, 2, planner=Looking())
    assert not seen
    go_on.set()
    future.result(RESULT_TIMEOUT_S)
    assert seen == [1000.0]


@pytest.mark.parametrize("mode", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_a_change_that_nobody_announced_fails_the_save_and_no_later_one(
    door: Door, process_group: None, mode: str
) -> None:
    job = Job()
    job.step()
    door.save(job.state(), 1)
    door.writer.watch(job.optimizer)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Overlap, "_start", lambda self, late: None)
        future = door.async_save(job.state(), 2, **checkpointer(mode))
        with torch.no_grad():
            job.first.bias.add_(1)
        door.writer.before_update()
    with pytest.raises(CheckpointException, match=r"'model\.0\.bias' was changed while it was copied"):
        future.result(RESULT_TIMEOUT_S)
    expected = clones(job.state())
    future = door.async_save(job.state(), 3, **checkpointer(mode))
    with torch.no_grad():
        job.first.bias.add_(1)
    future.result(RESULT_TIMEOUT_S)
    assert_same(door.load(blank(expected), 3), expected)


def test_a_change_that_was_announced_is_none_of_the_version(door: Door, nobody_copies: None) -> None:
    job = Job()
    job.step()
    door.save(job.state(), 1)
    door.writer.watch(job.optimizer)
    expected = clones(job.state())
    future = door.async_save(job.state(), 2)
    door.writer.before_update()
    with torch.no_grad():
        job.first.bias.add_(1)
    future.result(RESULT_TIMEOUT_S)
    assert_same(door.load(blank(expected), 2), expected)


def test_a_save_that_follows_at_once_waits_for_theclones(door: Door, nobody_copies: None) -> None:
    weight = torch.nn.Parameter(torch.ones(1000))
    door.writer.watch(torch.optim.SGD([weight], lr=1.0))
    door.save({"w": weight}, 1)
    futures = [door.async_save({"w": weight}, step) for step in (2, 3)]
    door.writer.before_update()
    for future in futures:
        future.result(RESULT_TIMEOUT_S)


def test_closing_ends_the_copy_and_takes_the_hooks_away(make_door: Callable[..., Door], nobody_copies: None) -> None:
    job, door = Job(), make_door()
    job.step()
    door.save(job.state(), 1)
    door.writer.watch(job.optimizer)
    expected = clones(job.state())
    future = door.async_save(job.state(), 2)
    door.close()
    future.result(RESULT_TIMEOUT_S)
    assert not job.optimizer._optimizer_step_pre_hooks
    assert_same(make_door().load(blank(expected), 2), expected)


def test_a_call_copies_only_what_no_optimizer_updates(
    door: Door, nobody_copies: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, copied = Job(), CopiedBytes(monkeypatch)
    job.step()
    door.save(job.state(), 1)
    copied.here()
    door.async_save(job.state(), 2).result(RESULT_TIMEOUT_S)
    blocking = copied.here()
    assert blocking == nbytes_of(job.state())
    door.writer.watch(job.optimizer)
    future = door.async_save(job.state(), 3)
    assert copied.here() == nbytes_of(dict(job.model.named_buffers()))
    door.writer.before_update()
    future.result(RESULT_TIMEOUT_S)


def test_what_is_made_of_it_is_copied_late_too(door: Door, nobody_copies: None) -> None:
    main = torch.nn.Parameter(torch.zeros(1000))
    optimizer, half = torch.optim.SGD([main], lr=1.0), torch.zeros(1000, dtype=torch.bfloat16)
    door.writer.watch(optimizer, updates=lambda: [half])
    door.save({"half": half}, 1)
    for step in (2, 3):
        expected = {"halves": list(half.clone().chunk(2)), "main": main.detach().clone()}
        future = door.async_save({"halves": list(half.chunk(2)), "main": main}, step)
        late = door.writer._overlap._late
        assert late is not None
        assert not late.over
        main.grad = torch.ones(1000)
        optimizer.step()
        half.copy_(main.detach())
        future.result(RESULT_TIMEOUT_S)
        assert_same(door.load(blank(expected), step), expected)


def test_an_optimizer_whose_steps_call_no_hooks_is_told_of(
    door: Door, nobody_copies: None, caplog: pytest.LogCaptureFixture
) -> None:
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.param_groups, self.state = inner.param_groups, inner.state

    weight = torch.nn.Parameter(torch.ones(10))
    door.writer.watch(Wrapper(torch.optim.SGD([weight], lr=1.0)))
    assert "call no hooks" in caplog.text
    door.save({"w": weight}, 1)
    future = door.async_save({"w": weight}, 2)
    with torch.no_grad():
        weight.add_(1)
    future.result(RESULT_TIMEOUT_S)
    found = {"w": torch.zeros(10)}
    assert torch.equal(door.load(found, 2)["w"], torch.ones(10))


def test_bad_arguments(tmpfs: Path) -> None:
    with (
        Engine.open(tmpfs / "job") as engine,
        pytest.raises(InvalidArgumentError, match=r"optimizer=.*Linear"),
    ):
        engine.writer.watch(torch.nn.Linear(1, 1))  # type: ignore[arg-type]
