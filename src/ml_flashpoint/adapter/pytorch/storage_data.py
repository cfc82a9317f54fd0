"""What torch's DCP keeps with our checkpoints: where each item lies, and items that are no tensors.

Owns that planners unpickle nothing which `safe_archive` would not load. DCP's metadata is `metadata_format`'s.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from ml_flashpoint.adapter.pytorch.safe_archive import SafeGlobal as SafeGlobal
from ml_flashpoint.adapter.pytorch.safe_archive import load_archive, refused_names
from ml_flashpoint.core.errors import UnsafeContentError

METADATA_KEY = "__dcp_metadata__"
"""Item of the coordinator's object that holds DCP's metadata."""

METADATA_SCOPE = "dcp_metadata"
"""Manifest label of a part whose object has that item: ``global`` or, for saves without collectives, ``rank``."""


@dataclass(frozen=True, slots=True)
class ItemPlace:
    """Where an item of a checkpoint lies: the part of a rank, and the key in its object. The same for every save
    of one structure, because DCP may reuse it from a cached plan."""

    rank: int
    key: str


def check_bytes(data: Any, key: str, *, path: str, allowed: Sequence[SafeGlobal] = ()) -> io.BytesIO:
    """A non-tensor item, for a planner that will unpickle it, which DCP's do without restriction.

    It is loaded here, without trust, and saved again: what the planner gets was written by this process.

    Raises:
        UnsafeContentError: it names something that is not allowed.
        DamagedError: it makes no sense.
    """
    value = load_archive(data, key, path=path, allowed=allowed)
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream


def refuse_unloadable(data: bytes, what: str, *, allowed: Sequence[SafeGlobal] = ()) -> None:
    """Check, when an item is saved, that :func:`check_bytes` would let it pass with the same ``allowed``.

    Args:
        data: an archive of ``torch.save``.
        what: it is, for the error.

    Raises:
        UnsafeContentError: it would not.
    """
    seen = (xxhash.xxh3_128_digest(data), frozenset(name for _, name in by_name(allowed)))
    if seen in _loadable:
        return
    try:
        names = ", ".join(sorted(refused_names(data, allowed=allowed)))
    except Exception as error:
        raise UnsafeContentError(
            f"{what} is nothing that torch.save wrote of plain values, so loading would refuse it ({error})",
            hint="pass trust_bytes=True to writer and reader if their planners write bytes that are never unpickled",
        ) from error
    if names:
        raise UnsafeContentError(
            f"{what} holds {names}, which loading would refuse, because such types may run code",
            hint=f"keep plain values in it, or pass safe_globals=[{names}] to writer and reader if you trust that",
        )
    if len(_loadable) >= _MOST_KNOWN:
        _loadable.clear()
    _loadable.add(seen)


_MOST_KNOWN = 100_000
# Most items that are no tensors are the same in every save, such as the settings of an optimizer.
_loadable: set[tuple[bytes, frozenset[str]]] = set()


def by_name(allowed: Iterable[SafeGlobal]) -> tuple[tuple[Callable[..., Any], str], ...]:
    """Types and the names that they are known by in archives."""
    return tuple(
        each if isinstance(each, tuple) else (each, f"{each.__module__}.{each.__qualname__}") for each in allowed
    )


def unsafe_globals(stream: io.BytesIO, *, allowed: Sequence[SafeGlobal] = ()) -> set[str]:
    """Names in an archive of ``torch.save`` for which loading would refuse it. The stream is left at its start.

    Raises:
        Exception: loading would refuse it for another reason, or it is no such archive.
    """
    stream.seek(0)
    return refused_names(stream.getbuffer(), allowed=allowed)
