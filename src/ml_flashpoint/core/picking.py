"""Thousands of tensors handed on without a step of Python for each. Owns nothing else."""

from __future__ import annotations

import bisect
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import torch


def elements(indices: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """What takes these elements out of a sequence, in one call."""
    if len(indices) > 1:
        return operator.itemgetter(*indices)
    return lambda values: tuple(values[index] for index in indices)


class NamedTensors(Sequence[tuple[str, torch.Tensor]]):
    """Names and tensors, as pairs that are made when they are asked for.

    Args:
        names, tensors: as many.
    """

    def __init__(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
        self.names, self.tensors = names, tensors

    def __len__(self) -> int:
        return len(self.tensors)

    @overload
    def __getitem__(self, index: int) -> tuple[str, torch.Tensor]: ...

    @overload
    def __getitem__(self, index: slice) -> NamedTensors: ...

    def __getitem__(self, index: int | slice) -> tuple[str, torch.Tensor] | NamedTensors:
        if isinstance(index, slice):
            return NamedTensors(self.names[index], self.tensors[index])
        return self.names[index], self.tensors[index]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return zip(self.names, self.tensors, strict=True)


def tensors_of(items: Sequence[tuple[str, torch.Tensor]]) -> Sequence[torch.Tensor]:
    """The second of each pair."""
    return items.tensors if isinstance(items, NamedTensors) else [tensor for _, tensor in items]


class Joined(Sequence[Any]):
    """Several sequences as one, without a list of all.

    Args:
        parts: do not change any more.
    """

    def __init__(self, parts: Sequence[Sequence[Any]]) -> None:
        self._parts = parts
        self._ends = list(itertools.accumulate(map(len, parts)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return list(self)[index]
        if index < 0:
            index += len(self)
        part = bisect.bisect_right(self._ends, index)
        if index < 0 or part == len(self._parts):
            raise IndexError(index)
        return self._parts[part][index - self._ends[part] + len(self._parts[part])]

    def __iter__(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(self._parts)
