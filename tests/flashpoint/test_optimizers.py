"""Optimizers of all kinds, wrapped modules and changed groups: what was saved of them comes back, in new ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize, prune

from ml_flashpoint import Flashpoint, open_version
from ml_flashpoint.format.errors import LoadError
from tests.support import tensors
from tests.support.forked import Report, call_team
from tests.support.loops import resumed, save
from tests.support.worker import base_path

Made = dict[str, Any]
Groups = Callable[[nn.Module], list[dict[str, Any]]]


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def optimized(make: Callable[..., Any], groups: Groups | None = None, model: Any = layers, **options: Any) -> Any:
    """Makes a model, and an optimizer of its parameters, or groups of them."""

    def made() -> Made:
        module = model()
        return {"model": module, "optimizer": make(groups(module) if groups else module.parameters(), **options)}

    return made


def step(made: Made) -> None:
    """A step of training, the same for models that are the same."""
    model, optimizer = made["model"], made["optimizer"]
    x = torch.tensor([1, 2]) if isinstance(model, nn.Embedding) else torch.linspace(-1, 1, 12).view(3, 4)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value: torch.Tensor = model(x if isinstance(model, nn.Embedding) else x.to(next(model.parameters()).dtype))
        value = value.square().sum()
        value.backward()
        return value

    optimizer.step(loss)


def assert_same(one: Made, other: Made) -> None:
    tensors.assert_same(one["optimizer"].state_dict(), other["optimizer"].state_dict())
    for mine, theirs in zip(one["model"].parameters(), other["model"].parameters(), strict=True):
        assert torch.equal(mine, theirs)


# ---- groups of parameters --------------------------------------------------------------------------------------


def one_group(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": list(model.parameters()), "lr": 0.01}]


def empty_first(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": [], "lr": 0.01}, {"params": list(model.parameters())}]


def empty_everywhere(model: Any) -> list[dict[str, Any]]:
    one, other = (list(part.parameters()) for part in model)
    return [{"params": []}, {"params": one}, {"params": []}, {"params": other, "lr": 0.01}, {"params": []}]


def all_empty(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": [], "lr": 0.01}, {"params": []}]


def decayed(model: nn.Module, decay: float = 0.01) -> list[dict[str, Any]]:
    weights = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    return [
        {"params": weights, "weight_decay": decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]


# ---- optimizers that are not as torch expects them -------------------------------------------------------------


class WithClosure(torch.optim.Optimizer):
    """One that takes no step by itself, as those that look for flat minima; with moments in float32."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        assert closure is not None, "it needs a closure"
        closure()
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                moment = self.state[parameter].setdefault("moment", torch.zeros_like(parameter, dtype=torch.float32))
                moment.add_(parameter.grad.float() * 1.2345678)
                parameter.data.sub_(moment)


class Table(dict[str, torch.Tensor]):
    """A type that torch's pytree does not know."""


class WithTables(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = Table(last=parameter.detach().clone())
        return result


class Counting(torch.optim.SGD):
    """Its state dict has more than what torch's has."""

    steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps = state_dict["steps"]
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "steps"})


def counting_by_hooks(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    def load(optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
        optimizer.steps = state["steps"]
        return {key: value for key, value in state.items() if key != "steps"}

    made: Any = torch.optim.SGD(parameters, **options)
    made.steps = 0
    made.register_state_dict_post_hook(lambda optimizer, state: {**state, "steps": optimizer.steps})
    made.register_load_state_dict_pre_hook(load)
    return made  # type: ignore[no-any-return]


def hooked(change: Callable[[dict[str, Any]], object], back: Callable[[dict[str, Any]], object]) -> Any:
    """AdamW whose state dict has its items otherwise than its state."""

    def through(change: Callable[[dict[str, Any]], object]) -> Callable[[Any, dict[str, Any]], dict[str, Any]]:
        def hook(_: object, state: dict[str, Any]) -> dict[str, Any]:
            tables = {number: dict(values) for number, values in state["state"].items()}
            for values in tables.values():
                if values:
                    change(values)
            return {**state, "state": tables}

        return hook

    def make(parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(parameters)
        optimizer.register_state_dict_post_hook(through(change))  # type: ignore[arg-type]
        optimizer.register_load_state_dict_pre_hook(through(back))
        return optimizer

    return make


def frozen_in_part() -> nn.Module:
    model = layers()
    model[0].requires_grad_(False)
    return model


class Partly(nn.Module):
    """A model that does not use all of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.used(x)
        return out


class OddlyNamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.odd = nn.ParameterDict({"two\nlines": torch.rand(4), "_orig_mod": torch.rand(4)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.odd["two\nlines"] + self.odd["_orig_mod"]


OPTIMIZERS: dict[str, Callable[[], Made]] = {
    "amsgrad": optimized(torch.optim.Adam, lr=0.1, amsgrad=True),
    "momentum": optimized(torch.optim.SGD, lr=0.1, momentum=0.9),
    "sgd": optimized(torch.optim.SGD, lr=0.1),
    "adafactor": optimized(torch.optim.Adafactor),
    "lists for state": optimized(torch.optim.LBFGS, one_group, max_iter=3),
    "sparse gradients": optimized(torch.optim.SparseAdam, model=lambda: nn.Embedding(8, 4, sparse=True)),
    "tensor for lr, one group": optimized(torch.optim.AdamW, one_group, lr=torch.tensor(0.1)),
    "tensor for lr, decayed": optimized(torch.optim.AdamW, decayed, lr=torch.tensor(0.1)),
    "empty group first": optimized(torch.optim.SGD, empty_first, lr=0.1),
    "empty groups everywhere": optimized(torch.optim.AdamW, empty_everywhere),
    "all groups empty": optimized(torch.optim.AdamW, all_empty),
    "no step by itself": optimized(WithClosure),
    "no step by itself, frozen": optimized(WithClosure, model=frozen_in_part),
    "state of another dtype": optimized(WithClosure, model=lambda: layers().bfloat16()),
    "tables of a type of their own": optimized(WithTables),
    "more in its state dict": optimized(Counting, lr=0.1),
    "more in its state dict, momentum": optimized(Counting, lr=0.1, momentum=0.9),
    "more in its state dict, by a hook": optimized(counting_by_hooks, lr=0.1, momentum=0.9),
    "less in its state dict": optimized(hooked(lambda values: values.pop("exp_avg_sq", None), bool)),
    "other names in its state dict": optimized(
        hooked(
            lambda values: values.update(second=values.pop("exp_avg_sq")),
            lambda values: values.update(exp_avg_sq=values.pop("second")),
        )
    ),
    "parameters without state": optimized(torch.optim.AdamW, model=Partly),
    "odd names": optimized(torch.optim.AdamW, model=OddlyNamed),
}


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_and_all_hyper_parameters_of_every_group_come_back(base: Path, name: str, steps: int) -> None:
    saved, fresh = OPTIMIZERS[name](), OPTIMIZERS[name]()
    for _ in range(steps):
        step(saved)
    for number, group in enumerate(saved["optimizer"].param_groups):
        group.update({"lr": group["lr"] * (number + 2), "of_a_schedule": [number, {"at": 0.5}]})
    if "more in its state dict" in name:
        saved["optimizer"].steps = 7
    save(base, **saved)
    assert resumed(base, **fresh) == 1
    assert_same(fresh, saved)
    assert getattr(fresh["optimizer"], "steps", 7) == 7
    assert all(parameter.grad is None for parameter in fresh["model"].parameters())
    if "less in its state dict" not in name:  # which cannot go on by itself
        step(saved)
        step(fresh)
        assert_same(fresh, saved)


def test_an_optimizer_that_has_not_stepped_is_not_made_to(base: Path) -> None:
    made = optimized(torch.optim.AdamW)()
    with Flashpoint(base, strict=True) as fp:
        assert fp.track(**made).resume() == 0
        fp.save(0)
        fp.wait()
        assert not made["optimizer"].state
        step(made)
        assert fp.resume() == 0
        assert not made["optimizer"].state


def test_one_optimizer_of_two_modules_and_of_none(base: Path, caplog: pytest.LogCaptureFixture) -> None:
    def make() -> dict[str, Any]:
        one, two, loose = nn.Linear(4, 4), nn.Linear(4, 2), nn.Parameter(torch.ones(3))
        both = torch.optim.AdamW([*one.parameters(), *two.parameters()])
        alone = torch.optim.AdamW([loose])
        return {"one": one, "two": two, "both": both, "alone": alone}

    saved, fresh = make(), make()
    saved["two"](saved["one"](torch.ones(3, 4))).sum().backward()
    saved["alone"].param_groups[0]["params"][0].grad = torch.ones(3)
    saved["both"].step()
    saved["alone"].step()
    save(base, **saved)
    assert "'alone' is saved whole" in caplog.text
    assert "'both'" not in caplog.text
    resumed(base, **fresh)
    for name in ("both", "alone"):
        tensors.assert_same(fresh[name].state_dict(), saved[name].state_dict())


def test_groups_that_were_divided_otherwise(base: Path) -> None:
    model = layers()
    save(base, model=model, optimizer=torch.optim.AdamW(decayed(model, 0.5)))
    swapped = torch.optim.AdamW(decayed(model)[::-1])
    assert resumed(base, model=model, optimizer=swapped) == 1
    assert [group["weight_decay"] for group in swapped.param_groups] == [0.0, 0.5]
    mixed = torch.optim.AdamW([{"params": part.parameters()} for part in model])
    with pytest.raises(LoadError, match="group 0 of optimizer 'optimizer' has parameters of groups 0 and 1"):
        resumed(base, model=model, optimizer=mixed)


def test_a_group_keeps_the_names_of_its_own_parameters(base: Path) -> None:
    model = layers()
    groups: list[Any] = [{"params": list(part.named_parameters(prefix=str(n)))} for n, part in enumerate(model)]
    save(base, model=model, optimizer=torch.optim.AdamW(groups, lr=0.5))
    swapped = torch.optim.AdamW(groups[::-1], lr=0.1)
    assert resumed(base, model=model, optimizer=swapped) == 1
    assert [group["param_names"] for group in swapped.param_groups] == [["1.weight", "1.bias"], ["0.weight", "0.bias"]]
    together = torch.optim.AdamW(model.named_parameters(), lr=0.1)
    assert resumed(base, model=model, optimizer=together) == 1
    (group,) = together.param_groups
    assert (group["lr"], len(group["param_names"])) == (0.5, 4)


# ---- state that changes while it trains ------------------------------------------------------------------------


def _state(key: Any, make: Callable[[int, torch.Tensor], Any]) -> Callable[[Own], None]:
    def change(optimizer: Own) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            optimizer.state[parameter][key] = make(optimizer.steps, parameter.detach())

    return change


def _group(make: Callable[[int], Any]) -> Callable[[Own], None]:
    return lambda optimizer: optimizer.param_groups[0].update(extra=make(optimizer.steps))


def _whole(optimizer: Own) -> None:
    optimizer.state["all"] = {"count": optimizer.steps}  # type: ignore[index]


def _in_place(optimizer: Own) -> None:
    optimizer.param_groups[0].setdefault("extra", torch.zeros(2)).add_(1)


CHANGES: dict[str, Callable[[Own], None]] = {
    "tensor": _state("extra", lambda step, parameter: parameter * step),
    "tensor of another shape": _state("extra", lambda step, parameter: parameter.flatten()[:step].clone()),
    "number": _state("extra", lambda step, _: step),
    "nothing, at times": _state("extra", lambda step, parameter: parameter * step if step % 2 else None),
    "list": _state("extra", lambda step, parameter: [parameter * step, step]),
    "table": _state("extra", lambda step, parameter: {"of": parameter * step}),
    "by number": _state(7, lambda step, _: step),
    "of none of the parameters": _whole,
    "number in the group": _group(lambda step: step),
    "table in the group": _group(lambda step: {"at": {"step": step}}),
    "table by number in the group": _group(lambda step: {step: 1.5}),
    "tensor in the group, in place": _in_place,
    "tensor in the group, another each time": _group(lambda step: torch.ones(2) * step),
    "tensors in the group, others each time": _group(lambda step: [torch.ones(2) * step]),
}


class Own(torch.optim.Optimizer):
    """One that some more things belong to from its third step on."""

    def __init__(self, params: Any, change: Callable[[Own], None]) -> None:
        super().__init__(params, {"lr": 0.1})
        self.steps, self._change = 0, change

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        with torch.enable_grad():
            closure()
        self.steps += 1
        for parameter in self.param_groups[0]["params"]:
            moment = self.state[parameter].setdefault("moment", torch.zeros_like(parameter))
            moment.lerp_(parameter.grad, 0.5)
            parameter.sub_(moment, alpha=self.param_groups[0]["lr"])
        if self.steps >= 3:
            self._change(self)


def loop(base: Path, made: Made, steps: int, change_at: int = -1, change: Callable[[Any], object] = bool) -> None:
    """Train and save at each step; before one, change the model."""
    with Flashpoint(base, strict=True) as fp:
        fp.track(**made).resume()
        for number in range(steps):
            if number == change_at:
                change(made["model"])
            step(made)
            fp.step()
            fp.wait()


@pytest.mark.parametrize("name", CHANGES)
def test_what_belongs_to_an_optimizer_from_some_step_on_comes_back(base: Path, name: str) -> None:
    saved, fresh = (optimized(Own, change=CHANGES[name])() for _ in range(2))
    loop(base, saved, 5)
    assert resumed(base, **fresh) == 5
    assert_same(fresh, saved)


@pytest.mark.usefixtures("process_group")
def test_sharded_state_that_comes_later(base: Path) -> None:
    def sharded() -> nn.Module:
        return fully_shard(layers(), mesh=init_device_mesh("cpu", (1,)))

    saved, fresh = (optimized(Own, model=sharded, change=CHANGES["tensor"])() for _ in range(2))
    loop(base, saved, 4)
    assert resumed(base, **fresh) == 4
    tensors.assert_same(fresh["optimizer"].state_dict(), saved["optimizer"].state_dict())
    for one, other in zip(saved["model"].parameters(), fresh["model"].parameters(), strict=True):
        found = fresh["optimizer"].state[other]["extra"]
        assert isinstance(found, DTensor)
        assert found.placements == saved["optimizer"].state[one]["extra"].placements


def _swap(model: Any) -> None:
    model[0].weight, model[1].weight = model[1].weight, model[0].weight


def _prune(model: Any) -> None:
    prune.identity(model[0], "weight")  # type: ignore[no-untyped-call]


def _parametrize(model: Any) -> None:
    parametrize.register_parametrization(model[1], "weight", nn.Identity())


def _wrap(model: Any) -> None:
    model[0] = nn.Sequential(model[0])


@pytest.mark.parametrize("change", [_prune, _parametrize, _wrap, _swap])
def test_parameters_that_get_other_names_keep_their_optimizer_state(
    base: Path, change: Callable[[nn.Module], None]
) -> None:
    def square() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    saved, fresh = (optimized(torch.optim.AdamW, model=square)() for _ in range(2))
    loop(base, saved, 4, 3, change)
    if change is not _swap:
        change(fresh["model"])
    assert resumed(base, **fresh) == 4
    for one, other in zip(saved["model"].parameters(), fresh["model"].parameters(), strict=True):
        assert torch.equal(one, other)
        had, has = saved["optimizer"].state[one], fresh["optimizer"].state[other]
        assert had.keys() == has.keys()
        assert all(torch.equal(value, has[key]) for key, value in had.items())


@pytest.mark.parametrize("frozen", [1, 2])
def test_parameters_that_were_frozen_keep_their_optimizer_state(base: Path, frozen: int) -> None:
    saved, fresh = (optimized(torch.optim.AdamW)() for _ in range(2))
    step(saved)
    save(base, **saved)
    for layer in fresh["model"][:frozen]:
        layer.requires_grad_(False)
    assert resumed(base, **fresh) == 1
    assert all(parameter.requires_grad for parameter in fresh["model"].parameters()), "as it was saved"
    assert_same(fresh, saved)


def test_parameters_without_state_are_none_to_a_second_resume(base: Path) -> None:
    made = OPTIMIZERS["parameters without state"]()
    with Flashpoint(base, strict=True) as fp:
        fp.track(**made).resume()
        step(made)
        fp.step()
        fp.wait()
        step(made)
        assert fp.resume() == 1
    assert [values["step"] for values in made["optimizer"].state.values()] == [1, 1]


# ---- modules that are wrapped ----------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


WRAPPED: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Sequential(Block(), nn.Linear(4, 2)),
    "compiled": lambda: compiled(nn.Sequential(Block(), nn.Linear(4, 2))),
    "blocks compiled": lambda: nn.Sequential(compiled(Block()), nn.Linear(4, 2)),
    "compiled blocks checkpointed": lambda: nn.Sequential(checkpoint_wrapper(compiled(Block())), nn.Linear(4, 2)),
    "checkpointed blocks compiled": lambda: nn.Sequential(compiled(checkpoint_wrapper(Block())), nn.Linear(4, 2)),
    "blocks in ddp": lambda: nn.Sequential(DistributedDataParallel(Block()), nn.Linear(4, 2)),
    "everything": lambda: compiled(
        nn.Sequential(checkpoint_wrapper(compiled(DistributedDataParallel(compiled(Block())))), nn.Linear(4, 2))
    ),
}


@pytest.mark.usefixtures("process_group")
def test_a_resume_with_or_without_wrappers_finds_the_same_names(base: Path) -> None:
    def made(name: str) -> Made:
        model = WRAPPED[name]()
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        for buffer in model.buffers():
            buffer.add_(torch.rand(buffer.shape).to(buffer.dtype))
        return {"model": model, "optimizer": optimizer}

    names = set()
    for name in WRAPPED:
        saved, folder = made(name), base.with_name(name.replace(" ", "-"))
        save(folder, **saved)
        with open_version(folder) as version:
            names.add(frozenset(version.state_dict("model.")))
        for other in WRAPPED if name in ("plain", "everything") else ("plain", "everything"):
            restored = made(other)
            assert resumed(folder, **restored) == 1
            assert_same(restored, saved)
            assert all(map(torch.equal, saved["model"].buffers(), restored["model"].buffers()))
    assert names == {frozenset(WRAPPED["plain"]().state_dict())}


def flattened(use_orig_params: bool) -> Callable[[nn.Module], Any]:
    def wrap(module: nn.Module) -> Any:
        return FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=use_orig_params)

    return wrap


def check_flattened(report: Report, rank: int, use_orig_params: bool) -> None:
    """Groups of parameters that FSDP has flattened: empty ones, swapped ones, and those of several modules."""
    torch.set_num_threads(1)
    wrap = flattened(use_orig_params)

    def one_root(module: nn.Module) -> list[dict[str, Any]]:
        return [{"params": [], "lr": 0.2}, {"params": list(module.parameters()), "betas": (0.5, 0.5)}, {"params": []}]

    saved, fresh = (optimized(torch.optim.AdamW, one_root, model=lambda: wrap(layers()))() for _ in range(2))
    step(saved)
    saved["optimizer"].param_groups[2]["lr"] = 0.7
    save(base_path() / "empty", **saved)
    assert resumed(base_path() / "empty", **fresh) == 1
    for one, other in zip(saved["optimizer"].param_groups, fresh["optimizer"].param_groups, strict=True):
        assert {**one, "params": len(one["params"])} == {**other, "params": len(other["params"])}
    for each in (saved, fresh):
        step(each)
    assert all(map(torch.equal, saved["model"].parameters(), fresh["model"].parameters()))

    def nested(order: slice) -> Made:
        parts = [wrap(nn.Linear(4, 4)) for _ in range(3)]
        model = wrap(nn.Sequential(*parts))
        one = {"params": list(parts[0].parameters()), "lr": 0.1}
        other = {"params": [*parts[1].parameters(), *parts[2].parameters()], "lr": 0.2}
        return {"model": model, "optimizer": torch.optim.AdamW([one, other][order])}

    saved, fresh = nested(slice(None)), nested(slice(None, None, -1))
    for number, group in enumerate(saved["optimizer"].param_groups):
        group.update(lr=0.3 + number, of_a_schedule=number)
    step(saved)
    save(base_path() / "swapped", **saved)
    assert resumed(base_path() / "swapped", **fresh) == 1
    for one, other in zip(saved["optimizer"].param_groups, reversed(fresh["optimizer"].param_groups), strict=True):
        assert {**one, "params": 0} == {**other, "params": 0}

    def several() -> dict[str, Any]:
        modules = {name: wrap(nn.Linear(4, 4)) for name in ("one", "other")}
        parameters = [each for module in modules.values() for each in module.parameters()]
        for number, each in enumerate(parameters):  # also those that a program may have made before it resumes
            each.grad = torch.full_like(each, 1.0 + number + rank)
        return {**modules, "optimizer": torch.optim.Adam(parameters)}

    saved, fresh = several(), several()
    saved["optimizer"].step()
    save(base_path() / "several", **saved)
    assert resumed(base_path() / "several", **fresh) == 1
    for name in ("one", "other"):
        for mine, theirs in zip(saved[name].parameters(), fresh[name].parameters(), strict=True):
            assert torch.equal(mine, theirs)
            moment, other_moment = (
                each["optimizer"].state[p]["exp_avg"] for each, p in ((saved, mine), (fresh, theirs))
            )
            assert torch.equal(moment, other_moment)


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_groups_of_parameters_that_fsdp_has_flattened(tmpfs: Path, use_orig_params: bool) -> None:
    call_team(check_flattened, tmpfs, 2, use_orig_params)
