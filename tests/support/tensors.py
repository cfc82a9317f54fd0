"""Tensors of every dtype for tests, and what it means that two states are the same: bit for bit.

Owns making them and comparing them; nothing here knows of checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

_NAMED = {value: name for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


def dtype_name(dtype: torch.dtype) -> str:
    """For example ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def is_quantized(dtype: torch.dtype) -> bool:
    """Whether tensors of a dtype are more than their memory."""
    return dtype_name(dtype).startswith(("qint", "quint"))


PLAIN_DTYPES: tuple[torch.dtype, ...] = tuple(sorted((d for d in _NAMED if not is_quantized(d)), key=str))
"""Every dtype of this torch whose tensors are their memory."""


def _is_planned(dtype: torch.dtype) -> bool:
    try:
        torch._utils._element_size(dtype)
    except TypeError:
        return False
    return True


PLANNED_DTYPES: tuple[torch.dtype, ...] = tuple(d for d in PLAIN_DTYPES if _is_planned(d))
"""Those of which DCP's own planner can tell the size, which it must to distribute them."""


def tensor_of(dtype: torch.dtype, shape: Sequence[int] = (3, 4), seed: int = 0) -> torch.Tensor:
    """A contiguous tensor of random bits, NaNs and all; a bool is 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    count = math.prod(shape) * dtype.itemsize
    limit = 2 if dtype is torch.bool else 256
    octets = torch.randint(0, limit, (count,), dtype=torch.uint8, generator=generator)
    return octets.view(dtype).view(tuple(shape))


def raw(tensor: torch.Tensor) -> bytes:
    """The elements of a strided tensor in order, as bytes."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.dtype.itemsize == 1:
        tensor = tensor.view(torch.uint8)
    elif tensor.dtype.itemsize == 2:
        tensor = tensor.view(torch.int16)
    tensor = (
        tensor.cpu().contiguous().flatten()
    )  # one of a single element may be called contiguous whatever its strides
    return tensor.view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def assert_same_tensor(found: Any, expected: torch.Tensor, where: str = "tensor") -> None:
    """Same kind, dtype, shape and bits."""
    assert isinstance(found, torch.Tensor), f"{where}: {type(found)}"
    if isinstance(expected, DTensor):
        assert isinstance(found, DTensor), f"{where}: {type(found)}"
        assert found.shape == expected.shape, where
        assert found.placements == expected.placements, where
        found, expected = found.to_local(), expected.to_local()
    assert found.dtype == expected.dtype, f"{where}: {found.dtype}, not {expected.dtype}"
    assert found.layout == expected.layout, where
    assert found.shape == expected.shape, f"{where}: {found.shape}, not {expected.shape}"
    if expected.is_quantized:
        assert found.qscheme() == expected.qscheme(), where
        assert torch.equal(found.int_repr(), expected.int_repr()), where
        assert torch.equal(found.dequantize(), expected.dequantize()), where
    elif expected.layout is torch.sparse_coo:
        found, expected = found.coalesce(), expected.coalesce()
        assert raw(found.indices()) == raw(expected.indices()), where
        assert raw(found.values()) == raw(expected.values()), where
    elif expected.layout is not torch.strided:
        by_column = expected.layout in (torch.sparse_csc, torch.sparse_bsc)
        for part in (
            ("ccol_indices", "row_indices", "values") if by_column else ("crow_indices", "col_indices", "values")
        ):
            assert raw(getattr(found, part)()) == raw(getattr(expected, part)()), f"{where}: {part}"
    else:
        assert raw(found) == raw(expected), f"{where}: {found} is not {expected}"


def assert_same(found: Any, expected: Any, where: str = "state") -> None:
    """Same structure, with the same tensors and values in it; a mapping is any mapping."""
    if isinstance(expected, torch.Tensor):
        assert_same_tensor(found, expected, where)
    elif isinstance(expected, Mapping):
        assert isinstance(found, Mapping), where
        assert list(map(str, found)) == list(map(str, expected)), f"{where}: {list(found)}, not {list(expected)}"
        for (_, one), (key, other) in zip(found.items(), expected.items(), strict=True):
            assert_same(one, other, f"{where}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert type(found) is type(expected), f"{where}: {type(found)}"
        assert len(found) == len(expected), where
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{where}.{index}")
    else:
        assert found == expected, f"{where}: {found!r}, not {expected!r}"


def blank(state: Any) -> Any:
    """A state of the same structure with other bits in its tensors and other plain values, to load into."""
    if isinstance(state, torch.Tensor):
        return _blank_tensor(state)
    if isinstance(state, Mapping):
        return {key: blank(value) for key, value in state.items()}
    if isinstance(state, list):
        return [blank(value) for value in state]
    return None if not isinstance(state, tuple) else tuple(blank(value) for value in state)


def clones(state: Any) -> Any:
    """The same state with copies of its tensors."""
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    if isinstance(state, Mapping):
        return {key: clones(value) for key, value in state.items()}
    return [clones(value) for value in state] if isinstance(state, list) else state


OVERLAPPING = {
    "expanded": lambda whole: whole[:1].expand(4, *whole.shape[1:]),
    "one element": lambda whole: whole[0, 0].expand(5),
    "broadcast": lambda whole: torch.broadcast_to(whole[0], (3, 2, whole.shape[1])),
    "overlapping": lambda whole: whole.as_strided((3, 3), (1, 1)),
    "windows": lambda whole: whole.view(-1).unfold(0, 4, 1),
    "conjugated": lambda whole: whole[:1].expand(4, -1).conj(),
}
"""Views of a matrix whose elements share memory."""


def _blank_tensor(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        return torch.full_like(tensor.detach(), 77)
    tensor = tensor.detach()
    if tensor.is_quantized:
        zeros, scheme = torch.zeros(tensor.shape), tensor.qscheme()
        if scheme is torch.per_tensor_affine:
            return torch.quantize_per_tensor(zeros, 1.0, 0, tensor.dtype)
        channels = torch.ones_like(tensor.q_per_channel_scales())
        return torch.quantize_per_channel(zeros, channels, channels.long(), tensor.q_per_channel_axis(), tensor.dtype)
    if tensor.layout is not torch.strided:
        return torch.zeros_like(tensor)
    octets = torch.full((tensor.numel() * tensor.dtype.itemsize,), 0x55, dtype=torch.uint8, device=tensor.device)
    if tensor.dtype is torch.bool:
        octets.fill_(0)
    return octets.view(tensor.dtype).view(tensor.shape)
