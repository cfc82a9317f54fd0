"""Two engines of one process in one base container: nothing is written over, and nothing newer passes for older."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ml_flashpoint.core.engine import CheckpointEngine
from ml_flashpoint.format.errors import JobInUseError


def save(engine: CheckpointEngine, step: int) -> None:
    engine.saver.save(engine.version(step), [("t", torch.full((3000,), float(step)))])
    assert engine.saver.wait(20)


def test_the_one_that_was_opened_first_saves_no_more_once_the_other_has(tmpfs: Path) -> None:
    with CheckpointEngine(tmpfs / "job") as first, CheckpointEngine(tmpfs / "job") as second:
        save(first, 1)
        save(second, 2)
        with pytest.raises(JobInUseError, match="another engine of this process"):
            save(first, 3)
        assert first.latest() == second.latest() == second.version(2)
        save(second, 4)
        assert second.latest() == second.version(4)


@pytest.mark.parametrize("how", ["first", "second"])
def test_one_that_is_closed_leaves_the_others_arenas_alone(tmpfs: Path, how: str) -> None:
    first, second = CheckpointEngine(tmpfs / "job"), CheckpointEngine(tmpfs / "job")
    one, other = (first, second) if how == "first" else (second, first)
    for step in (1, 2, 3):
        save(other, step)
    one.close()
    store = other.store
    for step in (4, 5, 6):
        save(other, step)
        assert not store.closed
        assert other.latest() == other.version(step)
    other.close()
    assert store.closed
    with CheckpointEngine(tmpfs / "job") as later:
        assert later.latest() == later.version(6)
