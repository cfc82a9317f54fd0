"""Arenas and the check before training go by what a container leaves."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from ml_flashpoint.checkpoint_object_manager.arena_pool import ArenaPool
from ml_flashpoint.checkpoint_object_manager.capacity import mount_of, preflight
from ml_flashpoint.core.checkpoint_saver import DefaultMLFlashpointCheckpointSaver
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.errors import CapacityError
from ml_flashpoint.memory import capacity


def test_the_preflight_goes_by_the_container(tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preflight(tmpfs, 10 << 20)
    preflight(tmpfs, 30 << 20)
    monkeypatch.setattr(capacity, "memory_left", lambda root: 40 << 20)
    preflight(tmpfs, 10 << 20)
    with pytest.raises(CapacityError, match="container") as raised:
        preflight(tmpfs, 30 << 20)
    assert raised.value.available_bytes == 40 << 20


def test_an_arena_is_not_made_beyond_what_the_container_has(tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = [3 << 20]
    monkeypatch.setattr(capacity, "memory_left", lambda root: left[0])
    pool = ArenaPool(tmpfs, threading.RLock())
    arena = pool.acquire(2 << 20)
    left[0] = 1 << 20
    with pytest.raises(CapacityError, match="container") as raised:
        arena.grow(4 << 20)
    assert (raised.value.needed_bytes, raised.value.available_bytes) == ((4 << 20) - arena.size, 1 << 20)
    assert arena.size == arena.path.stat().st_size < 4 << 20
    with pytest.raises(CapacityError, match="container"):
        pool.acquire(2 << 20)
    assert [path.name for path in tmpfs.iterdir()] == [arena.path.name]
    left[0] = 3 << 20
    pool.release(pool.acquire(2 << 20))
    pool.close()


def test_a_save_that_takes_no_more_does_not_ask(tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left, asked = [1 << 40], []
    monkeypatch.setattr(capacity, "memory_left", lambda root: asked.append(True) or left[0])
    saver = DefaultMLFlashpointCheckpointSaver()
    base = CheckpointContainerId(tmpfs)

    def save(step: int, numbers: int) -> None:
        saver.save(CheckpointContainerId.create_child(base, f"step-{step}_ckpt"), [("w", torch.ones(numbers))])
        assert saver.wait(30)

    for step in range(1, 4):
        save(step, 1 << 18)
    asked.clear()
    left[0] = 0
    for step in range(4, 10):
        save(step, 1 << 18)
    assert not asked
    with pytest.raises(CapacityError):
        save(10, 1 << 20)
    save(11, 1 << 18)
    left[0] = 1 << 40
    save(12, 1 << 20)
    assert saver.stats.last_verified == 12
    saver.close()
    saver._objects.close()


def test_what_is_memory(tmpfs: Path, tmp_path: Path) -> None:
    with open("/proc/self/status") as file:
        assert not capacity.is_memory(file.fileno())
    assert capacity.is_memory(Path("/dev/shm")) == (mount_of(Path("/dev/shm"))[1] == "tmpfs")
    assert not capacity.is_memory(tmpfs / "missing")
