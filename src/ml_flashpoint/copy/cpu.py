"""The copy on the CPU: a list of tensors into a list of others, in few calls of torch, by as many threads as help.

The pieces that the threads take are those that digests follow. For tensors on devices see `transfers`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from functools import partial

import torch

from ml_flashpoint.copy import cuda
from ml_flashpoint.copy.dtypes import as_integers
from ml_flashpoint.copy.transfers import copy_through_streams
from ml_flashpoint.format import knobs
from ml_flashpoint.format.digest import run_on_pool
from ml_flashpoint.format.errors import InvalidArgumentError, LoadError

PIECE = 8 << 20
"""Bytes that one thread copies at a time."""
_MAX_THREADS = 8  # more do not help: memory bandwidth is used up


def typed_view(data: torch.Tensor, begin: int, end: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Return bytes ``begin:end`` of a 1-D uint8 tensor as a contiguous tensor; no copy. They must be aligned to the
    dtype's size."""
    return data[begin:end].view(dtype).view(shape)


def view_identity(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a key that two plain strided tensors with elements share only if they are the same view of one memory."""
    lazily = (tensor.is_conj(), tensor.is_neg())  # these bits are of the view, and its memory does not know of them
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device, *lazily


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive tensors that one call copies, ``start`` up to ``stop``. Those up to ``stop`` have ``done`` bytes."""

    start: int
    stop: int
    done: int


def cut(sizes: Iterable[int], nbytes: int = PIECE) -> list[Piece]:
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


def threads_for(nbytes: int) -> int:
    """Return the number of threads that copy so many bytes: one a piece, up to this rank's share of the cores, and to
    eight, or ``FLASHPOINT_COPY_THREADS``. Where torch has several threads of its own, one thread calls it."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")  # of torchrun
    ranks_here = int(text) if text.isascii() and text.isdecimal() and len(text) < 6 else 1
    limit = knobs.copy_threads() or min(_MAX_THREADS, len(os.sched_getaffinity(0)) // max(1, ranks_here))
    if torch.get_num_threads() > 1:
        limit = 1
    return max(1, min(limit, nbytes // PIECE))


def copy_all(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], pieces: Sequence[Piece] | None = None
) -> None:
    """Copy every source into its target: same shapes, any devices and strides; dtypes are converted as ``copy_`` does.

    Returns when the bytes are there. Sources are read in the order of the current stream of their device.

    Args:
        pieces: the result of :func:`cut` for the targets' sizes, if the caller has it.

    Raises:
        LoadError: elements of a target share memory, and the source has different values for them.
    """
    if not all(map(torch.Tensor.is_contiguous, targets)):
        targets, sources = _copy_overlapping(targets, sources)
        pieces = None
    if cuda.are_on_devices(itertools.chain(sources, targets)):
        copy_through_streams(targets, sources, _copy_on_host)
    else:
        _copy_on_host(targets, sources, pieces)


def cpu_clone(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy on the CPU, in memory of its own; of any dtype."""
    return cpu_clones([tensor])[0]


def cpu_clones(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return contiguous copies on the CPU, each in memory of its own; of any dtypes."""
    clones = [torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu") for tensor in tensors]
    copy_all(clones, tensors)
    return clones


def _copy_on_host(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], pieces: Sequence[Piece] | None = None
) -> None:
    if pieces is None:
        pieces = cut(target.nbytes for target in targets)
    _do_all(_jobs(targets, sources, pieces), threads_for(pieces[-1].done if pieces else 0))


def _jobs(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], pieces: Sequence[Piece]
) -> Iterator[Callable[[], None]]:
    """Yield a job for each piece, and for each part of a large tensor."""
    for piece in pieces:
        to, of = targets[piece.start : piece.stop], sources[piece.start : piece.stop]
        if len(to) > 1 or to[0].nbytes <= PIECE or not (to[0].is_contiguous() and of[0].is_contiguous()):
            yield partial(_copy, to, of)
        else:
            flat_to, flat_of = to[0].view(-1), of[0].detach().view(-1)
            step = max(1, PIECE // flat_to.element_size())
            for at in range(0, flat_to.numel(), step):
                yield partial(_copy, [flat_to[at : at + step]], [flat_of[at : at + step]])


def _copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy tensors on the CPU by one call of torch."""
    if not targets:
        return
    _check_memory(targets, "targets")
    _check_memory(sources, "sources")
    with torch.no_grad():
        # `_foreach_copy_` refuses lazy targets, and torch has no kernels for some dtypes; old releases say so untyped.
        if not any(map(torch.Tensor.is_conj, targets)) and not any(map(torch.Tensor.is_neg, targets)):
            with contextlib.suppress(RuntimeError):
                torch._foreach_copy_(list(targets), list(sources))
                return
        for target, source in zip(targets, sources, strict=True):
            try:
                target.copy_(source)
            except RuntimeError:
                if target.dtype != source.dtype:
                    raise
                as_integers(target).copy_(as_integers(source))


def _check_memory(tensors: Sequence[torch.Tensor], argument: str) -> None:
    """Refuse tensors whose storage was emptied by ``resize_(0)``, as offloading does: reading one ends the process."""
    try:
        all_there = 0 not in map(torch.Tensor.data_ptr, tensors)
    except RuntimeError:  # of a kind that has no memory of its own
        return
    if not all_there and any(not each.data_ptr() and each.numel() and not each.is_meta for each in tensors):
        raise InvalidArgumentError("a tensor has elements and no memory", argument=argument)


def _do_all(jobs: Iterator[Callable[[], None]], threads: int) -> None:
    """Do jobs on this thread and some of the pool. End, or raise, once no thread is at work: the memory may go then."""
    if threads == 1:
        for job in jobs:
            job()
        return
    inference = torch.is_inference_mode_enabled()  # of a thread each, and says what may be written to
    taking, failures = threading.Lock(), list[BaseException]()

    def work() -> None:
        with torch.inference_mode(inference):
            while not failures:
                try:
                    with taking:
                        job = next(jobs, None)
                    if job is None:
                        return
                    job()
                except BaseException as error:
                    failures.append(error)

    helpers = []
    try:
        helpers = [run_on_pool(work) for _ in range(threads - 1)]
        work()
    except BaseException as error:
        failures.append(error)
    while True:
        try:
            wait([helper for helper in helpers if helper is not None and not helper.cancel()])
            break
        except BaseException as error:
            failures.append(error)
    if failures:
        raise failures[0]


# ---- targets whose elements share memory ------------------------------------------------------------------------


def _copy_overlapping(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Copy into the targets whose elements share memory, as those of an expanded one do. Return the other pairs."""
    others: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
    for target, source in zip(targets, sources, strict=True):
        if _may_overlap(target):
            with torch.no_grad():
                _write_by_place(target.detach(), source.detach().to(target))
        else:
            others[0].append(target)
            others[1].append(source)
    return others


def _may_overlap(tensor: torch.Tensor) -> bool:
    """Return False only if no two elements of a strided tensor share memory."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return tensor.numel() > 0
            reach += (size - 1) * stride
    return False


def _write_by_place(target: torch.Tensor, source: torch.Tensor) -> None:
    """Write each place of the memory once, then check that every element has the value of its source."""
    if target.is_conj():
        target, source = target.conj(), source.conj()
    if target.is_neg():
        target, source = torch._neg_view(target), torch._neg_view(source)
    to, of = as_integers(target), as_integers(source.resolve_conj().resolve_neg())
    span = 1 + sum((size - 1) * stride for size, stride in zip(to.shape, to.stride(), strict=True))
    places = torch.arange(span, dtype=torch.int64, device=to.device).as_strided(to.shape, to.stride())
    to.as_strided((span,), (1,), to.storage_offset())[places.reshape(-1)] = of.reshape(-1)
    if not torch.equal(to, of):
        raise LoadError(
            f"elements of a tensor of shape {tuple(target.shape)} and strides {target.stride()} share memory, and the"
            " version has different values for them",
            hint="load into a tensor whose elements have memory of their own: clone() it, or contiguous()",
        )
