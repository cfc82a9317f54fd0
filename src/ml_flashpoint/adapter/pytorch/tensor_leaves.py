"""The tensors of a nested state dict: `TensorLeaves` takes them out, and builds the state anew around copies of them.

Plain tensors count, and the local parts of `DTensor` and `ShardedTensor`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor

from ml_flashpoint.copy import cuda
from ml_flashpoint.copy.cpu import view_identity
from ml_flashpoint.copy.tensors import is_plain_strided, materialized, storable_name, whole_copy

_IMMUTABLE = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_COPY = -1


class TensorLeaves:
    """The plain tensors of a state dict, and how to build it anew around others.

    Few objects are made for each tensor, and none that Python's garbage collector looks at: states have tens of
    thousands of them, and its passes over all objects of the process would take longer than the copy.

    Args:
        state_dict: a nested state dict of mappings, lists and tuples. It must stay as it is until :meth:`rebuild`.

    Attributes:
        tensors: the tensors, without history; each memory once.
        paths: the place of each tensor, for example ``optim.state.0.exp_avg``: DCP's names, when it flattens.
        indices: for each of these places, which of ``tensors`` is there.
        others: places of everything else.
        error: the first value that could not be copied, and so is None in what is built; or None.
    """

    def __init__(self, state_dict: Mapping[str, Any]) -> None:
        self.tensors: list[torch.Tensor] = []
        self.paths: list[str] = []
        self.indices: list[int] = []
        self.others: list[str] = []
        self.error: Exception | None = None
        self._first_paths: list[str] = []
        # For each leaf, in the order met: which tensor it is, or that it is the next of the copies.
        self._leaves: list[int] = []
        self._copies: list[Any] = []
        self._by_address: dict[int, int] = {}
        self._more_by_address: dict[int, list[int]] = {}
        self._state = state_dict
        self._collect(state_dict, None)
        if cuda.in_use() and any(not isinstance(value, (torch.Tensor, *_IMMUTABLE)) for value in self._copies):
            cuda.settle()

    @property
    def names(self) -> list[str]:
        """A name for each tensor, as the format takes it; unique."""
        return _unique([storable_name(path) for path in self._first_paths])

    @property
    def structure(self) -> tuple[object, ...]:
        """Equal for two states exactly if they have the same kinds of tensors in the same places in the same order,
        and other values in the same places."""
        tensors = self.tensors
        return self.paths, self.indices, self.others, [t.dtype for t in tensors], [t.shape for t in tensors]

    def rebuild(self, replacements: Sequence[torch.Tensor]) -> dict[str, Any]:
        """The state dict with ``replacements[i]`` in the place of ``tensors[i]``; to be called once.

        Values that are neither tensors nor immutable were copied, so that the result does not change any more.
        """
        built = self._build(self._state, iter(self._leaves), iter(self._copies), replacements)
        assert isinstance(built, dict)
        return built

    def _collect(self, value: Any, path: str | None) -> None:
        if isinstance(value, torch.Tensor):
            self._collect_tensor(value, path or "")
        elif isinstance(value, Mapping):
            for key, item in value.items():
                self._collect(item, str(key) if path is None else f"{path}.{key}")
        elif type(value) in (list, tuple):
            for index, item in enumerate(value):
                self._collect(item, f"{path}.{index}")
        else:
            # The copy is made now: what the training changes later must not show up in the checkpoint.
            self._keep(value if isinstance(value, _IMMUTABLE) else self._copied(value, copy.deepcopy), path or "")

    def _collect_tensor(self, value: torch.Tensor, path: str) -> None:
        if isinstance(value, ShardedTensor):
            for number, shard in enumerate(value.local_shards()):
                self._add(materialized(shard.tensor), f"{path}.shard{number}")
            return
        plain = _memory_of(value)
        if plain is not None:
            self._add(plain, path)
        else:  # a meta tensor, too: it is an error only if the plan wants it
            self._keep(self._copied(value, lambda tensor: whole_copy(tensor, path)), path)

    def _build(self, value: Any, leaves: Iterator[int], copies: Iterator[Any], new: Sequence[torch.Tensor]) -> Any:
        """What :meth:`_collect` took apart, put together in the same order."""
        if isinstance(value, ShardedTensor):
            made = copy.copy(value)
            made._local_shards = [Shard(new[next(leaves)], shard.metadata) for shard in value.local_shards()]
            return made
        if isinstance(value, torch.Tensor):
            index = next(leaves)
            if index == _COPY:
                return next(copies)
            if isinstance(value, DTensor):
                return DTensor(new[index], value._spec, requires_grad=False)  # type: ignore[no-untyped-call]
            return new[index]
        if isinstance(value, Mapping):
            return {key: self._build(item, leaves, copies, new) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)([self._build(item, leaves, copies, new) for item in value])
        next(leaves)
        return next(copies)

    def _add(self, tensor: torch.Tensor, path: str) -> None:
        index = len(self.tensors)
        if tensor.numel():
            address = tensor.data_ptr()
            index = self._by_address.setdefault(address, index)
            if index < len(self.tensors) and not _same(tensor, self.tensors[index]):
                # Another view of memory that was seen before: seldom, and then there may be more of them.
                known = self._more_by_address.setdefault(address, [])
                index = next((i for i in known if _same(tensor, self.tensors[i])), len(self.tensors))
                if index == len(self.tensors):
                    known.append(index)
        if index == len(self.tensors):
            self.tensors.append(tensor)
            self._first_paths.append(path)
        self.paths.append(path)
        self.indices.append(index)
        self._leaves.append(index)

    def _copied(self, value: Any, copier: Callable[[Any], Any]) -> Any:
        try:
            return copier(value)
        except Exception as error:  # of whatever kind a value's own copying raises
            self.error = self.error or error
            return None

    def _keep(self, value: Any, path: str) -> None:
        self.others.append(path)
        self._leaves.append(_COPY)
        self._copies.append(value)


def _memory_of(value: torch.Tensor) -> torch.Tensor | None:
    """The plain tensor that is all there is to a tensor on this rank, None if there is more to it, or nothing."""
    local = materialized(value._local_tensor if isinstance(value, DTensor) else value)
    return local if is_plain_strided(local) and not local.is_meta else None


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors at one address are the same."""
    return view_identity(one) == view_identity(other)


def _unique(names: list[str]) -> list[str]:
    """The names, with a number appended to those that occur more than once."""
    if len(set(names)) == len(names):
        return names
    known, used = set(names), set()
    result: list[str] = []
    for index, name in enumerate(names):
        while name in used:
            name = next(f"{name}#{n}" for n in range(index, index + len(names) + 1) if f"{name}#{n}" not in known)
            known.add(name)
        used.add(name)
        result.append(name)
    return result
