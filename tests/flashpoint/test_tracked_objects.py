"""What is tracked comes back: optimizers, modules, values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

from ml_flashpoint import Flashpoint, open_version
from tests.support.loops import Stored, assert_same_state, resumed, save, state_of, trained


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.AdamW,
        lambda params: torch.optim.Adam(params, lr=0.1, amsgrad=True),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        lambda params: torch.optim.SGD(params, lr=0.1),
        lambda params: torch.optim.Adafactor(params),
        lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.01)),
    ],
    ids=["adamw", "amsgrad", "momentum", "sgd", "adafactor", "tensor-lr"],
)
def test_optimizers(base: Path, make: Callable[..., torch.optim.Optimizer]) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    optimizer = trained(model, make)
    save(base, model=model, optimizer=optimizer)
    fresh = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    restored = make(fresh.parameters())
    assert resumed(base, model=fresh, optimizer=restored) == 1
    assert_same_state(restored, optimizer)
    torch.testing.assert_close(fresh.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_optimizer_with_lists_for_state(base: Path) -> None:
    def closure() -> float:
        optimizer.zero_grad()
        loss = model(torch.ones(3, 4)).square().sum()
        loss.backward()
        return float(loss)

    model = nn.Linear(4, 2)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    optimizer.step(closure)
    save(base, model=model, optimizer=optimizer)
    fresh = nn.Linear(4, 2)
    restored = torch.optim.LBFGS(fresh.parameters(), max_iter=3)
    resumed(base, model=fresh, optimizer=restored)
    assert len(state_of(restored)[0]["old_dirs"]) == len(state_of(optimizer)[0]["old_dirs"]) > 0
    torch.testing.assert_close(state_of(restored)[0]["old_dirs"], state_of(optimizer)[0]["old_dirs"], rtol=0, atol=0)


class _Counting(torch.optim.SGD):
    """Its state dict has more than what torch's has."""

    steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps = state_dict["steps"]
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "steps"})


def _hooked(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    def load(optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
        optimizer.steps = state["steps"]
        return {key: value for key, value in state.items() if key != "steps"}

    made: Any = torch.optim.SGD(parameters, **options)
    made.steps = 0
    made.register_state_dict_post_hook(lambda optimizer, state: {**state, "steps": optimizer.steps})
    made.register_load_state_dict_pre_hook(load)
    return made  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [_Counting, _hooked], ids=["method", "hook"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_an_optimizer_whose_state_dict_has_more(base: Path, make: Any, momentum: float) -> None:
    model, fresh = nn.Linear(4, 2), nn.Linear(4, 2)
    optimizer: Any = trained(model, lambda parameters: make(parameters, lr=0.1, momentum=momentum))
    restored: Any = make(fresh.parameters(), lr=0.1, momentum=momentum)
    optimizer.steps = 7
    save(base, model=model, optimizer=optimizer)
    assert resumed(base, model=fresh, optimizer=restored) == 1
    assert restored.steps == 7
    assert_same_state(restored, optimizer)


def test_optimizer_that_has_not_stepped_is_not_made_to(base: Path) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    with Flashpoint(base, strict=True) as fp:
        assert fp.track(model=model, optimizer=optimizer).resume() == 0
        fp.save(0)
        fp.wait()
        assert not optimizer.state
    stepped = trained(model, torch.optim.AdamW)
    assert resumed(base, model=model, optimizer=stepped) == 0
    assert not stepped.state


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)


def _compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


_WRAPPED: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Sequential(_Block(), nn.Linear(4, 2)),
    "compiled": lambda: _compiled(nn.Sequential(_Block(), nn.Linear(4, 2))),
    "blocks compiled": lambda: nn.Sequential(_compiled(_Block()), nn.Linear(4, 2)),
    "compiled blocks checkpointed": lambda: nn.Sequential(checkpoint_wrapper(_compiled(_Block())), nn.Linear(4, 2)),
    "checkpointed blocks compiled": lambda: nn.Sequential(_compiled(checkpoint_wrapper(_Block())), nn.Linear(4, 2)),
    "blocks in ddp": lambda: nn.Sequential(DistributedDataParallel(_Block()), nn.Linear(4, 2)),
    "everything": lambda: _compiled(
        nn.Sequential(checkpoint_wrapper(_compiled(DistributedDataParallel(_compiled(_Block())))), nn.Linear(4, 2))
    ),
}


@pytest.mark.usefixtures("process_group")
def test_a_resume_with_or_without_wrappers_finds_the_same_names(base: Path) -> None:
    def made(wrapped: Callable[[], nn.Module]) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = wrapped()
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        for buffer in model.buffers():
            buffer.add_(torch.ones_like(buffer))
        return model, optimizer

    names = set()
    for name, wrapped in _WRAPPED.items():
        model, optimizer = made(wrapped)
        folder = base.with_name(name.replace(" ", "-"))
        save(folder, model=model, optimizer=optimizer)
        with open_version(folder) as version:
            names.add(frozenset(version.state_dict("model.")))
        for other in _WRAPPED.values():
            restored, its = made(other)
            assert resumed(folder, model=restored, optimizer=its) == 1
            assert all(map(torch.equal, model.parameters(), restored.parameters()))
            assert all(map(torch.equal, model.buffers(), restored.buffers()))
            assert_same_state(its, optimizer)
    assert names == {frozenset(_WRAPPED["plain"]().state_dict())}


def test_a_name_with_a_newline_is_a_name(base: Path) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.ParameterDict({"two\nlines": torch.rand(3), "_orig_mod": torch.rand(3)})
        return model, torch.optim.AdamW(model.parameters())

    (model, optimizer), (again, restored) = make(), make()
    sum(each.sum() for each in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    save(base, model=model, optimizer=optimizer)
    assert resumed(base, model=again, optimizer=restored) == 1
    assert_same_state(restored, optimizer)
    assert all(map(torch.equal, model.parameters(), again.parameters()))


def test_parameters_without_optimizer_state_get_none(base: Path) -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    model = Partly()
    optimizer = trained(model, torch.optim.AdamW)
    save(base, model=model, optimizer=optimizer)
    fresh = Partly()
    restored = torch.optim.AdamW(fresh.parameters())
    resumed(base, model=fresh, optimizer=restored)
    assert len(restored.state) == 2
    assert_same_state(restored, optimizer)


def test_state_of_another_dtype_than_its_parameter_keeps_its_bits(base: Path) -> None:
    class Precise(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})

        def step(self, closure: Any = None) -> None:
            for parameter in self.param_groups[0]["params"]:
                if parameter.grad is not None:
                    sums = self.state[parameter].setdefault("sum", torch.zeros_like(parameter, dtype=torch.float32))
                    sums.add_(parameter.grad.float() * 1.2345678)

    model = nn.Linear(4, 2).bfloat16()
    optimizer = trained(model, Precise, torch.ones(3, 4).bfloat16())
    save(base, model=model, optimizer=optimizer)
    fresh = nn.Linear(4, 2).bfloat16()
    restored = Precise(fresh.parameters())
    resumed(base, model=fresh, optimizer=restored)
    assert_same_state(restored, optimizer)
    assert state_of(restored)[0]["sum"].dtype is torch.float32


def test_one_optimizer_of_two_modules_and_of_none(base: Path, caplog: pytest.LogCaptureFixture) -> None:
    def make() -> dict[str, Any]:
        one, two, loose = nn.Linear(4, 4), nn.Linear(4, 2), nn.Parameter(torch.ones(3))
        both = torch.optim.AdamW([*one.parameters(), *two.parameters()])
        alone = torch.optim.AdamW([loose])
        return {"one": one, "two": two, "both": both, "alone": alone}

    saved = make()
    saved["two"](saved["one"](torch.ones(3, 4))).sum().backward()
    saved["alone"].param_groups[0]["params"][0].grad = torch.ones(3)
    saved["both"].step()
    saved["alone"].step()
    save(base, **saved)
    assert "'alone' is saved whole" in caplog.text
    assert "'both'" not in caplog.text
    fresh = make()
    resumed(base, **fresh)
    for name in ("both", "alone"):
        assert_same_state(fresh[name], saved[name])


def test_modules_of_all_sorts(base: Path) -> None:
    class WithExtra(nn.Linear):
        extra: Any = 0

        def get_extra_state(self) -> Any:
            return {"extra": self.extra}

        def set_extra_state(self, state: Any) -> None:
            self.extra = state["extra"]

    def make(seed: int) -> dict[str, nn.Module]:
        torch.manual_seed(seed)
        tied = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
        tied[1].weight = tied[0].weight
        compiled: Any = torch.compile(nn.Linear(3, 3))
        nested = nn.Sequential(compiled, nn.Linear(3, 3))
        return {"extra": WithExtra(3, 2), "tied": tied, "stateless": nn.GELU(), "compiled": compiled, "nested": nested}

    saved = make(1)
    saved["extra"].extra = [1, "two"]
    save(base, **saved)
    fresh = make(2)
    assert resumed(base, **fresh) == 1
    assert fresh["extra"].extra == [1, "two"]
    for name, module in saved.items():
        torch.testing.assert_close(list(fresh[name].parameters()), list(module.parameters()), rtol=0, atol=0)


def test_values_of_all_sorts(base: Path) -> None:
    value = {
        "a": [1, (2.5, None)],
        "b": {3, 4},
        "c": b"\0\xff",
        "d": np.arange(3),
        "e": torch.ones(2, dtype=torch.bool),
    }
    save(base, stored=Stored(value))
    stored = Stored()
    resumed(base, stored=stored)
    assert stored.value["a"] == value["a"]
    assert stored.value["b"] == value["b"]
    assert stored.value["c"] == value["c"]
    assert stored.value["d"].tolist() == [0, 1, 2]
    assert stored.value["e"].tolist() == [True, True]


def test_a_job_without_a_module_or_an_optimizer_saves_again_and_again(base: Path) -> None:
    class Counter:
        value = 0

        def state_dict(self) -> dict[str, int]:
            return {"value": self.value}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.value = state["value"]

    counter = Counter()
    with Flashpoint(base, strict=True) as fp:
        fp.track(counter=counter).resume()
        for counter.value in (1, 2, 3):
            fp.step()
            assert fp.wait()
    again = Counter()
    with Flashpoint(base, strict=True) as fp:
        assert fp.track(counter=again).resume() == again.value == 3
