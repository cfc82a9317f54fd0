"""A small GPT of megatron-core's with its own distributed optimizer, trained on the CPU.

Owns what of CUDA must be played for that: the optimizers make tensors on the device "cuda" and look at the names of
types. Nothing here saves or loads.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.overrides import TorchFunctionMode

VOCABULARY, LENGTH = 64, 16
SHARDING = (
    "dp_reshardable"
    if hasattr(DistributedOptimizer, "sharded_param_state_dp_reshardable")
    else "fully_sharded_model_space"
)
"""Sharding of the distributed optimizer's state, unless a test is about that: its first name exists since 0.15."""


class PlayedCuda(TorchFunctionMode):
    """Tensors for "cuda" are made on the CPU, and those there say they are of CUDA's types."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.")
        return result


class Gpt:
    """Model and optimizer of one rank, with tensor parallelism ``tp`` and the rest data-parallel. Collective.

    Args:
        sharding: how the optimizer's state is sharded in checkpoints.
        half: with parameters in bfloat16, of which the optimizer has others in 32 bits.
        distributed: with the distributed optimizer.
    """

    def __init__(self, tp: int, sharding: str, *, seed: int, half: bool = False, distributed: bool = True) -> None:
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
        # For generators on CUDA devices, of which there are none, and nothing here is random.
        initialize_rng_tracker(inference_rng_tracker=True)
        torch.manual_seed(seed)
        config = TransformerConfig(
            num_layers=1,
            hidden_size=32,
            num_attention_heads=4,
            use_cpu_initialization=True,
            gradient_accumulation_fusion=False,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            bf16=half,
            params_dtype=torch.bfloat16 if half else torch.float32,
        )
        model: Any = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=VOCABULARY, max_sequence_length=LENGTH)
        if half:
            model = Float16Module(config, model)
        self.model = DistributedDataParallel(
            config, DistributedDataParallelConfig(use_distributed_optimizer=distributed), model
        )
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(optimizer="adam", lr=1e-2, bf16=half, use_distributed_optimizer=distributed, clip_grad=0.0),
            [self.model],
        )
        self._metadata = {"distrib_optim_sharding_type": sharding}
        self._dp = dist.get_rank() // tp

    @torch.compiler.set_stance("force_eager")  # compiling what megatron-core would have compiled takes half a minute
    def step(self, number: int) -> float:
        """One optimizer step; the loss on this rank's batch."""
        generator = torch.Generator().manual_seed(1000 * number + self._dp)
        tokens = torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=generator)
        positions = torch.arange(LENGTH).expand(2, LENGTH)
        mask = torch.ones(1, 1, LENGTH, LENGTH).triu(1) > 0
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = self.model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).mean()
        loss.backward()
        self.model.finish_grad_sync()
        self.optimizer.step()
        return float(loss.item())

    def sharded_state(self, *, is_loading: bool = False) -> dict[str, Any]:
        """For `dist_checkpointing`."""
        model = self.model.module.sharded_state_dict()
        optimizer = self.optimizer.sharded_state_dict(
            self.model.module.sharded_state_dict(), is_loading=is_loading, metadata=self._metadata
        )
        return {"model": model, "optimizer": optimizer}

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        """What was loaded into :meth:`sharded_state`."""
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def parameters(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
