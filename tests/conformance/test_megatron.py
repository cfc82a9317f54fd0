"""The Megatron-LM door."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.conformance.suite import Conformance, Door, State, state_of

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

from tests.support import forked, megatron

pytestmark = pytest.mark.slow
megatron.without_cuda()
# Importing megatron-core takes seconds: once for all children of this session, not once each.
forked.preload("tests.support.megatron")


def _sharded(state: State) -> dict[str, Any]:
    sharded: dict[str, Any] = {}
    for key, value in state.items():
        if not torch.is_tensor(value):
            sharded[key] = value
        elif value.numel():
            sharded[key] = ShardedTensor.from_rank_offsets(key, value)
        else:  # megatron-core has no sharded tensors without elements
            sharded[key] = ShardedObject(key, value, (1,), (0,))
    return sharded


class MegatronDoor(Door):
    """Saves odd steps synchronously, and even ones asynchronously."""

    def __init__(self, base: Path) -> None:
        super().__init__(base)
        # megatron-core does nothing without one.
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self._door = megatron.Door(base)
        self._door.latest()  # as one must, where there may be something

    def save(self, step: int, state: State) -> None:
        self._door.save_megatron(_sharded(state), step, asynchronous=step % 2 == 0)

    def load_latest(self) -> tuple[int, State] | None:
        step = self._door.latest()
        if step is None:
            return None
        template = {key: value for key, value in state_of(0, 99).items() if torch.is_tensor(value)}
        found = self._door.load_megatron(_sharded(template), step)
        return step, {key: found[key] for key in state_of(0)}

    def close(self) -> None:
        self._door.close()
        dist.destroy_process_group()


class TestMegatron(Conformance):
    door = MegatronDoor
