"""Has torchtitan 0.3 run where there is no GPU, for a first try and for tests: import this before all of torchtitan.

It is nothing that a job with GPUs needs, nor one that this package changes.
"""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from torch.distributed.fsdp import FSDPModule
from torchtitan.tools import utils


def _nothing(*arguments: object) -> None:
    """Is called in place of what only a GPU has."""


utils.device_type = "cpu"
utils.device_module = SimpleNamespace(
    current_device=lambda: 0,
    device_count=lambda: 1,
    empty_cache=_nothing,
    get_device_name=lambda device: "cpu",
    get_device_properties=lambda device: SimpleNamespace(total_memory=1 << 30),
    memory_stats=lambda device: {},
    reset_peak_memory_stats=_nothing,
    set_device=_nothing,
    synchronize=_nothing,
)
torch.distributed.set_timeout = _nothing  # which gloo lacks
if importlib.util.find_spec("triton") is None:  # which torch for CPUs comes without
    sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = MagicMock()


def adapted(config: Any) -> Any:
    """Return a ``Trainer.Config`` of a Llama, changed so that it runs on a CPU."""
    from torchtitan.models.common.attention import ScaledDotProductAttention

    config.parallelism.spmd_backend = "partial_dtensor"
    config.training.disable_cuda_graphs = True
    config.training.mixed_precision_param = "float32"
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    parallelize = config.model_spec.parallelize_fn

    def parallelize_for_gloo(*arguments: Any, **named: Any) -> Any:
        model = parallelize(*arguments, **named)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        return model

    config.model_spec.parallelize_fn = parallelize_for_gloo
    return config
