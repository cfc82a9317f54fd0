"""The preflight of a job, against what its arenas really take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ml_flashpoint.checkpoint_object_manager import capacity
from ml_flashpoint.checkpoint_object_manager.arena_pool import with_headroom
from ml_flashpoint.core.engine import CheckpointEngine
from ml_flashpoint.core.room import check_capacity, prepare_room
from ml_flashpoint.format.errors import CapacityError

SIZE = 10 << 20


def test_what_arenas_have_beside_their_content_counts(tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with CheckpointEngine(tmpfs / "job") as engine:
        checks: list[Callable[[], None]] = [
            lambda: check_capacity(engine.ranks, SIZE, engine.store, engine.replication),
            lambda: prepare_room(engine.store, engine.ranks, SIZE, 0),
        ]
        needed = 2 * with_headroom(SIZE)
        assert needed > 2 * SIZE
        for check in checks:
            monkeypatch.setattr(capacity, "available_bytes", lambda path: needed)
            check()
            monkeypatch.setattr(capacity, "available_bytes", lambda path: needed - 1)
            with pytest.raises(CapacityError) as raised:
                check()
            assert (raised.value.needed_bytes, raised.value.available_bytes) == (needed, needed - 1)
