"""Copies of small plain states, so that they can be packed after the loop has gone on.

``torch.save`` takes hundreds of microseconds for a scheduler's ten numbers. Owns which states are copied instead, and
packed later: those made of exact plain types, which are copied as pickling them would, shared parts included, at a
fraction of the cost. What else there is, is packed while the loop waits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

_ATOMS = frozenset({bool, int, float, complex, str, bytes, type(None)})
_MOST, _LARGE = 1000, 64 << 10
"""Containers and arrays of a state, and bytes of an array, that are copied at most."""


class NotPlainError(Exception):
    """A state has something else in it, or too much."""


def plain_copy(value: Any) -> Any:
    """A copy that shares nothing with a state that could change.

    Raises:
        NotPlainError: it has parts that only pickling can copy, or would copy faster.
    """
    return _Copies().of(value)


class _Copies:
    def __init__(self) -> None:
        self._by_id: dict[int, Any] = {}
        self._storages: set[int] = set()

    def of(self, value: Any) -> Any:
        kind = type(value)
        if kind in _ATOMS:
            return value
        if id(value) in self._by_id:
            return self._by_id[id(value)]
        if len(self._by_id) >= _MOST:
            raise NotPlainError
        if kind is tuple:
            return self._keep(value, value if set(map(type, value)) <= _ATOMS else tuple(map(self.of, value)))
        if kind is list:
            if set(map(type, value)) <= _ATOMS:
                return self._keep(value, value.copy())
            items: list[Any] = self._keep(value, [])  # before what is in it, which may be itself
            items.extend(map(self.of, value))
            return items
        if kind is dict and set(map(type, value)) <= _ATOMS:
            table: dict[Any, Any] = self._keep(value, {})
            for key, item in value.items():
                table[key] = self.of(item)
            return table
        if kind is torch.Tensor:
            return self._keep(value, self._tensor(value))
        if kind is np.ndarray and not value.dtype.hasobject and value.nbytes <= _LARGE:
            return self._keep(value, value.copy(order="K"))
        raise NotPlainError

    def _keep(self, value: Any, copy: Any) -> Any:
        self._by_id[id(value)] = copy
        return copy

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        plain = tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.is_quantized
        if not plain or tensor.requires_grad or tensor.__dict__ or tensor.is_conj() or tensor.is_neg():
            raise NotPlainError
        storage = tensor.untyped_storage()
        whole = tensor.is_contiguous() and storage.nbytes() == tensor.nbytes <= _LARGE
        # Tensors that share memory are saved so that they do when they are loaded.
        if not whole or (tensor.nbytes and storage.data_ptr() in self._storages):
            raise NotPlainError
        self._storages.add(storage.data_ptr())
        return tensor.clone()
