"""A state as torch's pytree, and the comparison of two of them.

A save calls ``state_dict()`` and flattens the result each time. Names cost ten times as much as leaves, so they are
made only where the structure differs from that of the save before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ml_flashpoint.state.private import MappingKey, SequenceKey, ShardedTensor, tree_flatten, tree_flatten_with_path

Path = tuple[str | int, ...]
"""Keys of mappings as text, and places in lists: the way to a value, as DCP has it."""

_aspects = attrgetter("shape", "dtype", "layout")


def elements(numbers: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Return a function that takes these elements out of a sequence, without a step of Python for each."""
    if len(numbers) > 1:
        return itemgetter(*numbers)
    return lambda values: tuple(values[number] for number in numbers)


class Tree:
    """A nested state, flattened.

    Args:
        state: dictionaries and lists of tensors and other values.
        is_leaf: says of a value that it is no container; by default those are that torch's pytree knows.

    Attributes:
        state: the same.
        leaves: tensors and other values.
        spec: the containers and their keys; equal for two states if their leaves are in the same places.
    """

    def __init__(self, state: Mapping[str, Any], is_leaf: Callable[[Any], bool] | None = None) -> None:
        self.state = state
        self._is_leaf = is_leaf
        self.leaves, self.spec = tree_flatten(state, is_leaf)

    def places(self) -> dict[Path, int]:
        """Return the number of each leaf by its path."""
        found, _ = tree_flatten_with_path(self.state, self._is_leaf)
        return {tuple(map(_part, keys)): number for number, (keys, _) in enumerate(found)}


def _part(key: object) -> str | int:
    if isinstance(key, SequenceKey):
        return key.idx
    return str(key.key if isinstance(key, MappingKey) else key)


class Structure:
    """Everything of a state except for its content: keys, kinds, shapes, dtypes and shards.

    Args:
        tree: the state.
    """

    def __init__(self, tree: Tree) -> None:
        self._spec = tree.spec
        self._numbers = _numbers_of_tensors(tree)
        self._take = elements(self._numbers)
        tensors = self._take(tree.leaves)
        self._kinds = list(map(type, tensors))
        # A ShardedTensor has no layout to ask for.
        self._usual = elements([i for i, each in enumerate(tensors) if not isinstance(each, ShardedTensor)])
        self._aspects = list(map(_aspects, self._usual(tensors)))
        self._sharded = elements([i for i, each in enumerate(tensors) if isinstance(each, (DTensor, ShardedTensor))])
        self._shards = list(map(_shards, self._sharded(tensors)))

    def is_of(self, tree: Tree) -> bool:
        """Return True if a plan for this structure is one for another state, too."""
        if _numbers_of_tensors(tree) != self._numbers or tree.spec != self._spec:
            return False
        tensors = self._take(tree.leaves)
        if list(map(type, tensors)) != self._kinds:
            return False
        try:
            same = list(map(_aspects, self._usual(tensors))) == self._aspects
        except RuntimeError:  # a nested tensor has no shape, and no plan
            return False
        return same and list(map(_shards, self._sharded(tensors))) == self._shards


def _numbers_of_tensors(tree: Tree) -> list[int]:
    return [number for number, leaf in enumerate(tree.leaves) if isinstance(leaf, torch.Tensor)]


def _shards(value: Any) -> object:
    """Return which part of a tensor is on this rank."""
    if isinstance(value, DTensor):
        return value._spec, value._local_tensor.shape
    return value.metadata(), [(shard.metadata, shard.tensor.dtype) for shard in value.local_shards()]
