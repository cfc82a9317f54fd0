"""Pushing copies: a copy that was not acknowledged is never taken for one that was."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ml_flashpoint.checkpoint_object_manager.checkpoint_object_manager import CheckpointObjectManager
from ml_flashpoint.checkpoint_object_manager.held_part import HeldPart
from ml_flashpoint.format.errors import InvalidNameError, ReplicationError
from ml_flashpoint.format.manifest import Manifest, ObjectRecord
from ml_flashpoint.ranks.strategies import RingReplicationStrategy, Topology
from ml_flashpoint.replication import replication_manager
from ml_flashpoint.replication.replication_manager import ReplicationManager
from ml_flashpoint.replication.store_backend import StoreBackend
from tests.support.forked import call_team
from tests.support.injector import Fault
from tests.workers import injected


@pytest.mark.parametrize("failing", [1, 2])
def test_any_error_of_any_push_fails_the_replication(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = ReplicationManager(RingReplicationStrategy(copies=2))
    group: Any = SimpleNamespace(topology=Topology(("a", "b", "c")))
    monkeypatch.setattr(manager, "_group", group)

    def push(target: int, *_: object) -> None:
        if target == failing:
            raise ValueError("operation forbidden on released memoryview object")

    monkeypatch.setattr(manager, "_push", push)
    manifest = Manifest("step-1_ckpt", 0, 3, "a-1", "a", (ObjectRecord("rank-00000-a-1.safetensors", 0, 0, ()),))
    arena: Any = SimpleNamespace(buffer=memoryview(b""))
    with pytest.raises(ReplicationError, match="released memoryview"):
        manager.replicate(HeldPart(manifest.version, 0, manifest.save_id, [arena], manifest))


@pytest.mark.parametrize("name", ["rank-00001-a-1.safetensors", "rank-00000-a-2.safetensors", "other"])
def test_a_copy_cannot_take_the_place_of_another_part(name: str) -> None:
    manifest = Manifest("step-1_ckpt", 0, 3, "a-1", "a", (ObjectRecord(name, 0, 0, ()),))
    with pytest.raises(InvalidNameError, match="no object of this part"):
        StoreBackend(lambda: CheckpointObjectManager().wait_for_store(1.0)).receive(manifest, {}).__enter__()


def test_a_rank_that_cannot_listen_is_an_error_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bytes] = []
    group: Any = SimpleNamespace(
        rank=0,
        node="a",
        secret=bytes(32),
        topology=Topology(("a", "b")),
        check_nodes=lambda place, what: None,
        gather=lambda blob: told.append(blob) or [blob, blob],
    )
    monkeypatch.setattr(replication_manager, "rank_group", lambda: group)
    manager = ReplicationManager(advertise_host="192.0.2.1")  # no address of this host
    with pytest.raises(ReplicationError, match="cannot listen"):
        manager.initialize(CheckpointObjectManager())
    assert [json.loads(blob)[1] for blob in told] == [None]  # the others learn of it by the same message
    assert not manager.initialized


def test_a_rank_that_can_start_no_thread_is_an_error_of_all(tmpfs: Path) -> None:
    fault = Fault(rank=1, step=0, point="thread", action="no-thread")
    results = call_team(injected.construct, tmpfs, 2, [fault])
    assert "ReplicationError: another rank cannot serve its peers" in results[0][0]
    assert "ReplicationError: cannot serve peers: can't start new thread" in results[1][0]
    assert [then for _, then in results] == ["constructed"] * 2
