"""Replaces the tensors of a nested state dict by copies of them, keeping everything else as it is.

Owns what counts as a tensor leaf (plain tensors, DTensor and ShardedTensor shards) and how each kind is taken
apart and put together again. Where the copies go is the caller's business.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor

from ml_flashpoint.format.errors import SaveError
from ml_flashpoint.staging import cuda
from ml_flashpoint.staging.copy import view_identity

_IMMUTABLE = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_COPY = -1


def is_plain_strided(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory is all there is to it, so that copying its elements preserves it."""
    wraps_others = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    return tensor.layout is torch.strided and not tensor.is_quantized and not wraps_others and not tensor.is_nested


def check_copies(value: Any, path: str) -> None:
    """Refuse tensors that Lightning could not give back: it makes copies of what callbacks have saved.

    Args:
        value: what callbacks save. path: its place in the dictionary.

    Raises:
        SaveError: says which.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            check_copies(item, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            check_copies(item, f"{path}.{index}")
    elif isinstance(value, torch.Tensor) and not is_plain_strided(value):
        try:
            copy.deepcopy(value.detach())
        except Exception as error:  # of whatever kind torch raises
            kind = "a nested tensor" if value.is_nested else f"a tensor of layout {value.layout}"
            raise SaveError(
                f"{path!r} is {kind}, of which Lightning could make no copy when it restores the callback",
                hint="keep a dense tensor, a list of them, or (nested) one with layout=torch.jagged",
            ) from error


def held_bytes(tensor: torch.Tensor) -> int:
    """About what a tensor takes when it is stored; of one that torch gives no size of, 0."""
    parts = [tensor]
    if tensor.layout is torch.sparse_coo:
        parts = [tensor._indices(), tensor._values()]
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    try:
        return sum(part.numel() * part.element_size() for part in parts)
    except RuntimeError:  # NotImplementedError is one
        return 0


def materialized(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without history whose memory holds its elements: no collective under way, no lazy conjugate."""
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor = tensor.wait()
    if tensor.requires_grad:
        tensor = tensor.detach()
    if is_plain_strided(tensor) and (tensor.is_conj() or tensor.is_neg()):
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor


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
        wholes: by the number of a tensor that is a rank's part of a `DTensor`, that one.
        error: the first value that could not be copied, and so is None in what is built; or None.
    """

    def __init__(self, state_dict: Mapping[str, Any]) -> None:
        self.tensors: list[torch.Tensor] = []
        self.paths: list[str] = []
        self.indices: list[int] = []
        self.others: list[str] = []
        self.wholes: dict[int, DTensor] = {}
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
            if isinstance(value, DTensor):
                self.wholes.setdefault(self.indices[-1], value)
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


def check_storable(tensor: torch.Tensor, path: str) -> None:
    """Refuse tensors that torch's checkpoints have no place for.

    Args:
        path: its place in the state.

    Raises:
        SaveError: says which.
    """
    if tensor.is_nested or tensor.is_mkldnn:
        kind = "nested" if tensor.is_nested else "in MKLDNN's layout"
        raise SaveError(
            f"the tensor {path!r} is {kind}, which torch's checkpoints have no place for",
            hint="save what it is made of: for example its values and offsets, or to_dense()",
        )


def whole_copy(tensor: torch.Tensor, path: str) -> torch.Tensor:
    """A copy of a tensor that is more than its memory, to be saved as bytes.

    Raises:
        SaveError: see :func:`check_storable`; or its class neither copies itself nor names its inner tensors.
    """
    check_storable(tensor, path)
    try:
        return _copied_whole(tensor)
    except Exception as error:  # of whatever kind a class raises
        raise SaveError(
            f"the tensor {path!r}, a {type(tensor).__name__}, cannot be copied: {type(error).__name__}: {error}",
            hint="have its class implement clone(), or __tensor_flatten__ and __tensor_unflatten__",
        ) from error


def _copied_whole(tensor: torch.Tensor) -> torch.Tensor:
    flattens = hasattr(tensor, "__tensor_flatten__") and hasattr(tensor, "__tensor_unflatten__")
    try:
        detached = tensor.detach()
        # Not on a device: it is pickled later, by another thread, for which the device works in another order.
        copied = detached.clone() if tensor.device.type in ("cpu", "meta") else detached.cpu()
        if type(copied) is type(tensor) or not flattens:
            return copied
    except (NotImplementedError, TypeError):  # torch raises the latter where a class has no answer to an operation
        if not flattens:
            raise
    made_of: Any = tensor
    names, context = made_of.__tensor_flatten__()
    inner = {name: getattr(tensor, name) for name in names}  # a DTensor names its mesh, too
    inner = {name: _copied_whole(each) if isinstance(each, torch.Tensor) else each for name, each in inner.items()}
    rebuilt: torch.Tensor = made_of.__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())
    return rebuilt


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors at one address are the same."""
    return view_identity(one) == view_identity(other)


def storable_name(fqn: str) -> str:
    """A name as the format takes it: text, and none of those that mean something to it."""
    name = str(fqn)
    if not name.isascii():
        name = name.encode("utf-8", "backslashreplace").decode()
    return f"item {name}" if name.startswith("__") else name


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
