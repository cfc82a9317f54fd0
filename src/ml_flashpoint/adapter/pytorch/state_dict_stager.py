"""Replaces the tensors of a nested state dict by copies of them, keeping everything else as it is.

Owns what counts as a tensor leaf (plain tensors, DTensor and ShardedTensor shards) and how each kind is taken
apart and put together again. Where the copies go is the caller's business.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor

_IMMUTABLE = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


def is_plain_strided(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory is all there is to it, so that copying its elements preserves it."""
    wraps_others = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    return tensor.layout is torch.strided and not tensor.is_quantized and not wraps_others and not tensor.is_nested


@dataclass(slots=True)
class TensorLeaves:
    """The plain tensors of a state dict, and how to build it anew around others.

    Attributes:
        names: path of each tensor, for example ``optim.state.0.exp_avg``; unique.
        tensors: the tensors, detached; each memory once.
    """

    names: list[str] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    _root: Any = None
    _known: dict[tuple[Any, ...], int] = field(default_factory=dict)

    @classmethod
    def of(cls, state_dict: Mapping[str, Any]) -> TensorLeaves:
        """Find the tensors of a nested state dict of mappings, lists and tuples."""
        leaves = cls()
        leaves._root = leaves._take(state_dict, "")
        return leaves

    def rebuild(self, replacements: list[torch.Tensor]) -> dict[str, Any]:
        """The state dict with ``replacements[i]`` in the place of ``tensors[i]``.

        Values that are neither tensors nor immutable are copied, so that the result does not change any more.
        """
        built = self._root(replacements)
        assert isinstance(built, dict)
        return built

    def _take(self, value: Any, path: str) -> Callable[[list[torch.Tensor]], Any]:
        if isinstance(value, DTensor):
            return self._take_dtensor(value, path)
        if isinstance(value, ShardedTensor):
            return self._take_sharded(value, path)
        if isinstance(value, torch.Tensor) and is_plain_strided(value):
            index = self._add(value, path)
            return lambda new: new[index]
        if isinstance(value, Mapping):
            items = [(key, self._take(item, f"{path}.{key}" if path else str(key))) for key, item in value.items()]
            return lambda new: {key: build(new) for key, build in items}
        if type(value) in (list, tuple):
            parts = [self._take(item, f"{path}.{i}") for i, item in enumerate(value)]
            kind = type(value)
            return lambda new: kind(build(new) for build in parts)
        if not isinstance(value, _IMMUTABLE):
            # The copy is made now: what the training changes later must not show up in the checkpoint.
            value = copy.deepcopy(value)
        return lambda new: value

    def _add(self, tensor: torch.Tensor, path: str) -> int:
        tensor = tensor.detach()
        identity = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        if tensor.numel() and (known := self._known.get(identity)) is not None:
            return known
        index = len(self.tensors)
        if tensor.numel():
            self._known[identity] = index
        # Paths that differ only in how they are nested read alike; the number keeps them apart.
        self.names.append(path)
        self.tensors.append(tensor)
        return index

    def _take_dtensor(self, value: DTensor, path: str) -> Callable[[list[torch.Tensor]], Any]:
        local = value._local_tensor
        if hasattr(local, "wait") and not is_plain_strided(local):
            local = local.wait()  # the result of a collective still under way
        if not is_plain_strided(local):
            frozen = copy.deepcopy(value)
            return lambda new: frozen
        index = self._add(local, path)
        spec = value._spec
        return lambda new: DTensor(new[index], spec, requires_grad=False)  # type: ignore[no-untyped-call]

    def _take_sharded(self, value: ShardedTensor, path: str) -> Callable[[list[torch.Tensor]], Any]:
        shards = [(self._add(s.tensor, f"{path}.shard{i}"), s.metadata) for i, s in enumerate(value.local_shards())]

        def build(new: list[torch.Tensor]) -> ShardedTensor:
            made = copy.copy(value)
            made._local_shards = [Shard(new[index], metadata) for index, metadata in shards]
            return made

        return build


def unique_names(names: list[str]) -> list[str]:
    """The names, with a number appended to those that occur more than once."""
    seen: dict[str, int] = {}
    result = []
    for name in names:
        count = seen.get(name, 0)
        seen[name] = count + 1
        result.append(name if not count else f"{name}#{count}")
    return result
