"""Pushing copies: a copy that was not acknowledged is never taken for one that was."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ml_flashpoint.checkpoint_object_manager.rank_store import HeldPart
from ml_flashpoint.core.errors import ReplicationError
from ml_flashpoint.core.manifest import Manifest
from ml_flashpoint.replication.replication_manager import ReplicationManager
from ml_flashpoint.replication.strategies import RingReplicationStrategy, Topology


@pytest.mark.parametrize("failing", [1, 2])
def test_any_error_of_any_push_fails_the_replication(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = ReplicationManager(RingReplicationStrategy(copies=2))
    group: Any = SimpleNamespace(topology=Topology(("a", "b", "c")))
    monkeypatch.setattr(manager, "_group", group)

    def push(target: int, *_: object) -> None:
        if target == failing:
            raise ValueError("operation forbidden on released memoryview object")

    monkeypatch.setattr(manager, "_push", push)
    manifest = Manifest("step-1_ckpt", 0, 3, "a-1", "a", ())
    with pytest.raises(ReplicationError, match="released memoryview"):
        manager.replicate(HeldPart(manifest.version, 0, manifest.attempt, [], manifest))
