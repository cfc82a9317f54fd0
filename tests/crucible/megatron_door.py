"""megatron-core's `dist_checkpointing` as a door of the crucible: how a holder is written as a sharded state dict.

Owns the ways in which tensors are described (whole, split, by layers, by offsets of no grid). Imported where
megatron-core is installed only.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from typing import Any, TypeVar
from unittest import mock

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ml_flashpoint.adapter.megatron.save_utils import save_local_aware_megatron_checkpoint
from tests.crucible.ranks import DEADLINE_S, Door, Order
from tests.crucible.scenarios import Save
from tests.support import megatron

T = TypeVar("T")
_OF_ITS_OWN_FILES = ("file", "mkdir")
"""Points at which `dist_checkpointing.save` fails on rank 0 alone, outside of the strategy."""


class MegatronDoor(Door):
    """`dist_checkpointing.save` and `load`, and its queue."""

    def __init__(self, order: Order) -> None:
        super().__init__(order)
        # As `megatron.without_cuda`, but only for this life: other doors use this process, too.
        self._played = mock.patch.multiple(torch.cuda, current_device=lambda: "cpu", synchronize=lambda *args: None)
        self._played.start()
        child = any(save.mode == "process" for save in order.plan.saves)
        self.door = megatron.Door(order.base, child=child)  # type: ignore[arg-type]
        self._under_way: int | None = None

    def make(self, variant: int) -> None:
        super().make(variant)
        if self.holder.optimizer is not None:
            self.door.writer.watch(self.holder.optimizer)

    def before_change(self) -> None:
        self.door.writer.before_update()

    # ---- the holder as megatron-core sees it -------------------------------------------------------------

    def state(self, saved_by: int | None = None) -> dict[str, Any]:
        """What is saved; or, with the number of ranks that did, what is loaded into."""
        rank, world_size, notes = self.order.rank, self.order.world_size, self.holder.notes.state
        common = {"step": notes["step"], "life": notes["life"], "variant": notes["variant"], "tensor": notes["tensor"]}
        state: dict[str, Any] = {} if saved_by else {"common": common | {"world_size": world_size}}
        described = {name: self._described(name, each, saved_by) for name, each in self.holder.tensors()}
        state["tensors"] = {name: each for name, each in described.items() if each is not None}
        state["own"] = {name: self._whole(f"own.{name}", each, 0) for name, each in notes["own"].items()}
        state["notes"] = {key: self._object(key, None if saved_by else notes[key]) for key in ("payload", "array")}
        if saved_by in (None, world_size):
            state["rank"] = ShardedObject("rank", rank, (world_size,), (rank,))
        return state

    def _replica(self, name: str) -> int:
        return (self.order.rank + zlib.crc32(name.encode())) % self.order.world_size

    def _object(self, name: str, value: Any, replica: int | None = None) -> ShardedObject:
        return ShardedObject(name, value, (1,), (0,), replica_id=self._replica(name) if replica is None else replica)

    def _whole(self, name: str, tensor: torch.Tensor, replica: int) -> Any:
        if not tensor.numel() or tensor.layout is not torch.strided:  # which megatron-core does not shard
            return self._object(name, tensor, replica)
        return ShardedTensor.from_rank_offsets(name, tensor, replica_id=replica)

    def _described(self, name: str, tensor: torch.Tensor, saved_by: int | None) -> Any:
        rank, world_size, replica = self.order.rank, self.order.world_size, self._replica(name)
        if tensor.layout is not torch.strided and not isinstance(tensor, DTensor):
            return self._whole(name, tensor, replica)
        tensor = tensor.detach()
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            at = zip(tensor.placements, mesh.get_coordinate() or (), strict=True)
            return _piece(
                name,
                tensor.to_local(),
                tuple(tensor.shape),
                compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)[1],
                tuple(where for placement, where in at if not placement.is_shard()),
            )
        rows = tensor.shape[0] if tensor.dim() else 0
        how = zlib.crc32(f"how {name}".encode()) % 3 if tensor.numel() and rows > 1 else 0
        if how == 1 and rows <= 7 and tensor.dim() > 1:  # as layers are, which lie in one tensor
            return [
                ShardedTensor.from_rank_offsets(name, row, (0, index, rows), replica_id=replica, prepend_axis_num=1)
                for index, row in enumerate(tensor)
            ]
        if how == 2 and saved_by is None:  # each rank has its rows, and loads those of all
            if rows % world_size == 0:
                part = tensor.chunk(world_size)[rank]
                return ShardedTensor.from_rank_offsets(name, part, (0, rank, world_size))
            first, after = rows * rank // world_size, rows * (rank + 1) // world_size
            return _piece(name, tensor[first:after], tuple(tensor.shape), (first, *[0] * (tensor.dim() - 1)), 0)
        return self._whole(name, tensor, replica)

    # ---- the door ----------------------------------------------------------------------------------------

    def load(self) -> int | None:
        step = self.door.latest()
        if step is None:
            self.make(0)
            return None
        folder = self.door.version(step)
        common = _again(lambda: dist_checkpointing.load_common_state_dict(folder))["common"]
        self.make(int(common["variant"]))
        template = self.state(saved_by=int(common["world_size"]))
        loaded = _again(lambda: megatron.load_from(folder, template, self.door.load_strategy))
        with torch.no_grad():
            for name, tensor in self.holder.tensors():
                _put(loaded.get("tensors", {}).get(name), tensor)
        assert loaded.get("rank", self.order.rank) == self.order.rank
        own = {name: loaded["own"][name] for name in self.holder.notes.state["own"]}
        del common["world_size"]
        self.holder.notes.state |= common | loaded["notes"] | {"own": own}
        return step

    def save(self, save: Save) -> None:
        self._end()
        strategy, asynchronous, checks = self.door.save_strategy, save.mode != "sync", save.nth == 1
        version = self.door.version(save.step)
        if save.nth % 3 or any(fault.point in _OF_ITS_OWN_FILES for fault in self.order.plan.faults):
            request = save_local_aware_megatron_checkpoint(
                self.state(), version, strategy, asynchronous, validate_access_integrity=checks
            )
        else:
            if self.order.rank == 0:
                os.makedirs(version, exist_ok=True)
            request = dist_checkpointing.save(
                self.state(), version, strategy, validate_access_integrity=checks, async_sharded_save=asynchronous
            )
        self._under_way = save.step
        if request is not None:
            self.door.queue.schedule_async_request(request)
        if request is None or save.awaited:
            self._end()

    def _end(self) -> None:
        step, self._under_way = self._under_way, None
        if step is None:
            return
        self.door.queue.maybe_finalize_async_calls(blocking=True)
        error = self.door.save_strategy.last_error
        if error is not None:
            assert "was changed while it was copied" not in str(error), error
            self.failures.append(f"{type(error).__name__}: {error}")

    def settle(self) -> bool:
        self._end()
        return self.door.saver.wait(DEADLINE_S)

    def close(self) -> None:
        self.door.close()
        self._played.stop()


def _piece(name: str, data: torch.Tensor, shape: tuple[int, ...], offset: Any, replica: Any) -> Any:
    """A part of a tensor that lies in no grid; None, if there is nothing in it."""
    if not data.numel():
        return None
    return ShardedTensor(name, data, data.dtype, tuple(data.shape), shape, tuple(offset), None, replica)


def _put(loaded: Any, tensor: torch.Tensor) -> None:
    if isinstance(loaded, list):
        for row, each in zip(tensor, loaded, strict=True):
            row.copy_(each)
    elif loaded is not None:
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).copy_(loaded)


def _again(read: Callable[[], T]) -> T:
    """megatron-core reads the files beside the parts by itself, and once: a user would start again."""
    try:
        return read()
    except OSError:
        return read()
