"""Optimizers with quantised state, as torchao's: of a class that names its inner tensors, and copies nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ml_flashpoint import Flashpoint
from tests.support.dcp import RESULT_TIMEOUT_S, Door

aten = torch.ops.aten


class Opaque(torch.Tensor):
    """Numbers in 8 bits, with their scale. It has what optimizers and DCP need of torchao's, and no ``clone()``."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Opaque:
        made = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)  # type: ignore[attr-defined]
        made.codes, made.scale = codes, scale
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (aten.detach.default, aten.view.default, aten._to_copy.default):
            return cls(args[0].codes, args[0].scale)
        if function is aten.copy_.default:
            args[0].codes.copy_(args[1].codes)
            args[0].scale.copy_(args[1].scale)
            return args[0]
        if function is aten.is_pinned.default:  # which DCP asks
            return False
        raise NotImplementedError(f"{cls.__name__} has no {function}")


class Quantised(Opaque):
    """The same, and it names them."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: None, size: Any, stride: Any) -> Quantised:
        return cls(inner["codes"], inner["scale"])


class Optimizer(torch.optim.Optimizer):
    """Counts its steps in what it keeps of each parameter."""

    kind: type[Opaque] = Quantised

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if parameter not in self.state:
                kept: torch.Tensor = self.kind(torch.zeros(local.shape, dtype=torch.uint8), torch.ones(1))
                if isinstance(parameter, DTensor):
                    kept = DTensor.from_local(kept, parameter.device_mesh, parameter.placements, run_check=False)
                self.state[parameter]["kept"] = kept
            inner = _inner(self.state[parameter]["kept"])
            inner.codes.add_(1)
            inner.scale.mul_(2)


def _inner(tensor: Any) -> Opaque:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # type: ignore[no-any-return]


def _content(optimizer: Optimizer) -> list[tuple[int, float]]:
    kept = [_inner(state["kept"]) for state in optimizer.state.values()]
    assert all(type(each) is Quantised for each in kept)
    return [(int(each.codes.flatten()[0]), float(each.scale)) for each in kept]


def _training(sharded: bool = False) -> tuple[nn.Module, Optimizer]:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    optimizer = Optimizer(model.parameters())
    optimizer.step()
    return model, optimizer


class Holder:
    """An object of a program's own whose state has an optimizer's in it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return {"of": self._optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state["of"])


TRACKED: list[Callable[[nn.Module, Optimizer], dict[str, Any]]] = [
    lambda model, optimizer: {"model": model, "optimizer": optimizer},
    lambda model, optimizer: {"optimizer": optimizer},
    lambda model, optimizer: {"model": model, "holder": Holder(optimizer)},
]


@pytest.mark.parametrize("tracked", TRACKED, ids=["by names", "whole", "held"])
@pytest.mark.parametrize("sharded", [False, True])
def test_the_facade_saves_what_it_is_at_the_step(
    tmpfs: Path, process_group: None, tracked: Callable[..., dict[str, Any]], sharded: bool
) -> None:
    model, optimizer = _training(sharded)
    with Flashpoint(tmpfs / "job", strict=True, safe_globals=[Quantised]) as fp:
        fp.track(**tracked(model, optimizer)).resume()
        fp.step()
        optimizer.step()
        fp.wait()
    model, optimizer = _training(sharded)
    optimizer.step()
    with Flashpoint(tmpfs / "job", safe_globals=[Quantised]) as fp:
        assert fp.track(**tracked(model, optimizer)).resume() == 1
    assert _content(optimizer) == [(1, 2.0)] * 4


@pytest.mark.parametrize("sharded", [False, True])
def test_dcp_saves_what_it_is_at_the_call(make_door: Callable[..., Door], process_group: None, sharded: bool) -> None:
    door = make_door(safe_globals=[Quantised])
    _, optimizer = _training(sharded)
    for step in (1, 2):
        future = door.async_save({"optimizer": optimizer.state_dict()}, step)
        optimizer.step()
        future.result(RESULT_TIMEOUT_S)
        _, other = _training(sharded)
        state = {"optimizer": other.state_dict()}
        door.load(state, step, reader={"safe_globals": [Quantised]})
        other.load_state_dict(state["optimizer"])
        assert _content(other) == [(step, 2.0**step)] * 4


def test_a_class_that_cannot_be_copied_is_refused_by_name(
    make_door: Callable[..., Door], tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Optimizer, "kind", Opaque)
    model, optimizer = _training()
    text = (
        r"(?s)'optimizer\.state\.0.*\.kept', a Opaque, cannot be copied: NotImplementedError: Opaque has no aten.clone"
    )
    with pytest.raises(CheckpointException, match=text):
        make_door().async_save({"optimizer": optimizer.state_dict()}, 1).result(RESULT_TIMEOUT_S)
    with Flashpoint(os.fspath(tmpfs / "other")) as fp:
        fp.track(model=model, optimizer=optimizer).resume()
        fp.step()
        fp.wait()
        assert "'optimizer.state.0.weight.kept', a Opaque, cannot be copied" in str(fp.health.last_error)
