"""The states that are saved: few large tensors, and many small ones."""

from __future__ import annotations

import torch

from benchmarks.timing import State


def large(scale: float = 1.0) -> State:
    """2 GiB of float32 in 128 tensors."""
    rows = max(1, int(4096 * scale))
    return {f"layers.{i}.weight": torch.rand(rows, 1024) for i in range(128)}


def small(scale: float = 1.0) -> State:
    """1.2 GiB of float32 in 20,000 tensors of 64 KiB."""
    count = max(1, int(20_000 * scale))
    return {f"blocks.{i // 20}.experts.{i % 20}.weight": torch.rand(128, 128) for i in range(count)}


def tiny() -> State:
    """2,000 tensors of 64 bytes: what is left is the fixed cost."""
    return {f"blocks.{i}.bias": torch.rand(16) for i in range(2000)}


STATES = {"128 tensors, 2 GiB": large, "20,000 tensors, 1.2 GiB": small}
