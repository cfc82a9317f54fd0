"""Kinds of tensors: which are all in their memory, and how others are copied whole."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from ml_flashpoint.format.errors import SaveError


def is_plain_strided(tensor: torch.Tensor) -> bool:
    """Return True if the memory of a tensor is all of it, so that a copy of its elements is the same tensor."""
    wraps_others = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    return tensor.layout is torch.strided and not tensor.is_quantized and not wraps_others and not tensor.is_nested


def check_copies(value: Any, path: str) -> None:
    """Raise a `SaveError` for a tensor at or below a path that Lightning could not give back: it makes copies of what
    callbacks have saved."""
    parts: Any = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    )
    for key, item in parts:
        check_copies(item, f"{path}.{key}")
    if isinstance(value, torch.Tensor) and not is_plain_strided(value):
        try:
            copy.deepcopy(value.detach())
        except Exception as error:  # of whatever kind torch raises
            kind = "a nested tensor" if value.is_nested else f"a tensor of layout {value.layout}"
            raise SaveError(
                f"{path!r} is {kind}, of which Lightning could make no copy when it restores the callback",
                hint="keep a dense tensor, a list of them, or (nested) one with layout=torch.jagged",
            ) from error


def materialized(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without history whose memory holds its elements: no collective under way, no lazy conjugate."""
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor = tensor.wait()
    if tensor.requires_grad:
        tensor = tensor.detach()
    if is_plain_strided(tensor) and (tensor.is_conj() or tensor.is_neg()):
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor


def storable_name(fqn: str) -> str:
    """Return a name as the format takes it: text, and none of those that mean something to it."""
    name = str(fqn)
    if not name.isascii():
        name = name.encode("utf-8", "backslashreplace").decode()
    return f"item {name}" if name.startswith("__") else name


def check_storable(tensor: torch.Tensor, path: str) -> None:
    """Raise a `SaveError` for tensors that torch's checkpoints have no place for."""
    if tensor.is_nested or tensor.is_mkldnn:
        kind = "nested" if tensor.is_nested else "in MKLDNN's layout"
        raise SaveError(
            f"the tensor {path!r} is {kind}, which torch's checkpoints have no place for",
            hint="save what it is made of: for example its values and offsets, or to_dense()",
        )


def whole_copy(tensor: torch.Tensor, path: str) -> torch.Tensor:
    """Copy a tensor that is more than its memory, to be saved as bytes. Raise a `SaveError` if its class neither copies
    itself nor names its inner tensors; and see :func:`check_storable`."""
    check_storable(tensor, path)
    try:
        return copied_whole(tensor)
    except Exception as error:  # of whatever kind a class raises
        raise SaveError(
            f"the tensor {path!r}, a {type(tensor).__name__}, cannot be copied: {type(error).__name__}: {error}",
            hint="have its class implement clone(), or __tensor_flatten__ and __tensor_unflatten__",
        ) from error


def copied_whole(tensor: torch.Tensor, *, stays: bool = False) -> torch.Tensor:
    """Return a copy as the tensor's class makes it, or one of its inner tensors where the class makes none.

    It is on the CPU: it is pickled later, by another thread, for which the device works in another order. ``stays``: it
    is on the tensor's device, and the caller waits for that.
    """
    flattens = hasattr(tensor, "__tensor_flatten__") and hasattr(tensor, "__tensor_unflatten__")
    try:
        detached = tensor.detach()
        copied = detached.clone() if stays or tensor.device.type in ("cpu", "meta") else detached.cpu()
        if type(copied) is type(tensor) or not flattens:
            return copied
    except (NotImplementedError, TypeError):  # torch raises the latter where a class has no answer to an operation
        if not flattens:
            raise
    made_of: Any = tensor
    names, context = made_of.__tensor_flatten__()
    inner = {name: getattr(tensor, name) for name in names}  # a DTensor names its mesh, too
    inner = {
        name: copied_whole(each, stays=stays) if isinstance(each, torch.Tensor) else each
        for name, each in inner.items()
    }
    rebuilt: torch.Tensor = made_of.__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())
    return rebuilt
