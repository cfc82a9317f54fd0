"""Ranks that have lost each other in a collective meet again in a later one, and those that are missing are named."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from ml_flashpoint.format.errors import RanksLostError
from ml_flashpoint.ranks.collectives import Collectives
from tests.support.forked import Report, Team


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
    collectives = Collectives(10.0)
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
