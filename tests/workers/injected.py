"""What ranks do when a call fails as it is told to; for `tests.support.forked.Team`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ml_flashpoint.format.errors import FlashpointError
from tests.support import dcp
from tests.support.injector import Fault, Injector
from tests.support.worker import base_path

Report = Callable[..., None]


def construct(report: Report, rank: int, faults: list[Fault]) -> tuple[str, str]:
    """Puts the engine together, while a call fails, and once more; what became of each."""
    said: list[Any] = []
    for injected in (faults, []):
        try:
            with Injector(rank, injected):
                dcp.Door(base_path()).close()
            said.append("constructed")
        except FlashpointError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said[0], said[1]
