"""Tensors from what they pickle to. No size, stride or offset is believed that leads out of a storage.

Torch itself lets a pickle say that a storage is larger than the bytes it has, checks no sparse tensor unless it is
told to, and no nested one at all. These are the functions that pickles of tensors name, made again with such checks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch

_LIMIT: Final = 1 << 48
"""Bytes of one tensor, also if it repeats few. Keeps torch's own arithmetic from overflowing."""

Tensors = dict[str, Callable[..., Any]]


def makers(device_of: Callable[[str], torch.device]) -> Tensors:
    """What makes tensors, by the name that pickles call it.

    Args:
        device_of: where a tensor is loaded to that was on the device of this name.
    """
    return {
        "torch._utils._rebuild_tensor": _tensor,
        "torch._utils._rebuild_tensor_v2": _tensor_v2,
        "torch._utils._rebuild_tensor_v3": _tensor_v3,
        "torch._utils._rebuild_parameter": parameter,
        "torch._utils._rebuild_qtensor": _quantized,
        "torch._utils._rebuild_sparse_tensor": _sparse,
        "torch._utils._rebuild_nested_tensor": _nested,
        "torch._utils._rebuild_meta_tensor_no_storage": _meta,
        "torch._utils._rebuild_device_tensor_from_cpu_tensor": lambda data, dtype, device, requires_grad: (
            _exactly(data).to(dtype=dtype, device=device_of(str(device))).requires_grad_(bool(requires_grad))
        ),
    }


def storage(data: memoryview, dtype: torch.dtype, numel: Any, device: torch.device) -> torch.storage.TypedStorage:
    """A storage with these bytes, in memory of its own.

    Raises:
        ValueError: there are fewer of them than elements.
    """
    if type(numel) is not int or not 0 <= numel * dtype.itemsize <= len(data):
        raise ValueError(f"a storage of {len(data)} bytes does not hold {numel} {dtype}")
    octets = torch.empty(len(data), dtype=torch.uint8, device="cpu")
    if len(data):
        octets.numpy().data.cast("B")[:] = data
    held = octets.to(device).untyped_storage()
    return torch.storage.TypedStorage(wrap_storage=held, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


def _checked(held: Any, offset: Any, size: Any, stride: Any, itemsize: int) -> Any:
    """Where in its storage a tensor begins. Views of nothing may begin anywhere, also behind it: here at 0."""
    if not isinstance(held, torch.storage.TypedStorage):
        raise TypeError("a tensor without a storage")
    offset = offset if all(size) else 0
    _check_bounds(offset, size, stride, itemsize, held._untyped_storage.nbytes())
    return offset


def _check_bounds(offset: Any, size: Any, stride: Any, itemsize: int, nbytes: int) -> None:
    numbers = (offset, *size, *stride)
    if any(type(n) is not int or not 0 <= n < _LIMIT for n in numbers) or len(size) != len(stride) or len(size) > 64:
        raise ValueError(f"no tensor has offset {offset}, size {size} and stride {stride}")
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if all(size) else offset - 1
    if (last + 1) * itemsize > nbytes or math.prod(max(n, 1) for n in size) * itemsize >= _LIMIT:
        raise ValueError(f"a tensor of size {size} and stride {stride} at {offset} leads out of its {nbytes} bytes")


def _tensor(held: Any, offset: Any, size: Any, stride: Any) -> torch.Tensor:
    return _view(held, offset, size, stride, held.dtype)


def _view(held: Any, offset: Any, size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    offset = _checked(held, offset, size, stride, dtype.itemsize)
    untyped = held._untyped_storage
    return torch.empty(0, dtype=dtype, device=untyped.device).set_(untyped, offset, tuple(size), tuple(stride))


def _tensor_v2(
    held: Any, offset: Any, size: Any, stride: Any, requires_grad: Any, hooks: Any, metadata: Any = None
) -> torch.Tensor:
    return _finished(_tensor(held, offset, size, stride), requires_grad, hooks, metadata)


def _tensor_v3(
    held: Any, offset: Any, size: Any, stride: Any, requires_grad: Any, hooks: Any, dtype: Any, metadata: Any = None
) -> torch.Tensor:
    if not isinstance(dtype, torch.dtype):
        raise TypeError("a tensor without a dtype")
    return _finished(_view(held, offset, size, stride, dtype), requires_grad, hooks, metadata)


def _finished(tensor: torch.Tensor, requires_grad: Any, hooks: Any, metadata: Any = None) -> torch.Tensor:
    if hooks:
        raise ValueError("a tensor with hooks")
    if metadata:
        conj, neg = metadata.pop("conj", False), metadata.pop("neg", False)
        if metadata or (conj and not tensor.is_complex()):
            raise ValueError("a tensor with unknown properties")
        tensor = tensor.conj() if conj else tensor
        tensor = torch._neg_view(tensor) if neg else tensor
    return tensor.requires_grad_() if requires_grad else tensor


def _exactly(value: Any) -> torch.Tensor:
    if type(value) is not torch.Tensor:
        raise TypeError(f"a {type(value).__name__} in the place of a tensor")
    return value


def parameter(data: Any, requires_grad: Any, hooks: Any) -> torch.nn.Parameter:
    """A parameter, of a tensor that was made here."""
    if hooks or not isinstance(data, torch.Tensor):
        raise ValueError("a parameter that is none")
    return torch.nn.Parameter(data, bool(requires_grad))


def _quantized(
    held: Any, offset: Any, size: Any, stride: Any, quantizer: Any, requires_grad: Any, hooks: Any
) -> torch.Tensor:
    offset = _checked(held, offset, size, stride, held.dtype.itemsize)
    if len(quantizer) == 4:
        _, scales, zero_points, axis = quantizer
        expected = (size[axis],) if type(axis) is int and 0 <= axis < len(size) else None
        if any(
            tuple(torch.as_tensor(each, dtype=torch.float64, device="cpu").shape) != expected
            for each in (scales, zero_points)
        ):
            raise ValueError("a quantized tensor without a scale for each channel")
    made = torch._utils._rebuild_qtensor(held, offset, size, stride, quantizer, False, hooks or {})  # type: ignore[no-untyped-call]
    return _finished(made, requires_grad, hooks)


def _sparse(layout: Any, data: Any) -> torch.Tensor:
    *indices, values, size = data[:3] if layout is torch.sparse_coo else data
    for each in (*indices, values):
        _exactly(each)
    if any(type(n) is not int or not 0 <= n < _LIMIT for n in size):
        raise ValueError(f"no sparse tensor has size {size}")
    if layout is not torch.sparse_coo:
        first, second = indices
        return torch.sparse_compressed_tensor(
            first,
            second,
            values,
            tuple(size),
            dtype=values.dtype,
            device=values.device,
            layout=layout,
            check_invariants=True,
        )
    coalesced: dict[str, Any] = {"is_coalesced": bool(data[3])} if len(data) > 3 and data[3] is not None else {}
    return torch.sparse_coo_tensor(
        indices[0], values, tuple(size), dtype=values.dtype, device=values.device, check_invariants=True, **coalesced
    )


def _nested(buffer: Any, sizes: Any, strides: Any, offsets: Any) -> torch.Tensor:
    _exactly(buffer)
    for each, dimensions in ((sizes, 2), (strides, 2), (offsets, 1)):
        if _exactly(each).dim() != dimensions or each.dtype != torch.int64 or not each.is_contiguous():
            raise ValueError("a nested tensor without sizes")
    if buffer.dim() != 1 or not buffer.is_contiguous() or any(each.is_cuda for each in (sizes, strides, offsets)):
        raise ValueError("a nested tensor without a buffer")
    described = zip(offsets.tolist(), sizes.tolist(), strides.tolist(), strict=True)
    for offset, size, stride in described:
        _check_bounds(offset, size, stride, buffer.itemsize, buffer.nbytes)
    return torch._nested_view_from_buffer(buffer, sizes, strides, offsets)


def _meta(dtype: Any, size: Any, stride: Any, requires_grad: Any) -> torch.Tensor:
    _check_bounds(0, size, stride, dtype.itemsize, _LIMIT)
    return torch.empty_strided(size, stride, dtype=dtype, device="meta", requires_grad=bool(requires_grad))
