"""What is read from an object that another process may prune at any time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ml_flashpoint.checkpoint_object_manager.checkpoint_object_manager import CheckpointObjectManager
from ml_flashpoint.core.checkpoint_loader import DefaultMLFlashpointCheckpointLoader
from ml_flashpoint.core.checkpoint_saver import DefaultMLFlashpointCheckpointSaver
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.errors import LoadError


@pytest.mark.slow
def test_an_object_that_is_pruned_while_it_is_read_is_not_trusted(tmpfs: Path) -> None:
    objects = CheckpointObjectManager()
    saver = DefaultMLFlashpointCheckpointSaver(ckpt_obj_manager=objects)
    loader = DefaultMLFlashpointCheckpointLoader(objects)
    version = CheckpointContainerId.create_child(tmpfs / "job", "step-1_ckpt")
    manifest = saver.save(version, [("weight", torch.ones(1000))])
    try:
        reader = loader.open_object(version, manifest, manifest.objects[0])
        assert torch.equal(reader.tensor("weight"), torch.ones(1000))
        reader.check_kept()
        for path in Path(str(version)).glob("*.manifest"):
            path.unlink()
        with pytest.raises(LoadError, match="pruned"):
            reader.check_kept()
    finally:
        loader.release()
        saver.close()
        objects.close()
