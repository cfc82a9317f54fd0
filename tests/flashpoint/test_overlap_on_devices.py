"""Training goes on while its state is copied from a device: what is saved is what it was, or the save fails.

The device is played: its memory is the host's, and its streams lag behind.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ml_flashpoint import Flashpoint
from ml_flashpoint.copy import cuda
from tests.flashpoint.test_overlap import Job as HostJob
from tests.flashpoint.test_overlap import _is_same, _loaded
from tests.support.played_device import PlayedDevice, lock_slots

LOCKED = 4
"""Saves after which all memory is page-locked, so that later ones are copied late."""


class Job(HostJob):
    device: PlayedDevice


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    made = Job()
    made.device = PlayedDevice(monkeypatch, (made.model, made.average), (made.optimizer,))
    return made


@pytest.fixture
def base(tmpfs: Path) -> Path:
    return tmpfs / "job"


def locked(fp: Flashpoint) -> None:
    lock_slots(fp._checkpointer._pool)


def settled(base: Path, job: Job, **options: Any) -> Flashpoint:
    """A façade with overlap whose next save is copied late, and is not over before something waits for that."""
    fp = Flashpoint(base, overlap=True, **options)
    fp.track(**job.tracked).resume()
    for _ in range(LOCKED):
        job.step()
        fp.step()
        assert fp.wait()
        locked(fp)
    job.step()
    job.device.late.clear()
    job.device.lag()
    return fp


def test_each_version_is_the_state_of_its_step(base: Path, job: Job) -> None:
    with Flashpoint(base, strict=True, overlap=True) as fp:
        fp.track(**job.tracked).resume()
        for _ in range(10):
            job.step()
            saved, step = job.state(), fp.step()
            job.step()
            assert fp.wait()
            locked(fp)
        assert fp.health.failures == 0
    assert len(job.device.late) >= 4, "the first saves go through slots, those that follow need not"
    found, state = _loaded(base)
    assert found == step
    assert _is_same(state, saved)


def test_without_overlap_nothing_is_copied_late(base: Path, job: Job) -> None:
    with Flashpoint(base, strict=True) as fp:
        fp.track(**job.tracked).resume()
        for _ in range(LOCKED + 2):
            job.step()
            saved = job.state()
            fp.step()
            _through_data(job)
            assert fp.wait()
            locked(fp)
    assert not job.device.late
    assert _is_same(_loaded(base)[1], saved)


def test_only_what_optimizers_update_is_copied_late(base: Path, job: Job) -> None:
    with settled(base, job, strict=True) as fp:
        saved = job.state()
        fp.step()
        with torch.no_grad():  # all but what the optimizer updates may change in any way
            for tensor in (*job.average.parameters(), *job.model.buffers()):
                tensor.zero_()
        job.optimizer.step()
        assert fp.wait()
        assert len(job.device.late) == 1
    assert _is_same(_loaded(base)[1], saved)


def _in_place(job: Job) -> None:
    with torch.no_grad():
        job.model.last.bias.add_(1)


def _through_data(job: Job) -> None:
    for parameter in job.model.parameters():
        parameter.data.mul_(2)


@pytest.mark.parametrize("change", [_in_place, _through_data])
def test_a_change_that_nobody_announced_fails_the_save_and_no_later_one(
    base: Path, job: Job, change: Callable[[Job], None]
) -> None:
    with settled(base, job) as fp:
        fp.step()
        change(job)
        job.step()
        fp.wait()
        assert fp.health.failures == 1
        assert "was changed while it was copied" in str(fp.health.last_error)
        for _ in range(2):
            saved = job.state()
            fp.step()
            change(job)
            job.step()
        assert fp.wait()
        assert fp.health.failures == 1
        assert len(job.device.late) == 1
    assert _is_same(_loaded(base)[1], saved)


@pytest.mark.parametrize("change", [_in_place, _through_data])
def test_a_change_that_was_announced_is_none_of_the_version(
    base: Path, job: Job, change: Callable[[Job], None]
) -> None:
    with settled(base, job, strict=True) as fp:
        saved = job.state()
        fp.step()
        fp.before_update()
        change(job)
        assert len(job.device.late) == 1
    assert _is_same(_loaded(base)[1], saved)


def test_memory_that_a_tensor_had_at_the_save_is_what_is_copied(base: Path, job: Job) -> None:
    """As where averages take the place of parameters for an evaluation."""
    with settled(base, job, strict=True) as fp:
        saved = job.state()
        fp.step()
        for parameter in job.model.parameters():
            parameter.data = torch.zeros_like(parameter)
        fp.before_update()
        assert len(job.device.late) == 1
    assert _is_same(_loaded(base)[1], saved)


@pytest.mark.parametrize(
    "part", [lambda whole: whole, lambda whole: whole.to_local(), lambda whole: whole._local_tensor]
)
def test_a_change_of_a_sharded_parameter_fails_the_save(
    base: Path, monkeypatch: pytest.MonkeyPatch, part: Callable[[Any], torch.Tensor]
) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        job: Any = Job()
        job.model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        fully_shard(job.model, mesh=init_device_mesh("cpu", (1,)))
        job.optimizer = torch.optim.AdamW(job.model.parameters())
        job.tracked = {"model": job.model, "optimizer": job.optimizer}

        def step() -> None:
            job.model(torch.ones(2, 8)).sum().backward()
            job.optimizer.step()

        job.step = step
        job.device = PlayedDevice(monkeypatch, [job.model], [job.optimizer])
        with settled(base, job) as fp:
            fp.step()
            with torch.no_grad():
                part(job.model[1].bias).add_(1)
            fp.before_update()
            fp.wait()
            assert len(job.device.late) == 1
            assert "'model.1.bias' was changed" in str(fp.health.last_error)
    finally:
        dist.destroy_process_group()


class Wrapper(torch.optim.Optimizer):
    """An optimizer that has not called the constructor of its base, as wrappers of some libraries have not."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.defaults = inner.defaults
        self.param_groups = inner.param_groups
        self.state = inner.state

    def step(self, closure: Any = None) -> None:
        self.inner.step()


def test_the_state_of_an_optimizer_without_hooks_is_not_copied_late(base: Path, job: Job) -> None:
    job.tracked["optimizer"] = Wrapper(job.optimizer)
    with settled(base, job) as fp:
        fp.step()
        assert not job.device.late


@pytest.mark.slow
def test_compiled_steps_wait_too(base: Path, job: Job) -> None:
    compiled = torch.compile(job.optimizer.step, backend="eager")
    with settled(base, job, strict=True) as fp:
        for _ in range(3):
            job.step()
            saved = job.state()
            step = fp.step()
            compiled()
        assert job.device.late
    found, state = _loaded(base)
    assert found == step
    assert _is_same(state, saved)


def test_nothing_is_copied_late_once_a_step_was_captured(base: Path, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays of a CUDA graph change the state without any hook being called."""
    with settled(base, job, strict=True) as fp:
        fp.step()
        fp.before_update()
        assert fp.wait()
        assert len(job.device.late) == 1
        job.step()
        fp.step()
        monkeypatch.setattr(cuda, "is_capturing", lambda: True)
        job.optimizer.zero_grad()
        job.optimizer.step()
        monkeypatch.setattr(cuda, "is_capturing", lambda: False)
        fp.before_update()
        assert fp.wait()
        for _ in range(2):
            job.step()
            saved = job.state()
            fp.step()
            _through_data(job)
            assert fp.wait()
        assert len(job.device.late) == 2
    assert _is_same(_loaded(base)[1], saved)
