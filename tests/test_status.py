"""The status of a rank: what follows from its events, and a file that nobody reads half."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ml_flashpoint import events
from ml_flashpoint.memory.container import BaseContainer, JobLock
from ml_flashpoint.ranks.strategies import PairwiseReplicationStrategy, Topology
from ml_flashpoint.status import Status, StatusFile, read_status, write_status

RANKS: Any = SimpleNamespace(rank=1, node="b", topology=Topology(("a", "b", "c", "d")))
NEW = Status(rank=1, node="n", pid=7)


def _after(*told: events.Event) -> Status:
    status = NEW
    for event in told:
        status = status.after(event)
    return status


def test_a_good_save() -> None:
    status = _after(
        events.Resumed(step=4, source="memory", seconds=1.0, time_s=10.0),
        events.PartCommitted(step=5, bytes=100, seconds=0.5, time_s=11.0),
        events.PartReplicated(step=5, bytes=100, seconds=0.2, holders=(0,), time_s=12.0),
        events.VersionVerified(step=5, seconds=1.5, time_s=13.0),
        events.LoopHeld(step=5, seconds=0.003, time_s=14.0),
    )
    assert status == Status(
        rank=1,
        node="n",
        pid=7,
        updated_s=14.0,
        resumed=4,
        committed=5,
        replicated=5,
        verified=5,
        verified_s=13.0,
        held_s=0.003,
        held_total_s=0.003,
        committed_after_s=0.5,
        verified_after_s=1.5,
        part_bytes=100,
        copied_bytes=100,
        copied_in_s=0.2,
        saves=1,
    )
    assert not status.degraded


def test_what_is_amiss_and_when_it_is_over() -> None:
    status = _after(events.ReplicationFailed(error="no peer", step=5), events.AgreementFailed(error="lost", step=5))
    assert status.degraded
    assert (status.replication_error, status.agreement_error) == ("no peer", "lost")
    status = status.after(events.PartReplicated(step=6, bytes=1, seconds=0.1, holders=(0,)))
    assert status.replication_error is None
    status = status.after(events.VersionVerified(step=6, seconds=0.1))
    assert not status.degraded
    status = status.after(events.PersistFailed(error="full", step=6))
    assert (status.degraded, status.persist_error, status.persist_failures) == (True, "full", 1)
    status = status.after(events.PartPersisted(step=7, bytes=1, seconds=0.1))
    assert (status.degraded, status.persisted, status.persist_lag) == (False, 7, 0)
    assert status.after(events.VersionVerified(step=9, seconds=0.1)).persist_lag == 2
    status = status.after(events.SaveFailed(error="x" * 10**6)).after(events.SteppedBack(error="damaged"))
    assert (status.failures, status.stepped_back) == (1, 1)
    assert len(status.error or "") == 2000


def test_what_rank_0_has_persisted_is_what_is_complete() -> None:
    status = Status(rank=0, node="n").after(events.PersistFailed(error="full"))
    part = status.after(events.PartPersisted(step=7, bytes=1, seconds=0.1))
    assert (part.persisted, part.persist_error, part.persist_failures) == (None, "full", 0)
    whole = part.after(events.VersionPersisted(step=7, url="file:///store"))
    assert (whole.persisted, whole.persist_error) == (7, None)


def test_a_run_has_versions_of_its_own() -> None:
    status = _after(
        events.PartCommitted(step=5, bytes=100, seconds=0.5),
        events.PartReplicated(step=5, bytes=100, seconds=0.2, holders=(0,)),
        events.VersionVerified(step=5, seconds=1.5),
        events.RunBegun(step=3, run=2),
    )
    assert (status.committed, status.replicated, status.verified, status.saves) == (None, None, None, 1)


def test_it_comes_back_from_its_file(tmp_path: Path) -> None:
    status = _after(events.VersionVerified(step=6, seconds=0.1))
    placed = Status(rank=1, node="n", nodes=3, survives=1, copies_on=("m", "o"))
    assert read_status(tmp_path / "0") is None
    for each in (status, NEW, placed, status):
        write_status(tmp_path / "0", each)
        assert read_status(tmp_path / "0") == each
    assert os.listdir(tmp_path) == ["0"]


def test_anything_else_is_none_and_what_a_newer_release_adds_is_left_out(tmp_path: Path) -> None:
    path, good = tmp_path / "0", {"schema": 1, "rank": 1, "node": "n", "pid": 7}
    path.write_text(json.dumps({**good, "colour": "red"}))
    assert read_status(path) == NEW
    wrong: list[dict[str, Any]] = [{"schema": 2}, {"rank": "0"}, {"node": 3}, {"committed": 1.5}, {"held_s": "1"}]
    wrong += [{"error": 7}, {"saves": None}, {"pid": [1]}, *({"copies_on": each} for each in ("m", [1], [["m"]]))]
    texts = ["", "{}", "[]", "null", "[" * 50_000, '{"schema": 1, "rank": 0}']
    for text in (*texts, *(json.dumps({**good, **change}) for change in wrong)):
        path.write_text(text)
        assert read_status(path) is None, text[:100]


def test_nothing_planted_is_followed(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("kept")
    (tmp_path / "0").symlink_to(tmp_path / "kept")
    assert read_status(tmp_path / "0") is None
    write_status(tmp_path / "0", NEW)
    assert (tmp_path / "kept").read_text() == "kept"
    assert read_status(tmp_path / "0") == NEW
    (tmp_path / "0").unlink()
    os.mkfifo(tmp_path / "0")
    assert read_status(tmp_path / "0") is None


# ---- of a job ---------------------------------------------------------------------------------------------------


@pytest.fixture
def base(tmpfs: Path) -> Path:
    return tmpfs / "job"


@contextlib.contextmanager
def opened(base: Path) -> Iterator[StatusFile]:
    lock = JobLock(base, "job", 1.0)
    made = StatusFile(BaseContainer(base, lock), lock, RANKS, PairwiseReplicationStrategy())
    yield made
    made.close()
    lock.release()


@pytest.fixture
def board(base: Path) -> Iterator[StatusFile]:
    with opened(base) as made:
        yield made


def file_of(base: Path) -> Path:
    return base / ".flashpoint" / "status" / "1"


def test_a_file_shows_what_events_amount_to(base: Path, board: StatusFile) -> None:
    first = read_status(file_of(base))
    assert first is not None
    assert (first.node, first.nodes, first.survives, first.copies_on, first.starts) == ("b", 4, 1, ("a",), 1)
    events.emit(events.PartCommitted, RANKS, base, 7, bytes=3, seconds=0.1)
    events.emit(events.SaveSkipped, RANKS, base, 8)
    events.emit(events.VersionVerified, RANKS, base, 7, seconds=0.2)
    events.emit(events.VersionVerified, SimpleNamespace(rank=0, node="a"), base, 9, seconds=0.2)
    assert (board.status.committed, board.status.verified, board.status.skipped) == (7, 7, 1), "at once"
    events.flush()
    shown = read_status(file_of(base))
    assert shown == board.status
    assert (shown.committed, shown.verified, shown.skipped, shown.saves) == (7, 7, 1, 1)


def test_the_next_process_goes_on_with_the_number_of_starts(base: Path) -> None:
    for starts in (1, 2, 3):
        with opened(base):
            events.emit(events.PartCommitted, RANKS, base, starts, bytes=3, seconds=0.1)
        shown = read_status(file_of(base))
        assert shown is not None
        assert (shown.starts, shown.committed) == (starts, starts)


def test_nothing_is_written_where_the_base_container_was_removed(base: Path, board: StatusFile) -> None:
    shutil.rmtree(base)
    events.emit(events.VersionVerified, RANKS, base, 7, seconds=0.2)
    events.flush()
    assert not base.exists()
