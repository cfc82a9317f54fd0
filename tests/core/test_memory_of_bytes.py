"""States that are mostly bytes, with a length that is known only after staging, take no more arenas than others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from ml_flashpoint.checkpoint_object_manager.arena_pool import with_headroom
from ml_flashpoint.core.checkpoint_saver import DefaultMLFlashpointCheckpointSaver
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.local import BasicTensorAwareStateDict, LocalCheckpointManager

MIB = 1 << 20
TENSORS = [("weight", torch.arange(1000.0))]


@pytest.fixture
def saver() -> Iterator[DefaultMLFlashpointCheckpointSaver]:
    saver = DefaultMLFlashpointCheckpointSaver()
    yield saver
    saver.close(0.1)
    saver._objects.close()


def save(saver: DefaultMLFlashpointCheckpointSaver, base: Path, step: int, payload: bytes) -> None:
    """As the doors of asynchronous saving do: tensors first, bytes when the plan is known."""
    version = CheckpointContainerId.create_child(CheckpointContainerId(base), f"step-{step}_ckpt")
    save = saver.begin()
    try:
        saver.stage(save, TENSORS, base=CheckpointContainerId(base))
        assert save.staged is not None
        saver.write(save, version, list(zip(["weight"], save.staged.views, strict=True)), [("packed", payload)])
        saver.commit(save)
    except BaseException as error:
        saver.fail(save, error)
        raise


def held(base: Path) -> list[int]:
    return [path.stat().st_size for path in base.glob(".flashpoint/rank-*/arena-*")]


def test_arenas_do_not_pile_up(saver: DefaultMLFlashpointCheckpointSaver, tmpfs: Path) -> None:
    size = 2 * MIB
    for step in range(1, 30):
        save(saver, tmpfs, step, bytes([step]) * (size - 1000 * (step % 7)))
        assert saver.wait(30)
        assert sum(held(tmpfs)) <= 2 * with_headroom(size + 128 * 1024), held(tmpfs)
    assert saver.stats.last_verified == 29


def test_three_times_the_state_is_enough(saver: DefaultMLFlashpointCheckpointSaver, small_tmpfs: Path) -> None:
    size = 5 * MIB // 4
    for step in range(1, 20):
        save(saver, small_tmpfs / "job", step, bytes([step]) * size)
    assert saver.wait(30)
    assert saver.stats.last_verified == 19


def test_a_local_state_of_numpy_arrays(tmpfs: Path) -> None:
    manager = LocalCheckpointManager(tmpfs)
    state = {"array": np.arange(MIB, dtype=np.uint8), "weight": torch.ones(10)}
    for step in range(1, 25):
        manager.save(BasicTensorAwareStateDict(state), step, is_async=False)
    sizes = [path.stat().st_size for path in tmpfs.glob("**/.flashpoint/rank-*/arena-*")]
    assert sum(sizes) <= 4 * with_headroom(MIB + 64 * 1024), sizes
    manager.close()
