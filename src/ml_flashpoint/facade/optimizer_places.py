"""Places for what a checkpoint has of an optimizer, and a new optimizer does not have yet.

DCP loads into what there is, and a new optimizer has only what its first step makes. State that comes later (an average
from some step on, what a schedule adds to the groups) and all state of an optimizer that takes no step without
gradients is lacking. Owns what is put there to be loaded into, as the checkpoint's metadata describe it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

_NOTHING = object()


def add_places(name: str, state: dict[str, Any], metadata: Metadata, parameters: Mapping[str, torch.Tensor]) -> None:
    """Give a state dict by names a place for all that a checkpoint has of it. What is sharded otherwise than its
    parameter gets none, nor do parameters and groups that there are not: loading says so.

    Args:
        name: what the optimizer is tracked as.
        state: its own dictionaries, which are changed, of what the optimizer has, which is not.
        parameters: those of the optimizer, by the names in its state.
    """
    paths: Mapping[str, tuple[str | int, ...]] = metadata.planner_data or {}
    for key, entry in metadata.state_dict_metadata.items():
        path = paths.get(key, ())
        match path:
            case (own, "state", str(parameter), str(kind)) if own == name and parameter in parameters:
                values = state["state"].get(parameter, {})
                place = _place(values.get(kind, _NOTHING), kind, entry, parameters[parameter])
                if place is not _NOTHING:
                    state["state"].setdefault(parameter, {})[kind] = place
            case (own, "param_groups", int(group), *_) if own == name and 0 <= group < len(state["param_groups"]):
                place = _place(_found(state, path[1:]), path[-1], entry, None)
                if place is not _NOTHING and _has_room(state, path[1:]):
                    set_element(state, path[1:], place)


def _place(value: object, kind: str | int, entry: object, parameter: torch.Tensor | None) -> object:
    """What to load an item into, if that is another thing than what is there; `_NOTHING` if there is none."""
    is_tensor = isinstance(entry, TensorStorageMetadata)
    if value is not _NOTHING and isinstance(value, torch.Tensor) is is_tensor and _fits(value, entry):
        return _NOTHING
    if not isinstance(entry, TensorStorageMetadata):
        return None
    dtype, is_element = entry.properties.dtype, not entry.size
    if entry.properties.layout is not torch.strided:
        return _NOTHING
    if isinstance(parameter, DTensor) and not is_element:
        return torch.empty_like(parameter.detach(), dtype=dtype) if entry.size == parameter.shape else _NOTHING
    # Optimizers keep numbers of steps on the CPU. All else is given to the parameter's device by them, too.
    device = "cpu" if parameter is None or kind == "step" else parameter.device
    return torch.empty(entry.size, dtype=dtype, device=device)


def _fits(value: object, entry: object) -> bool:
    """Whether a value of the right kind can be loaded into. Elements also need the dtype that was saved: a number of
    steps has the default dtype of the program that made it."""
    if not isinstance(entry, TensorStorageMetadata) or isinstance(value, (DTensor, ShardedTensor)):
        return True
    assert isinstance(value, torch.Tensor)
    return value.shape == entry.size and (bool(entry.size) or value.dtype == entry.properties.dtype)


def _found(state: Any, path: tuple[str | int, ...]) -> object:
    for part in path:
        try:
            state = state[part]
        except (LookupError, TypeError):
            return _NOTHING
    return state


def _has_room(state: Any, path: tuple[str | int, ...]) -> bool:
    """Whether everything on the way is a container, or not there."""
    containers = (_found(state, path[:end]) for end in range(len(path)))
    kinds = (dict if isinstance(part, str) else list for part in path)
    return all(each is _NOTHING or isinstance(each, kind) for each, kind in zip(containers, kinds, strict=True))
