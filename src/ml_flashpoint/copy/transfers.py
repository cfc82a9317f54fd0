"""Copies between host memory and CUDA devices that are over when the call returns.

A large tensor goes straight to and from host memory that is page-locked, in transfers of at most `TRANSFER` bytes: the
training step's own, which come between them, wait for no more. Everything else is packed on the device, and goes
through two page-locked buffers in turn, which the CPU fills and empties.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from ml_flashpoint.copy import cuda, pinned
from ml_flashpoint.copy.dtypes import bytes_of

TRANSFER = 32 << 20
SMALL = 1 << 20
"""Tensors of fewer bytes are packed: the call would cost more than the transfer."""

# A device copies these bit by bit. Half floats go through floats there, which changes those that are NaN.
_EXACT = frozenset(
    getattr(torch, f"{kind}{bits}")
    for kind, sizes in {"float": (32, 64), "complex": (64, 128), "int": (8, 16, 32, 64), "uint": (8,)}.items()
    for bits in sizes
)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

CopyOnHost = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None]
Pair = tuple[torch.Tensor, torch.Tensor]
"""A tensor on the host, or a part of it, and one on a device."""


def copy_through_streams(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], copy_on_host: CopyOnHost
) -> None:
    """Copy every source into its target, some of which are on devices. Return when the bytes are there.

    Args:
        copy_on_host: copies between CPU tensors.

    Raises:
        SaveError: a CUDA graph is being captured.
    """
    downs: dict[int, list[Pair]] = {}
    ups: dict[int, list[Pair]] = {}
    hosts: list[Pair] = []
    with contextlib.ExitStack() as stack:

        def begin(index: int) -> Any:
            stream = cuda.stream(index, "now")
            stream.start()
            pinned.note_device(index)
            stack.callback(lambda: stream.event().wait())
            return stream

        for target, source, to, of in zip(targets, sources, cuda.indices(targets), cuda.indices(sources), strict=True):
            if not target.numel():
                continue
            if to >= 0 and of >= 0:
                begin(of).do(partial(target.copy_, source, non_blocking=True))
            elif of >= 0:
                downs.setdefault(of, []).append((target, source))
            elif to >= 0:
                ups.setdefault(to, []).append((source, target))
            else:
                hosts.append((target, source))
        for index, pairs in downs.items():
            _copy_down(begin(index), pairs, copy_on_host)
        for index, pairs in ups.items():
            _copy_up(begin(index), pairs, copy_on_host)
        copy_on_host([target for target, _ in hosts], [source for _, source in hosts])


def transfers(host: torch.Tensor, device: torch.Tensor) -> list[Pair] | None:
    """Return the transfers that move a tensor straight to or from host memory, as bytes; None if it must not go so.

    It may if both are contiguous, of one dtype and not small, and the host's memory is page-locked.
    """
    if host.nbytes < SMALL or host.dtype != device.dtype or not (_is_plain(host) and _is_plain(device)):
        return None
    pairs = list(_cut(host, device))
    return pairs if all(pinned.is_locked(here.data_ptr(), here.nbytes) for here, _ in pairs) else None


def _cut(host: torch.Tensor, device: torch.Tensor) -> Iterator[Pair]:
    """Cut two contiguous tensors of one dtype into pairs of bytes, each within one slice of page-locked memory."""
    here, there, begin = bytes_of(host), bytes_of(device), host.data_ptr()
    for first, last in pinned.slices(begin, begin + host.nbytes, TRANSFER):
        yield here[first - begin : last - begin], there[first - begin : last - begin]


def _copy_down(stream: Any, pairs: Sequence[Pair], copy_on_host: CopyOnHost) -> None:
    """Copy from the device."""
    pieces: list[Pair] = []
    after: list[Pair] = []
    for host, device in pairs:
        if (straight := transfers(host, device)) is not None:
            for here, there in straight:
                stream.do(partial(here.copy_, there, non_blocking=True))
            continue
        is_large = host.nbytes > TRANSFER
        if _is_lazy(device) or device.dtype != host.dtype or (is_large and not _is_plain(device)):
            made = stream.empty(host.shape, host.dtype)
            stream.do(partial(_copy_on_device, made, device))
            device = made
        if is_large and not _is_plain(host):
            after.append((host, host := torch.empty(host.shape, dtype=host.dtype, device="cpu")))
        pieces += _cut(host, device) if is_large else [(host, device)]

    def unpack(batch: list[Pair], slab: torch.Tensor, event: Any) -> None:
        event.wait()
        here = [host for host, _ in batch]
        copy_on_host(here, cuda.views_like(slab, here))

    packed: tuple[list[Pair], torch.Tensor, Any] | None = None
    for batch, slab in _batches(stream, pieces):
        _pack(stream, slab, [_bits(device) for _, device in batch])
        before, packed = packed, (batch, slab, stream.event())
        if before is not None:
            unpack(*before)
    if packed is not None:
        unpack(*packed)
    copy_on_host([host for host, _ in after], [made for _, made in after])


def _copy_up(stream: Any, pairs: Sequence[Pair], copy_on_host: CopyOnHost) -> None:
    """Copy to the device."""
    pieces: list[Pair] = []
    after: list[Pair] = []
    for host, device in pairs:
        if (straight := transfers(host, device)) is not None:
            for here, there in straight:
                stream.do(partial(there.copy_, here, non_blocking=True))
            continue
        is_large = device.nbytes > TRANSFER
        if is_large and not (_is_plain(host) and host.dtype == device.dtype):
            made = torch.empty(device.shape, dtype=device.dtype, device="cpu")
            copy_on_host([made], [host])
            host = made
        if _is_lazy(device) or (is_large and not _is_plain(device)):
            after.append((device, device := stream.empty(device.shape, device.dtype)))
        pieces += _cut(host, device) if is_large else [(host, device)]
    busy: dict[int, Any] = {}
    for batch, slab in _batches(stream, pieces):
        if (event := busy.get(slab.data_ptr())) is not None:
            event.wait()
        views = cuda.views_like(slab, [device for _, device in batch])
        copy_on_host(views, [host for host, _ in batch])
        _unpack(stream, slab, [_bits(device) for _, device in batch])
        busy[slab.data_ptr()] = stream.event()
    for device, made in after:
        stream.do(partial(_copy_on_device, device, made))


def _batches(stream: Any, pieces: Sequence[Pair]) -> Iterator[tuple[list[Pair], torch.Tensor]]:
    """Yield pieces of one dtype each, of `TRANSFER` bytes at most, and by turns one of two buffers for them."""
    groups: dict[torch.dtype, list[list[Pair]]] = {}
    room: dict[torch.dtype, int] = {}
    for piece in pieces:
        device = piece[1]
        left = room.get(device.dtype, 0) - device.nbytes
        if left < 0:
            groups.setdefault(device.dtype, []).append([])
            left = TRANSFER - device.nbytes
        groups[device.dtype][-1].append(piece)
        room[device.dtype] = left
    batches = [batch for group in groups.values() for batch in group]
    sizes = [sum(device.nbytes for _, device in batch) for batch in batches]
    slabs = [stream.pinned(max(sizes)) for _ in batches[:2]]
    for turn, (batch, nbytes) in enumerate(zip(batches, sizes, strict=True)):
        yield batch, slabs[turn % 2][:nbytes].view(batch[0][1].dtype)


def _pack(stream: Any, slab: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    """Copy tensors of the device into a buffer of the host, by one transfer."""
    try:
        packed = stream.empty(slab.shape, tensors[0].dtype)
    except torch.OutOfMemoryError:
        for view, tensor in zip(cuda.views_like(_bits(slab), tensors), tensors, strict=True):
            stream.do(partial(view.copy_, tensor, non_blocking=True))
        return
    stream.do(lambda: torch._foreach_copy_([*cuda.views_like(packed, tensors)], tensors))
    stream.do(lambda: _bits(slab).copy_(packed, non_blocking=True))


def _unpack(stream: Any, slab: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    """Copy a buffer of the host into tensors of the device, by one transfer."""
    try:
        packed = stream.empty(slab.shape, tensors[0].dtype)
    except torch.OutOfMemoryError:
        for view, tensor in zip(cuda.views_like(_bits(slab), tensors), tensors, strict=True):
            stream.do(partial(tensor.copy_, view, non_blocking=True))
        return
    stream.do(lambda: packed.copy_(_bits(slab), non_blocking=True))
    stream.do(lambda: torch._foreach_copy_(tensors, [*cuda.views_like(packed, tensors)]))


def _copy_on_device(target: torch.Tensor, source: torch.Tensor) -> None:
    if target.dtype == source.dtype and not (_is_lazy(target) or _is_lazy(source)):
        target, source = _bits(target), _bits(source)  # torch has no kernels for some dtypes
    target.copy_(source)


def _is_lazy(tensor: torch.Tensor) -> bool:
    return tensor.is_conj() or tensor.is_neg()


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not _is_lazy(tensor)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype in _EXACT else tensor.view(_INTEGERS[tensor.dtype.itemsize])
