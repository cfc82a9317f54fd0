"""States that several ranks hold together, whose every element is known, so that any rank can check its share.

Owns making them on meshes of all kinds, and what they should be; nothing here saves or loads.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.support.tensors import assert_same


def numbered(step: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A whole tensor in which every element differs from its neighbours, and from those of another step."""
    return (torch.arange(math.prod(shape), dtype=torch.float32).view(shape) + 1000 * step).to(dtype)


SHAPES = {
    "rows": (8, 6),
    "uneven_rows": (7, 3),
    "fewer_rows_than_ranks": (1, 5),
    "columns": (6, 10),
    "uneven_columns": (3, 9),
    "replicated": (5, 5),
    "vector": (13,),
    "cube": (3, 8, 4),
}
_SHARDED_ALONG = {"columns": 1, "uneven_columns": 1, "cube": 1, "replicated": None}


def sharded_state(step: int, mesh: DeviceMesh) -> dict[str, Any]:
    """DTensors on a mesh of one dimension, plain tensors, and plain values."""
    state: dict[str, Any] = {}
    for name, shape in SHAPES.items():
        along = _SHARDED_ALONG.get(name, 0)
        placement = Replicate() if along is None else Shard(along)
        state[name] = distribute_tensor(numbered(step, *shape), mesh, [placement])
    return {"sharded": state, "plain": plain_state(step), "step": step}


def full_state(step: int) -> dict[str, Any]:
    """The same, as plain tensors."""
    sharded = {name: numbered(step, *shape) for name, shape in SHAPES.items()}
    return {"sharded": sharded, "plain": plain_state(step), "step": step}


def plain_state(step: int) -> dict[str, Any]:
    """What every rank holds."""
    return {
        "weight": numbered(step, 40, 30),
        "half": numbered(step, 9, dtype=torch.bfloat16),
        "bias": numbered(step, 17),
        "scalar": torch.tensor(float(step)),
        "list": [numbered(step, 3), {"deep": numbered(step, 4)}, "text"],
        "empty": torch.empty(0, 4),
    }


class Model(torch.nn.Module):
    """Linear layers, some of sizes that no world size divides."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(10, 8)
        self.second = torch.nn.Linear(8, 11, bias=False)
        self.norm = torch.nn.LayerNorm(11)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.second(torch.relu(self.first(x))))


class Training:
    """A model and its optimizer, sharded in one of these ways: `ddp`, `fsdp`, `hsdp`, `tp`, `fsdp+tp`."""

    def __init__(self, kind: str, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model: Any = Model()
        world = dist.get_world_size()
        if kind == "ddp":
            self.model = torch.nn.parallel.DistributedDataParallel(self.model)
        elif kind == "fsdp":
            self._shard(init_device_mesh("cpu", (world,)))
        elif kind == "hsdp":
            self._shard(init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard")))
        elif kind in ("tp", "fsdp+tp"):
            mesh = init_device_mesh("cpu", (world // 2, 2) if kind != "tp" else (1, world), mesh_dim_names=("dp", "tp"))
            _parallelize(self.model, mesh["tp"])
            if kind != "tp":
                self._shard(mesh["dp"])
        else:
            raise ValueError(kind)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)

    def _shard(self, mesh: DeviceMesh) -> None:
        fully_shard(self.model.first, mesh=mesh)
        fully_shard(self.model.second, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def step(self, batch: int) -> None:
        """One optimizer step, the same on every rank."""
        generator = torch.Generator().manual_seed(batch)
        self.optimizer.zero_grad()
        self.model(torch.rand(4, 10, generator=generator)).square().sum().backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])

    def whole(self) -> dict[str, Any]:
        """Everything as plain tensors, on every rank. Collective."""
        return gathered(self.state())


def _parallelize(model: Model, mesh: DeviceMesh) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    parallelize_module(model, mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()})


def gathered(value: Any) -> Any:
    """A copy of a state with whole tensors in place of DTensors. Collective."""
    if isinstance(value, DTensor):
        return value.detach().full_tensor().clone()
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: gathered(each) for key, each in value.items()}
    return [gathered(each) for each in value] if isinstance(value, list) else value


def check(found: Any, expected: Any) -> None:
    """Compare a state that may have DTensors with one of plain tensors. Collective."""
    assert_same(gathered(found), expected)
