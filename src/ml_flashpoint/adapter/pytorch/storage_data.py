"""What torch's DCP keeps with our checkpoints: where each item lies, and items that are no tensors.

Owns that planners unpickle nothing which `safe_archive` would not load. DCP's metadata is `metadata_format`'s.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ml_flashpoint.adapter.pytorch.safe_archive import SafeGlobal as SafeGlobal
from ml_flashpoint.adapter.pytorch.safe_archive import load_archive, refused_names

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


def unsafe_globals(stream: io.BytesIO, *, allowed: Sequence[SafeGlobal] = ()) -> set[str]:
    """Names in an archive of ``torch.save`` for which loading would refuse it. The stream is left at its start.

    Raises:
        Exception: loading would refuse it for another reason, or it is no such archive.
    """
    stream.seek(0)
    return refused_names(stream.getbuffer(), allowed=allowed)
