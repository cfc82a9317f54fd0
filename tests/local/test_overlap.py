"""Asynchronous saves from a device that is played go on while training does: what is saved is what it was then."""

from __future__ import annotations

import contextlib
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
from tests.local.states import assert_equal
from tests.support.played_cuda import PlayedDevice, lock_slots

LOCKED = 4
"""Saves after which all memory is page-locked, so that later ones are copied late."""


class Job:
    """A training whose next save is copied late, if its optimizer is watched."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model = nn.Linear(200, 200)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.device = PlayedDevice(monkeypatch, [self.model], [self.optimizer])
        self.manager, self.queue = LocalCheckpointManager(folder, "job"), AsyncCallsQueue()
        self.iteration = 0
        for _ in range(LOCKED):
            self.step()
            self.begin()
            self.end()

    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()

    def begin(self) -> dict[str, torch.Tensor]:
        """Save; returns what the iteration is to be."""
        self.iteration += 1
        state = {name: tensor.detach() for name, tensor in self.model.state_dict().items()}
        expected = {name: tensor.clone() for name, tensor in state.items()}
        request = self.manager.save(BasicTensorAwareStateDict(state), self.iteration, is_async=True)
        assert request is not None
        self.queue.schedule_async_request(request)
        return expected

    def end(self) -> None:
        self.queue.maybe_finalize_async_calls(blocking=True)
        lock_slots(self.manager._engine._pool)

    def check(self, expected: dict[str, torch.Tensor]) -> None:
        loaded, (found, _, _) = self.manager.load()
        assert found == self.iteration
        assert_equal(loaded.state_dict, expected)  # type: ignore[attr-defined]


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
    with pytest.raises(InvalidArgumentError, match=r"optimizer must be .*, got 7"):
        job.manager.watch(7)  # type: ignore[arg-type]
    job.begin()
    job.manager.close()
    assert len(job.device.late) == 1
    job.optimizer.step()  # which nothing of a closed manager sees
    with contextlib.closing(LocalCheckpointManager(tmpfs, "job")) as again:
        assert again.find_latest() == job.iteration
