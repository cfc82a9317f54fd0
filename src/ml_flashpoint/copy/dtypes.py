"""The dtypes of the torch at hand, their names in `format.dtypes`, and tensors as bytes and integers."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import torch

from ml_flashpoint.format.dtypes import ITEMSIZES
from ml_flashpoint.format.errors import InvalidArgumentError, ObjectFormatError

DTYPES: Final[dict[str, torch.dtype]] = {name: getattr(torch, name) for name in ITEMSIZES if hasattr(torch, name)}
"""Dtypes by their names. Not every supported torch has every dtype."""

_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

STORABLE_DTYPES: Final = frozenset(_NAMES)
"""Dtypes of tensors that can be stored by their bytes alone: all but the quantized ones."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as ``float32``. Raises an `InvalidArgumentError` if it is not storable."""
    try:
        return _NAMES[dtype]
    except (KeyError, TypeError):
        raise InvalidArgumentError(
            "a tensor of this dtype cannot be stored by its bytes",
            argument="dtype",
            value=dtype,
            hint="store what it is made of: its integers, scales and zero points",
        ) from None


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype of this name. Raises an `ObjectFormatError` if this torch has none."""
    try:
        return DTYPES[name]
    except KeyError:
        raise ObjectFormatError(
            f"this torch ({torch.__version__}) has no dtype {name[:40]!a}", hint="load with the torch that saved it"
        ) from None


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor, as one dimension of uint8; no copy."""
    flat = tensor.detach().view(-1)
    # torch takes a single element for contiguous whatever its stride, and then has no view of it as bytes.
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor, of any strides, as integers of its size."""
    real = torch.view_as_real(tensor) if tensor.dtype is torch.complex128 else tensor
    return real.view(_INTEGERS[real.dtype.itemsize])


def octets_of(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the memory of a contiguous tensor on the CPU, as an array of bytes; no copy.

    ``tensor.numpy()`` would leave a mark: torch never again resizes a storage that NumPy has seen.
    """
    octets = bytes_of(tensor)
    memory: Any = (ctypes.c_uint8 * octets.nbytes).from_address(octets.data_ptr())
    memory.tensor = octets  # which keeps it
    return np.frombuffer(memory, np.uint8)


def described(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, str, tuple[int, ...]]]:
    """Return key, dtype's name and shape of each, as `format.object_format` takes them."""
    return [(key, dtype_name(tensor.dtype), tuple(tensor.shape)) for key, tensor in tensors]
