"""Saves in inference mode, in which Lightning's loops validate, and others before and after them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ml_flashpoint.checkpoint_object_manager.arena import Arena
from ml_flashpoint.checkpoint_object_manager.checkpoint_object_manager import CheckpointObjectManager
from ml_flashpoint.copy import cpu
from ml_flashpoint.core.checkpoint_loader import DefaultMLFlashpointCheckpointLoader
from ml_flashpoint.core.checkpoint_saver import DefaultMLFlashpointCheckpointSaver
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId


@pytest.fixture
def objects() -> Iterator[CheckpointObjectManager]:
    manager = CheckpointObjectManager()
    yield manager
    manager.close()


def _by_another_thread(job: Callable[[], object]) -> bool:
    thread = threading.Thread(target=job)
    thread.start()
    thread.join(60)
    return True


@pytest.mark.parametrize("elsewhere", [False, True])
def test_saves_in_and_out_of_inference_mode(
    objects: CheckpointObjectManager, tmpfs: Path, elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if elsewhere:
        monkeypatch.setenv("FLASHPOINT_COPY_THREADS", "2")
        monkeypatch.setattr(cpu, "PIECE", 1000)
        monkeypatch.setattr(cpu, "run_on_pool", _by_another_thread)
    saver = DefaultMLFlashpointCheckpointSaver(ckpt_obj_manager=objects)
    loader = DefaultMLFlashpointCheckpointLoader(objects)
    try:
        for step, inference in enumerate([True, False, True, False, False, True]):
            version = CheckpointContainerId.create_child(tmpfs / "job", f"step-{step}_ckpt")
            with torch.inference_mode(inference):
                manifest = saver.save(version, [("weight", torch.full((5000,), float(step)))])
            reader = loader.open_object(version, manifest, manifest.objects[0])
            assert reader.tensor("weight").eq(step).all()
            del reader
            loader.release()
    finally:
        saver.close()


def test_memory_that_was_first_seen_in_inference_mode_can_be_written_to_later(tmpfs: Path) -> None:
    arena = Arena.create(tmpfs / "arena", 4096)
    with torch.inference_mode():
        views = [arena.tensor, arena.view(0, 8, torch.float32, (2,)), arena.view(8, 8, torch.float32, (0,))]
    for view in views:
        view.fill_(1)
    assert arena.tensor.eq(1).sum() > 4000
    del views, view
    arena.close()
