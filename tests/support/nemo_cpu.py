"""What a GPU is played with, where there is none, so that NeMo's own trainer, strategy and GPT train on the CPU.

Owns all of it; everything else of NeMo and megatron-core is as it is installed. In their files:

* `torch.cuda.current_device()` is the CPU: `nemo/lightning/megatron_parallel.py` (`default_data_step`, `reduce`),
  `megatron/core/distributed/param_and_grad_buffer.py`, `megatron/core/optimizer/*.py`, and the collectives of
  megatron-core's checkpoints. `torch.cuda.synchronize()` returns:
  `megatron/core/dist_checkpointing/strategies/filesystem_async.py`.
* Tensors made on the device "cuda", moved there by `Tensor.cuda`, or asked for their type, by `PlayedCuda`:
  `megatron/core/optimizer/optimizer.py`, `nemo/collections/llm/gpt/model/base.py` (`gpt_data_step`).
* megatron-core's generators of random numbers for a model-parallel region, which are those of CUDA devices, are
  left out, as for inference: `megatron/core/tensor_parallel/random.py`.
* `nemo.lightning.io.pl._fix_tensors_device`, which asserts that CUDA is in use and moves tensors from one GPU to
  another at the end of a load of a long-term checkpoint, returns what it is given.
* A gathering of nothing, which NeMo's progress printer makes on rank 0 alone, waits for nobody, as with NCCL:
  `megatron/core/timers.py`.
* `FusedAdam` of TransformerEngine and Apex, which need CUDA, is ours, below: `megatron/core/optimizer/__init__.py`,
  `distrib_optimizer.py`. Without one of the two, megatron-core's distributed optimizer takes torch's `AdamW`, and then
  cannot load what it has saved.
"""

from __future__ import annotations

from typing import Any

import megatron.core.optimizer
import megatron.core.timers
import nemo.lightning.io.pl
import torch
import torch.distributed as dist
from megatron.core.optimizer import distrib_optimizer
from megatron.core.tensor_parallel.random import initialize_rng_tracker

from tests.support.megatron_gpt import PlayedCuda


def play_cuda() -> None:
    """In this process and thread, from now on. Nothing where there is a GPU."""
    if torch.cuda.is_available():
        return
    torch.cuda.synchronize = lambda *args: None
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    PlayedCuda().__enter__()
    initialize_rng_tracker(inference_rng_tracker=True)
    nemo.lightning.io.pl._fix_tensors_device = lambda checkpoint: checkpoint
    megatron.core.timers.dist_all_gather_func = _gather_something
    megatron.core.optimizer.Adam = distrib_optimizer.Adam = FusedAdam
    distrib_optimizer.HAVE_APEX_OR_TE = True


def _gather_something(output: torch.Tensor, mine: torch.Tensor, **options: Any) -> Any:
    return dist.all_gather_into_tensor(output, mine, **options) if mine.numel() else None


class FusedAdam(torch.optim.Optimizer):
    """AdamW with the constructor and the state of Apex's and TransformerEngine's: steps are counted by group."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            step = group["step"] = group.get("step", 0) + 1
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                for name in ("exp_avg", "exp_avg_sq"):
                    state.setdefault(name, torch.zeros_like(parameter))
                mean, square = state["exp_avg"], state["exp_avg_sq"]
                mean.lerp_(parameter.grad, 1 - beta1)
                square.mul_(beta2).addcmul_(parameter.grad, parameter.grad, value=1 - beta2)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                root = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
                parameter.addcdiv_(mean, root, value=-group["lr"] / (1 - beta1**step))
