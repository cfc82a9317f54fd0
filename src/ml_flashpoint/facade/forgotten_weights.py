"""Warning of optimizers that are tracked without the weights that they update."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves

_log = logging.getLogger(__name__)


def warn_of_weights(modules: Iterable[nn.Module], optimizers: Mapping[str, Optimizer], others: Sequence[Any]) -> None:
    """Warn of optimizers whose parameters nothing that is tracked has in its state.

    Args:
        modules, optimizers: those that are tracked.
        others: what else is tracked, and may hold weights.
    """
    held = {id(parameter) for module in modules for parameter in module.parameters()}
    for name, optimizer in optimizers.items():
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        if parameters and held.isdisjoint(map(id, parameters)) and not _may_hold(others, parameters):
            _log.warning(
                "the weights that the optimizer %r updates are not saved: nothing that is tracked has them; track the"
                " model, too, or a restart has the weights that the program makes",
                name,
            )


def _may_hold(others: Sequence[Any], parameters: Sequence[torch.Tensor]) -> bool:
    shapes = {each.shape for each in parameters}
    for other in others:
        if isinstance(other, LRScheduler):
            continue
        with contextlib.suppress(Exception):  # a save will say so
            leaves = tree_leaves(other.state_dict())
            if any(isinstance(leaf, torch.Tensor) and leaf.shape in shapes for leaf in leaves):
                return True
    return False
