"""Loops that do more than forward, backward and step: versions are what the state was, and can be loaded again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ml_flashpoint import Flashpoint
from ml_flashpoint.core.overlap import Overlap
from ml_flashpoint.core.staging_trial import StagingTrial
from ml_flashpoint.staging import late_copy

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
        fp.before_update()  # parametrizing writes to a parameter what it had
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
        fp.before_update()
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


def _of_all(optimizer: torch.optim.Optimizer, hook: Callable[..., None]) -> Any:
    return register_optimizer_step_pre_hook(hook)


@pytest.fixture
def nobody_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that copies gets no processor time before it is asked for."""
    monkeypatch.setattr(Overlap, "_start", lambda self, late: None)


@pytest.mark.parametrize("part", range(4))
def test_other_weights_for_a_while_are_noticed_wherever_the_copy_is_then(
    base: Path, nobody_copies: None, part: int
) -> None:
    """As an average of the weights is put in their place for an evaluation, and they are put back afterwards."""
    model = _layers(20)
    optimizer = torch.optim.AdamW(model.parameters())
    with Flashpoint(base) as fp:
        fp.track(model=model, optimizer=optimizer).resume()
        for _ in range(2):
            _step(model, optimizer)
            fp.step()
        late = fp._saves.overlap._late
        assert late is not None
        some = list(model.parameters())[part * 10 : part * 10 + 10]
        before = [parameter.detach().clone() for parameter in some]
        for parameter in some:
            parameter.data.copy_(torch.ones_like(parameter))
        late.copy()
        for parameter, was in zip(some, before, strict=True):
            parameter.data.copy_(was)
        assert fp.wait()
        assert "was changed while it was copied" in str(fp.health.last_error)
        assert fp.last_saved == 1


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


def test_what_an_optimizer_has_and_does_not_update_is_copied_at_once(base: Path, nobody_copies: None) -> None:
    model = Teacher()
    optimizer = torch.optim.AdamW(model.parameters())
    saved: dict[str, torch.Tensor] = {}
    with Flashpoint(base, strict=True, verify_staging=True) as fp:
        fp.track(model=model, optimizer=optimizer).resume()
        for _ in range(3):
            _step(model, optimizer)
            saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            fp.step()
        _step(model, optimizer)
    again = Teacher()
    with Flashpoint(base) as fp:
        assert fp.track(model=again, optimizer=torch.optim.AdamW(again.parameters())).resume() == 3
    assert all(torch.equal(tensor, saved[name]) for name, tensor in again.state_dict().items())


class Walked(nn.Linear):
    """A layer that has a say in its state dict, so that every save walks through the model."""

    def get_extra_state(self) -> torch.Tensor:
        return torch.ones(1)

    def set_extra_state(self, state: torch.Tensor) -> None:
        pass


@pytest.mark.parametrize("kind", [nn.Linear, Walked])
def test_what_is_frozen_later_is_copied_at_once_from_then_on(base: Path, nobody_copies: None, kind: type) -> None:
    """Whatever changes it then need not be noticed: a few numbers, through `.data`."""
    model = nn.Sequential(kind(WIDTH, WIDTH), kind(WIDTH, WIDTH))
    optimizer = torch.optim.AdamW(model.parameters())
    saved: dict[str, torch.Tensor] = {}
    with Flashpoint(base, strict=True, verify_staging=True) as fp:
        fp.track(model=model, optimizer=optimizer).resume()
        for number in range(5):
            if number > 1:
                model[0].requires_grad_(False)
            if number > 2:  # the save before has found it frozen
                model[0].weight.data[0, 0] += 1
            _step(model, optimizer)
            saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            fp.step()
        model[0].weight.data[0, 0] += 1
        fp.before_update()
    again = nn.Sequential(kind(WIDTH, WIDTH), kind(WIDTH, WIDTH))
    with Flashpoint(base) as fp:
        assert fp.track(model=again, optimizer=torch.optim.AdamW(again.parameters())).resume() == 5
    assert all(torch.equal(tensor, saved[name]) for name, tensor in again.state_dict().items())


@pytest.mark.parametrize("register", [torch.optim.Optimizer.register_step_pre_hook, _of_all])
def test_hooks_of_the_program_that_change_parameters_in_a_step_come_after_the_copy(
    base: Path, nobody_copies: None, register: Callable[..., Any]
) -> None:
    def decay(*_: object) -> None:
        model[0].weight.data[0, 0] *= 0.5

    model = _layers()
    optimizer = torch.optim.AdamW(model.parameters())
    hook = register(optimizer, decay)  # before it is tracked
    try:
        with Flashpoint(base, strict=True, verify_staging=True) as fp:
            fp.track(model=model, optimizer=optimizer).resume()
            saved = model[0].weight.detach().clone()
            for _ in range(4):
                _step(model, optimizer)
                saved = model[0].weight.detach().clone()
                fp.step()
            _step(model, optimizer)
    finally:
        hook.remove()
    again = _layers()
    with Flashpoint(base) as fp:
        assert fp.track(model=again, optimizer=torch.optim.AdamW(again.parameters())).resume() == 4
    assert torch.equal(again[0].weight, saved)


def test_steps_in_several_threads_all_wait(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Overlap, "_start", lambda self, late: None)
    models = [_layers() for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters()) for model in models]
    copying, go_on = threading.Event(), threading.Event()
    copied = late_copy.copy_all

    def slow(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], *rest: Any) -> None:
        copying.set()
        assert go_on.wait(30)
        copied(targets, sources, *rest)

    with Flashpoint(base, strict=True) as fp:
        fp.track(**{f"model{i}": model for i, model in enumerate(models)})
        fp.track(**{f"optimizer{i}": optimizer for i, optimizer in enumerate(optimizers)}).resume()
        for _ in range(2):
            for model, optimizer in zip(models, optimizers, strict=True):
                _step(model, optimizer)
            fp.step()
        monkeypatch.setattr(late_copy, "copy_all", slow)
        threads = [threading.Thread(target=optimizer.step) for optimizer in optimizers]
        threads[0].start()
        assert copying.wait(30)
        threads[1].start()
        threads[1].join(0.2)
        assert threads[1].is_alive()
        go_on.set()
        for thread in threads:
            thread.join(30)
        assert fp.wait()
        assert fp.last_saved == 2


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


@pytest.mark.parametrize("overlap", [True, False])
def test_saves_in_inference_mode(base: Path, monkeypatch: pytest.MonkeyPatch, overlap: bool) -> None:
    """As of callbacks that are called at the end of an evaluation; and saves outside of it that use the same memory."""
    monkeypatch.setenv("FLASHPOINT_COPY_THREADS", "4")
    model = nn.Linear(3000, 1000)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    with Flashpoint(base, strict=True, overlap=overlap, verify_staging=overlap) as fp:
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


@pytest.mark.slow
@pytest.mark.parametrize("what", ["parameter", "moment"])
def test_a_tensor_that_is_given_other_data_meanwhile(base: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """As where averages take the place of parameters for an evaluation. Nothing counts that; only a part of so many
    tensors is sampled."""
    monkeypatch.setattr(Overlap, "_start", lambda self, late: None)  # the thread that copies gets no time
    model = nn.ParameterList([nn.Parameter(torch.rand(WIDTH)) for _ in range(1000)])
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    monkeypatch.setattr(StagingTrial, "begin", lambda self: True)
    with Flashpoint(base, strict=True) as fp:
        fp.track(model=model, optimizer=optimizer).resume()
        for _ in range(4):
            for parameter in model:
                parameter.grad = torch.ones(WIDTH)
            optimizer.step()
            saved = [parameter.detach().clone() for parameter in model]
            moments = [optimizer.state[parameter]["momentum_buffer"].clone() for parameter in model]
            fp.step()
            for number in range(500, 504):
                changed = model[number] if what == "parameter" else optimizer.state[model[number]]["momentum_buffer"]
                changed.data = torch.rand(WIDTH)
        fp.before_update()
    again = nn.ParameterList([nn.Parameter(torch.rand(WIDTH)) for _ in range(1000)])
    optimizer_again = torch.optim.SGD(again.parameters(), momentum=0.9)
    with Flashpoint(base) as fp:
        assert fp.track(model=again, optimizer=optimizer_again).resume() == 4
    assert all(map(torch.equal, again, saved))
    found = [optimizer_again.state[parameter]["momentum_buffer"] for parameter in again]
    assert all(map(torch.equal, found, moments))


@pytest.mark.parametrize("overlap", [True, False])
def test_memory_that_was_let_go_of_fails_the_save_and_nothing_else(
    base: Path, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    monkeypatch.setattr(StagingTrial, "begin", lambda self: True)
    model = _layers()
    optimizer = torch.optim.AdamW(model.parameters())
    with Flashpoint(base, overlap=overlap) as fp:
        fp.track(model=model, optimizer=optimizer).resume()
        for _ in range(2):
            _step(model, optimizer)
            fp.step()
        fp.wait()
        weight = model[0].weight
        assert isinstance(weight, nn.Parameter)
        weight.data = weight.data.clone()  # torch resizes no storage that numpy has seen, as where content is compared
        storage = weight.untyped_storage()
        size = storage.nbytes()
        storage.resize_(0)
        fp.step()
        fp.wait()
        assert "no memory" in str(fp.health.last_error)
        storage.resize_(size)
        fp.step()
        fp.wait()
        assert fp.health.saves == 3
