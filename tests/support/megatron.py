"""The Megatron-LM door, put together as a user would, and megatron-core's own `torch_dist` beside it.

Owns the only thing that megatron-core wants of CUDA on the way of a checkpoint: a device to put small tensors of
collectives on, and to wait for. Without a CUDA device, that is the CPU.
"""

from __future__ import annotations

import inspect
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)

from ml_flashpoint.adapter.megatron.load_strategies import MLFlashpointMegatronLoadStrategy
from ml_flashpoint.adapter.megatron.save_strategies import MLFlashpointMegatronAsyncSaveStrategy
from ml_flashpoint.adapter.megatron.save_utils import save_local_aware_megatron_checkpoint
from tests.support import dcp
from tests.support.megatron_states import Layout, assert_same_state, plain, sharded_state

# megatron-core's `torch_dist` uses names of DCP that torch means to rename.
warnings.filterwarnings("ignore", category=FutureWarning)


def without_cuda() -> None:
    """Let megatron-core's collectives of checkpoints run on the CPU, where there is no CUDA device."""
    if not hasattr(numpy, "product"):  # megatron-core before 0.16 uses it; numpy 2 has dropped it
        numpy.product = numpy.prod  # type: ignore[attr-defined]
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
        if asynchronous:
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
