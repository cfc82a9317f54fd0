"""What the lives of a job reported that is killed, goes on, and is trained once more undisturbed by the last life."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

Reports = list[dict[str, Any]]


def last(reports: Reports, name: str) -> Any:
    """The value that was reported last under a name."""
    return [each[name] for each in reports if name in each][-1]


def assert_undisturbed(reports: Reports, but: Set[str] = frozenset()) -> Reports:
    """The job came to what the undisturbed run came to. Return what its lives have reported until then."""
    resumed, undisturbed = last(reports, "resumed"), last(reports, "undisturbed")
    for name in undisturbed.keys() - but:
        assert resumed[name] == undisturbed[name], name
    return reports[: next(number for number, each in enumerate(reports) if "resumed" in each)]
