"""Versions to be exported, saved by several ranks; for `tests.support.forked.Team`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh

from ml_flashpoint import Engine
from tests.support.sharded import sharded_state
from tests.workers.distributed_training import base


def save(report: Callable[..., None], rank: int, world_size: int, steps: list[int], replication: str) -> None:
    """Save the states of these steps."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (world_size,))
    with Engine.open(base(), replication=replication) as engine:
        for step in steps:
            dcp.save(sharded_state(step, mesh), checkpoint_id=engine.version(step), storage_writer=engine.writer)
        assert engine.saver.wait(60)
