"""A trainer of NeMo's, wrapped or about to be, whose state is made up: nothing is trained.

Owns how it is set up, what it saves, and how that is checked. Importing this imports NeMo.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import nemo.lightning as nl
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from nemo.lightning.pytorch.strategies import MegatronStrategy

from ml_flashpoint.adapter.nemo.checkpoint_callback import MLFlashpointCheckpointCallback, flashpoint_io_of
from ml_flashpoint.adapter.nemo.checkpoint_io import MLFlashpointAsyncFinalizableCheckpointIO
from tests.support.megatron import load_from
from tests.support.worker import base_path, rank, world_size

ROWS, COLUMNS = 4, 300


def without_cuda() -> None:
    """Let megatron-core's collectives of long-term checkpoints run on the CPU. NeMo still sees that there is no GPU."""
    if not torch.cuda.is_available():
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
        torch.cuda.synchronize = lambda *args: None


def trainer_of(
    base: Path,
    *callbacks: Callback,
    user_async: bool = False,
    every: int = 1,
    strategy: Callable[..., MegatronStrategy] = MegatronStrategy,
    **options: Any,
) -> Any:
    """A trainer of NeMo's, set up as far as a recipe does before it is wrapped."""
    ours = MLFlashpointCheckpointCallback(str(base), every, **options)
    trainer = trainer_with([ours, *callbacks], strategy(process_group_backend="gloo", ckpt_async_save=user_async))
    trainer.strategy.setup_environment()
    return trainer


def trainer_with(callbacks: list[Callback], strategy: MegatronStrategy | None = None) -> Any:
    """A trainer of NeMo's, whose environment nobody has set up."""
    return nl.Trainer(
        accelerator="cpu",
        devices=world_size(),
        strategy=strategy or MegatronStrategy(process_group_backend="gloo"),
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
    )


def state_of(step: int, *, blank: bool = False) -> dict[str, Any]:
    """A sharded checkpoint as the strategy makes it: rows sharded over the ranks, and common state."""
    full = torch.full((ROWS * world_size(), COLUMNS), float(step)) + torch.arange(ROWS * world_size()).view(-1, 1)
    own = full[rank() * ROWS : (rank() + 1) * ROWS].clone()
    data = torch.zeros_like(own) if blank else own
    sharded = ShardedTensor.from_rank_offsets("weight", data, (0, rank(), world_size()))
    progress = {"fit_loop": {"epoch_loop.batch_progress": {"total": {"completed": step}}}}  # NeMo logs it
    return {"state_dict": {"weight": sharded}, "global_step": step, "loops": progress}


def save(trainer: Any, path: Path, step: int, **storage: Any) -> None:
    state, ours = state_of(step), flashpoint_io_of(trainer)
    trainer.strategy.checkpoint_io.save_checkpoint(state, str(path), storage_options=storage or None)
    if ours is not None and ours.engine.holds(path):
        state["state_dict"]["weight"].data.fill_(-1)  # what is saved is what it was at the call


def check_load(trainer: Any, path: Path, step: int) -> None:
    template = {"state_dict": state_of(0, blank=True)["state_dict"]}
    if (path / "weights").is_dir():
        # NeMo's own loading ends with an assertion that CUDA is in use (nemo.lightning.io.pl._fix_tensors_device).
        found = load_from(str(path / "weights"), template, TorchDistLoadShardedStrategy())
    else:
        found = trainer.strategy.checkpoint_io.load_checkpoint(str(path), sharded_state_dict=template, strict=True)
    assert torch.equal(found["state_dict"]["weight"], state_of(step)["state_dict"]["weight"].data)
    assert found["global_step"] == step


def version(base: Path, step: int) -> Path:
    return base / f"step-{step}_ckpt"


def shared(name: str) -> Path:
    """A folder that all ranks see, whichever node they play to be on."""
    return base_path().parent.parent / name


def settle(trainer: Any) -> None:
    """Wait until our saves are committed and have their copies, which is not the same as finalized."""
    io = flashpoint_io_of(trainer)
    assert io is not None
    assert io.engine.wait(60)
    dist.barrier()


def finish(trainer: Any) -> None:
    io = flashpoint_io_of(trainer)
    assert io is not None
    if isinstance(trainer.strategy.checkpoint_io, MLFlashpointAsyncFinalizableCheckpointIO):
        trainer.strategy.checkpoint_io.maybe_finalize_save_checkpoint(blocking=True)
    assert io.save_strategy.last_error is None
    assert io.engine.wait(60)
    dist.barrier()
    io.close()


class Module(nl.io.IOMixin, LightningModule):  # type: ignore[misc]
    """As little as a context wants of a module."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(width, width)


class Strategy(MegatronStrategy):  # type: ignore[misc]
    """NeMo's, without a model: its sharded state dict is made up."""

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        checkpoint["state_dict"] = state_of(self.lightning_module.trainer.global_step)["state_dict"]
        self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)


def attach(trainer: Any) -> None:
    """Give the trainer a module, as `fit` does."""
    module = Module(3)
    trainer.strategy._lightning_module = module
    module.trainer = trainer
