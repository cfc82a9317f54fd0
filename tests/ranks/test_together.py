"""What fails on one rank is raised on all ranks, whatever the text of the error is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ml_flashpoint.format.errors import FlashpointError, LoadError
from ml_flashpoint.ranks.rank_group import rank_group
from tests.support.forked import Report, Team


class MuteError(Exception):
    """An error whose text cannot be had."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


FAILURES: list[tuple[type[Exception], tuple[Any, ...], str]] = [
    (ValueError, ("cannot read /data/\udcff",), "ValueError: cannot read /data/\udcff"),
    (FlashpointError, ("",), ""),
    (MuteError, (), "MuteError: its text cannot be shown (RuntimeError)"),
    (FlashpointError, ("x" * 10_000,), "x" * 2000),
]
"""Kinds of errors, their arguments, and their texts on other ranks."""


def fail_on_rank_1(report: Report, rank: int, kind: type[Exception], args: tuple[Any, ...]) -> list[str]:
    """Return the kind, and on rank 0 the text, of what is raised; and what is gathered after that."""
    ranks = rank_group()

    def act() -> None:
        if rank == 1:
            raise kind(*args)

    try:
        ranks.together(act, LoadError, "acting")
    except Exception as error:
        raised = [type(error).__name__, ascii(str(error)) if rank == 0 else ""]
    return [*raised, b"".join(ranks.gather(b"%d" % rank)).decode()]


@pytest.mark.parametrize(("kind", "args", "text"), FAILURES, ids=["surrogate", "empty", "mute", "long"])
def test_a_failure_of_one_rank_is_raised_on_all(
    tmp_path: Path, kind: type[Exception], args: tuple[Any, ...], text: str
) -> None:
    with Team(fail_on_rank_1, tmp_path, 2, kind, args) as team:
        assert team.results() == [
            ["LoadError", ascii(f"acting failed on rank 1, node-1: {text}"), "01"],
            [kind.__name__, "", "01"],
        ]
