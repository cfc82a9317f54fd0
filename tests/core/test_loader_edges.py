"""What a loader does with what no checkpoint is to blame for: an error that ranks do not share must not part them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ml_flashpoint.checkpoint_object_manager.checkpoint_object_manager import CheckpointObjectManager
from ml_flashpoint.core import recovery_run
from ml_flashpoint.core.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.core.checkpoint_loader import DefaultMLFlashpointCheckpointLoader
from ml_flashpoint.core.checkpoint_saver import DefaultMLFlashpointCheckpointSaver
from ml_flashpoint.core.errors import DigestMismatchError, NothingLoadableError, UnsafePathError
from ml_flashpoint.core.manifest import ObjectRecord


def version(base: Path, step: int) -> CheckpointContainerId:
    name = CheckpointContainerId.format_version_container(step)
    return CheckpointContainerId.create_child(CheckpointContainerId(base), name)


@pytest.fixture
def objects(tmpfs: Path) -> Iterator[CheckpointObjectManager]:
    objects = CheckpointObjectManager()
    saver = DefaultMLFlashpointCheckpointSaver(ckpt_obj_manager=objects)
    saver.save(version(tmpfs, 1), [("weight", torch.arange(1000.0))])
    saver.close()
    yield objects
    objects.close()


def test_an_error_of_the_system_is_voted_on_and_not_raised(
    objects: CheckpointObjectManager, tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(recovery_run, "open_local", broken)
    monkeypatch.setenv("FLASHPOINT_RECOVERY_DEADLINE_S", "0.2")
    loader = DefaultMLFlashpointCheckpointLoader(objects)
    with pytest.raises(NothingLoadableError, match=r"step-1_ckpt .*rank 0 on .*Cannot allocate memory"):
        loader.get_latest_complete_checkpoint(tmpfs)
    monkeypatch.undo()
    assert loader.get_latest_complete_checkpoint(tmpfs) == version(tmpfs, 1), "nothing is remembered of it"


def test_a_folder_that_cannot_be_used_is_an_error_of_ours(tmpfs: Path) -> None:
    (tmpfs / "base").write_text("a file, not a folder")
    with pytest.raises(UnsafePathError, match="cannot be used as a folder: Not a directory"):
        DefaultMLFlashpointCheckpointLoader().get_latest_complete_checkpoint(tmpfs / "base")


@pytest.mark.damages_on_purpose
def test_a_damaged_object_is_read_from_elsewhere_if_it_is_elsewhere(
    objects: CheckpointObjectManager, tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = DefaultMLFlashpointCheckpointLoader(objects)
    found = loader.get_latest_complete_checkpoint(tmpfs)
    assert found is not None
    manifest = loader.read_manifest(found, 0)
    loader._verified.clear()
    path = tmpfs / found.name / manifest.objects[0].name
    intact = path.read_bytes()
    with path.open("r+b") as file:
        file.seek(manifest.objects[0].size - 1)
        file.write(bytes([intact[manifest.objects[0].size - 1] ^ 1]))
    with pytest.raises(DigestMismatchError):
        loader.open_object(found, manifest, manifest.objects[0])

    def fetch(manifest: object, record: ObjectRecord, first: int, buffer: memoryview) -> None:
        begin = first * record.block_size
        buffer[:] = intact[begin : begin + buffer.nbytes]

    monkeypatch.setattr(loader, "_is_elsewhere", lambda *_: True)
    monkeypatch.setattr(loader, "_fetch_blocks", fetch)
    reader = loader.open_object(found, manifest, manifest.objects[0])
    assert torch.equal(reader.tensor("weight"), torch.arange(1000.0))
