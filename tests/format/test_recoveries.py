"""Recoveries, put together from events as ranks tell them."""

from __future__ import annotations

from typing import Any

import pytest

from ml_flashpoint.format.events import (
    Event,
    LoopHeld,
    PartFetched,
    Resumed,
    SteppedBack,
    VersionRecovered,
    VersionVerified,
)
from ml_flashpoint.format.recoveries import Phase, Recoveries, Recovery


def _of(time_s: float, rank: int = 0, step: int | None = 7) -> dict[str, Any]:
    return {"time_s": time_s, "rank": rank, "node": "n", "base": "/b", "step": step}


def _recovered(time_s: float, rank: int = 0) -> VersionRecovered:
    return VersionRecovered(
        **_of(time_s, rank), detect_s=1.0, plan_s=0.5, fetch_s=2.0, fetched_bytes=9, tries=1
    )  # fmt: skip


def _together(*events: Event) -> list[Recovery]:
    recoveries = Recoveries()
    return [each for event in events for each in recoveries.add(event)] + recoveries.rest()


def test_a_recovery_with_all_its_phases() -> None:
    fetched = PartFetched(**_of(103.0), part_rank=0, bytes=9, seconds=1.0)
    resumed = Resumed(**_of(105.0), source="memory", seconds=5.5)
    (told,) = _together(fetched, _recovered(104.0), resumed)
    assert (told.rank, told.node, told.base, told.step, told.source) == (0, "n", "/b", 7, "memory")
    assert (told.began_s, told.ended_s) == (99.5, 105.0)
    assert told.phases == (
        Phase("detect", 100.5, 101.5),
        Phase("plan", 101.5, 102.0),
        Phase("fetch", 102.0, 104.0),
        Phase("load", 104.0, 105.0),
    )
    assert told.fetched == (fetched,)
    assert told.stepped_back == ()


def test_ranks_are_told_apart() -> None:
    ends = (Resumed(**_of(105.0, rank), source="memory", seconds=5.0) for rank in (1, 0))
    told = _together(_recovered(104.0, 0), _recovered(104.1, 1), *ends)
    assert [each.rank for each in told] == [1, 0]
    assert [each.phases[2].ended_s for each in told] == [104.1, 104.0]


def test_a_version_that_was_gone_back_from() -> None:
    back = SteppedBack(**_of(104.5, step=8), error="damaged")
    resumed = Resumed(**_of(109.0), source="memory", seconds=9.0)
    (told,) = _together(_recovered(104.0), back, _recovered(108.0), resumed)
    assert told.stepped_back == (back,)
    assert [phase.name for phase in told.phases] == ["detect", "plan", "fetch"] * 2 + ["load"]


@pytest.mark.parametrize("end", [LoopHeld(**_of(110.0), seconds=1.0), None])
def test_doors_that_do_not_say_when_training_goes_on(end: Event | None) -> None:
    (told,) = _together(_recovered(104.0), *([end] if end else []))
    assert (told.step, told.source, told.ended_s) == (7, "", 104.0)
    assert [phase.name for phase in told.phases] == ["detect", "plan", "fetch"]


def test_a_process_that_did_not_live_to_resume() -> None:
    first, second = _together(
        _recovered(104.0), _recovered(204.0), Resumed(**_of(205.0), source="memory", seconds=5.0)
    )  # fmt: skip
    assert (first.source, first.ended_s) == ("", 104.0)
    assert (second.source, second.began_s) == ("memory", 200.0)


def test_what_is_no_recovery() -> None:
    copy = PartFetched(**_of(103.0), part_rank=1, bytes=9, seconds=1.0)
    assert _together(VersionVerified(**_of(101.0), seconds=1.0), copy, LoopHeld(**_of(104.0), seconds=1.0)) == []
    (told,) = _together(Resumed(**_of(105.0, step=0), source="nothing", seconds=0.5))
    assert told.phases == (Phase("load", 104.5, 105.0),)
