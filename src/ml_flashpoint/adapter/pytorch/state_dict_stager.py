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
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor

_IMMUTABLE = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)

Build = Callable[[list[torch.Tensor]], Any]


def is_plain_strided(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory is all there is to it, so that copying its elements preserves it."""
    wraps_others = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    return tensor.layout is torch.strided and not tensor.is_quantized and not wraps_others and not tensor.is_nested


def settled(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor, detached, whose memory says what its elements are: no collective under way, no lazy conjugate."""
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor = tensor.wait()
    tensor = tensor.detach()
    return tensor.resolve_conj().resolve_neg() if is_plain_strided(tensor) else tensor


@dataclass(slots=True)
class TensorLeaves:
    """The plain tensors of a state dict, and how to build it anew around others.

    Attributes:
        tensors: the tensors, detached; each memory once.
        paths: all places of each tensor, for example ``optim.state.0.exp_avg``: DCP's names, when it flattens.
        others: places of everything else.
        error: the first value that could not be copied, and so is None in what is built; or None.
    """

    tensors: list[torch.Tensor] = field(default_factory=list)
    paths: list[list[str]] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    error: Exception | None = None
    _root: Build = field(default=lambda new: {})
    _known: dict[tuple[Any, ...], int] = field(default_factory=dict)

    @classmethod
    def of(cls, state_dict: Mapping[str, Any]) -> TensorLeaves:
        """Find the tensors of a nested state dict of mappings, lists and tuples."""
        leaves = cls()
        leaves._root = leaves._take(state_dict, None)
        return leaves

    @property
    def names(self) -> list[str]:
        """A name for each tensor, as the format takes it; unique."""
        return _unique([storable_name(paths[0]) for paths in self.paths])

    @property
    def structure(self) -> tuple[object, ...]:
        """Equal for two states exactly if they have the same places with the same kinds of tensors."""
        return self.paths, self.others, [(t.dtype, t.shape) for t in self.tensors]

    def rebuild(self, replacements: list[torch.Tensor]) -> dict[str, Any]:
        """The state dict with ``replacements[i]`` in the place of ``tensors[i]``.

        Values that are neither tensors nor immutable are copied, so that the result does not change any more.
        """
        built = self._root(replacements)
        assert isinstance(built, dict)
        return built

    def _take(self, value: Any, path: str | None) -> Build:
        if isinstance(value, torch.Tensor):
            return self._take_tensor(value, path or "")
        if isinstance(value, Mapping):
            items = [(key, self._take(item, _joined(path, key))) for key, item in value.items()]
            return lambda new: {key: build(new) for key, build in items}
        if type(value) in (list, tuple):
            parts = [self._take(item, _joined(path, index)) for index, item in enumerate(value)]
            kind = type(value)
            return lambda new: kind(build(new) for build in parts)
        # The copy is made now: what the training changes later must not show up in the checkpoint.
        return self._keep(value if isinstance(value, _IMMUTABLE) else self._copied(value, copy.deepcopy), path or "")

    def _take_tensor(self, value: torch.Tensor, path: str) -> Build:
        if isinstance(value, ShardedTensor):
            return self._take_sharded(value, path)
        if isinstance(value, DTensor):
            local = settled(value._local_tensor)
            if is_plain_strided(local) and not local.is_meta:
                index, spec = self._add(local, path), value._spec
                return lambda new: DTensor(new[index], spec, requires_grad=False)  # type: ignore[no-untyped-call]
        else:
            plain = settled(value)
            if is_plain_strided(plain) and not plain.is_meta:
                index = self._add(plain, path)
                return lambda new: new[index]
        if value.is_meta:  # nothing to copy, and an error only if the plan wants it
            return self._keep(value.detach(), path)
        return self._keep(self._copied(value, lambda tensor: tensor.detach().clone()), path)

    def _take_sharded(self, value: ShardedTensor, path: str) -> Build:
        shards = [
            (self._add(settled(shard.tensor), f"{path}.shard{number}"), shard.metadata)
            for number, shard in enumerate(value.local_shards())
        ]

        def build(new: list[torch.Tensor]) -> ShardedTensor:
            made = copy.copy(value)
            made._local_shards = [Shard(new[index], metadata) for index, metadata in shards]
            return made

        return build

    def _add(self, tensor: torch.Tensor, path: str) -> int:
        identity = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        index = self._known.get(identity) if tensor.numel() else None
        if index is None:
            index = self._known[identity] = len(self.tensors)
            self.tensors.append(tensor)
            self.paths.append([])
        self.paths[index].append(path)
        return index

    def _copied(self, value: Any, copier: Callable[[Any], Any]) -> Any:
        try:
            return copier(value)
        except Exception as error:  # of whatever kind a value's own copying raises
            self.error = self.error or error
            return None

    def _keep(self, value: Any, path: str) -> Build:
        self.others.append(path)
        return lambda new: value


def storable_name(fqn: str) -> str:
    """A name as the format takes it: text, and none of those that mean something to it."""
    name = str(fqn)
    if not name.isascii():
        name = name.encode("utf-8", "backslashreplace").decode()
    return f"item {name}" if name.startswith("__") else name


def _joined(path: str | None, key: object) -> str:
    return str(key) if path is None else f"{path}.{key}"


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
