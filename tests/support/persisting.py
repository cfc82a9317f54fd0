"""What tests of doors that persist share: what is in a store, and how memory is lost."""

from __future__ import annotations

import shutil
from pathlib import Path

from ml_flashpoint.engine.persist import Persister
from ml_flashpoint.stores.location import open_store
from tests.support.forked import wait_until


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
