"""What tests of doors that persist share: what is refused, and what is in a store."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from ml_flashpoint import Flashpoint
from ml_flashpoint.engine.persist import Persister
from ml_flashpoint.format.errors import InvalidArgumentError
from ml_flashpoint.stores.location import open_store
from tests.support.forked import wait_until

REFUSED: list[tuple[str, Any]] = [
    ("persist", ""),
    ("persist", 3),
    ("persist", "file://relative"),
    ("persist_every", 0),
    ("persist_keep", 0),
    ("persist_bytes_per_s", 0),
    ("persist_bytes_per_s", True),
]
"""Arguments with values that no door takes."""


def refusal(argument: str, value: Any) -> str:
    """What the façade says to a value of one of these arguments; every door says the same."""
    options: dict[str, Any] = {"persist": "memory://any", argument: value}
    with pytest.raises(InvalidArgumentError, match=f"{argument}( must|=)") as refused:
        Flashpoint("/nowhere", **options)
    return str(refused.value)


def persisted_steps(store: Path) -> list[int]:
    """Steps of the complete versions in a folder, newest first."""
    return [version.step for version in open_store(store).versions() if version.counts]


def await_store(persister: Persister | None) -> None:
    """Until this process is the one that persists there."""
    assert persister is not None
    wait_until(lambda: persister.owns_store, "the store is owned")


def lose_all_nodes(root: Path) -> None:
    """What happens to the memory of the nodes of a `Team` or `Cluster` when all of them lose power."""
    for node in root.glob("node-*"):
        shutil.rmtree(node)
