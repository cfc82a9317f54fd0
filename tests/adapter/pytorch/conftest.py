"""A DCP door in memory for each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

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


@pytest.fixture(params=["sync", "thread"])
def mode(request: pytest.FixtureRequest) -> str:
    """How DCP saves in this process."""
    name: str = request.param
    return name
