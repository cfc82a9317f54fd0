"""Saving where there are versions of an earlier run that nobody has asked about: refused, and they stay."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from ml_flashpoint import Flashpoint
from ml_flashpoint.adapter.pytorch.memory_storage_reader import MemoryStorageReader
from ml_flashpoint.checkpoint_object_manager.checkpoint_object_manager import CheckpointObjectManager
from ml_flashpoint.core.checkpoint_saver import DefaultMLFlashpointCheckpointSaver
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.errors import UnaskedVersionsError
from ml_flashpoint.local import BasicTensorAwareStateDict, LocalCheckpointManager
from tests.support.dcp import Door
from tests.support.forked import Report, Team, call, call_team
from tests.support.loops import Stored

DOORS = ["engine", "sync", "thread", "local", "local asynchronous"]


def _state(step: int) -> dict[str, Any]:
    return {"weight": torch.full((100,), float(step))}


def save(report: Report | None, base: Path, how: str, steps: list[int]) -> list[str]:
    """Save some steps through a door, as a run of its own; the errors."""
    errors: list[str] = []
    if how.startswith("local"):
        manager = LocalCheckpointManager(base)
        for step in steps:
            with _noting(errors):
                request = manager.save(BasicTensorAwareStateDict(_state(step)), step, is_async=how != "local")
                if request is not None:
                    request.execute_sync()
        manager.close()
        return errors
    door = Door(base)
    for step in steps:
        with _noting(errors):
            if how == "engine":
                door.saver.save(CheckpointContainerId(door.version(step)), list(_state(step).items()))
            else:
                door.save_by(how, _state(step), step)
    door.settle()
    door.close()
    return errors


@contextlib.contextmanager
def _noting(errors: list[str]) -> Any:
    try:
        yield
    except (UnaskedVersionsError, CheckpointException) as error:
        errors.append(f"{type(error).__name__}: {error}")


def versions(base: Path) -> list[str]:
    return sorted(path.name for path in base.glob("step-*"))


@pytest.mark.parametrize("how", DOORS)
def test_versions_that_nobody_asked_about_are_not_saved_over(tmpfs: Path, how: str) -> None:
    base = tmpfs / "job"
    assert call(save, base, how, [60, 61]) == []
    assert versions(base) == ["step-61_ckpt"]
    errors = call(save, base, how, [2, 3])
    assert len(errors) == 2
    for error in errors:
        assert "UnaskedVersionsError" in error
        assert ("find_latest" if how.startswith("local") else "get_latest_complete_checkpoint") in error
    assert versions(base) == ["step-61_ckpt"]


def _in_a_process(folder: Path, steps: list[int]) -> list[list[str]]:
    with Team(_on_a_node, folder, 1, "process", steps) as team:  # which starts a process that imports torch
        return team.results(200)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_nor_by_a_saving_process(tmpfs: Path) -> None:
    """It has no store, and its trainer has not opened one yet when it saves first."""
    base = tmpfs / "node-0" / "job"
    assert call_team(_on_a_node, tmpfs, 1, "sync", [61]) == [[]]
    (errors,) = _in_a_process(tmpfs, [2, 3])
    assert [("UnaskedVersionsError" in error) for error in errors] == [True, True], errors
    assert versions(base) == ["step-61_ckpt"]
    shutil.rmtree(base)
    assert _in_a_process(tmpfs, [2, 3, 4]) == [[]]
    assert versions(base) == ["step-4_ckpt"]


def _asking(report: Report, base: Path, how: str) -> int:
    if how == "find_latest":
        with contextlib.closing(LocalCheckpointManager(base)) as manager:
            assert manager.find_latest() == 61
            manager.save(BasicTensorAwareStateDict(_state(62)), 62)
            return manager.find_latest()
    door = Door(base)
    if how == "recovery":
        door.loader.get_latest_complete_checkpoint(base)
    else:
        reader = MemoryStorageReader(path=door.version(61), checkpoint_loader=door.loader)
        dcp.load(_state(0), storage_reader=reader)
    door.save(_state(2), 2)
    door.settle()
    step = door.latest()
    door.close()
    assert step is not None
    return step


@pytest.mark.parametrize(
    ("how", "first", "newest"), [("recovery", "sync", 2), ("path", "sync", 2), ("find_latest", "local", 62)]
)
def test_who_asked_saves(tmpfs: Path, how: str, first: str, newest: int) -> None:
    base = tmpfs / "job"
    call(save, base, first, [61])
    assert call(_asking, base, how) == newest
    assert versions(base) == [f"step-{newest}_ckpt"]


def _on_a_node(report: Report, rank: int, how: str, steps: list[int]) -> list[str]:
    return save(None, Path(os.environ["FLASHPOINT_TEST_BASE"]), how, steps)


@pytest.mark.parametrize("how", ["sync", "local", "local asynchronous"])
def test_no_rank_saves_where_one_has_found_something(tmpfs: Path, how: str) -> None:
    """A node was replaced: its rank finds nothing, and the others' versions would go nevertheless."""
    assert call_team(_on_a_node, tmpfs, 2, how, [60, 61]) == [[], []]
    shutil.rmtree(tmpfs / "node-0")
    for errors in call_team(_on_a_node, tmpfs, 2, how, [2, 3]):
        assert len(errors) == 2
        assert all("UnaskedVersionsError" in error for error in errors)
    assert versions(tmpfs / "node-1" / "job") == ["step-61_ckpt"]


@pytest.mark.parametrize("how", [*DOORS, "facade"])
def test_a_process_that_opens_again_has_to_ask_again(tmpfs: Path, how: str) -> None:
    """A notebook's cell that is run twice, say: that the first opening had asked does not count for the second."""
    base = tmpfs / "job"
    assert call(_opening_twice, base, how) == [0, 2]
    assert versions(base) == ["step-61_ckpt"]


def _opening_twice(report: Report, base: Path, how: str) -> list[int]:
    one = _save_by_facade if how == "facade" else save
    return [len(one(None, base, how, steps)) for steps in ([60, 61], [2, 3])]


def _save_by_facade(report: Report | None, base: Path, how: str, steps: list[int]) -> list[str]:
    errors: list[str] = []
    with Flashpoint(base) as fp:
        fp.track(value=Stored(1))
        if not versions(base):
            assert fp.resume() == 0
        for step in steps:
            with _noting(errors):
                fp.save(step)
                assert fp.wait()
    return errors


def test_what_this_opening_has_saved_need_not_be_asked_about(tmpfs: Path) -> None:
    base, objects = tmpfs / "job", CheckpointObjectManager()
    for step in (1, 2):
        saver = DefaultMLFlashpointCheckpointSaver(ckpt_obj_manager=objects)
        saver.save(CheckpointContainerId(f"{base}/step-{step}_ckpt"), list(_state(step).items()))
        assert saver.wait(30)
        saver.close()
    objects.close()
    assert versions(base) == ["step-2_ckpt"]


@pytest.mark.parametrize("error", [PermissionError, OSError])
def test_what_cannot_be_listed_is_not_taken_for_nothing(
    tmpfs: Path, error: type[OSError], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmpfs / "job"
    call(save, base, "sync", [61])
    door, listdir = Door(base), os.listdir

    def refusing(path: Any) -> list[str]:
        if "step-" in str(path):
            raise error("not now")
        return listdir(path)

    with monkeypatch.context() as patched:
        patched.setattr(os, "listdir", refusing)
        with pytest.raises(UnaskedVersionsError):
            door.saver.propose(CheckpointContainerId(door.version(62)))
    door.close()
