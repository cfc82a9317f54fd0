"""Ranks that do not come to a save: rank 0 names them, in its log, its events and its status."""

from __future__ import annotations

import os
from pathlib import Path

from ml_flashpoint import Flashpoint, events
from ml_flashpoint.status import read_status
from tests.support.forked import Report, Team, wait_until
from tests.support.loops import Stored


def train(report: Report, rank: int) -> None:
    """Save once, when told to, and end when told to."""
    base = os.environ["FLASHPOINT_TEST_BASE"]
    with Flashpoint(base) as fp:
        fp.track(value=Stored(1)).resume()
        with events.subscribe(lambda event: isinstance(event, events.RanksMissing) and report("missing", event), base):
            report("before")
            report.listen()
            fp.save(7)
            report.listen()


def test_ranks_that_do_not_come_are_named(tmpfs: Path) -> None:
    with Team(train, tmpfs, 3, placement=[0, 0, 0], env={"FLASHPOINT_LATE_S": "0.5"}) as team:
        for child in team.ranks:
            child.next_report("before")
        team[0].say("go")
        _, event = team[0].next_report("missing")
        assert (event.ranks, event.step, event.rank) == ((1, 2), 7, 0)
        status = tmpfs / "node-0/job/.flashpoint/status/0"
        wait_until(lambda: (told := read_status(status)) is not None and told.degraded, "it is in the status")
        told = read_status(status)
        assert told is not None
        assert "ranks 1, 2 have not come to the save of step 7" in (told.agreement_error or "")
        assert "nothing was heard of rank 1, 2" in team[0].log
        for late in team[1], team[2]:
            late.say("go")
        wait_until(lambda: (told := read_status(status)) is not None and told.verified == 7, "it is verified")
        told = read_status(status)
        assert told is not None
        assert not told.degraded
        for child in team.ranks:
            child.say("end")
        team.results()
