"""Versions to be exported, saved by several ranks; for `tests.support.forked.Team`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from ml_flashpoint import Checkpointer, Config
from tests.support.sharded import sharded_state
from tests.support.worker import base_path


def save(report: Callable[..., None], rank: int, world_size: int, steps: list[int], replication: str) -> None:
    """Save the states of these steps."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (world_size,))
    with Checkpointer(base_path(), Config(replication=replication)) as engine:
        for step in steps:
            dcp.save(sharded_state(step, mesh), checkpoint_id=engine.id(step), storage_writer=engine.writer())
        assert engine.wait(60)


def save_large(report: Callable[..., None], rank: int, world_size: int, tensors: int, nbytes: int) -> None:
    """Save a step of large tensors, with the block size that jobs have."""
    mesh = init_device_mesh("cpu", (world_size,))
    local = {f"t{each}": torch.full((nbytes // world_size,), each, dtype=torch.uint8) for each in range(tensors)}
    state = {name: DTensor.from_local(tensor, mesh, [Shard(0)]) for name, tensor in local.items()}
    with Checkpointer(base_path(), Config(replication="none")) as engine:
        dcp.save(state, checkpoint_id=engine.id(1), storage_writer=engine.writer())
        assert engine.wait(60)
