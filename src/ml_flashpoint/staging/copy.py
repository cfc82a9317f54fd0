"""How bytes get into an arena and out of it: one copy, in few calls, with the GIL released.

Owns the copy itself on CPU and CUDA, and the views that it copies through. Where tensors go in an arena is
the layout's business (`core.object_format`); what is done with the bytes afterwards is the saver's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

# The copy is cut into pieces of about this many bytes, so that digests can follow close behind.
_PIECE = 32 << 20
_BYTE_COPIED = frozenset(
    dtype
    for name in (
        "float4_e2m1fn_x2", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2",
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
    )
    if isinstance(dtype := getattr(torch, name, None), torch.dtype)
)  # fmt: skip
"""dtypes for which torch has no copy kernel: their bytes are copied instead."""


def typed_view(data: torch.Tensor, begin: int, end: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Bytes ``begin:end`` of a 1-D uint8 tensor as a contiguous tensor; no copy.

    ``begin`` must be aligned to the dtype's size, relative to the memory of ``data``.
    """
    piece = data[begin:end]
    if dtype is torch.uint8:
        return piece.view(shape)
    if dtype in _BYTE_COPIED:
        out = torch.empty(0, dtype=dtype)
        return out.set_(piece.untyped_storage(), piece.storage_offset() // max(1, dtype.itemsize), tuple(shape))
    return piece.view(dtype).view(shape)


def copy_all(
    targets: Sequence[torch.Tensor],
    sources: Sequence[torch.Tensor],
    on_copied: Callable[[int], None] | None = None,
) -> None:
    """Copy every source into its target: same shapes and dtypes, any devices.

    Returns when the bytes are there. Sources are read in the order of the current stream of their device.

    Args:
        on_copied: called after each piece with the number of leading targets that are complete. On CUDA it is
            called once, at the end, since copies complete asynchronously.
    """
    devices = {t.device for pair in zip(targets, sources, strict=True) for t in pair if t.device.type == "cuda"}
    if devices:
        _copy_through_streams(targets, sources, devices)
        if on_copied is not None:
            on_copied(len(targets))
        return
    start, pending = 0, 0
    for index, target in enumerate(targets):
        pending += target.nbytes
        if pending >= _PIECE or index == len(targets) - 1:
            _copy(targets[start : index + 1], sources[start : index + 1])
            start, pending = index + 1, 0
            if on_copied is not None:
                on_copied(start)


def _copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], *, non_blocking: bool = False) -> None:
    plain_targets, plain_sources = [], []
    for target, source in zip(targets, sources, strict=True):
        if target.dtype in _BYTE_COPIED:
            as_bytes(target).copy_(as_bytes(source.contiguous()), non_blocking=non_blocking)
        else:
            plain_targets.append(target)
            plain_sources.append(source)
    if plain_targets:
        with torch.no_grad():
            torch._foreach_copy_(plain_targets, plain_sources, non_blocking=non_blocking)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory as 1-D uint8; no copy."""
    out = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    start = tensor.storage_offset() * tensor.dtype.itemsize
    return out.set_(tensor.untyped_storage(), start, (tensor.numel() * tensor.dtype.itemsize,))


def _copy_through_streams(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], devices: set[torch.device]
) -> None:
    # A stream of its own per device: the copy waits for what was queued before, and nothing queued after
    # waits for the copy.
    streams = {}
    for device in devices:
        streams[device] = torch.cuda.Stream(device=device)
        streams[device].wait_stream(torch.cuda.current_stream(device))
    by_device: dict[torch.device | None, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        device = next((t.device for t in (source, target) if t.device.type == "cuda"), None)
        pair = by_device.setdefault(device, ([], []))
        pair[0].append(target)
        pair[1].append(source)
    for device, (to, of) in by_device.items():
        if device is None:
            _copy(to, of)
            continue
        with torch.cuda.stream(streams[device]):
            _copy(to, of, non_blocking=True)
    for stream in streams.values():
        stream.synchronize()
