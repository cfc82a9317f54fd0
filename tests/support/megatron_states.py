"""megatron-core's sharded state dicts of every kind, in any layout of four ranks or fewer, with known contents.

Owns which part of each global tensor a rank has; nothing here saves or loads. Elements tell steps apart.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import LocalNonpersistentObject, ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

from tests.support.sharded import numbered
from tests.support.tensors import assert_same

LAYERS = 4
EXPERTS = 4


@dataclass(frozen=True)
class Layout:
    """Tensor-, pipeline- and data-parallel sizes; with ``ep``, experts are spread over the data-parallel ranks."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: bool = False

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    def __str__(self) -> str:
        return f"tp{self.tp}-pp{self.pp}-dp{self.dp}" + ("-ep" if self.ep else "")


LAYOUTS = {
    1: [Layout()],
    2: [Layout(tp=2), Layout(dp=2), Layout(pp=2), Layout(dp=2, ep=True)],
    4: [
        Layout(tp=4),
        Layout(dp=4),
        Layout(pp=4),
        Layout(tp=2, dp=2),
        Layout(tp=2, pp=2),
        Layout(pp=2, dp=2, ep=True),
        Layout(dp=4, ep=True),
        Layout(tp=2, dp=2, ep=True),
    ],
}


@dataclass(frozen=True)
class Place:
    """Where this rank is in a layout."""

    layout: Layout
    rank: int

    @property
    def tp(self) -> int:
        return self.rank % self.layout.tp

    @property
    def dp(self) -> int:
        return self.rank // self.layout.tp % self.layout.dp

    @property
    def pp(self) -> int:
        return self.rank // self.layout.tp // self.layout.dp

    @property
    def layers(self) -> range:
        count = LAYERS // self.layout.pp
        return range(self.pp * count, (self.pp + 1) * count)

    @property
    def experts(self) -> range:
        if not self.layout.ep:
            return range(EXPERTS)
        count = EXPERTS // self.layout.dp
        return range(self.dp * count, (self.dp + 1) * count)


def _split(tensor: torch.Tensor, dim: int, index: int, count: int) -> torch.Tensor:
    return tensor.tensor_split(count, dim)[index]


def _gated(key: str, data: torch.Tensor, place: Place) -> ShardedTensorFactory:
    """A matrix of two halves, each sharded by itself, as megatron-core's gated linear units are."""
    tp = place.layout.tp

    def build(key: str, tensor: torch.Tensor, replica_id: Any, flattened_range: Any) -> list[ShardedTensor]:
        return [
            ShardedTensor.from_rank_offsets(key, half, (0, place.tp + number * tp, 2 * tp), replica_id=replica_id)
            for number, half in enumerate(tensor.chunk(2))
        ]

    def merge(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(parts))

    return ShardedTensorFactory(key, data, build, merge, (0, 0, place.dp + place.layout.dp * place.pp))


def sharded_state(layout: Layout, step: int, *, blank: bool = False, own_objects: bool = True) -> dict[str, Any]:
    """What this rank saves; or, blank, what it loads into.

    Args:
        own_objects: also an object of every rank, which only the same layout can load.
    """
    rank = dist.get_rank()
    place = Place(layout, rank)
    tp, dp, pp = layout.tp, layout.dp, layout.pp

    def data(tensor: torch.Tensor) -> torch.Tensor:
        # Not contiguous slices stay what they are: a rank's tensors may be views of anything.
        return torch.full_like(tensor, -1) if blank else tensor

    def sharded(
        key: str, whole: torch.Tensor, *offsets: tuple[int, int, int], replica: tuple[int, ...], **options: Any
    ) -> ShardedTensor:
        part = whole
        for axis, index, count in offsets:
            dim = axis - options.get("prepend_axis_num", 0)
            part = _split(part, dim, index, count) if dim >= 0 else part
        return ShardedTensor.from_rank_offsets(key, data(part), *offsets, replica_id=replica, **options)

    state: dict[str, Any] = {"model": {}, "optimizer": {"state": {}}, "local": LocalNonpersistentObject({"rank": rank})}
    model = state["model"]
    if place.pp == 0:
        model["embedding"] = sharded("embedding", numbered(step, 16, 8), (0, place.tp, tp), replica=(0, 0, place.dp))
        model["gated"] = _gated("gated", data(_gated_part(step, place)), place)
    if place.pp == pp - 1:
        model["output"] = sharded("output", numbered(step, 8, 12).t(), (1, place.tp, tp), replica=(0, 0, place.dp))
    for layer in place.layers:
        at = (0, layer, LAYERS)
        half = numbered(step + layer, 8, 12, dtype=torch.bfloat16)
        model[f"layers.{layer}"] = {
            "column": sharded(
                "layers.column", half, at, (1, place.tp, tp), replica=(0, 0, place.dp), prepend_axis_num=1
            ),
            "row": sharded(
                "layers.row",
                numbered(step + layer, 12, 8),
                at,
                (2, place.tp, tp),
                replica=(0, 0, place.dp),
                prepend_axis_num=1,
            ),
            "norm": sharded(
                "layers.norm", numbered(step + layer, 8), at, replica=(0, place.tp, place.dp), prepend_axis_num=1
            ),
            "object": ShardedObject(
                "layers.object", None if blank else {"layer": layer, "step": step}, (LAYERS,), (layer,),
                replica_id=(0, place.tp, place.dp),
            ),
        }  # fmt: skip
    experts_replica = (0, place.tp, place.pp if layout.ep else place.dp + dp * place.pp)
    for expert in place.experts:
        model[f"expert.{expert}"] = sharded(
            "experts", numbered(step + expert, 6, 5), (0, expert, EXPERTS), replica=experts_replica, prepend_axis_num=1
        )
    # The distributed optimizer: the same elements on no two data-parallel ranks. Its keys are numbers.
    everywhere = (0, place.tp, place.pp)
    for number, name in enumerate(("exp_avg", "exp_avg_sq")):
        whole = numbered(step + number, 24)
        state["optimizer"]["state"][number] = {
            name: sharded(f"optimizer.{name}", whole, (0, place.dp, dp), replica=everywhere)
        }
    state["optimizer"]["step"] = sharded("optimizer.step", torch.tensor(float(step)), replica=(0, 0, rank))
    if own_objects:
        mine = (
            None
            if blank
            else {"rank": rank, "numbers": [step, rank], "state": torch.arange(3) + rank, "at": np.int64(step)}
        )
        state["rng"] = ShardedObject("rng", mine, (layout.world_size,), (rank,))
    if not blank:
        state |= {"step": step, "args": argparse.Namespace(lr=0.1, step=step), "nested": {"names": ["a", "b"]}}
        state["small"] = torch.arange(5) + step
    return state


def _gated_part(step: int, place: Place) -> torch.Tensor:
    halves = numbered(step, 16, 3).chunk(2)
    return torch.cat([_split(half, 0, place.tp, place.layout.tp) for half in halves])


def plain(value: Any) -> Any:
    """What must come out of a load: a sharded state dict with its contents in place of what describes them."""
    if isinstance(value, ShardedTensor | ShardedObject | ShardedTensorFactory):
        return value.data.clone() if isinstance(value.data, torch.Tensor) else value.data
    if isinstance(value, LocalNonpersistentObject):
        return value.unwrap()
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return value


def tensors_of(value: Any, path: str = "") -> dict[str, torch.Tensor]:
    """Copies of all tensors that are in a checkpoint, by their places: of what is saved, or was loaded."""
    if isinstance(value, (dict, list)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {name: each for key, item in items for name, each in tensors_of(item, f"{path}.{key}").items()}
    if not isinstance(value, torch.Tensor | ShardedTensor | ShardedTensorFactory):
        return {}
    return {path: value.detach().clone() if isinstance(value, torch.Tensor) else value.data.detach().clone()}


def assert_same_state(found: Any, expected: Any) -> None:
    """The same keys, in whatever order, with the same bits."""
    assert_same(_in_order(found), _in_order(expected))


def _in_order(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _in_order(value[key]) for key in sorted(value, key=str)}
    return value
