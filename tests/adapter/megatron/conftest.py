"""Megatron-LM doors in a process group of one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def make_door(tmpfs: Path, process_group: None) -> Iterator[Callable[[], Any]]:
    """Makes doors on the same base container, one after the other; the last one is closed at the end."""
    from tests.support.megatron import Door

    doors: list[Door] = []

    def make() -> Door:
        for door in doors:
            door.close()
        doors.append(Door(tmpfs / "job", child=False))
        return doors[-1]

    yield make
    for door in doors:
        door.close()


@pytest.fixture
def door(make_door: Callable[[], Any]) -> Any:
    return make_door()
