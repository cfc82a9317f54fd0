"""The rule for which verified versions stay."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ml_flashpoint.format.errors import InvalidArgumentError
from ml_flashpoint.format.names import SaveId
from ml_flashpoint.ranks.retention import Keep, checked_keep, kept

rules = st.builds(Keep, st.integers(1, 5), st.none() | st.integers(1, 7), st.integers(1, 3))
steps_of_saves = st.lists(st.integers(0, 60), min_size=1, max_size=25)


def saves(steps: list[int]) -> list[SaveId]:
    return [SaveId(1 + index, step) for index, step in enumerate(steps)]


def steps_kept(steps: list[int], keep: Keep) -> list[int]:
    return [each.step for each in kept(saves(steps), keep)]


def test_examples() -> None:
    steps = list(range(1, 13))
    assert steps_kept(steps, Keep()) == [12]
    assert steps_kept(steps, Keep(newest=3)) == [10, 11, 12]
    assert steps_kept(steps, Keep(newest=2, every_n_steps=5)) == [10, 11, 12]
    assert steps_kept(steps, Keep(newest=2, every_n_steps=5, milestones=2)) == [5, 10, 11, 12]
    assert steps_kept(steps, Keep(newest=3, every_n_steps=5)) == [5, 10, 11, 12]
    assert steps_kept(steps, Keep(every_n_steps=4)) == [8, 12]


@given(steps_of_saves, rules)
def test_what_stays(steps: list[int], keep: Keep) -> None:
    line = saves(steps)
    stay = kept(line, keep)
    assert stay == sorted(stay)
    assert line[-1] in stay
    assert set(line[-keep.newest :]) <= set(stay)
    assert len(stay) <= keep.versions, "more than the capacity is computed for"
    assert kept(stay, keep) == stay


@given(steps_of_saves, rules)
def test_dropping_as_saves_come_ends_with_what_the_rule_says_of_all(steps: list[int], keep: Keep) -> None:
    """So ranks that drop at different times, and a restart that sees all of them, come to the same."""
    line = saves(steps)
    stay: list[SaveId] = []
    for each in line:
        stay = kept([*stay, each], keep)
    assert stay == kept(line, keep)


@pytest.mark.parametrize("value", [0, -1, True, 2.0, "3", None, [1]])
def test_no_rule(value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="keep"):
        checked_keep(value)
    for field in ("newest", "milestones", "every_n_steps"):
        if value is None and field == "every_n_steps":
            continue
        with pytest.raises(InvalidArgumentError, match=field):
            Keep(**{field: value})


def test_a_number_is_the_newest_so_many() -> None:
    assert {checked_keep(3)} == {Keep(newest=3)}
    assert Keep(newest=3, every_n_steps=100, milestones=2).versions == 5
