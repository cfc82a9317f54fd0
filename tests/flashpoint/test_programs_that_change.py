"""Loops that do more than forward, backward and step: versions are what the state was, and can be loaded again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

from ml_flashpoint import Flashpoint
from tests.support.played_device import PlayedDevice, lock_slots

WIDTH = 16


def _layers(count: int = 2) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, WIDTH)).square().mean().backward()
    optimizer.step()


def _prune(model: nn.Sequential) -> None:
    prune.identity(model[0], "weight")  # type: ignore[no-untyped-call]


def _parametrize(model: nn.Sequential) -> None:
    parametrize.register_parametrization(model[1], "weight", nn.Identity())


def _wrap(model: nn.Sequential) -> None:
    model[0] = nn.Sequential(model[0])


@pytest.mark.parametrize("change", [_prune, _parametrize, _wrap])
def test_parameters_that_get_other_names_keep_their_optimizer_state(
    base: Path, change: Callable[[nn.Sequential], None]
) -> None:
    model = _layers()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters)
    with Flashpoint(base, strict=True) as fp:
        fp.track(model=model, optimizer=optimizer).resume()
        for _ in range(3):
            _step(model, optimizer)
            fp.step()
            fp.wait()
        change(model)
        _step(model, optimizer)
        fp.step()
    again = _layers()
    parameters_again = list(again.parameters())
    change(again)
    optimizer_again = torch.optim.AdamW(parameters_again)
    with Flashpoint(base) as fp:
        assert fp.track(model=again, optimizer=optimizer_again).resume() == 4
    for one, other in zip(parameters, parameters_again, strict=True):
        assert torch.equal(one, other)
        assert optimizer.state[one].keys() == optimizer_again.state[other].keys()
        for key, value in optimizer.state[one].items():
            assert torch.equal(value, optimizer_again.state[other][key])


def test_parameters_that_change_places_keep_their_optimizer_state(base: Path) -> None:
    model = _layers()
    optimizer = torch.optim.AdamW(model.parameters())
    with Flashpoint(base, strict=True) as fp:
        fp.track(model=model, optimizer=optimizer).resume()
        _step(model, optimizer)
        fp.step()
        fp.wait()
        first, second = model
        first.weight, second.weight = second.weight, first.weight
        _step(model, optimizer)
        fp.step()
    again = _layers()
    optimizer_again = torch.optim.AdamW(again.parameters())
    with Flashpoint(base) as fp:
        assert fp.track(model=again, optimizer=optimizer_again).resume() == 2
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
        for key, value in optimizer.state[one].items():
            assert torch.equal(value, optimizer_again.state[other][key])


def _settle(fp: Flashpoint) -> None:
    """From the third time on, the next save is copied late."""
    assert fp.wait()
    lock_slots(fp._checkpointer._pool)


class Teacher(nn.Module):
    """A model with an average of itself that has no gradients, and is brought up to date in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = _layers(), _layers().requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for one, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            one.data.mul_(0.5).add_(other.data, alpha=0.5)
        out: torch.Tensor = self.student(x) - self.teacher(x)
        return out


def test_what_an_optimizer_has_and_does_not_update_is_copied_at_once(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Teacher()
    optimizer = torch.optim.AdamW(model.parameters())
    device = PlayedDevice(monkeypatch, [model], [optimizer])
    saved: dict[str, torch.Tensor] = {}
    with Flashpoint(base, strict=True, overlap=True) as fp:
        fp.track(model=model, optimizer=optimizer).resume()
        for _ in range(6):
            _settle(fp)
            _step(model, optimizer)
            saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            fp.step()
        _step(model, optimizer)
    assert device.late
    again = Teacher()
    with Flashpoint(base) as fp:
        assert fp.track(model=again, optimizer=torch.optim.AdamW(again.parameters())).resume() == 6
    assert all(torch.equal(tensor, saved[name]) for name, tensor in again.state_dict().items())


class Walked(nn.Linear):
    """A layer that has a say in its state dict, so that every save walks through the model."""

    def get_extra_state(self) -> torch.Tensor:
        return torch.ones(1)

    def set_extra_state(self, state: torch.Tensor) -> None:
        pass


@pytest.mark.parametrize("kind", [nn.Linear, Walked])
def test_what_is_frozen_later_is_copied_at_once_from_then_on(
    base: Path, monkeypatch: pytest.MonkeyPatch, kind: type
) -> None:
    """Whatever changes it then need not be noticed: a few numbers, through `.data`."""
    model = nn.Sequential(kind(WIDTH, WIDTH), kind(WIDTH, WIDTH))
    optimizer = torch.optim.AdamW(model.parameters())
    device = PlayedDevice(monkeypatch, [model], [optimizer])
    saved: dict[str, torch.Tensor] = {}
    with Flashpoint(base, strict=True, overlap=True) as fp:
        fp.track(model=model, optimizer=optimizer).resume()
        for number in range(7):
            _settle(fp)
            if number > 3:
                model[0].requires_grad_(False)
            if number > 4:  # the save before has found it frozen
                model[0].weight.data[0, 0] += 1
            _step(model, optimizer)
            saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            fp.step()
        model[0].weight.data[0, 0] += 1
        fp.before_update()
    assert device.late
    again = nn.Sequential(kind(WIDTH, WIDTH), kind(WIDTH, WIDTH))
    with Flashpoint(base) as fp:
        assert fp.track(model=again, optimizer=torch.optim.AdamW(again.parameters())).resume() == 7
    assert all(torch.equal(tensor, saved[name]) for name, tensor in again.state_dict().items())


def test_hooks_of_the_program_that_change_parameters_in_a_step_come_after_the_copy(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decay(*_: object) -> None:
        model[0].weight.data[0, 0] *= 0.5

    model = _layers()
    optimizer = torch.optim.AdamW(model.parameters())
    device = PlayedDevice(monkeypatch, [model], [optimizer])
    hook = optimizer.register_step_pre_hook(decay)  # before it is tracked
    try:
        with Flashpoint(base, strict=True, overlap=True) as fp:
            fp.track(model=model, optimizer=optimizer).resume()
            saved = model[0].weight.detach().clone()
            for _ in range(6):
                _settle(fp)
                _step(model, optimizer)
                saved = model[0].weight.detach().clone()
                fp.step()
            _step(model, optimizer)
    finally:
        hook.remove()
    assert device.late
    again = _layers()
    with Flashpoint(base) as fp:
        assert fp.track(model=again, optimizer=torch.optim.AdamW(again.parameters())).resume() == 6
    assert torch.equal(again[0].weight, saved)


def test_parameters_without_state_are_none_to_a_second_resume(base: Path) -> None:
    model = _layers()
    optimizer = torch.optim.AdamW([*model.parameters(), *(unused := nn.Linear(2, 2)).parameters()])
    with Flashpoint(base, strict=True) as fp:
        fp.track(model=model, unused=unused, optimizer=optimizer).resume()
        _step(model, optimizer)
        fp.step()
        fp.wait()
        _step(model, optimizer)
        assert fp.resume() == 1
        assert all(values["step"] == 1 for values in optimizer.state.values())
        assert len(optimizer.state) == 4


@pytest.mark.parametrize("frozen", [1, 2])
def test_parameters_that_were_frozen_keep_their_optimizer_state(base: Path, frozen: int) -> None:
    model = _layers()
    optimizer = torch.optim.AdamW(model.parameters())
    with Flashpoint(base, strict=True) as fp:
        fp.track(model=model, optimizer=optimizer).resume()
        _step(model, optimizer)
        fp.step()
    again = _layers()
    for layer in again[:frozen]:
        layer.requires_grad_(False)
    optimizer_again = torch.optim.AdamW(again.parameters())
    with Flashpoint(base) as fp:
        assert fp.track(model=again, optimizer=optimizer_again).resume() == 1
    assert all(parameter.requires_grad for parameter in again.parameters()), "as it was saved"
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert optimizer.state[one].keys() == optimizer_again.state[other].keys()
        for key, value in optimizer.state[one].items():
            assert torch.equal(value, optimizer_again.state[other][key])


def test_saves_in_inference_mode(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of callbacks that are called at the end of an evaluation; and saves outside of it that use the same memory."""
    monkeypatch.setenv("FLASHPOINT_COPY_THREADS", "4")
    model = nn.Linear(3000, 1000)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    with Flashpoint(base, strict=True) as fp:
        fp.track(model=model, optimizer=optimizer).resume()
        for number in range(6):
            model(torch.randn(2, 3000)).square().mean().backward()
            optimizer.step()
            with torch.inference_mode(number % 3 < 2):
                fp.step()
            fp.wait()
    again = nn.Linear(3000, 1000)
    with Flashpoint(base) as fp, torch.inference_mode():
        assert fp.track(model=again, optimizer=torch.optim.SGD(again.parameters(), momentum=0.9)).resume() == 6
    assert torch.equal(model.weight, again.weight)


def test_memory_that_was_let_go_of_fails_the_save_and_nothing_else(base: Path) -> None:
    model = _layers()
    optimizer = torch.optim.AdamW(model.parameters())
    with Flashpoint(base) as fp:
        fp.track(model=model, optimizer=optimizer).resume()
        for _ in range(2):
            _step(model, optimizer)
            fp.step()
            fp.wait()
        storage = model[0].weight.untyped_storage()  # type: ignore[operator,union-attr]
        size = storage.nbytes()
        storage.resize_(0)
        fp.step()
        fp.wait()
        assert "no memory" in str(fp.health.last_error)
        storage.resize_(size)
        fp.step()
        fp.wait()
        assert fp.health.saves == 3
