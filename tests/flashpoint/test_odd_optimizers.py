"""Optimizers that are not as torch expects them: what was saved of them comes back, in a new one of the same kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

from ml_flashpoint import Flashpoint
from ml_flashpoint.format.errors import LoadError
from tests.support.forked import call_team
from tests.support.loops import assert_same_state, resumed, save
from tests.workers.distributed_training import base as team_base

STEPS, LATER = 5, 3


def _state(key: str, make: Callable[[int, torch.Tensor], Any]) -> Callable[[Own], None]:
    def change(optimizer: Own) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            optimizer.state[parameter][key] = make(optimizer.steps, parameter.detach())

    return change


def _group(make: Callable[[int], Any]) -> Callable[[Own], None]:
    return lambda optimizer: optimizer.param_groups[0].update(extra=make(optimizer.steps))


def _whole(key: str) -> Callable[[Own], None]:
    return lambda optimizer: optimizer.state.update({key: {"count": optimizer.steps}})


def _in_place(optimizer: Own) -> None:
    optimizer.param_groups[0].setdefault("extra", torch.zeros(2)).add_(1)


CHANGES: dict[str, Callable[[Own], None]] = {
    "tensor": _state("extra", lambda step, parameter: parameter * step),
    "tensor of another shape": _state("extra", lambda step, parameter: parameter.flatten()[:step].clone()),
    "number": _state("extra", lambda step, _: step),
    "nothing, at times": _state("extra", lambda step, parameter: parameter * step if step % 2 else None),
    "list": _state("extra", lambda step, parameter: [parameter * step, step]),
    "table": _state("extra", lambda step, parameter: {"of": parameter * step}),
    "by number": _state(7, lambda step, _: step),  # type: ignore[arg-type]
    "of none of the parameters": _whole("all"),
    "number in the group": _group(lambda step: step),
    "list in the group": _group(lambda step: [step, step]),
    "table in the group": _group(lambda step: {"at": {"step": step}}),
    "table by number in the group": _group(lambda step: {step: 1.5}),
    "tensor in the group, in place": _in_place,
    "tensor in the group, another each time": _group(lambda step: torch.ones(2) * step),
    "tensors in the group, others each time": _group(lambda step: [torch.ones(2) * step]),
}


class Own(torch.optim.Optimizer):
    """One that some more things belong to from some step on."""

    def __init__(self, params: Any, change: Callable[[Own], None]) -> None:
        super().__init__(params, {"lr": 0.1})
        self.steps, self._change = 0, change

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                moment = self.state[parameter].setdefault("moment", torch.zeros_like(parameter))
                moment.lerp_(parameter.grad, 0.5)
                parameter.sub_(moment, alpha=self.param_groups[0]["lr"])
        if self.steps >= LATER:
            self._change(self)


@pytest.mark.parametrize("name", CHANGES)
def test_what_belongs_to_an_optimizer_from_some_step_on_comes_back(base: Path, name: str) -> None:
    model = nn.Linear(4, 2)
    optimizer = Own(model.parameters(), CHANGES[name])
    with Flashpoint(base, strict=True) as fp:
        fp.track(model=model, optimizer=optimizer).resume()
        for _ in range(STEPS):
            model(torch.randn(3, 4)).square().sum().backward()
            optimizer.step()
            fp.step()
            fp.wait()
    fresh = nn.Linear(4, 2)
    restored = Own(fresh.parameters(), CHANGES[name])
    assert resumed(base, model=fresh, optimizer=restored) == STEPS
    assert torch.equal(model.weight, fresh.weight)
    assert _plain(restored.state_dict()) == _plain(optimizer.state_dict())


def _plain(value: Any) -> Any:
    """With lists in the place of tensors, to be compared."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value


def _one_group(model: nn.Sequential, extra: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"params": list(model.parameters()), **extra}]


def _empty_first(model: nn.Sequential, extra: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"params": [], **extra}, {"params": list(model.parameters())}]


def _empty_everywhere(model: nn.Sequential, extra: dict[str, Any]) -> list[dict[str, Any]]:
    one, other = (list(part.parameters()) for part in model)
    return [{"params": [], **extra}, {"params": one}, {"params": []}, {"params": other, **extra}, {"params": []}]


def _all_empty(model: nn.Sequential, extra: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"params": [], **extra}, {"params": []}]


def _decayed(model: nn.Sequential, extra: dict[str, Any]) -> list[dict[str, Any]]:
    weights = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    return [{"params": weights, **extra}, {"params": [p for p in model.parameters() if p.dim() < 2]}]


_ALL = (_one_group, _empty_first, _empty_everywhere, _all_empty, _decayed)
_GROUPED = [
    *((torch.optim.AdamW, groups) for groups in _ALL),
    (torch.optim.SGD, _empty_first),
    (torch.optim.LBFGS, _one_group),
]


@pytest.mark.parametrize(("make", "groups"), _GROUPED)
@pytest.mark.parametrize("steps", [0, 2])
def test_all_hyper_parameters_of_every_group_come_back(
    base: Path, make: Any, groups: Callable[[nn.Sequential, dict[str, Any]], list[dict[str, Any]]], steps: int
) -> None:
    def build(**options: Any) -> tuple[nn.Sequential, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        return model, make(groups(model, options), lr=torch.tensor(0.1) if make is torch.optim.AdamW else 0.1)

    def step(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
        def loss() -> torch.Tensor:
            optimizer.zero_grad()
            value = model(torch.ones(3, 4)).square().sum()
            value.backward()
            return value

        optimizer.step(loss)  # type: ignore[arg-type]

    model, optimizer = build(lr=0.01)
    for _ in range(steps):
        step(model, optimizer)
    for number, group in enumerate(optimizer.param_groups):
        group.update({"lr": group["lr"] * (number + 2), "of_a_schedule": [number, {"at": 0.5}]})
    save(base, model=model, optimizer=optimizer)
    fresh, restored = build()
    assert resumed(base, model=fresh, optimizer=restored) == 1
    assert_same_state(restored, optimizer)
    step(model, optimizer)
    step(fresh, restored)
    assert_same_state(restored, optimizer)
    assert all(map(torch.equal, model.parameters(), fresh.parameters()))


def test_groups_that_were_divided_otherwise(base: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(_decayed(model, {"weight_decay": 0.5}))
    save(base, model=model, optimizer=optimizer)
    swapped = torch.optim.AdamW(_decayed(model, {})[::-1])
    assert resumed(base, model=model, optimizer=swapped) == 1
    assert [group["weight_decay"] for group in swapped.param_groups] == [0.01, 0.5]
    mixed = torch.optim.AdamW([{"params": part.parameters()} for part in model])
    with pytest.raises(LoadError, match="group 0 of optimizer 'optimizer' has parameters of groups 0 and 1"):
        resumed(base, model=model, optimizer=mixed)


def test_a_group_keeps_the_names_of_its_own_parameters(base: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    groups: list[Any] = [{"params": list(part.named_parameters(prefix=str(n)))} for n, part in enumerate(model)]
    save(base, model=model, optimizer=torch.optim.AdamW(groups, lr=0.5))
    swapped = torch.optim.AdamW(groups[::-1], lr=0.1)
    assert resumed(base, model=model, optimizer=swapped) == 1
    assert [group["param_names"] for group in swapped.param_groups] == [["1.weight", "1.bias"], ["0.weight", "0.bias"]]
    together = torch.optim.AdamW(model.named_parameters(), lr=0.1)
    assert resumed(base, model=model, optimizer=together) == 1
    (group,) = together.param_groups
    assert (group["lr"], len(group["param_names"])) == (0.5, 4)


class WithClosure(torch.optim.Optimizer):
    """One that takes no step by itself, as those that look for flat minima."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        assert closure is not None, "it needs a closure"
        closure()
        for parameter in self.param_groups[0]["params"]:
            moment = self.state[parameter].setdefault("moment", torch.zeros_like(parameter))
            moment.add_(parameter.grad)
            parameter.data.sub_(moment)


@pytest.mark.parametrize("frozen", [False, True])
def test_an_optimizer_that_takes_no_step_without_gradients(base: Path, frozen: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].requires_grad_(not frozen)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = WithClosure(trained)
    optimizer.step(lambda: model(torch.ones(3, 4)).square().sum().backward())
    save(base, model=model, optimizer=optimizer)
    fresh = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    restored = WithClosure(fresh.parameters() if not frozen else fresh[1].parameters())
    assert resumed(base, model=fresh, optimizer=restored) == 1
    assert_same_state(restored, optimizer)
    assert restored.param_groups[0]["lr"] == 0.1
    assert all(parameter.grad is None for parameter in fresh.parameters())


def test_an_optimizer_of_sparse_gradients(base: Path) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Embedding(8, 4, sparse=True)
        return model, torch.optim.SparseAdam(model.parameters())

    model, optimizer = make()
    model(torch.tensor([1, 2])).square().sum().backward()
    optimizer.step()
    save(base, model=model, optimizer=optimizer)
    fresh, restored = make()
    assert resumed(base, model=fresh, optimizer=restored) == 1
    assert_same_state(restored, optimizer)


def test_a_failed_load_leaves_such_an_optimizer_as_it_was(base: Path) -> None:
    model = nn.Linear(4, 2)
    optimizer = WithClosure(model.parameters())
    optimizer.step(lambda: model(torch.ones(3, 4)).square().sum().backward())
    save(base, model=model, optimizer=optimizer)
    fresh = nn.Linear(4, 3)
    restored = WithClosure(fresh.parameters())
    with pytest.raises(LoadError, match="does not fit"):
        resumed(base, model=fresh, optimizer=restored)
    assert not restored.state
    assert restored.param_groups[0]["lr"] == 0.1


@pytest.mark.usefixtures("process_group")
def test_sharded_state_that_comes_later(base: Path) -> None:
    change = CHANGES["tensor"]

    def make() -> tuple[nn.Module, Own]:
        model = nn.Linear(4, 2)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        return model, Own(model.parameters(), change)

    model, optimizer = make()
    for _ in range(STEPS):
        model(torch.randn(3, 4)).square().sum().backward()
        optimizer.step()
    save(base, model=model, optimizer=optimizer)
    fresh, restored = make()
    assert resumed(base, model=fresh, optimizer=restored) == 1
    for one, other in zip(model.parameters(), fresh.parameters(), strict=True):
        saved, found = optimizer.state[one]["extra"], restored.state[other]["extra"]
        assert isinstance(found, DTensor)
        assert found.placements == saved.placements
        assert torch.equal(found.to_local(), saved.to_local())


def _hooked(change: Callable[[dict[str, Any]], None], back: Callable[[dict[str, Any]], None]) -> Any:
    """A model, and an optimizer whose state dict has its items otherwise than its state."""

    def through(change: Callable[[dict[str, Any]], None]) -> Callable[[Any, dict[str, Any]], dict[str, Any]]:
        def hook(_: object, state: dict[str, Any]) -> dict[str, Any]:
            tables = {number: dict(values) for number, values in state["state"].items()}
            for values in tables.values():
                change(values)
            return {**state, "state": tables}

        return hook

    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.register_state_dict_post_hook(through(change))  # type: ignore[arg-type]
    optimizer.register_load_state_dict_pre_hook(through(back))
    return model, optimizer


def _leave_out(values: dict[str, Any]) -> None:
    values.pop("exp_avg_sq", None)


def _rename(values: dict[str, Any]) -> None:
    values["second"] = values.pop("exp_avg_sq")


def _rename_back(values: dict[str, Any]) -> None:
    values["exp_avg_sq"] = values.pop("second")


@pytest.mark.parametrize(("change", "back"), [(_leave_out, lambda _: None), (_rename, _rename_back)])
def test_items_that_the_state_dict_leaves_out_or_renames(base: Path, change: Any, back: Any) -> None:
    model, optimizer = _hooked(change, back)
    model(torch.ones(3, 4)).square().sum().backward()
    optimizer.step()
    save(base, model=model, optimizer=optimizer)
    fresh, restored = _hooked(change, back)
    assert resumed(base, model=fresh, optimizer=restored) == 1
    assert_same_state(restored, optimizer)


class Table(dict[str, torch.Tensor]):
    """A type that torch's pytree does not know."""


class WithTables(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = Table(last=parameter.detach().clone())
        return result


def test_tables_of_a_type_of_their_own(base: Path) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(4, 2)
        return model, WithTables(model.parameters())

    model, optimizer = make()
    optimizer.step()
    save(base, model=model, optimizer=optimizer)
    fresh, restored = make()
    assert resumed(base, model=fresh, optimizer=restored) == 1
    assert_same_state(restored, optimizer)


class Flattened:
    """Modules that FSDP has flattened, each by itself, and one optimizer over all of them."""

    def __init__(self, *names: str) -> None:
        cpu = torch.device("cpu")
        self.modules = {name: FullyShardedDataParallel(nn.Linear(4, 4), device_id=cpu) for name in names}
        self.optimizer = torch.optim.Adam([p for module in self.modules.values() for p in module.parameters()])

    def set_gradients(self, seed: int) -> None:
        torch.manual_seed(seed)
        for parameter in self.parameters:
            parameter.grad = torch.randn_like(parameter)

    @property
    def parameters(self) -> list[torch.Tensor]:
        return list(self.optimizer.param_groups[0]["params"])


def flattened(report: Callable[..., None], rank: int, names: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    saved, restored = Flattened(*names), Flattened(*names)
    saved.set_gradients(rank)
    saved.optimizer.step()
    restored.set_gradients(rank)  # that a program may have made before it resumes
    save(team_base(), **saved.modules, optimizer=saved.optimizer)
    assert resumed(team_base(), **restored.modules, optimizer=restored.optimizer) == 1
    for one, other in zip(saved.parameters, restored.parameters, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(saved.optimizer.state[one]["exp_avg"], restored.optimizer.state[other]["exp_avg"])


def flattened_with_groups(report: Callable[..., None], rank: int, use_orig_params: bool) -> None:
    torch.set_num_threads(1)

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = FullyShardedDataParallel(
            nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)),
            device_id=torch.device("cpu"),
            use_orig_params=use_orig_params,
        )
        groups: list[dict[str, Any]] = [{"params": []}, {"params": list(model.parameters())}, {"params": []}]
        return model, torch.optim.AdamW(groups)

    model, optimizer = build()
    for number, group in enumerate(optimizer.param_groups):
        group.update(lr=0.1 * (number + 1), betas=(0.5, 0.5), of_a_schedule=number)
    model(torch.ones(3, 4)).square().sum().backward()
    optimizer.step()
    save(team_base(), model=model, optimizer=optimizer)
    fresh, restored = build()
    assert resumed(team_base(), model=fresh, optimizer=restored) == 1
    for one, other in zip(optimizer.param_groups, restored.param_groups, strict=True):
        assert {**one, "params": 0} == {**other, "params": 0}
        assert len(one["params"]) == len(other["params"])
    for each, its in ((model, optimizer), (fresh, restored)):
        each.zero_grad()
        each(torch.ones(3, 4)).square().sum().backward()
        its.step()
    assert all(map(torch.equal, model.parameters(), fresh.parameters()))


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_empty_groups_of_parameters_that_fsdp_has_flattened(tmpfs: Path, use_orig_params: bool) -> None:
    call_team(flattened_with_groups, tmpfs, 2, use_orig_params)


def flattened_with_swapped_groups(report: Callable[..., None], rank: int, use_orig_params: bool) -> None:
    torch.set_num_threads(1)
    options: dict[str, Any] = {"device_id": torch.device("cpu"), "use_orig_params": use_orig_params}

    def build(order: slice) -> tuple[nn.Module, torch.optim.Optimizer]:
        layers = [FullyShardedDataParallel(nn.Linear(4, 4), **options) for _ in range(3)]
        model = FullyShardedDataParallel(nn.Sequential(*layers), **options)
        one = {"params": list(layers[0].parameters()), "lr": 0.1}
        other = {"params": [*layers[1].parameters(), *layers[2].parameters()], "lr": 0.2}
        return model, torch.optim.AdamW([one, other][order])

    model, optimizer = build(slice(None))
    optimizer.param_groups[0].update(lr=0.3, betas=(0.5, 0.5), of_a_schedule=1)
    optimizer.param_groups[1].update(lr=0.4, of_a_schedule=2)
    model(torch.ones(3, 4)).square().sum().backward()
    optimizer.step()
    save(team_base(), model=model, optimizer=optimizer)
    fresh, restored = build(slice(None, None, -1))
    assert resumed(team_base(), model=fresh, optimizer=restored) == 1
    for one, other in zip(optimizer.param_groups, reversed(restored.param_groups), strict=True):
        assert {**one, "params": 0} == {**other, "params": 0}


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_swapped_groups_of_parameters_that_fsdp_has_flattened(tmpfs: Path, use_orig_params: bool) -> None:
    call_team(flattened_with_swapped_groups, tmpfs, 2, use_orig_params)


def test_an_optimizer_of_several_modules_that_fsdp_has_flattened(tmpfs: Path) -> None:
    call_team(flattened, tmpfs, 2, ("one", "other"))
