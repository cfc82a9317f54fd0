"""Training goes on while its state is copied from a device: what is saved is what it was, or the save fails.

The device is played: its memory is the host's, and its streams lag behind. Loops on the host are
`tests.conformance.test_writes_after_a_save`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ml_flashpoint import Flashpoint
from ml_flashpoint.copy import cuda
from tests.support.played_cuda import PlayedDevice, lock_slots

WIDTH = 192
LOCKED = 4
"""Saves after which all memory is page-locked, so that later ones are copied late."""


class Net(nn.Module):
    """With parameters, statistics that change in forward, and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.tied(self.last(self.norm(self.first(x))))
        return out


class Job:
    """A loop with everything that changes: parameters, optimizer state, statistics, and an average of the weights."""

    device: PlayedDevice

    def __init__(self, make: Callable[[], nn.Module] = Net) -> None:
        self.model: Any = make()
        self.average = make()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.tracked: dict[str, Any] = {
            "model": self.model, "average": self.average, "optimizer": self.optimizer
        }  # fmt: skip

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(8, WIDTH)).square().mean().backward()
        self.optimizer.step()
        with torch.no_grad():
            for mine, theirs in zip(self.average.parameters(), self.model.parameters(), strict=True):
                mine.lerp_(theirs, 0.5)

    def state(self) -> dict[str, torch.Tensor]:
        """Copies of all tensors."""
        found = {f"model.{name}": t for name, t in self.model.state_dict().items()}
        found |= {f"average.{name}": t for name, t in self.average.state_dict().items()}
        for number, values in self.optimizer.state_dict()["state"].items():
            found |= {f"optimizer.{number}.{key}": value for key, value in values.items()}
        return {name: tensor.clone() for name, tensor in found.items()}


def assert_loaded(base: Path, saved: dict[str, torch.Tensor], step: int, make: Callable[[], nn.Module] = Net) -> None:
    """The newest version is that of the step, and has these tensors."""
    again = Job(make)
    with Flashpoint(base) as fp:
        assert fp.track(**again.tracked).resume() == step
    found = again.state()
    assert found.keys() == saved.keys()
    assert [name for name in saved if not torch.equal(found[name], saved[name])] == []


def on_device(monkeypatch: pytest.MonkeyPatch, job: Job) -> Job:
    job.device = PlayedDevice(monkeypatch, [job.model, job.average], [job.optimizer])
    return job


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    return on_device(monkeypatch, Job())


def saved_by_loop(fp: Flashpoint, job: Job, steps: int, before: Callable[[int], object] = int) -> dict[str, Any]:
    """The state that the last of some saves has; from the fifth on, they are copied late."""
    saved: dict[str, torch.Tensor] = {}
    for number in range(steps):
        ended(fp)
        before(number)
        job.step()
        saved = job.state()
        fp.step()
    return saved


def ended(fp: Flashpoint) -> None:
    assert fp.wait()
    lock_slots(fp._checkpointer._pool)


def settled(base: Path, job: Job, **options: Any) -> Flashpoint:
    """A façade with overlap whose next save is copied late, and is not over before something waits for that."""
    fp = Flashpoint(base, overlap=True, **options)
    fp.track(**job.tracked).resume()
    saved_by_loop(fp, job, LOCKED)
    ended(fp)
    job.step()
    job.device.late.clear()
    job.device.lag()
    return fp


def test_without_overlap_nothing_is_copied_late_and_optimizers_are_left_alone(base: Path, job: Job) -> None:
    hooks = job.optimizer.register_step_pre_hook(lambda *_: None).hooks_dict_ref
    with Flashpoint(base, strict=True) as fp:
        fp.track(**job.tracked).resume()
        assert len(hooks()) == 1  # type: ignore[misc, arg-type]
        saved_by_loop(fp, job, LOCKED + 1)
        saved = job.state()
        fp.step()
        _through_data(job)
    assert not job.device.late
    assert_loaded(base, saved, LOCKED + 2)
    with Flashpoint(base, overlap=True) as fp:
        fp.track(**job.tracked)
        assert len(hooks()) == 2  # type: ignore[misc, arg-type]
    assert len(hooks()) == 1, "hooks go with the Flashpoint"  # type: ignore[misc, arg-type]


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
    assert_loaded(base, saved, LOCKED + 1)


def _in_place(job: Job) -> None:
    with torch.no_grad():
        job.model.last.bias.add_(1)


def _through_data(job: Job) -> None:
    for parameter in job.model.parameters():
        parameter.data.mul_(2)


def _other_memory(job: Job) -> None:
    """As where averages take the place of parameters for an evaluation."""
    for parameter in job.model.parameters():
        parameter.data = torch.zeros_like(parameter)


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
            step = fp.step()
            change(job)
            job.step()
        assert fp.wait()
        assert fp.health.failures == 1
        assert len(job.device.late) == 1
    assert_loaded(base, saved, step)


@pytest.mark.parametrize(("change", "announced"), [(_in_place, True), (_through_data, True), (_other_memory, False)])
def test_a_change_that_was_announced_or_leaves_the_memory_alone_is_none_of_the_version(
    base: Path, job: Job, change: Callable[[Job], None], announced: bool
) -> None:
    with settled(base, job, strict=True) as fp:
        saved = job.state()
        fp.step()
        if announced:
            fp.before_update()
        change(job)
        fp.before_update()
        assert len(job.device.late) == 1
    assert_loaded(base, saved, LOCKED + 1)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("part", [lambda whole: whole, lambda whole: whole.to_local()])
def test_a_change_of_a_sharded_parameter_fails_the_save(
    base: Path, monkeypatch: pytest.MonkeyPatch, part: Callable[[Any], torch.Tensor]
) -> None:
    def sharded() -> nn.Module:
        return fully_shard(nn.Sequential(nn.Linear(WIDTH, 8), nn.Linear(8, 8)), mesh=init_device_mesh("cpu", (1,)))

    job = on_device(monkeypatch, Job(sharded))
    with settled(base, job) as fp:
        fp.step()
        with torch.no_grad():
            part(job.model[1].bias).add_(1)
        fp.before_update()
        fp.wait()
        assert len(job.device.late) == 1
        assert "'model.1.bias' was changed" in str(fp.health.last_error)


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
    assert_loaded(base, saved, step)


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
            step = fp.step()
            _through_data(job)
            assert fp.wait()
        assert len(job.device.late) == 2
    assert_loaded(base, saved, step)


class Walked(Net):
    """A model that has a say in its state dict, so that every save walks through it."""

    def get_extra_state(self) -> torch.Tensor:
        return torch.ones(1)

    def set_extra_state(self, state: torch.Tensor) -> None:
        pass


@pytest.mark.parametrize("make", [Net, Walked])
def test_what_is_frozen_later_is_copied_at_once_from_then_on(
    base: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[], nn.Module]
) -> None:
    """Whatever changes it then need not be noticed: a few numbers, through `.data`."""
    job = on_device(monkeypatch, Job(make))

    def change(number: int) -> None:
        if number >= LOCKED:
            job.model.last.requires_grad_(False)
        if number > LOCKED:  # the save before has found it frozen
            job.model.last.weight.data[0, 0] += 1

    with Flashpoint(base, strict=True, overlap=True) as fp:
        fp.track(**job.tracked).resume()
        saved = saved_by_loop(fp, job, LOCKED + 3, change)
        job.model.last.weight.data[0, 0] += 1
        fp.before_update()
    assert job.device.late
    assert_loaded(base, saved, LOCKED + 3, make)


def test_hooks_of_the_program_that_change_parameters_in_a_step_come_after_the_copy(base: Path, job: Job) -> None:
    def decay(*_: object) -> None:
        job.model.last.weight.data[0, 0] *= 0.5

    job.optimizer.register_step_pre_hook(decay)  # before it is tracked
    with Flashpoint(base, strict=True, overlap=True) as fp:
        fp.track(**job.tracked).resume()
        saved = saved_by_loop(fp, job, LOCKED + 2)
        job.step()
    assert job.device.late
    assert_loaded(base, saved, LOCKED + 2)
