"""The state of one tracked module, under names that do not depend on how the module is wrapped, compiled or sharded."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from ml_flashpoint.state.packed_state import PackedState, copied
from ml_flashpoint.state.plain_modes import plain_modes

_log = logging.getLogger(__name__)

_COMPILED = "_orig_mod"
"""The attribute of a compiled module in which the module itself is."""
_WRAPPERS = re.compile(rf"(?<![^.])(?:{_COMPILED}|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")


def plain_name(name: str) -> str:
    """Return the name of a parameter or buffer without what wrappers add to names."""
    return _WRAPPERS.sub("", name) if "_mod" in name else name


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module within DDP and compilation."""
    while True:
        if isinstance(module, DistributedDataParallel):
            module = module.module
        elif isinstance(compiled := getattr(module, _COMPILED, None), nn.Module):
            module = compiled
        else:
            return module


def _plain_names(module: nn.Module, names: Iterable[str]) -> list[str]:
    """Return a module's own names of parameters or buffers without what wrappers, and DDP inside of it, add to them."""
    plain = list(map(plain_name, names))
    parts = module.named_modules(remove_duplicate=False)
    inside = [plain_name(f"{name}.") for name, part in parts if isinstance(part, DistributedDataParallel)]
    for prefix in reversed(inside):  # the innermost first
        own = f"{prefix}module."
        plain = [prefix + name[len(own) :] if name.startswith(own) else name for name in plain]
    return plain


def named_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters by plain names; one that is tied by the first of its names."""
    inner = unwrapped(module)
    own = dict(inner.named_parameters())
    return list(zip(_plain_names(inner, own), own.values(), strict=True))


def is_flat(module: nn.Module) -> bool:
    """Return True if FSDP has flattened parameters of a module, which only torch's own functions take apart."""
    return any(isinstance(part, FullyShardedDataParallel) for part in module.modules())


def frozen_parameters(module: nn.Module) -> list[str]:
    """Return the names of the parameters that need no gradients."""
    if all(parameter.requires_grad for parameter in module.parameters()):
        return []
    return [name for name, parameter in named_parameters(module) if not parameter.requires_grad]


def freeze_parameters(module: nn.Module, frozen: Collection[str]) -> None:
    """Have exactly the parameters of these names, as `frozen_parameters` gives them, need no gradients."""
    frozen = frozenset(frozen)
    changed = 0
    for name, parameter in named_parameters(module):
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


class ModuleState:
    """One tracked module.

    Args:
        module: plain, compiled, or wrapped by DDP, FSDP2 or FSDP, or with DTensors for parameters.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._names: dict[str, str] = {}  # the module's own names, by plain ones

    def to_save(self) -> dict[str, Any]:
        """Return what this rank offers to save: references, not copies.

        Of buffers under DDP, those of rank 0 count, since forward broadcasts them from there.
        """
        state = self.current()
        if isinstance(self.module, DistributedDataParallel) and dist.get_rank(self.module.process_group) != 0:
            module = unwrapped(self.module)
            for name in _plain_names(module, dict(module.named_buffers(remove_duplicate=False))):
                state.pop(name, None)
        return state

    def current(self) -> dict[str, Any]:
        """Return the state dict, of references; also what a checkpoint is loaded into. Extra state that is no tensor is
        packed, as it has no names."""
        with plain_modes():
            # FSDP's own `state_dict()` gathers everything.
            flat, module = is_flat(self.module), unwrapped(self.module)
            own = get_model_state_dict(self.module) if flat else module.state_dict()
        plain = map(plain_name, own) if flat else _plain_names(module, own)
        self._names = dict(zip(plain, own, strict=True))
        return {
            name: value if isinstance(value, torch.Tensor) else PackedState(copied(value, name))
            for name, value in zip(self._names, own.values(), strict=True)
        }

    def load(self, state: dict[str, Any]) -> None:
        """Hand a loaded state dict, the one that :meth:`current` gave, to the module."""
        own = {self._names[name]: value for name, value in state.items()}
        with plain_modes():
            if not own:
                return
            if is_flat(self.module):
                set_model_state_dict(self.module, own)
            else:
                unwrapped(self.module).load_state_dict(own)
