"""Values of kinds that the schema of `structure` does not know, as archives of ``torch.save``.

Owns that such an archive holds nothing but what is allowed, which is checked when it is made and again before it is
opened, and that what is saved can be loaded: every archive is opened once before it counts.
"""

from __future__ import annotations

import io
from typing import Any

import torch

from ml_flashpoint.copy.cuda import device_today
from ml_flashpoint.format.errors import InvalidArgumentError, UnsafeContentError
from ml_flashpoint.local.known_types import KnownTypes
from ml_flashpoint.unpickling.safe_archive import load_archive


def pack(value: Any, where: str, types: KnownTypes) -> bytes:
    """An archive of a value.

    Args:
        where: the value's place in the state, for errors.

    Raises:
        UnsafeContentError: it holds a value of a type that is not allowed.
        InvalidArgumentError: it cannot be stored, or would come back as something else.
    """
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
    except Exception as error:
        raise _unstorable(value, where, error) from error
    data = stream.getvalue()
    try:
        made = unpack(data, where, "", types)
    except UnsafeContentError as error:
        raise UnsafeContentError(
            f"{where}: {type(value).__name__} could not be loaded: {error}",
            hint="list its types in safe_globals= of the manager, when saving and when loading",
        ) from error
    except Exception as error:
        raise _unstorable(value, where, error) from error
    if _kind_of(made) != _kind_of(value):
        raise _unstorable(value, where, TypeError(f"it would come back as {_kind_of(made)}"))
    return data


def unpack(data: bytes, where: str, path: str, types: KnownTypes) -> Any:
    """The value in an archive.

    Raises:
        UnsafeContentError: it needs a type that is not allowed.
        DamagedError: it is no archive.
        Exception: it cannot be opened.
    """
    return load_archive(data, where or "archive", path=path, allowed=types.listed, device_of=device_today)


def _unstorable(value: Any, where: str, error: Exception) -> InvalidArgumentError:
    return InvalidArgumentError(f"cannot be stored: {type(error).__name__}: {error}", argument=where, value=type(value))


def _kind_of(value: Any) -> tuple[Any, ...]:
    """What must not change on the way."""
    if not isinstance(value, torch.Tensor):
        return (type(value),)
    shape = None if value.is_nested else value.shape
    return type(value), value.dtype, value.layout, shape, value.requires_grad, value.is_meta
