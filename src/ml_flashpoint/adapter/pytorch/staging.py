"""A state that DCP stages: its tensors taken out (`TensorLeaves`), and the state built anew around their copies."""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import Shard  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor

from ml_flashpoint.copy import cuda
from ml_flashpoint.copy.cpu import view_identity
from ml_flashpoint.copy.tensors import is_plain_strided, materialized, storable_name, whole_copy
from ml_flashpoint.format.errors import NotStagedError
from ml_flashpoint.state.plan import Tree
from ml_flashpoint.state.private import ShardedTensor, tree_unflatten

_IMMUTABLE = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_CONTAINERS = frozenset({dict, OrderedDict, defaultdict, list, tuple})


class LeftOut(torch.Tensor):
    """A stand-in for a tensor that is not staged. It has no data, and a planner cannot pickle it."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> LeftOut:
        """Return one of a tensor's shape and dtype."""
        return torch.empty_like(tensor, device="meta").as_subclass(cls)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NotStagedError(f"a tensor of shape {tuple(self.shape)} has no data: another rank used to write it")


@dataclass(frozen=True, eq=False, slots=True)
class Places:
    """The places of plain tensors in states of one structure: number of the leaf that each is of, and its path, such as
    ``optim.state.0.exp_avg``: DCP's name, when it flattens."""

    structure: object
    numbers: list[int]
    paths: list[str]


class TensorLeaves:
    """The plain tensors of a state dict, local parts of `DTensor` and `ShardedTensor` among them. The rest is copied.

    Args:
        before: places of the save before, which are taken where the structure is the same.

    Attributes:
        tensors: the tensors, without history; each memory once.
        indices: for each place of a plain tensor, which of ``tensors`` is there.

    Raises:
        Exception: a value cannot be copied, for whatever reason that has.
    """

    def __init__(self, state_dict: Mapping[str, Any], before: Places | None = None) -> None:
        tree = self._tree = _flattened(state_dict)
        self._before = before
        self._values = list(tree.leaves)
        self._numbers: list[int] = []  # of the leaf that each plain tensor is of
        tensors: list[torch.Tensor] = []
        for number, leaf in enumerate(tree.leaves):
            if isinstance(leaf, torch.Tensor) and (parts := _parts(leaf)) is not None:
                tensors += parts
                self._numbers += [number] * len(parts)
            elif isinstance(leaf, torch.Tensor):  # a meta tensor, too: it is an error only if the plan wants it
                self._values[number] = whole_copy(leaf, _paths(tree)[number])
            elif not isinstance(leaf, _IMMUTABLE):
                self._values[number] = copy.deepcopy(leaf)
        if cuda.in_use() and any(one is not other for one, other in zip(self._values, tree.leaves, strict=True)):
            cuda.settle()
        self.indices = _each_memory_once(tensors)
        self._first: dict[int, int] = {}
        for place, index in enumerate(self.indices):
            self._first.setdefault(index, place)
        self.tensors = [tensors[place] for place in self._first.values()]

    @functools.cached_property
    def places(self) -> Places:
        """The places: the same object as before while nothing but content has changed."""
        tree, before = self._tree, self._before
        if before is not None and before.numbers == self._numbers and before.structure == tree.structure:
            return before
        paths = _paths(tree)
        return Places(tree.structure, self._numbers, [paths[number] for number in self._numbers])

    @property
    def names(self) -> list[str]:
        """A name for each tensor, as the format takes it; unique."""
        names = [storable_name(self.places.paths[place]) for place in self._first.values()]
        return names if len(set(names)) == len(names) else [f"{name}#{number}" for number, name in enumerate(names)]

    def rebuild(self, copies: Mapping[int, torch.Tensor]) -> dict[str, Any]:
        """Return the state dict with ``copies[i]`` in the place of ``tensors[i]``, or else a `LeftOut`."""
        parts: dict[int, list[torch.Tensor]] = {}
        for number, index in zip(self._numbers, self.indices, strict=True):
            copied = copies.get(index)
            parts.setdefault(number, []).append(LeftOut.of(self.tensors[index]) if copied is None else copied)
        for number, found in parts.items():
            self._values[number] = _rebuilt(self._tree.leaves[number], found)
        built: dict[str, Any] = tree_unflatten(self._values, self._tree.spec)
        return built


def _flattened(state_dict: Mapping[str, Any]) -> Tree:
    """Return a state as a tree. Mappings of other types become dictionaries, other containers are copied whole."""
    tree = Tree(state_dict, _is_leaf)
    while any(isinstance(leaf, Mapping) for leaf in tree.leaves):
        leaves = [dict(leaf) if isinstance(leaf, Mapping) else leaf for leaf in tree.leaves]
        tree = Tree(tree_unflatten(leaves, tree.spec), _is_leaf)
    return tree


def _is_leaf(value: Any) -> bool:
    return type(value) not in _CONTAINERS


def _parts(tensor: torch.Tensor) -> list[torch.Tensor] | None:
    """Return the plain tensors that are all there is to a tensor on this rank; None if there is more to it."""
    if isinstance(tensor, ShardedTensor):
        return [materialized(shard.tensor) for shard in tensor.local_shards()]
    local = materialized(tensor._local_tensor if isinstance(tensor, DTensor) else tensor)
    return [local] if is_plain_strided(local) and not local.is_meta else None


def _rebuilt(tensor: Any, parts: list[torch.Tensor]) -> Any:
    if isinstance(tensor, ShardedTensor):
        made = copy.copy(tensor)
        shards = zip(parts, tensor.local_shards(), strict=True)
        made._local_shards = [Shard(part, shard.metadata) for part, shard in shards]
        return made
    if isinstance(tensor, DTensor):
        return DTensor(parts[0], tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return parts[0]


def _each_memory_once(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return a number for each tensor: the same for those that are the same view of the same memory."""
    if len(set(map(torch.Tensor.data_ptr, tensors))) == len(tensors):
        return list(range(len(tensors)))
    seen: dict[object, int] = {}
    return [seen.setdefault(view_identity(t) if t.numel() else place, len(seen)) for place, t in enumerate(tensors)]


def _paths(tree: Tree) -> list[str]:
    """Return the place of each leaf. DCP refuses a mapping with two keys that are the same as text."""
    found = {number: ".".join(map(str, path)) for path, number in tree.places().items()}
    return [found.get(number, "") for number in range(len(tree.leaves))]
