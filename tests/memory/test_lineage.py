"""Runs, and which saves exist in the newest one that has begun."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ml_flashpoint.format.errors import CapacityError, DamagedError, SaveError, UnsafePathError
from ml_flashpoint.format.names import SaveId
from ml_flashpoint.memory.container import BaseContainer
from ml_flashpoint.memory.lineage import (
    RunRecord,
    mark_begun,
    mark_verified,
    newest_begun,
    next_run,
    read_records,
    write_record,
)
from tests.memory.support import fill_up


def test_a_run_counts_once_it_is_marked(tmpfs: Path) -> None:
    container = BaseContainer(tmpfs)
    assert read_records(container) == []
    write_record(container, RunRecord(3))
    mark_begun(container, 3)
    write_record(container, RunRecord(5, {3: 40}))
    assert read_records(container) == [RunRecord(3, {}, True), RunRecord(5, {3: 40})]
    assert newest_begun(read_records(container)) == RunRecord(3, {}, True)
    for _ in range(2):  # also where it was marked before
        mark_begun(container, 5)
        assert read_records(container) == [RunRecord(5, {3: 40}, True)]
    with pytest.raises(SaveError):
        mark_begun(container, 6)
    assert os.listdir(tmpfs / ".flashpoint/runs") == ["00000005.begun"]


def test_that_a_run_had_a_verified_version_is_marked(tmpfs: Path) -> None:
    container = BaseContainer(tmpfs)
    write_record(container, RunRecord(1))
    mark_begun(container, 1)
    for _ in range(2):
        mark_verified(container, 1)
        assert read_records(container) == [RunRecord(1, {}, True, True)]
    with pytest.raises(SaveError):
        mark_verified(container, 2)


def test_a_full_tmpfs_refuses_the_record_and_lets_it_be_marked(small_tmpfs: Path) -> None:
    container = BaseContainer(small_tmpfs)
    write_record(container, RunRecord(1))
    fill_up(small_tmpfs)
    with pytest.raises(CapacityError):
        write_record(container, RunRecord(2))
    mark_begun(container, 1)
    assert os.listdir(small_tmpfs / ".flashpoint/runs") == ["00000001.begun"]


def test_damaged_and_planted_records_are_refused(tmpfs: Path) -> None:
    container = BaseContainer(tmpfs)
    write_record(container, RunRecord(3, {1: 5}))
    path = tmpfs / ".flashpoint/runs/00000003.written"
    good = path.read_bytes()
    for bad in (b"", good[:-1], good.replace(b"5", b"6"), good.replace(b"-run-1", b"-run-2")):
        path.write_bytes(bad)
        with pytest.raises(DamagedError):
            read_records(container)
    path.rename(path.with_name("00000004.written"))
    path.with_name("00000004.written").write_bytes(good)
    with pytest.raises(DamagedError, match="unlike its name"):
        read_records(container)
    path.with_name("00000004.written").unlink()
    path.symlink_to("/etc/passwd")
    with pytest.raises(UnsafePathError):
        read_records(container)


@given(st.lists(st.tuples(st.integers(0, 30), st.booleans(), st.booleans()), max_size=12))
def test_what_was_gone_back_from_never_exists_again(moves: list[tuple[int, bool, bool]]) -> None:
    """Each run saves some steps, then the next one goes on from any save that exists; some runs never begin."""
    records: list[RunRecord] = []
    there: set[SaveId] = set()
    exist: set[SaveId] = set()
    for steps, begins, newest in moves:
        chosen = None if not exist else max(exist) if newest else sorted(exist)[steps % len(exist)]
        record = next_run(records, there, chosen)
        assert record.run > max([0, *(save.run for save in there), *(each.run for each in records)])
        records.append(record)
        if not begins:
            continue
        records[-1] = record = RunRecord(record.run, record.lineage, True)
        first = chosen.step + 1 if chosen else 0
        exist = {save for save in exist if chosen and (save <= chosen)}
        made = {SaveId(record.run, step) for step in range(first, first + steps % 4)}
        there |= made
        exist |= made
        counts = newest_begun(records)
        assert counts is not None
        assert {save for save in there if counts.has(save)} == exist
