"""Savers of one process, one after the other, in one base container."""

from __future__ import annotations

from pathlib import Path

import torch

from ml_flashpoint.checkpoint_object_manager.checkpoint_object_manager import CheckpointObjectManager
from ml_flashpoint.core.checkpoint_loader import DefaultMLFlashpointCheckpointLoader
from ml_flashpoint.core.checkpoint_saver import DefaultMLFlashpointCheckpointSaver
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId


def _save(base: Path, steps: list[int]) -> None:
    objects = CheckpointObjectManager()
    DefaultMLFlashpointCheckpointLoader(objects).get_latest_complete_checkpoint(base)
    saver = DefaultMLFlashpointCheckpointSaver(ckpt_obj_manager=objects)
    for step in steps:
        saver.save(CheckpointContainerId(f"{base}/step-{step}_ckpt"), [("t", torch.full((3,), float(step)))])
    saver.close()
    objects.close()


def _latest(base: Path) -> tuple[int | None, int | None]:
    objects = CheckpointObjectManager()
    loader = DefaultMLFlashpointCheckpointLoader(objects)
    found = loader.get_latest_complete_checkpoint(base)
    objects.close()
    assert loader.last_recovery is not None
    return (None if found is None else found.step), loader.last_recovery.world_size


def test_what_a_later_saver_saves_is_newer(tmpfs: Path) -> None:
    base = tmpfs / "job"
    assert _latest(base) == (None, None)
    # More saves by the first than by the second, whose own count starts again.
    _save(base, [7, 8, 9])
    _save(base, [5])
    assert _latest(base) == (5, 1)
    _save(base, [6])
    assert _latest(base) == (6, 1)
    assert [path.name for path in base.glob("step-*")] == ["step-6_ckpt"]
