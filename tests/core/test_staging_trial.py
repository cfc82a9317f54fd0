"""What costs the loop less is done, found out by doing both now and then."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ml_flashpoint.core.staging_trial import StagingTrial


def _saves(trial: StagingTrial, count: int, overlapped_s: float, blocking_s: float) -> list[bool]:
    chosen = []
    for _ in range(count):
        chosen.append(overlaps := trial.begin())
        trial.took(overlaps, overlapped_s if overlaps else blocking_s)
    return chosen


@given(st.floats(0.001, 10), st.floats(0.001, 10))
def test_the_cheaper_way_is_taken_nearly_always(overlapped_s: float, blocking_s: float) -> None:
    chosen = _saves(StagingTrial(), 1000, overlapped_s, blocking_s)
    expected = overlapped_s <= 1.01 * blocking_s
    assert chosen.count(expected) >= 0.95 * len(chosen)
    assert {True, False} <= set(chosen[:12])


def test_the_first_saves_overlap_and_count_for_nothing() -> None:
    trial = StagingTrial()
    assert all(_saves(trial, 4, 100.0, 0.1))
    assert (trial.overlapped_s, trial.blocking_s) == (0.0, 0.0)


def test_what_changes_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    trial = StagingTrial()
    with caplog.at_level("INFO"):
        assert all(_saves(trial, 128, 1.0, 2.0)[11:])
        assert not caplog.records
        assert not any(_saves(trial, 128, 3.0, 2.0)[11:])
        assert "take 3.0000 s with the copy under way, and 2.0000 s" in caplog.text
        assert (trial.overlapped_s, trial.blocking_s) == (3.0, 2.0)
        assert all(_saves(trial, 128, 1.0, 2.0)[11:])
    assert len(caplog.records) == 2


def test_one_save_that_took_long_decides_nothing() -> None:
    trial = StagingTrial()
    for number in range(60):
        overlaps = trial.begin()
        trial.took(overlaps, 9.0 if number % 3 == 0 else (1.0 if overlaps else 2.0))
    assert trial.begin()


def test_without_measurements_saves_overlap() -> None:
    trial = StagingTrial()
    chosen = [trial.begin() for _ in range(128)]
    assert all(chosen[11:])
