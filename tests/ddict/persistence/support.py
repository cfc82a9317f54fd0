"""What tests of persisters write, and find again."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from ml_flashpoint.ddict.persistence import (
    CheckpointPersister,
    PersistedCheckpoint,
)

MANAGERS = 2


def mount_dfuse(monkeypatch: pytest.MonkeyPatch, where: Path) -> None:
    """Have the list of mounts say that a folder is one of dfuse: DAOS needs a cluster of its own."""
    mounts = [*psutil.disk_partitions(all=True), SimpleNamespace(mountpoint=str(where), fstype="fuse.daos")]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounts)


def _items(run: str, checkpoint_id: int, manager: int) -> list[tuple[str, bytes]]:
    seed = f"{run}, {checkpoint_id}, {manager}".encode()
    return [("small", seed), ("empty", b""), ("large", seed * 2000)]


def _write(persister: CheckpointPersister, run: str, checkpoint_id: int) -> list[str]:
    return [
        persister.write_part(checkpoint_id, manager, f"index {manager}".encode(), _items(run, checkpoint_id, manager))
        for manager in range(persister.managers)
    ]


def _persist(persister: CheckpointPersister, run: str, *checkpoint_ids: int) -> None:
    for checkpoint_id in checkpoint_ids:
        persister.complete(checkpoint_id, _write(persister, run, checkpoint_id))


def _begun(persister: CheckpointPersister, run: str, restored: PersistedCheckpoint | None = None) -> Any:
    persister.begin_run(run, continues=None if restored is None else (restored.run, restored.checkpoint_id))
    return persister


def _assert_whole(persister: CheckpointPersister, checkpoint_id: int, run: str) -> None:
    checkpoint = PersistedCheckpoint.from_fields(persister.locate(checkpoint_id).to_fields())
    assert (checkpoint.run, checkpoint.checkpoint_id) == (run, checkpoint_id)
    for part in range(checkpoint.managers):
        assert persister.read_index(checkpoint, part) == f"index {part}".encode()
        for name, content in _items(run, checkpoint_id, part):
            assert persister.read_item(checkpoint, part, name) == content
            into = bytearray(len(content) + 1)
            assert persister.read_item(checkpoint, part, name, into) == content
