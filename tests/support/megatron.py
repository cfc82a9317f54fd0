"""The Megatron-LM door, put together as a user would, megatron-core's own `torch_dist` beside it, and what both save.

Owns the only thing that megatron-core wants of CUDA on the way of a checkpoint: a device to put small tensors of
collectives on, and to wait for. Without a CUDA device, that is the CPU. And sharded state dicts of every kind, in any
layout of four ranks or fewer: which part of each global tensor a rank has; elements tell steps apart.
"""

from __future__ import annotations

import argparse
import inspect
import os
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import LocalNonpersistentObject, ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)

from ml_flashpoint.adapter.megatron.load_strategies import MLFlashpointMegatronLoadStrategy
from ml_flashpoint.adapter.megatron.save_strategies import MLFlashpointMegatronAsyncSaveStrategy
from ml_flashpoint.adapter.megatron.save_utils import save_local_aware_megatron_checkpoint
from tests.support import dcp
from tests.support.sharded import numbered
from tests.support.tensors import assert_same

# megatron-core's `torch_dist` uses names of DCP that torch means to rename.
warnings.filterwarnings("ignore", category=FutureWarning)


def without_cuda() -> None:
    """Let megatron-core's collectives of checkpoints run on the CPU, where there is no CUDA device."""
    if not hasattr(np, "product"):  # megatron-core before 0.16 uses it; numpy 2 has dropped it
        np.product = np.prod  # type: ignore[attr-defined]
    if not torch.cuda.is_available():
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
        torch.cuda.synchronize = lambda *args: None
        # Of the optimizers: since 0.19 they wait for events on it, of which there are none.
        torch.cuda.current_stream = lambda *args: None  # type: ignore[assignment,return-value]
        # Of the process of a persistent caller.
        torch.cuda.device_count = lambda: 1
        torch.cuda.set_device = lambda device: None


class Door(dcp.Door):
    """Strategies on one base container. Collective."""

    def __init__(self, base: Path, *, child: bool = True) -> None:
        super().__init__(base)
        self.save_strategy = MLFlashpointMegatronAsyncSaveStrategy(storage_writer=self.writer, child=child)
        self.load_strategy = MLFlashpointMegatronLoadStrategy(
            replication_manager=self.replication, checkpoint_loader=self.loader
        )
        self.queue = AsyncCallsQueue()

    def save_megatron(
        self, state: dict[str, Any], step: int, *, asynchronous: bool = False, strategy: Any = None, **options: Any
    ) -> None:
        """Save by way of the guide, and wait."""
        request = save_local_aware_megatron_checkpoint(
            state, self.version(step), strategy or self.save_strategy, asynchronous, **options
        )
        self._end(request if asynchronous else None)

    def save_by_megatron(
        self, state: dict[str, Any], step: int, *, asynchronous: bool = False, strategy: Any = None, **options: Any
    ) -> None:
        """Save by `dist_checkpointing.save` itself, and wait."""
        folder = self.version(step)
        os.makedirs(folder, exist_ok=True)
        dist.barrier()
        self._end(
            dist_checkpointing.save(
                state, folder, strategy or self.save_strategy, async_sharded_save=asynchronous, **options
            )
        )

    def _end(self, request: Any) -> None:
        if request is not None:
            self.queue.schedule_async_request(request)
            self.queue.maybe_finalize_async_calls(blocking=True)

    def load_megatron(self, template: dict[str, Any], step: int, *, strategy: Any = None, **options: Any) -> Any:
        """Recover, which must find ``step``, and load."""
        found = self.loader.get_latest_complete_checkpoint(self.base)
        assert found is not None, "no version can be recovered"
        assert found.step == step, f"step {found.step} was found, not {step}"
        return load_from(str(found), template, strategy or self.load_strategy, **options)


def load_from(folder: str, template: dict[str, Any], strategy: Any, **options: Any) -> Any:
    """`dist_checkpointing.load`, in the form that all releases of megatron-core take."""
    return dist_checkpointing.load(template, folder, strategy, **options)


def expected(layout: Layout, step: int, **options: Any) -> Any:
    """What a load of `sharded_state` comes to."""
    return plain(sharded_state(layout, step, **options))


def check_load(door: Door, layout: Layout, step: int, saved_by: Layout | None = None, **options: Any) -> None:
    """What is recovered is what was saved, bit for bit."""
    same = saved_by is None or saved_by == layout
    template = sharded_state(layout, 0, blank=True, own_objects=same)
    assert_same_state(door.load_megatron(template, step, **options), expected(layout, step, own_objects=same))


class TorchDist:
    """megatron-core's own strategy on a folder that all ranks share. Collective."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.save_strategy = TorchDistSaveShardedStrategy("torch_dist", 1)
        self.load_strategy = TorchDistLoadShardedStrategy()

    def save(self, state: dict[str, Any], *, strategy: Any = None) -> None:
        """A save in place of the last one."""
        if dist.get_rank() == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
            os.makedirs(self.folder)
        dist.barrier()
        dist_checkpointing.save(state, str(self.folder), strategy or self.save_strategy)

    def async_save(self, state: dict[str, Any], folder: str) -> Any:
        """A request for megatron-core's own queue, which since 0.17 is not the one that it takes by default."""
        has_queues = "async_strategy" in inspect.signature(dist_checkpointing.save).parameters
        options = {"async_strategy": "mcore"} if has_queues else {}
        return dist_checkpointing.save(state, folder, self.save_strategy, async_sharded_save=True, **options)

    def load(self, template: dict[str, Any], *, strategy: Any = None, **options: Any) -> Any:
        return load_from(str(self.folder), template, strategy or self.load_strategy, **options)


# -- states -------------------------------------------------------------------------------------------------------

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
