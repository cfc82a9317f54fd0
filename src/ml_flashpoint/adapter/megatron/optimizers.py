"""megatron-core's optimizers, for adapters that copy from CUDA devices while training goes on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from ml_flashpoint.copy.overlap import OverlappingDoor


def watch_optimizers(door: OverlappingDoor, *optimizers: Any) -> None:
    """Have what optimizers update on CUDA devices copied while training goes on: see `OverlappingDoor.watch`.

    megatron-core's own have no hooks. Each ``step()`` of theirs first makes gradients ready, which are in no
    checkpoint. Only the step of a torch optimizer inside changes anything else, and that waits.

    Args:
        door: a `MemoryStorageWriter`, or a `LocalCheckpointManager`.
        optimizers: megatron-core's, chained or not, or torch's.

    Raises:
        InvalidArgumentError: one is neither.
    """
    for optimizer in optimizers:
        for part in _parts_of(optimizer):
            if isinstance(part, Optimizer) or not hasattr(part, "optimizer"):
                door.watch(part)
            elif part.optimizer is not None:  # a rank may have nothing to train
                door.watch(part.optimizer, updates=_Updates(part))


def _parts_of(optimizer: Any) -> Iterator[Any]:
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is None:
        yield optimizer
        return
    for each in chained:
        yield from _parts_of(each)


class _Updates:
    """Tensors that one optimizer of megatron-core's updates. Loading a checkpoint may put others in their places."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def __call__(self) -> list[torch.Tensor]:
        optimizer = self._optimizer
        # Not told apart by whether they have gradients: what is not trained is not among them, and 32-bit copies of
        # parameters are not part of any graph.
        found = [each for group in optimizer.optimizer.param_groups for each in group["params"]]
        found += [each for group in getattr(optimizer, "float16_groups", ()) for each in group]
        for chunk in getattr(optimizer, "model_chunks", ()):
            config = getattr(chunk, "ddp_config", None)
            # Where parameters are gathered while forward runs, that is what updates those of other ranks.
            in_forward = getattr(config, "overlap_param_gather", True) or getattr(config, "use_megatron_fsdp", False)
            if not in_forward:
                found += [each for each in chunk.parameters() if each.requires_grad]
        return [each for each in found if isinstance(each, torch.Tensor)]
