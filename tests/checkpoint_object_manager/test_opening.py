"""Opening a base container: where it is looked for, and what is done if it is removed meanwhile."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ml_flashpoint.checkpoint_object_manager import checkpoint_object_manager, rank_lock
from ml_flashpoint.checkpoint_object_manager.checkpoint_object_manager import CheckpointObjectManager
from ml_flashpoint.format import private_folders


def test_a_store_that_is_open_is_found_by_its_name_without_a_look_along_the_way(
    tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, link = tmpfs / "job", tmpfs / "link"
    manager, looks = CheckpointObjectManager(), list[Path]()
    store = manager.open(base, 0)
    link.symlink_to(base)
    check_way = checkpoint_object_manager.check_way

    def counted(path: Path) -> Path:
        looks.append(path)
        return check_way(path)

    monkeypatch.setattr(checkpoint_object_manager, "check_way", counted)
    assert manager.open(base, 0) is store
    assert manager.resolved(str(base)) == store.base
    assert not looks
    assert manager.open(link, 0) is store
    assert looks == [link]
    manager.close()
    assert manager.resolved(base) == store.base
    assert looks == [link, base]


@pytest.mark.parametrize(
    ("module", "after"),
    [
        (private_folders, "check_way"),
        (rank_lock, "make_tree"),
        (rank_lock, "keep_reserve"),
        (rank_lock, "_register"),
    ],
)
def test_a_folder_that_is_removed_while_it_is_opened_is_made_anew(
    tmpfs: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType, after: str
) -> None:
    base, real, removals = tmpfs / "job", getattr(module, after), list[None]()
    base.mkdir(mode=0o700)

    def then_remove(*args: Any) -> Any:
        result = real(*args)
        if not removals:
            removals.append(shutil.rmtree(base))
        return result

    monkeypatch.setattr(module, after, then_remove)
    manager = CheckpointObjectManager()
    store = manager.open(base, 0)
    assert removals
    assert (store.directory / rank_lock.LOCK).exists()
    manager.close()
