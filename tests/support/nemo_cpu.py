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
* Mean and variance of `FusedAdam`, of Apex or TransformerEngine, are torch's `Adam`'s. See `AdamOfTorch`.
"""

from __future__ import annotations

from typing import Any

import nemo.lightning.io.pl
import torch
from lightning.pytorch import Callback
from megatron.core.tensor_parallel.random import initialize_rng_tracker

from tests.support.megatron import without_cuda
from tests.support.megatron_gpt import PlayedCuda


def play_cuda() -> None:
    """In this process and thread, from now on. Nothing where there is a GPU."""
    if torch.cuda.is_available():
        return
    without_cuda()
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    PlayedCuda().__enter__()
    initialize_rng_tracker(inference_rng_tracker=True)
    nemo.lightning.io.pl._fix_tensors_device = lambda checkpoint: checkpoint


class AdamOfTorch(Callback):  # type: ignore[misc]
    """Makes torch's `Adam` good enough for megatron-core's distributed optimizer to save and load.

    That one is made for `FusedAdam`, of Apex or TransformerEngine, which need CUDA. With torch's, it cannot describe a
    state that is not there before the first step, and loads one counter of steps for all parameters, which each of
    them then counts up.
    """

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Called before a checkpoint is loaded: make the state that the first step would."""
        for optimizer in _adams(trainer):
            for parameter in (each for group in optimizer.param_groups for each in group["params"]):
                optimizer.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Called after it is loaded: give each parameter a counter of its own."""
        for optimizer in _adams(trainer):
            for state in optimizer.state.values():
                state["step"] = state["step"].clone()


def _adams(trainer: Any) -> list[torch.optim.Adam]:
    found = [each.optimizer for each in trainer.optimizers[0].mcore_optimizer.chained_optimizers]
    assert all(isinstance(each, (torch.optim.Adam, torch.optim.AdamW)) for each in found)
    return found
