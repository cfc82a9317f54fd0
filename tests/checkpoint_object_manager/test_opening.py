"""A base container is looked for along its way once, and by every other name that it is given by."""

from __future__ import annotations

from pathlib import Path

import pytest

from ml_flashpoint.checkpoint_object_manager import checkpoint_object_manager
from ml_flashpoint.checkpoint_object_manager.checkpoint_object_manager import CheckpointObjectManager


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
