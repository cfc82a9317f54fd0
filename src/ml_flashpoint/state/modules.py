"""The state of one tracked module, under names that do not depend on how the module is wrapped, compiled or sharded.

``get_model_state_dict`` and ``set_model_state_dict`` of torch define the names. Reading through the former costs 25
times as much as the module's own ``state_dict()``, so that is used wherever it was seen to give the same.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ml_flashpoint.copy.cpu import view_identity
from ml_flashpoint.copy.tensors import is_plain_strided
from ml_flashpoint.state.plain_modes import plain_modes

_log = logging.getLogger(__name__)

_COMPILED = "_orig_mod"
"""The attribute of a compiled module in which the module itself is."""
_WRAPPERS = re.compile(r"(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")


def frozen_parameters(module: nn.Module) -> list[str]:
    """Return the names of the parameters that need no gradients, without what wrappers add to names."""
    return [name for name, parameter in _named(module) if not parameter.requires_grad]


def freeze_parameters(module: nn.Module, frozen: Collection[str]) -> None:
    """Have exactly the parameters of these names, as `frozen_parameters` gives them, need no gradients."""
    frozen = frozenset(frozen)
    changed = 0
    for name, parameter in _named(module):
        trained = name not in frozen
        if parameter.requires_grad != trained and (parameter.is_floating_point() or parameter.is_complex()):
            parameter.requires_grad_(trained)
            changed += 1
    if changed:
        _log.warning("requires_grad of %d parameters is put back to what was saved: change it after that", changed)
    for part in module.modules():
        if isinstance(part, DistributedDataParallel):
            known = part._get_ddp_logging_data().get("num_parameter_tensors")  # type: ignore[no-untyped-call]
            trained_now = sum(parameter.requires_grad for parameter in part.parameters())
            if known is not None and known < trained_now:
                _log.warning(
                    "%d parameters are trained that were frozen when DistributedDataParallel was made, which does not"
                    " synchronize their gradients: freeze parameters after it is made, or make it after resume()",
                    trained_now - known,
                )


def _named(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(_WRAPPERS.sub("", name), parameter) for name, parameter in unwrapped(module).named_parameters()]


class ModuleState:
    """One tracked module.

    Args:
        module: plain, compiled, or wrapped by DDP, FSDP2 or FSDP, or with DTensors for parameters.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._keys: list[str] | None = None  # of the module's own state dict, if that is used
        self._theirs: dict[str, str] = {}  # names that torch gives, by ours

    def to_save(self) -> dict[str, Any]:
        """Return what this rank offers to save: references, not copies.

        Of buffers under DDP, those of rank 0 count, since forward broadcasts them from there.
        """
        state = self.current()
        if isinstance(self.module, DistributedDataParallel) and dist.get_rank(self.module.process_group) != 0:
            for name, _ in unwrapped(self.module).named_buffers(remove_duplicate=False):
                state.pop(uncompiled(name), None)
        return state

    def frozen(self) -> list[str]:
        """Return `frozen_parameters` of the module."""
        trained = [parameter.requires_grad for parameter in self.module.parameters()]
        return [] if all(trained) else frozen_parameters(self.module)

    def current(self) -> dict[str, Any]:
        """Return the state dict, of references; also what a checkpoint is loaded into."""
        with plain_modes():
            # FSDP's own `state_dict()` gathers everything.
            sharded = any(isinstance(part, FullyShardedDataParallel) for part in self.module.modules())
            own = None if sharded else unwrapped(self.module).state_dict()
            if own is not None and (not own or list(own) == self._keys):
                return own
            theirs = get_model_state_dict(self.module)
        self._theirs = {uncompiled(name): name for name in theirs}
        state = {name: theirs[given] for name, given in self._theirs.items()}
        self._keys = list(own) if own is not None and _is_same(own, state) else None
        return state if self._keys is None or own is None else own

    def load(self, state: dict[str, Any]) -> None:
        """Hand a loaded state dict, the one that :meth:`current` gave, to the module."""
        if not state:
            return
        with plain_modes():
            if self._keys is None:
                set_model_state_dict(self.module, {self._theirs.get(name, name): each for name, each in state.items()})
            else:
                set_model_state_dict(unwrapped(self.module), state)


def uncompiled(name: str) -> str:
    """Return the name of a parameter or buffer as if no module was compiled."""
    return ".".join(part for part in name.split(".") if part != _COMPILED) if _COMPILED in name else name


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module within DDP and compilation."""
    while True:
        if isinstance(module, DistributedDataParallel):
            module = module.module
        elif isinstance(compiled := getattr(module, _COMPILED, None), nn.Module):
            module = compiled
        else:
            return module


def _is_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(_is_same_value(value, other[key]) for key, value in one.items())


def _is_same_value(one: object, other: object) -> bool:
    if type(one) is not type(other):
        return False
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return True
    if isinstance(one, DTensor) and isinstance(other, DTensor):
        return one.placements == other.placements and _is_same_value(one.to_local(), other.to_local())
    if not (is_plain_strided(one) and is_plain_strided(other)):
        return one.layout == other.layout  # it has no address to compare; the names are the same
    return view_identity(one) == view_identity(other)
