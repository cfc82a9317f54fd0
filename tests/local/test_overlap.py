"""Asynchronous saves that return before what watched optimizers update is copied: what is saved is what it was then."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ml_flashpoint.core.overlap import Overlap
from ml_flashpoint.format.errors import InvalidArgumentError
from ml_flashpoint.local import (
    AsyncCallsQueue,
    BasicTensorAwareStateDict,
    CheckpointingException,
    LocalCheckpointManager,
)
from tests.support.copied_bytes import CopiedBytes, nbytes_of


@pytest.fixture
def manager(tmpfs: Path) -> Iterator[LocalCheckpointManager]:
    made = LocalCheckpointManager(tmpfs, "job")
    yield made
    made.close()


@pytest.fixture
def nobody_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that copies gets no processor time before a step waits for it."""
    monkeypatch.setattr(Overlap, "_start", lambda self, late: None)


class Job:
    def __init__(self) -> None:
        self.weight, self.other = torch.nn.Parameter(torch.zeros(1000)), torch.zeros(10)
        self.optimizer = torch.optim.SGD([self.weight], lr=1.0, momentum=0.5)

    def step(self) -> None:
        self.other += 1
        self.weight.grad = torch.ones(1000)
        self.optimizer.step()

    def tensors(self) -> dict[str, torch.Tensor]:
        moments = self.optimizer.state[self.weight]["momentum_buffer"]
        return {"weight": self.weight.detach(), "other": self.other, "moments": moments}

    def state(self) -> BasicTensorAwareStateDict:
        return BasicTensorAwareStateDict(self.tensors())


def _check(manager: LocalCheckpointManager, count: int) -> None:
    job, queue = Job(), AsyncCallsQueue()
    manager.watch(job.optimizer)
    for iteration in range(1, count + 1):
        job.step()
        expected = {name: tensor.clone() for name, tensor in job.tensors().items()}
        request = manager.save(job.state(), iteration, is_async=True)
        assert request is not None
        queue.schedule_async_request(request)
        job.step()
        queue.maybe_finalize_async_calls(blocking=True)
        loaded, (found, _, _) = manager.load()
        assert found == iteration
        assert loaded.state_dict.keys() == expected.keys()  # type: ignore[attr-defined]
        assert all(torch.equal(loaded.state_dict[name], expected[name]) for name in expected)  # type: ignore[attr-defined]


def test_each_iteration_is_the_state_at_the_call(manager: LocalCheckpointManager) -> None:
    _check(manager, 15)


def test_the_same_if_nothing_is_copied_before_the_step_waits(
    manager: LocalCheckpointManager, nobody_copies: None
) -> None:
    _check(manager, 15)


def test_a_change_that_nobody_announced_fails_the_save_and_no_later_one(
    manager: LocalCheckpointManager, nobody_copies: None
) -> None:
    job, queue = Job(), AsyncCallsQueue()
    manager.watch(job.optimizer)
    job.step()
    for iteration in (1, 2):
        expected = job.weight.detach().clone()
        request = manager.save(job.state(), iteration, is_async=True)
        assert request is not None
        queue.schedule_async_request(request)
        with torch.no_grad():
            job.weight += 1
        manager.before_update()
        if iteration == 1:
            with pytest.raises(CheckpointingException, match="'weight' was changed while it was copied"):
                queue.maybe_finalize_async_calls(blocking=True)
        else:
            queue.maybe_finalize_async_calls(blocking=True)
    assert manager.find_latest() == 2
    loaded, _ = manager.load()
    assert torch.equal(loaded.state_dict["weight"], expected)  # type: ignore[attr-defined]


def test_a_call_copies_only_what_no_optimizer_updates(
    manager: LocalCheckpointManager, nobody_copies: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, queue, copied = Job(), AsyncCallsQueue(), CopiedBytes(monkeypatch)
    job.step()
    for watched, now in ((False, nbytes_of(job.tensors())), (True, job.other.nbytes)):
        if watched:
            manager.watch(job.optimizer)
        copied.here()
        request = manager.save(job.state(), 1, is_async=True)
        assert copied.here() == now
        assert request is not None
        queue.schedule_async_request(request)
        job.step()
        queue.maybe_finalize_async_calls(blocking=True)


def test_closing_ends_the_copy(tmpfs: Path, nobody_copies: None) -> None:
    job = Job()
    job.step()
    manager = LocalCheckpointManager(tmpfs, "job")
    manager.watch(job.optimizer)
    request = manager.save(job.state(), 1, is_async=True)
    assert request is not None
    manager.close()
    assert not job.optimizer._optimizer_step_pre_hooks
    again = LocalCheckpointManager(tmpfs, "job")
    assert again.find_latest() == 1
    again.close()


def test_bad_arguments(manager: LocalCheckpointManager) -> None:
    with pytest.raises(InvalidArgumentError, match="optimizer=7"):
        manager.watch(7)  # type: ignore[arg-type]
