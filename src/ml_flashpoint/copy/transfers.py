"""Copies between host memory and CUDA devices that are over when the call returns.

A large tensor goes straight to and from host memory that is page-locked, in transfers of at most `TRANSFER` bytes: the
training step's own, which come between them, wait for no more. Small ones are packed on the device, and go through a
page-locked buffer, which the CPU fills or empties. Everything else is left to torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from ml_flashpoint.copy import cuda
from ml_flashpoint.copy.dtypes import as_integers, bytes_of

TRANSFER = 32 << 20
SMALL = 1 << 20
"""Tensors of fewer bytes are packed: the call would cost more than the transfer."""

CopyOnHost = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None]
Pair = tuple[torch.Tensor, torch.Tensor]
"""A tensor on the host, or a part of it, and one on a device."""


def copy_through_streams(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], copy_on_host: CopyOnHost
) -> None:
    """Copy every source into its target, some of which are on devices. Return when the bytes are there. Raises a
    `SaveError` while a CUDA graph is being captured."""
    moves: dict[tuple[int, bool], list[Pair]] = {}  # by device, and whether they go down
    hosts: list[Pair] = []
    with contextlib.ExitStack() as stack:

        def begin(index: int) -> Any:
            stream = cuda.stream(index, "now")
            stream.start()
            cuda.note_device(index)
            stack.callback(lambda: stream.event().wait())
            return stream

        for target, source, to, of in zip(targets, sources, cuda.indices(targets), cuda.indices(sources), strict=True):
            if not target.numel():
                continue
            if to >= 0 and of >= 0:
                begin(of).do(partial(target.copy_, source, non_blocking=True))
            elif of >= 0:
                moves.setdefault((of, True), []).append((target.detach(), source.detach()))
            elif to >= 0:
                moves.setdefault((to, False), []).append((source.detach(), target.detach()))
            else:
                hosts.append((target, source))
        for (index, down), pairs in moves.items():
            _move(begin(index), pairs, down, copy_on_host)
        copy_on_host([target for target, _ in hosts], [source for _, source in hosts])


def transfers(host: torch.Tensor, device: torch.Tensor) -> list[Pair] | None:
    """Return the transfers that move a tensor straight to or from host memory, as bytes; None if it must not go so.

    It may if both are contiguous, of one dtype and not small, and the host's memory is page-locked.
    """
    if host.nbytes < SMALL or not _are_alike(host, device) or not (host.is_contiguous() and device.is_contiguous()):
        return None
    here, there, begin = bytes_of(host), bytes_of(device), host.data_ptr()
    spans = cuda.slices(begin, begin + host.nbytes, TRANSFER)
    pairs = [(here[first - begin : last - begin], there[first - begin : last - begin]) for first, last in spans]
    return pairs if all(cuda.is_locked(part.data_ptr(), part.nbytes) for part, _ in pairs) else None


def _move(stream: Any, pairs: Sequence[Pair], down: bool, copy_on_host: CopyOnHost) -> None:
    """Copy from the device, or to it."""
    small: dict[torch.dtype, list[Pair]] = {}
    for host, device in pairs:
        if (straight := transfers(host, device)) is not None:
            for here, there in straight:
                stream.do(partial(_copy, here, there, down=down, non_blocking=True))
        elif host.nbytes >= SMALL or not _are_alike(host, device):
            stream.do(partial(_copy, host, device, down=down))
        else:
            pair = as_integers(host), as_integers(device)
            small.setdefault(pair[0].dtype, []).append(pair)
    for group in small.values():
        for batch in _batches(group):
            _move_together(stream, batch, down, copy_on_host)


def _copy(host: torch.Tensor, device: torch.Tensor, *, down: bool, non_blocking: bool = False) -> None:
    if _are_alike(host, device):  # torch has no kernels for some dtypes, and changes half floats that are NaN
        host, device = as_integers(host), as_integers(device)
    target, source = (host, device) if down else (device, host)
    target.copy_(source, non_blocking=non_blocking)


def _batches(pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
    """Cut tensors of one dtype into lists of `TRANSFER` bytes at most."""
    batch: list[Pair] = []
    room = TRANSFER
    for pair in pairs:
        if pair[0].nbytes > room:
            yield batch
            batch, room = [], TRANSFER
        batch.append(pair)
        room -= pair[0].nbytes
    yield batch


def _move_together(stream: Any, batch: Sequence[Pair], down: bool, copy_on_host: CopyOnHost) -> None:
    """Copy small tensors of one dtype by one transfer."""
    hosts, devices = [host for host, _ in batch], [device for _, device in batch]
    slab = stream.pinned(sum(host.nbytes for host in hosts)).view(devices[0].dtype)
    views = cuda.views_like(slab, hosts)
    if not down:
        copy_on_host(views, hosts)
    try:
        packed = stream.empty(slab.shape, slab.dtype)
    except torch.OutOfMemoryError:
        for view, device in zip(views, devices, strict=True):
            stream.do(partial(_copy, view, device, down=down, non_blocking=True))
    else:
        parts = [*cuda.views_like(packed, devices)]
        if down:
            stream.do(lambda: torch._foreach_copy_(parts, devices))
        stream.do(partial(_copy, slab, packed, down=down, non_blocking=True))
        if not down:
            stream.do(lambda: torch._foreach_copy_(devices, parts))
    stream.event().wait()
    if down:
        copy_on_host(hosts, views)


def _are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two tensors have the same bits when they are equal."""
    return one.dtype == other.dtype and not (one.is_conj() or one.is_neg() or other.is_conj() or other.is_neg())
