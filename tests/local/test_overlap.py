"""Asynchronous saves from a device that is played go on while training does: what is saved is what it was then."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from ml_flashpoint.format.errors import InvalidArgumentError
from ml_flashpoint.local import (
    AsyncCallsQueue,
    BasicTensorAwareStateDict,
    CheckpointingException,
    LocalCheckpointManager,
)
from tests.support.played_device import PlayedDevice, lock_slots

LOCKED = 4
"""Saves after which all memory is page-locked, so that later ones are copied late."""


class Job:
    """A training whose next save is copied late, if its optimizer is watched."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model = nn.Linear(200, 200)
        self.model.register_buffer("other", torch.zeros(10))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0, momentum=0.5)
        self.device = PlayedDevice(monkeypatch, [self.model], [self.optimizer])
        self.manager, self.queue = LocalCheckpointManager(folder, "job"), AsyncCallsQueue()
        self.iteration = 0
        for _ in range(LOCKED):
            self.step()
            self.begin()
            self.end()

    def step(self) -> None:
        with torch.no_grad():
            self.model.other += 1  # type: ignore[operator]
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {name: tensor.detach() for name, tensor in self.model.state_dict().items()}
        moments = [self.optimizer.state[parameter]["momentum_buffer"] for parameter in self.model.parameters()]
        return found | {f"moment {number}": each for number, each in enumerate(moments)}

    def begin(self) -> dict[str, torch.Tensor]:
        """Save; returns what the iteration is to be."""
        self.iteration += 1
        expected = {name: tensor.clone() for name, tensor in self.tensors().items()}
        request = self.manager.save(BasicTensorAwareStateDict(self.tensors()), self.iteration, is_async=True)
        assert request is not None
        self.queue.schedule_async_request(request)
        return expected

    def end(self) -> None:
        self.queue.maybe_finalize_async_calls(blocking=True)
        lock_slots(self.manager._engine._pool)

    def check(self, expected: dict[str, torch.Tensor]) -> None:
        loaded, (found, _, _) = self.manager.load()
        assert found == self.iteration
        assert loaded.state_dict.keys() == expected.keys()  # type: ignore[attr-defined]
        assert all(torch.equal(loaded.state_dict[name], expected[name]) for name in expected)  # type: ignore[attr-defined]


@pytest.fixture
def job(tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    made = Job(tmpfs, monkeypatch)
    made.manager.watch(made.optimizer)
    made.step()
    made.device.lag()
    yield made
    made.manager.close()


def test_each_iteration_is_the_state_at_the_call(job: Job) -> None:
    for _ in range(4):
        expected = job.begin()
        job.step()
        job.end()
        job.check(expected)
    assert len(job.device.late) == 4
    assert all(each.over for each in job.device.late)


def test_a_change_that_nobody_announced_fails_the_save_and_no_later_one(job: Job) -> None:
    for fails in (True, False):
        expected = job.begin()
        with torch.no_grad():
            job.model.weight += 1
        job.manager.before_update()
        if fails:
            with pytest.raises(CheckpointingException, match="'weight' was changed while it was copied"):
                job.end()
        else:
            job.end()
    assert len(job.device.late) == 1
    assert job.manager.find_latest() == job.iteration
    job.check(expected)


def test_closing_ends_the_copy(tmpfs: Path, job: Job) -> None:
    job.begin()
    job.manager.close()
    assert len(job.device.late) == 1
    assert not job.optimizer._optimizer_step_pre_hooks
    again = LocalCheckpointManager(tmpfs, "job")
    assert again.find_latest() == job.iteration
    again.close()


def test_bad_arguments(job: Job) -> None:
    with pytest.raises(InvalidArgumentError, match=r"optimizer must be .*, got 7"):
        job.manager.watch(7)  # type: ignore[arg-type]
