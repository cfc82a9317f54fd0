"""The file that shows how saving goes on a rank."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ml_flashpoint import events
from ml_flashpoint.engine.status import StatusBoard
from ml_flashpoint.format.status import read_status
from ml_flashpoint.memory.container import BaseContainer
from ml_flashpoint.memory.lock import JobLock
from ml_flashpoint.ranks.strategies import PairwiseReplicationStrategy, Topology

RANKS: Any = SimpleNamespace(rank=1, node="b", topology=Topology(("a", "b", "c", "d")))


@pytest.fixture
def base(tmpfs: Path) -> Path:
    return tmpfs / "job"


@pytest.fixture
def board(base: Path) -> Iterator[StatusBoard]:
    lock = JobLock(base, "job", 1.0)
    made = StatusBoard(BaseContainer(base, lock), lock, RANKS, PairwiseReplicationStrategy())
    yield made
    made.close()
    lock.release()


def file_of(base: Path) -> Path:
    return base / ".flashpoint" / "status" / "1"


def test_a_file_shows_what_events_amount_to(base: Path, board: StatusBoard) -> None:
    first = read_status(file_of(base))
    assert first is not None
    assert (first.node, first.nodes, first.survives, first.copies_on, first.starts) == ("b", 4, 1, ("a",), 1)
    events.emit(events.PartCommitted, RANKS, base, 7, bytes=3, seconds=0.1)
    events.emit(events.SaveSkipped, RANKS, base, 8)
    events.emit(events.VersionVerified, RANKS, base, 7, seconds=0.2)
    events.emit(events.VersionVerified, SimpleNamespace(rank=0, node="a"), base, 9, seconds=0.2)
    events.flush()
    shown = read_status(file_of(base))
    assert shown == board.status
    assert (shown.committed, shown.verified, shown.skipped, shown.saves) == (7, 7, 1, 1)


def test_the_next_process_goes_on_with_the_number_of_starts(base: Path) -> None:
    for starts in (1, 2, 3):
        lock = JobLock(base, "job", 1.0)
        board = StatusBoard(BaseContainer(base, lock), lock, RANKS, PairwiseReplicationStrategy())
        events.emit(events.PartCommitted, RANKS, base, starts, bytes=3, seconds=0.1)
        board.close()
        lock.release()
        shown = read_status(file_of(base))
        assert shown is not None
        assert (shown.starts, shown.committed) == (starts, starts)


def test_nothing_is_written_where_the_base_container_was_removed(base: Path, board: StatusBoard) -> None:
    shutil.rmtree(base)
    events.emit(events.VersionVerified, RANKS, base, 7, seconds=0.2)
    events.flush()
    assert not base.exists()
