"""A DCP door in memory for each test, and a process group of one rank for those that need one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.dcp import Door

_EXPECTED_WARNINGS = (
    "torch.distributed is (disabled|unavailable)",
    "ComplexHalf",
    "Sparse",
    "torch.quantize",
    "TypedStorage",
    "`torch.jit",
    "Detected pickle protocol",
    "'torch.load' received a zip file",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What torch warns of at every save without a process group, and of dtypes, is what is tested here."""
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            for message in _EXPECTED_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(f"ignore:{message}"))


@pytest.fixture
def make_door(tmpfs: Path) -> Iterator[Callable[..., Door]]:
    """Makes doors on the same base container, one after the other; the last one is closed at the end."""
    doors: list[Door] = []

    def make(**options: Any) -> Door:
        for door in doors:
            door.close()
        doors.append(Door(tmpfs / "job", **options))
        return doors[-1]

    yield make
    for door in doors:
        door.close()


@pytest.fixture
def door(make_door: Callable[..., Door]) -> Door:
    return make_door()


@pytest.fixture
def process_group() -> Iterator[None]:
    """A gloo group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
