"""Saving beside versions of an earlier run that nobody has asked about, at doors that have no question to ask."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ml_flashpoint.checkpoint_object_manager.checkpoint_object_manager import CheckpointObjectManager
from ml_flashpoint.core.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.core.checkpoint_loader import DefaultMLFlashpointCheckpointLoader
from ml_flashpoint.core.checkpoint_saver import DefaultMLFlashpointCheckpointSaver


def save(base: Path, steps: list[int], *, look: bool) -> None:
    objects = CheckpointObjectManager()
    saver = DefaultMLFlashpointCheckpointSaver(ckpt_obj_manager=objects)
    if look:
        assert DefaultMLFlashpointCheckpointLoader(objects).get_latest_complete_checkpoint(base) is not None
    for step in steps:
        name = CheckpointContainerId.format_version_container(step)
        version = CheckpointContainerId.create_child(CheckpointContainerId(base), name)
        saver.save(version, [("weight", torch.full((100,), float(step)))])
        assert saver.wait(30)
    saver.close()
    objects.close()


def test_it_is_said_once_and_not_to_who_looked(tmpfs: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmpfs / "job", [60, 61], look=False)
    assert "nobody has asked about" not in caplog.text
    save(tmpfs / "job", [2, 3], look=False)
    assert caplog.text.count("nobody has asked about") == 1
    caplog.clear()
    save(tmpfs / "job", [4], look=True)
    assert "nobody has asked about" not in caplog.text
