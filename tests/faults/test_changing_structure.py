"""Replicated states whose structure changes: what that takes, where there is no room for it, and afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest

from ml_flashpoint.state.tracked import largest_share
from tests.faults.test_tight_room import MIB, documented, nodes
from tests.support.forked import call_team
from tests.workers.changing_structure import save_structures, save_structures_by_dcp

PACKED = 64 << 10
"""Room for what each rank has of its own, such as its generators."""


def room_for(states: int, phases: list[list[int]], ranks: int) -> int:
    return documented(states, max(largest_share(sizes, ranks) for sizes in phases) + PACKED)


PHASES = [[MIB, MIB // 2], [MIB, MIB, 3 * MIB // 2, MIB // 2], [MIB, MIB // 2, MIB // 2]]


@pytest.mark.slow
@pytest.mark.parametrize("hurry", [False, True])
def test_a_change_takes_no_more_room_than_what_is_saved(tmp_path: Path, hurry: bool) -> None:
    room = room_for(4 if not hurry else 5, PHASES, 2)
    with nodes(tmp_path, room):
        said = call_team(save_structures, tmp_path, 2, PHASES, 5, hurry)
    for each in said:
        assert each["errors"] == [None] * 15
        assert hurry or max(each["behind"]) == 0
        assert each["used"] <= room
        assert (each["found"], each["same"]) == (15, True)


@pytest.mark.slow
def test_where_dcp_copies_before_it_plans_a_change_without_room_for_it_costs_few_saves(tmp_path: Path) -> None:
    room = room_for(4, PHASES, 2)
    with nodes(tmp_path, room):
        said = call_team(save_structures_by_dcp, tmp_path, 2, PHASES, 5)
    for each in said:
        failed = {step: error for step, error in enumerate(each["errors"], 1) if error is not None}
        assert set(failed) <= {1, 6}, failed  # all of it is copied for the first save, too
        assert all("available" in error for error in failed.values())
        assert each["used"] <= room
        assert (each["found"], each["same"]) == (15, True)


@pytest.mark.slow
def test_what_a_change_took_where_dcp_copies_first_is_given_back(tmp_path: Path) -> None:
    phases = [[MIB // 2] * 8, [MIB // 2] * 8 + [4096]]
    with nodes(tmp_path, room_for(10, phases, 2)):
        said = call_team(save_structures_by_dcp, tmp_path, 2, phases, 50)
    for each in said:
        assert each["errors"] == [None] * 100
        assert each["used"] > room_for(5, phases, 2), "all of it was staged"
        assert each["left"] <= room_for(6, phases, 2)
        assert (each["found"], each["same"]) == (100, True)
