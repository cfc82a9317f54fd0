"""What a saver does where saves get in each other's way, or end in ways that no door plans for."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ml_flashpoint.checkpoint_object_manager.rank_store import RankStore
from ml_flashpoint.core.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.core.checkpoint_saver import DefaultMLFlashpointCheckpointSaver
from ml_flashpoint.core.errors import CapacityError, SaveError

TENSORS = [("weight", torch.arange(1000.0))]


def version(base: Path, step: int) -> CheckpointContainerId:
    name = CheckpointContainerId.format_version_container(step)
    return CheckpointContainerId.create_child(CheckpointContainerId(base), name)


@pytest.fixture
def saver() -> Iterator[DefaultMLFlashpointCheckpointSaver]:
    saver = DefaultMLFlashpointCheckpointSaver()
    yield saver
    saver.close(0.1)
    saver._objects.close()


def store_of(saver: DefaultMLFlashpointCheckpointSaver) -> RankStore:
    store = saver._objects.store
    assert store is not None
    return store


@pytest.mark.timeout(60)
def test_a_hand_off_that_waits_for_an_arena_holds_nobody_up(
    saver: DefaultMLFlashpointCheckpointSaver, tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver.save(version(tmpfs, 1), TENSORS)
    earlier = saver.begin()

    def full(size: int, *, exact: bool = False) -> None:
        raise CapacityError("full")

    monkeypatch.setattr(store_of(saver), "has_free", lambda size: False)
    monkeypatch.setattr(store_of(saver), "acquire", full)
    handing_off = threading.Thread(target=saver.hand_off, daemon=True)
    handing_off.start()
    time.sleep(0.3)  # it waits for the earlier save by now
    assert handing_off.is_alive()
    saver.fail(earlier, SaveError("given up"))
    handing_off.join(10)
    assert not handing_off.is_alive()
