"""Handles and main managers that begin anew. The managers are played by the test."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from ml_flashpoint.ddict.accounts import Write
from ml_flashpoint.ddict.errors import (
    DDictManagerLostError,
    DDictWritesLostError,
)
from tests.ddict.coordination import DEADLINE_S, Make
from tests.support.dictionaries import await_that


def test_a_handle_that_went_back_is_not_taken_for_one_that_fell_behind(make: Make) -> None:
    play = make(working_set_size=2)
    play.managers.refusals["seal"] = lambda manager, fields: DDictManagerLostError("away", manager=manager)
    play.join("a")
    for position in range(1, 4):
        play.move("a", position, play.write(1, position - 1))
    play.managers.incarnations[1] = "second-1"
    play.rollback("a", 0)
    play.managers.refusals.clear()
    assert play.newest() == -1
    play.move("a", 1, play.write(1, 0))
    assert play.newest() == 0
    play.move("a", 2, play.write(1, 1))
    assert play.newest() == 1
    assert play.coordinator.state()["oldest"] <= 1


def test_what_a_handle_goes_back_to_stays_while_a_commit_ends(make: Make) -> None:
    play = make(working_set_size=2)
    play.join("a")
    for position in (1, 2, 3):
        play.move("a", position, play.write(1, position - 1))
        assert play.newest() == position - 1
    gate = play.managers.close_gate("seal")
    sealed = len(play.managers.of("seal"))
    play.move("a", 4, play.write(1, 3))
    play.managers.await_asked("seal", sealed + 2)
    back = threading.Thread(target=play.rollback, args=("a", 2))
    back.start()
    deadline = time.monotonic() + DEADLINE_S
    while play.coordinator._writers["a"].position != 2:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    gate.set()
    back.join(DEADLINE_S)
    state = play.coordinator.state()
    assert (state["committed"], state["oldest"]) == (2, 2)
    play.move("a", 3, play.write(1, 2))
    assert play.newest() == 2


def test_what_a_manager_sealed_before_it_came_back_without_it_is_not_committed(make: Make) -> None:
    play = make(working_set_size=2)
    play.join("a")
    play.move("a", 1, play.write(1, 0))
    assert play.newest() == 0
    gate = play.managers.close_gate("seal")
    sealed = len(play.managers.of("seal"))
    lost = play.write(1, 1)

    def die_having_sealed(manager: int, fields: dict[str, Any]) -> None:
        if manager == 1 and play.managers.incarnations[1] != "second":
            assert play.coordinator.recovering(1, "second")["committed"] == 0

    play.managers.refusals["seal"] = die_having_sealed
    play.move("a", 2, lost)
    play.managers.await_asked("seal", sealed + 2)
    gate.set()
    play.managers.await_asked("prepare", len(play.managers.of("prepare")) + 2)
    assert play.coordinator.state()["committed"] == 0
    play.managers.incarnations[1] = "second"
    told: list[DDictWritesLostError] = []
    deadline = time.monotonic() + DEADLINE_S
    while not told and time.monotonic() < deadline:
        try:
            play.move("a", 2, lost)
            time.sleep(0.01)
        except DDictWritesLostError as error:
            told.append(error)
    assert [error.checkpoint_id for error in told] == [0]


def test_one_who_takes_over_commits_nothing_before_those_who_wrote_are_back(make: Make) -> None:
    play = make(committed=1, sealed=(1,), expected=("a", "b"))
    play.join("a", 3)
    play.move("a", 4)
    assert play.coordinator.state()["committed"] == 1
    lost = Write(1, "an incarnation that is gone", 2)
    play.join("b", 3, lost)
    play.managers.await_asked("abort", 1)
    with pytest.raises(DDictWritesLostError) as raised:
        play.move("b", 4, lost)
    assert raised.value.checkpoint_id == 1
    assert play.coordinator.state()["committed"] == 1


def test_one_who_takes_over_does_not_take_for_whole_what_processes_died_in(make: Make) -> None:
    play = make(working_set_size=2, committed=1, sealed=(1,), died=("a",))
    play.join("b", 2)
    play.move("b", 3)
    assert play.newest() == 1
    play.move("b", 4)
    assert play.newest() == 3


def test_what_was_lost_is_told_also_if_a_handle_moves_before_it_has_come_back(make: Make) -> None:
    play = make(working_set_size=2, committed=4, sealed=(4,), expected=("a", "b"))
    play.coordinator.recovering(0, play.managers.incarnations[0])
    lost = Write(0, "an incarnation that is gone", 7)
    play.coordinator.lease_began("lease of a", "connection")
    moving = threading.Thread(target=play.move, args=("a", 9, lost))
    moving.start()  # has to wait, since commits are behind
    await_that(lambda: "a" in play.coordinator.writers())
    play.join("b", 8)
    play.join("a", 8, lost)
    moving.join(DEADLINE_S)

    with pytest.raises(DDictWritesLostError) as raised:
        play.move("a", 10, lost)

    assert raised.value.checkpoint_id == 4
    assert play.coordinator.state()["committed"] == 4


def test_who_comes_back_too_late_is_told_what_was_lost(make: Make) -> None:
    play = make(working_set_size=9, committed=4, sealed=(4,))
    play.coordinator.recovering(0, play.managers.incarnations[0])
    play.join("b", 5)
    play.move("b", 9)
    assert play.newest() == 8
    lost, kept = Write(0, "an incarnation that is gone", 7), Write(0, "an incarnation that is gone", 4)
    play.join("a", 8, kept)
    play.move("a", 10, kept)
    play.move("b", 10)
    assert play.newest() == 9

    play.join("c", 8, lost)
    play.move("b", 12)
    play.move("a", 12)
    play.move("c", 12, lost)
    play.managers.await_asked("abort", 1)

    with pytest.raises(DDictWritesLostError) as raised:
        play.move("c", 13, lost)
    assert raised.value.checkpoint_id == 4
