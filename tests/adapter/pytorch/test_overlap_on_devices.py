"""``dcp.async_save`` from a device that is played, and lags behind: what is saved is what it was at the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlan

from ml_flashpoint.adapter.pytorch.memory_stager import HAS_FUTURES, MemoryStager
from ml_flashpoint.adapter.pytorch.staging import TensorLeaves
from ml_flashpoint.format.errors import InvalidArgumentError
from tests.support.dcp import RESULT_TIMEOUT_S, Door, checkpointer
from tests.support.played_cuda import PlayedDevice
from tests.support.tensors import assert_same, blank, clones

LOCKED = 4
"""Saves of a job before the one that is looked at."""

with_futures = pytest.mark.skipif(not HAS_FUTURES, reason="this torch knows none")


class Job:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model = nn.Sequential(nn.Linear(192, 192), nn.BatchNorm1d(192), nn.Linear(192, 192))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.device = PlayedDevice(monkeypatch, [self.model], [self.optimizer])

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(8, 192)).square().mean().backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "note": "n"}


@pytest.fixture
def job(door: Door, monkeypatch: pytest.MonkeyPatch) -> Job:
    """Its next save is copied late, and is not over before something waits for that."""
    made = Job(monkeypatch)
    for step in range(1, LOCKED + 1):
        made.step()
        door.async_save(made.state(), step).result(RESULT_TIMEOUT_S)
    made.step()
    door.writer.watch(made.optimizer)
    made.step()
    made.device.lag()
    return made


@pytest.mark.parametrize(
    "how",
    [
        "step",
        pytest.param("future", marks=with_futures),
        pytest.param("process", marks=pytest.mark.slow),
    ],
)
def test_each_version_is_the_state_at_the_call(
    door: Door, process_group: None, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    job = Job(monkeypatch)
    options: dict[str, Any] = checkpointer("process") if how == "process" else {}
    if how == "future":
        options["async_stager"] = MemoryStager(door.writer)
    else:
        door.writer.watch(job.optimizer)
    for step in range(1, 10):
        job.step()
        expected = clones(job.state())
        saving: Any = dcp.async_save(
            job.state(), checkpoint_id=door.version(step), storage_writer=door.writer, **options
        )
        if how == "future":
            saving.staging_completion.result(RESULT_TIMEOUT_S)
        job.step()
        getattr(saving, "upload_completion", saving).result(RESULT_TIMEOUT_S)
        assert_same(door.load(blank(expected), step), expected)
    assert len(job.device.late) >= 4, "the first saves go through slots, those that follow need not"
    assert all(each.over for each in job.device.late)


def test_a_change_that_nobody_announced_fails_the_save_and_no_later_one(door: Door, job: Job) -> None:
    future = door.async_save(job.state(), LOCKED + 1)
    with torch.no_grad():
        job.model[0].bias.add_(1)  # type: ignore[operator,union-attr]
    door.writer.before_update()
    with pytest.raises(CheckpointException, match=r"'model\.0\.bias' was changed while it was copied"):
        future.result(RESULT_TIMEOUT_S)
    expected = clones(job.state())
    future = door.async_save(job.state(), LOCKED + 2)
    with torch.no_grad():
        job.model[0].bias.add_(1)  # type: ignore[operator,union-attr]
    future.result(RESULT_TIMEOUT_S)
    assert_same(door.load(blank(expected), LOCKED + 2), expected)


def test_what_optimizers_update_may_change_once_that_is_announced_and_the_rest_at_once(door: Door, job: Job) -> None:
    """And nothing is planned before the copy is there: planners may look at what they are given."""
    seen = list[bool]()

    class Looking(DefaultSavePlanner):
        def create_local_plan(self) -> SavePlan:
            seen.append(torch.equal(self.state_dict["model.0.weight"], job.model[0].weight))  # type: ignore[arg-type]
            return super().create_local_plan()

    expected = clones(job.state())
    future = door.async_save(job.state(), LOCKED + 1, planner=Looking())
    for buffer in job.model.buffers():
        buffer.zero_()
    assert not seen
    door.writer.before_update()
    with torch.no_grad():
        job.model[0].bias.add_(1)  # type: ignore[operator,union-attr]
    future.result(RESULT_TIMEOUT_S)
    assert seen == [True]
    assert len(job.device.late) == 1
    assert_same(door.load(blank(expected), LOCKED + 1), expected)


def test_what_is_made_of_it_is_copied_late_too(door: Door, job: Job) -> None:
    model = nn.Module()
    model.register_buffer("made", torch.zeros(1000, dtype=torch.bfloat16))
    job.device._models = [job.model, model]
    door.writer.watch(job.optimizer, updates=lambda: [model.made])  # type: ignore[list-item]
    state = {**job.state(), "halves": list(model.made.chunk(2))}  # type: ignore[operator]
    for step in range(LOCKED + 1, LOCKED + 4):
        job.step()
        expected = clones(state)
        future = door.async_save(state, step)
        job.optimizer.step()
        model.made.add_(1)  # type: ignore[operator]
        future.result(RESULT_TIMEOUT_S)
        assert_same(door.load(blank(expected), step), expected)
    assert job.device.late


def test_closing_ends_the_copy_and_takes_the_hooks_away(make_door: Callable[..., Door], door: Door, job: Job) -> None:
    expected = clones(job.state())
    future = door.async_save(job.state(), LOCKED + 1)
    door.close()
    future.result(RESULT_TIMEOUT_S)
    assert len(job.device.late) == 1
    assert not job.optimizer._optimizer_step_pre_hooks
    assert_same(make_door().load(blank(expected), LOCKED + 1), expected)


class Quantized(torch.Tensor):
    """A tensor that is more than its memory, on a device as it seems."""

    values: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor, device: torch.device) -> Quantized:
        made = torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype, device=device)  # type: ignore[attr-defined]
        made.values = values
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return Quantized(args[0].values, (kwargs or {}).get("device", args[0].device))


def test_what_is_more_than_its_memory_leaves_its_device_while_it_is_staged() -> None:
    """It is pickled later, by a thread for which the device works in another order."""
    leaves = TensorLeaves({"quantized": Quantized(torch.ones(3), torch.device("cuda", 1))})
    staged = leaves.rebuild({})["quantized"]
    assert type(staged) is Quantized
    assert staged.device == torch.device("cpu")


def test_values_that_may_hold_tensors_are_complete_before_other_threads_see_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[int] = []
    stream = type("Played", (), {"synchronize": lambda self: waited.append(1)})()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for value, expected in ((object(), 1), ({1}, 2), (3, 2), (b"", 2), (torch.ones(2), 2)):
        TensorLeaves({"value": value, "x": 1})
        assert len(waited) == expected, value


def test_an_optimizer_whose_steps_call_no_hooks_is_told_of(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.param_groups, self.state = inner.param_groups, inner.state

    door.writer.watch(Wrapper(torch.optim.SGD([nn.Parameter(torch.ones(10))], lr=1.0)))
    assert "call no hooks" in caplog.text
    with pytest.raises(InvalidArgumentError, match=r"optimizer must be .*Linear"):
        door.writer.watch(nn.Linear(1, 1))  # type: ignore[arg-type]
