"""Thousands of tensors handed on without a step of Python for each. Owns nothing else."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, overload

import torch

T = TypeVar("T")


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


def with_aliases(items: Sequence[tuple[str, torch.Tensor]], begin: int) -> NamedTensors:
    """The same names, and from number ``begin`` on other tensors of the same memory: they keep it where a program gives
    a tensor of its own other data, which no version counter tells."""
    names = items.names if isinstance(items, NamedTensors) else [name for name, _ in items]
    tensors = tensors_of(items)
    return NamedTensors(names, [*tensors[:begin], *map(torch.Tensor.detach, tensors[begin:])])


class Picked(Sequence[T]):
    """Elements of a sequence, taken when they are asked for.

    Args:
        values: does not change any more.
        indices: of these.
    """

    def __init__(self, values: Sequence[T], indices: Sequence[int]) -> None:
        self._values, self._indices = values, indices

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> list[T]: ...

    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self._values[each] for each in self._indices[index]]
        return self._values[self._indices[index]]
