"""Megatron-Bridge's own code that saves and loads, through our manager, in a loop of ours: its steps need a GPU.

Argument: the step after which to stop for good, or 0.
"""

from __future__ import annotations

import os
import sys
import types
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from tests.support.state_digest import digest
from tests.support.worker import base_path, leave, rank, report

EVERY, STEPS = 2, 9


class _NotHere(types.ModuleType):
    """A module whose names are empty classes."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def stand_in_for_gpus() -> None:
    """The layers of Transformer Engine, which exists for GPUs only, and what is asked of the device."""
    name = "megatron.bridge.peft.lora_layers"
    sys.modules[name] = _NotHere(name)
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.get_rng_state = lambda *_: torch.get_rng_state()  # type: ignore[assignment]
    torch.cuda.set_rng_state = lambda *_: None  # type: ignore[assignment]


def training_state(checkpoint: Any, model_config: Any) -> SimpleNamespace:
    """Stands in for `GlobalState`, whose configuration needs a model of a GPU."""
    from megatron.bridge.training.state import TrainState

    config = SimpleNamespace(
        checkpoint=checkpoint,
        rng=SimpleNamespace(data_parallel_random_init=False),
        dataset=SimpleNamespace(),
        optimizer=SimpleNamespace(use_distributed_optimizer=False),
        logger=SimpleNamespace(log_progress=False, mlflow_log_artifacts=False),
        model=model_config,
        peft=None,
        ddp=None,
        dist=None,
        ft=None,
    )
    names = ("wandb_logger", "mlflow_logger", "comet_logger", "rank_monitor_client", "async_calls_queue")
    others: dict[str, Any] = dict.fromkeys(names)
    faults = SimpleNamespace()
    return SimpleNamespace(train_state=TrainState(), cfg=config, fault_tolerance_state=faults, **others)


def made() -> tuple[Any, Any]:
    """A small GPT with dropout, and its configuration."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
    from megatron.core.transformer import TransformerConfig

    parallel_state.initialize_model_parallel()
    init_num_microbatches_calculator(0, None, dist.get_world_size(), 1, dist.get_world_size())
    torch.manual_seed(7)
    tensor_parallel.get_cuda_rng_tracker().set_states({"model-parallel-rng": torch.get_rng_state()})
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=2, use_cpu_initialization=True, hidden_dropout=0.0
    )
    return GPTModel(config, get_gpt_layer_local_spec(), vocab_size=64, max_sequence_length=16), config


def main() -> None:
    ends_after = int(sys.argv[1])
    stand_in_for_gpus()
    from ml_flashpoint.adapter.megatron_bridge import attach  # before anything imports local checkpoints

    # ruff: isort: split
    from megatron.bridge.training import checkpointing
    from megatron.bridge.training.config import CheckpointConfig
    from megatron.core.process_groups_config import ProcessGroupCollection

    dist.init_process_group("gloo")
    checkpoint = CheckpointConfig(save=os.fspath(base_path().parent / "durable"), ckpt_format="torch_dist")
    checkpoint.non_persistent_local_ckpt_algo = "atomic"  # the other one exchanges shards on GPUs
    attach(SimpleNamespace(checkpoint=checkpoint), base_path(), every_n_steps=EVERY)  # type: ignore[arg-type]
    manager: Any = checkpointing.create_checkpoint_manager(checkpoint)
    model, config = made()
    state, groups = training_state(checkpoint, config), ProcessGroupCollection.use_mpu_process_groups()
    found = manager.checkpointing_context["local_checkpoint_manager"].find_latest()
    if found != -1:  # as its `setup` asks
        told = checkpointing.CheckpointLoadContext(state, [model], None, None, pg_collection=groups)
        step, operations = manager.load(told)
        assert (step, operations) == (state.train_state.step, state.train_state.floating_point_operations_so_far)
    report(resumed=found, samples=state.train_state.consumed_train_samples)
    for step in range(state.train_state.step + 1, STEPS + 1):
        manager.finalize_async_saves(state, blocking=False)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape) * 0.01)  # draws that differ unless the generator came back
        state.train_state.step, state.train_state.consumed_train_samples = step, 3 * step
        state.train_state.floating_point_operations_so_far = 1000.0 * step
        if step % EVERY == 0:
            saved = checkpointing.CheckpointSaveContext(
                state, [model], None, None, 1000 * step, non_persistent_ckpt=True, pg_collection=groups
            )
            manager.save(saved, None)
        if step == ends_after:
            manager.finalize_async_saves(state, blocking=True)
            report(reached=step)
            while True:
                dist.barrier()
    manager.finalize_async_saves(state, blocking=True, terminate=True)
    tensors = {name: each for name, each in model.state_dict().items() if isinstance(each, torch.Tensor)}
    report(ended=digest(tensors), rank=rank())
    leave()


if __name__ == "__main__":
    main()
