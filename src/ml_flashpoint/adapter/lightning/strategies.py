"""Strategies of Lightning that are supported, and the way in which each keeps its state."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.strategies import (
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)

from ml_flashpoint.format.errors import InvalidArgumentError

_SHARDED = (FSDPStrategy, ModelParallelStrategy)
_WHOLE = (DDPStrategy, SingleDeviceStrategy)
# Strategies that do any of these their own way keep a state of another form.
_OWN_WAYS = ("save_checkpoint", "load_checkpoint", "load_model_state_dict", "load_optimizer_state_dict")


def is_sharded(strategy: Strategy) -> bool:
    """Return True if each rank has a shard of model and optimizers, rather than all of them. Raises
    `InvalidArgumentError` if the strategy is not supported."""
    for supported in (*_SHARDED, *_WHOLE):
        if isinstance(strategy, supported):
            own = [way for way in _OWN_WAYS if getattr(type(strategy), way) is not getattr(supported, way)]
            if not own:
                return supported in _SHARDED
            raise InvalidArgumentError(
                f"has its own {', '.join(own)}, so its state is not that of {supported.__name__}",
                argument="strategy",
                value=type(strategy),
                hint="for NeMo's MegatronStrategy there is ml_flashpoint.adapter.nemo",
            )
    names = ", ".join(each.__name__ for each in (*_WHOLE, *_SHARDED))
    raise InvalidArgumentError(f"must be one of {names}", argument="strategy", value=type(strategy))


def check_callbacks(trainer: Any) -> None:
    """Raise `InvalidArgumentError` for weight averaging of a sharded model, which Lightning itself does not shard."""
    averaging = [each for each in trainer.callbacks if isinstance(each, WeightAveraging)]
    if averaging and is_sharded(trainer.strategy):
        raise InvalidArgumentError(
            f"{type(averaging[0]).__name__} keeps an unsharded model, which Lightning cannot restore with "
            f"{type(trainer.strategy).__name__}",
            argument="callbacks",
            value=averaging[0],
            hint="use DDP, or keep the averaged parameters in the LightningModule",
        )


def join_processes(strategy: Strategy) -> None:
    """Set up torch.distributed as the strategy will in `fit`, which then finds it done. Raises `InvalidArgumentError`
    if Lightning itself is to start the other processes."""
    environment = getattr(strategy, "cluster_environment", None)
    if strategy.launcher is not None and not (environment is not None and environment.creates_processes_externally):
        raise InvalidArgumentError(
            "Lightning would start the other processes in fit(), so they cannot agree on a checkpoint before",
            argument="strategy",
            value=type(strategy),
            hint="start all processes with torchrun or srun",
        )
    if isinstance(strategy, ModelParallelStrategy):
        # Its `setup_environment` wants the module, which the trainer does not have before `fit`.
        strategy._setup_distributed()
    else:
        strategy.setup_environment()


@contextlib.contextmanager
def without_tensors(strategy: Strategy) -> Iterator[None]:
    """While Lightning makes its dictionary, have a sharded strategy gather nothing, and copy nothing to the CPU. Hooks
    see what they do on all ranks but one of an unsharded checkpoint."""
    replaced: Any = strategy
    fsdp2 = isinstance(strategy, ModelParallelStrategy)
    replaced.lightning_module_state_dict = lambda: strategy.lightning_module.state_dict() if fsdp2 else {}
    replaced.optimizer_state = lambda optimizer: {}
    try:
        yield
    finally:
        del replaced.lightning_module_state_dict, replaced.optimizer_state
