"""One short text for a whole training state, to compare runs by. Imports nothing but torch."""

from __future__ import annotations

import hashlib
from typing import Any

import torch


def digest(value: Any) -> str:
    """Of tensors, and what holds them, bit for bit; of what is sharded, this rank's part."""
    stream = hashlib.sha256()
    _feed(stream, value)
    return stream.hexdigest()[:16]


def _feed(stream: Any, value: Any) -> None:
    if hasattr(value, "to_local"):
        value = value.to_local()
    if hasattr(value, "local_shards"):
        value = [shard.tensor for shard in value.local_shards()]
    if isinstance(value, torch.Tensor):
        stream.update(f"{value.dtype} {tuple(value.shape)}".encode())
        stream.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            stream.update(str(key).encode())
            _feed(stream, value[key])
    elif isinstance(value, (list, tuple)):
        for each in value:
            _feed(stream, each)
    else:
        stream.update(repr(value).encode())
