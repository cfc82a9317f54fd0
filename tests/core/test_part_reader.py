"""What is read from an object that another process may prune at any time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ml_flashpoint.checkpoint_object_manager.checkpoint_object_manager import CheckpointObjectManager
from ml_flashpoint.core.checkpoint_loader import DefaultMLFlashpointCheckpointLoader
from ml_flashpoint.core.checkpoint_saver import DefaultMLFlashpointCheckpointSaver
from ml_flashpoint.core.part_reader import ObjectReader
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.errors import LoadError, UnreadableError
from ml_flashpoint.format.manifest import MAX_BLOCK_SIZE, Manifest, ObjectRecord, object_name


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


def test_a_remote_object_of_a_size_that_cannot_be_is_a_typed_error() -> None:
    """A manifest that a peer gives may say anything."""
    blocks = 1 << 18
    size = blocks * MAX_BLOCK_SIZE
    record = ObjectRecord(object_name(0, "a-1"), size, size, ("0" * 16,) * blocks, MAX_BLOCK_SIZE)
    manifest = Manifest("step-1_ckpt", 0, 1, "a-1", "node", (record,))
    with pytest.raises(UnreadableError, match="no memory can be had"):
        ObjectReader(manifest, record, fetch=lambda *_: None)
