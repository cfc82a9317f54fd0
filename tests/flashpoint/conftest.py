"""Fixtures of the façade's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist


@pytest.fixture
def base(tmpfs: Path) -> Path:
    """A base container of the test's own."""
    return tmpfs / "job"


@pytest.fixture
def process_group() -> Iterator[None]:
    """A gloo group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
