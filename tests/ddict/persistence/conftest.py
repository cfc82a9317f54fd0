"""Persisters in every kind of store, for tests of what they persist."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ml_flashpoint.ddict.persistence import (
    CheckpointPersister,
    DAOSCheckpointPersister,
    FsspecCheckpointPersister,
    PosixCheckpointPersister,
)
from tests.ddict.persistence.support import MANAGERS, mount_dfuse


@pytest.fixture(autouse=True)
def _short_wait_for_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHPOINT_LOCK_DEADLINE_S", "0.05")


@pytest.fixture
def opened() -> Iterator[Callable[[CheckpointPersister], CheckpointPersister]]:
    """Closes persisters in the end."""
    with contextlib.ExitStack() as stack:

        def register(persister: CheckpointPersister) -> CheckpointPersister:
            stack.callback(persister.close)
            return persister

        yield register


@pytest.fixture(params=["posix", "file", "memory", "daos"])
def make(
    request: pytest.FixtureRequest, tmpfs: Path, monkeypatch: pytest.MonkeyPatch, opened: Callable[..., Any]
) -> Callable[..., CheckpointPersister]:
    """Makes persisters of one place and name, as dictionaries that come one after the other do."""
    if request.param == "posix":
        kind: type[CheckpointPersister] = PosixCheckpointPersister
        path = str(tmpfs / "persisted")
    elif request.param == "daos":
        mount_dfuse(monkeypatch, tmpfs)
        kind, path = DAOSCheckpointPersister, str(tmpfs / "persisted")
    else:
        kind = FsspecCheckpointPersister
        path = f"file://{tmpfs}/persisted" if request.param == "file" else f"memory://{secrets.token_hex(8)}"

    def make_one(name: str = "name", managers: int = MANAGERS) -> CheckpointPersister:
        persister: CheckpointPersister = opened(kind(path, name=name, managers=managers))
        return persister

    return make_one
