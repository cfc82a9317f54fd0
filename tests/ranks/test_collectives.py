"""Ranks that have lost each other in a collective meet again in a later one; what fails on one is raised on all."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from ml_flashpoint.format.errors import FlashpointError, InvalidArgumentError, LoadError, RanksLostError
from ml_flashpoint.ranks.collectives import Collectives
from ml_flashpoint.ranks.rank_group import rank_group
from tests.support.forked import Report, Team, call_team


def leave(report: Report, rank: int) -> list[int | str]:
    """Rank 1 leaves the second of three collectives at once: gloo cannot reduce what it brings."""
    collectives = Collectives(120.0)
    came_to: list[int | str] = []
    for turn in range(3):
        dtype = torch.complex64 if (rank, turn) == (1, 1) else torch.int64
        data = torch.tensor([rank], dtype=dtype)
        try:
            collectives.reduce("meeting", data, dist.ReduceOp.MAX)
            came_to.append(int(data))
        except RanksLostError:
            came_to.append("lost")
    return came_to


def come_late(report: Report, rank: int) -> int:
    """Rank 1 comes when it is told to; all try until they have met."""
    collectives = Collectives(2.0)
    if rank == 1:
        report.listen()
    while True:
        data = torch.tensor([rank])
        try:
            collectives.reduce("meeting", data, dist.ReduceOp.MAX)
            return int(data)
        except RanksLostError as error:
            report("lost", str(error))


def test_a_collective_that_a_rank_leaves_ends_and_the_next_one_is_made(tmp_path: Path) -> None:
    with Team(leave, tmp_path, 3) as team:
        assert team.results() == [[2, "lost", 2]] * 3


def test_a_rank_that_does_not_come_is_named_and_can_come_later(tmp_path: Path) -> None:
    with Team(come_late, tmp_path, 2) as team:
        _, error = team[0].next_report("lost")
        assert "the meeting of the job's ranks failed: rank 1 of 2 did not come: " in error
        team[1].say("come")
        assert team.results() == [1, 1]


def disagree(report: Report, rank: int) -> tuple[bool, str]:
    """What ranks come to of which one is not content, and that differ in one of two arguments."""
    ranks = rank_group()
    ranks.agree_on(alike="x", own=None)
    try:
        ranks.agree_on(alike="x", own=rank)
    except InvalidArgumentError as error:
        return ranks.all_ok(rank == 0), str(error)
    return ranks.all_ok(rank == 0), ""


def test_what_ranks_do_not_agree_on_is_refused_by_all(tmp_path: Path) -> None:
    for ok, error in call_team(disagree, tmp_path, 2):
        assert not ok
        assert "own" in error
        assert "differs between ranks: [0, 1]" in error


class MuteError(Exception):
    """An error whose text cannot be had."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


FAILURES: list[tuple[Exception, str]] = [
    (ValueError("cannot read /data/\udcff"), "ValueError: cannot read /data/\udcff"),
    (FlashpointError(""), ""),
    (MuteError(), "MuteError: its text cannot be shown (RuntimeError)"),
    (FlashpointError("x" * 10_000), "x" * 2000),
]
"""Errors of one rank, and their texts on others."""


def fail_on_rank_1(report: Report, rank: int) -> list[list[str]]:
    """Return the kind, and on rank 0 the text, of what is raised; and what is gathered after that."""
    ranks, said = rank_group(), []

    def act(error: Exception) -> None:
        if rank == 1:
            raise error

    for error, _ in FAILURES:
        try:
            ranks.together(lambda error=error: act(error), LoadError, "acting")  # type: ignore[misc]
        except Exception as raised:
            kind, text = type(raised).__name__, ascii(str(raised)) if rank == 0 else ""
        said.append([kind, text, b"".join(ranks.gather(b"%d" % rank)).decode()])
    return said


def test_a_failure_of_one_rank_is_raised_on_all_whatever_its_text_is(tmp_path: Path) -> None:
    one, other = call_team(fail_on_rank_1, tmp_path, 2)
    assert one == [["LoadError", ascii(f"acting failed on rank 1, node-1: {text}"), "01"] for _, text in FAILURES]
    assert other == [[type(error).__name__, "", "01"] for error, _ in FAILURES]
