"""Which memory belongs to tensors that an optimizer updates: theirs, and that of views of them.

Owns telling whether all of a tensor's memory does. States hold more than the tensors themselves: shards, chunks for a
layout of their own, slices of what is kept in one piece.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor


class OwnedMemory:
    """See the module. Good for as long as nothing moves.

    Args:
        owners: the tensors, or the `DTensor` of which this rank's part is meant. All have elements.
    """

    def __init__(self, owners: Iterable[torch.Tensor]) -> None:
        self._exact: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        spans = list[tuple[int, int, int, torch.Tensor]]()
        for owner in owners:
            local = owner._local_tensor if isinstance(owner, DTensor) else owner
            begin, end = _span(local)
            self._exact[begin] = local, owner
            if end - begin == local.nbytes:  # else there is memory in between that is not its own
                spans.append((begin, -end, len(spans), owner))
        self._begins, self._ends, self._owners = list[int](), list[int](), list[torch.Tensor]()
        for begin, negative_end, _, owner in sorted(spans):
            if not self._ends or -negative_end > self._ends[-1]:  # none within another
                self._begins.append(begin)
                self._ends.append(-negative_end)
                self._owners.append(owner)

    def owner_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The owner of all of a tensor's memory; None if there is no such."""
        if not self._exact or not tensor.numel():
            return None
        local, owner = self._exact.get(tensor.data_ptr(), (None, None))
        if local is not None and _is_seen_alike(local, tensor):
            return owner
        begin, end = _span(tensor)
        at = bisect_right(self._begins, begin) - 1
        return self._owners[at] if at >= 0 and end <= self._ends[at] else None


def _is_seen_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.stride() == other.stride() and one.dtype is other.dtype


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor's memory begins and ends, with what is in between."""
    begin = tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()
