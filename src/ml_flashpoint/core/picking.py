"""Thousands of tensors handed on without a step of Python for each. Owns nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import torch


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
