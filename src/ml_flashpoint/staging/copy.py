"""How bytes get into an arena and out of it: one copy, in few calls, with the GIL released.

Owns the copy itself on the CPU, and the views that it copies through. What is on devices is `device_copy`'s. Where
tensors go in an arena is the layout's business (`format.object_format`); what is done with the bytes afterwards is the
saver's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

import torch

from ml_flashpoint.format.errors import InvalidArgumentError
from ml_flashpoint.staging import copy_threads, cuda
from ml_flashpoint.staging.device_copy import copy_through_lanes
from ml_flashpoint.staging.transfer_plan import Memo

# The copy is cut into pieces of about this many bytes, for several threads, and for digests to follow close behind.
_PIECE = 8 << 20
_NO_KERNEL = frozenset(
    dtype
    for name in (
        "float4_e2m1fn_x2", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2",
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
    )
    if isinstance(dtype := getattr(torch, name, None), torch.dtype)
)  # fmt: skip
"""dtypes for which torch has no copy kernel, or had none: they are copied as integers of the same size."""
_INTEGER = {1: torch.uint8, 2: torch.int16}
_dtype = attrgetter("dtype")


def typed_view(data: torch.Tensor, begin: int, end: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Bytes ``begin:end`` of a 1-D uint8 tensor as a contiguous tensor; no copy.

    ``begin`` must be aligned to the dtype's size, relative to the memory of ``data``.
    """
    piece = data[begin:end]
    if dtype is torch.uint8:
        return piece.view(shape)
    return piece.view(dtype).view(shape)


def view_identity(tensor: torch.Tensor) -> tuple[object, ...]:
    """Equal for two plain strided tensors that are one and the same: memory, how it is read, and all. Not for those
    without elements, which have no memory."""
    lazily = (tensor.is_conj(), tensor.is_neg())  # these bits are of the view, and its memory does not know of them
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device, *lazily


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive tensors that are copied by one call: those numbered ``start`` up to ``stop``.

    ``done`` is the number of bytes of all tensors up to ``stop``.
    """

    start: int
    stop: int
    done: int


def cut(sizes: Iterable[int], nbytes: int = _PIECE) -> list[Piece]:
    """Cut tensors of these sizes, in bytes, into pieces of about ``nbytes``. A larger tensor is a piece of its own."""
    pieces: list[Piece] = []
    start = pending = done = count = 0
    for count, size in enumerate(sizes, 1):
        if size >= nbytes and pending:
            pieces.append(Piece(start, count - 1, done))
            start, pending = count - 1, 0
        pending += size
        done += size
        if pending >= nbytes:
            pieces.append(Piece(start, count, done))
            start, pending = count, 0
    if start < count:
        pieces.append(Piece(start, count, done))
    return pieces


def copy_all(
    targets: Sequence[torch.Tensor],
    sources: Sequence[torch.Tensor],
    on_copied: Callable[[int, int], None] | None = None,
    pieces: Sequence[Piece] | None = None,
    memo: Memo | None = None,
) -> None:
    """Copy every source into its target: same shapes, any devices and strides; dtypes are converted as ``copy_`` does.

    Returns when the bytes are there. Sources are read in the order of the current stream of their device.

    Args:
        on_copied: called with which bytes are complete, from where to where, of all targets one behind the other. By
            several threads, in any order. On CUDA it is called once, at the end, since copies complete asynchronously.
        pieces: what :func:`cut` made of the targets' sizes, if that is known already.
        memo: see `copy_through_lanes`.
    """
    if len(targets) != len(sources):
        raise InvalidArgumentError("must be as many as the targets", argument="sources", value=len(sources))
    if pieces is None:
        pieces = cut(target.nbytes for target in targets)
    if cuda.are_on_devices(itertools.chain(sources, targets)):
        copy_through_lanes(targets, sources, _copy, memo)
        if on_copied is not None and pieces:
            on_copied(0, pieces[-1].done)
        return
    nbytes = pieces[-1].done if pieces else 0
    jobs = (partial(_copy_slice, each, on_copied) for each in _slices(targets, sources, pieces))
    if nbytes >= copy_threads.MIN_BYTES:
        copy_threads.run(jobs, nbytes)
    else:
        for job in jobs:
            job()


@dataclass(frozen=True, slots=True)
class _Slice:
    """What is copied by one call: bytes ``begin:end`` of all targets, one behind the other."""

    targets: Sequence[torch.Tensor]
    sources: Sequence[torch.Tensor]
    begin: int
    end: int


def _slices(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], pieces: Sequence[Piece]
) -> Iterator[_Slice]:
    """The pieces that :func:`cut` made, one after the other, those of one large tensor in parts."""
    begin = 0
    for piece in pieces:
        to, of = targets[piece.start : piece.stop], sources[piece.start : piece.stop]
        if len(to) > 1 or to[0].nbytes <= _PIECE or not (to[0].is_contiguous() and of[0].is_contiguous()):
            yield _Slice(to, of, begin, piece.done)
        else:
            flat_to, flat_of = to[0].view(-1), of[0].detach().view(-1)
            itemsize = flat_to.element_size()
            step = max(1, _PIECE // itemsize)
            for at in range(0, flat_to.numel(), step):
                end = min(at + step, flat_to.numel())
                yield _Slice([flat_to[at:end]], [flat_of[at:end]], begin + at * itemsize, begin + end * itemsize)
        begin = piece.done


def _copy_slice(part: _Slice, on_copied: Callable[[int, int], None] | None) -> None:
    _copy(part.targets, part.sources)
    if on_copied is not None:
        on_copied(part.begin, part.end)


def cpu_clone(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy on the CPU, in memory of its own; of any dtype."""
    return cpu_clones([tensor])[0]


def cpu_clones(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same of several."""
    clones = [torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu") for tensor in tensors]
    copy_all(clones, tensors)
    return clones


def _copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    if not _NO_KERNEL.isdisjoint(map(_dtype, targets)):  # without a step of Python for each of thousands
        pairs = [_copyable(target, source) for target, source in zip(targets, sources, strict=True)]
        targets, sources = [target for target, _ in pairs], [source for _, source in pairs]
    if any(map(torch.Tensor.is_conj, targets)) or any(map(torch.Tensor.is_neg, targets)):
        pairs = [_unlazy(target, source) for target, source in zip(targets, sources, strict=True)]
        targets, sources = [target for target, _ in pairs], [source for _, source in pairs]
    if targets:
        _check_memory(targets, "targets")
        _check_memory(sources, "sources")
        with torch.no_grad():
            torch._foreach_copy_(list(targets), list(sources))


def _check_memory(tensors: Sequence[torch.Tensor], argument: str) -> None:
    """Refuse tensors whose memory was let go of, as offloading does by ``resize_(0)`` of a storage: torch does not
    look, and to read them ends the process."""
    try:
        all_there = 0 not in map(torch.Tensor.data_ptr, tensors)
    except RuntimeError:  # of a kind that has no memory of its own
        return
    if not all_there and any(not each.data_ptr() and each.numel() and not each.is_meta for each in tensors):
        raise InvalidArgumentError("a tensor has elements and no memory", argument=argument)


def _copyable(target: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # Only where no conversion is asked for: torch has none either, and says so.
    if target.dtype in _NO_KERNEL and source.dtype == target.dtype:
        integer = _INTEGER[target.dtype.itemsize]
        return target.view(integer), source.view(integer)
    return target, source


def _unlazy(target: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # torch's copy of several refuses targets whose memory is read conjugated or negated: change the source instead.
    if target.is_conj():
        target, source = target.conj(), source.conj()
    if target.is_neg():
        target, source = torch._neg_view(target), torch._neg_view(source.to(target.dtype))
    return target, source
