"""A trainer of Lightning that has nothing but a checkpoint dictionary."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch


def bare_trainer(checkpoint: Callable[[], dict[str, Any]]) -> Any:
    """Return what a `TrainerFlashpoint` asks of a trainer while it saves."""
    return SimpleNamespace(
        _checkpoint_connector=SimpleNamespace(dump_checkpoint=lambda weights_only: checkpoint()),
        _logger_connector=SimpleNamespace(_callback_metrics={}),
        fit_loop=SimpleNamespace(_data_fetcher=None, _combined_loader=None),
        lightning_module=torch.nn.Module(),
        optimizers=[],
    )
