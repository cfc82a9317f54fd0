"""What a loader does with what no checkpoint is to blame for: an error that ranks do not share must not part them."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ml_flashpoint.checkpoint_object_manager.checkpoint_object_manager import CheckpointObjectManager
from ml_flashpoint.core import inventory, recovery_run
from ml_flashpoint.core.checkpoint_loader import DefaultMLFlashpointCheckpointLoader
from ml_flashpoint.core.checkpoint_saver import DefaultMLFlashpointCheckpointSaver
from ml_flashpoint.core.inventory import NodeReport, Unread
from ml_flashpoint.core.opening import open_together
from ml_flashpoint.core.recovery_plan import NodeInventory
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.errors import (
    DigestMismatchError,
    LoadError,
    NothingLoadableError,
    ProtocolError,
    UnreadableError,
    UnsafePathError,
)
from ml_flashpoint.format.manifest import ObjectRecord
from ml_flashpoint.ranks.rank_group import rank_group


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


SHORTAGES = [
    OSError(12, "Cannot allocate memory"),
    MemoryError("Cannot allocate memory"),
    RuntimeError("Cannot allocate memory, or start a new thread"),
]


@pytest.mark.parametrize("error", SHORTAGES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("where", [(recovery_run, "open_local"), (inventory, "read_local_manifests")])
def test_an_error_of_the_system_is_voted_on_and_not_raised(
    objects: CheckpointObjectManager,
    tmpfs: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: tuple[object, str],
    error: Exception,
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(*where, broken)
    monkeypatch.setenv("FLASHPOINT_RECOVERY_DEADLINE_S", "0.2")
    loader = DefaultMLFlashpointCheckpointLoader(objects)
    with pytest.raises(NothingLoadableError, match=r"step-1_ckpt .*Cannot allocate memory"):
        loader.get_latest_complete_checkpoint(tmpfs)
    monkeypatch.undo()
    assert loader.get_latest_complete_checkpoint(tmpfs) == version(tmpfs, 1), "nothing is remembered of it"


def test_memory_that_comes_back_is_waited_for(
    objects: CheckpointObjectManager, tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failures = recovery_run.open_local, [MemoryError("just now"), OSError(24, "Too many open files")]

    def at_last(*args: Any, **kwargs: Any) -> Any:
        if failures:
            raise failures.pop()
        return real(*args, **kwargs)

    monkeypatch.setattr(recovery_run, "open_local", at_last)
    assert DefaultMLFlashpointCheckpointLoader(objects).get_latest_complete_checkpoint(tmpfs) == version(tmpfs, 1)


@pytest.mark.parametrize("error", SHORTAGES, ids=lambda error: type(error).__name__)
def test_a_base_that_one_rank_cannot_open_just_now_is_voted_on(
    tmpfs: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise error

    objects = CheckpointObjectManager()
    monkeypatch.setattr(objects, "open", broken)
    monkeypatch.setenv("FLASHPOINT_RECOVERY_DEADLINE_S", "0.2")
    with pytest.raises((LoadError, UnreadableError), match=r"cannot be used: .*Cannot allocate memory"):
        DefaultMLFlashpointCheckpointLoader(objects).get_latest_complete_checkpoint(tmpfs)


def test_descriptors_that_come_back_while_a_base_is_opened_lose_nothing(
    objects: CheckpointObjectManager, tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever file cannot be opened at first."""
    objects.close()
    before = {path.relative_to(tmpfs): path.stat().st_ino for path in tmpfs.rglob("*")}
    real, opened, failing = os.open, 0, -1

    def short(*args: Any, **kwargs: Any) -> int:
        nonlocal opened
        opened += 1
        if opened == failing:
            raise OSError(errno.EMFILE, "Too many open files")
        return real(*args, **kwargs)

    monkeypatch.setattr(os, "open", short)
    while failing <= opened:
        opened, failing = 0, max(failing, 0) + 1
        store = open_together(objects, tmpfs, 0, rank_group())
        assert {path.relative_to(tmpfs): path.stat().st_ino for path in tmpfs.rglob("*")} == before
        (part,) = store.held()
        assert part.manifest is not None
        objects.close()
    assert failing > 5


def test_a_report_survives_names_that_are_no_text() -> None:
    path = os.fsdecode(b"/dev/shm/job-\xff")
    report = NodeReport(NodeInventory("n", ()), (Unread("step-1_ckpt", f"cannot read {path}", True),))
    assert NodeReport.from_json(report.to_json()) == report


@pytest.mark.parametrize("savers", ["[1e999]", "[Infinity]", "[NaN]"])
def test_a_report_of_no_ranks_is_none(savers: str) -> None:
    blob = NodeReport(NodeInventory("n", ())).to_json().replace(b'"savers": []', f'"savers": {savers}'.encode())
    with pytest.raises(ProtocolError):
        NodeReport.from_json(blob)


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
