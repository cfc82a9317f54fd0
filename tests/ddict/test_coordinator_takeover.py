"""Handles and main managers that begin anew. The managers are played by the test."""

from __future__ import annotations

import multiprocessing
import threading
import time
from typing import Any

import pytest

from ml_flashpoint.ddict.accounts import Write, from_list
from ml_flashpoint.ddict.errors import (
    DDictCheckpointRetiredError,
    DDictManagerLostError,
    DDictTimeoutError,
    DDictWritesLostError,
)
from tests.ddict.coordination import DEADLINE_S, SHORT_S, Make, move_until_told, within
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
    await_that(lambda: play.coordinator._writers["a"].position == 2)
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


# ---- a main manager that takes over -----------------------------------------------------------------------


def test_one_who_takes_over_says_where_the_dictionary_is_when_handles_are_back(make: Make) -> None:
    play = make(committed=4, sealed=(4,), expected=("a", "b"))
    found: list[int] = []
    waiting = threading.Thread(target=lambda: found.append(play.newest()))
    waiting.start()
    play.join("a", 7)
    assert not found
    play.join("b", 7)
    waiting.join(DEADLINE_S)
    assert found == [6]


def test_one_who_takes_over_does_not_wait_for_handles_that_their_process_has_no_more(make: Make) -> None:
    play = make(committed=4, sealed=(4,), expected=("a", "b"))
    play.coordinator.lease_began("lease of a", "connection", handles=["a"])
    with pytest.raises(DDictTimeoutError, match="2 handle"):
        play.newest(SHORT_S)
    play.coordinator.lease_began("lease of b", "connection", handles=[])
    play.join("a", 6)
    assert play.newest() == 5


def test_who_only_looks_does_not_end_what_a_process_died_in(make: Make) -> None:
    play = make(working_set_size=4, committed=4, sealed=(4,), expected=("a",), died=("dead",))
    looking = threading.Thread(target=play.newest)
    looking.start()
    play.join("a", 6)
    looking.join(DEADLINE_S)
    play.move("a", 7)
    assert play.newest() == 4  # the dead one was in 5


def test_what_a_rollback_took_back_can_still_be_lost_after_a_takeover(make: Make) -> None:
    first = make(2)
    first.join("a")
    first.join("b")
    for position in (1, 2):
        wrote = first.write(0, position - 1)
        first.move("a", position)
        first.move("b", position, wrote)
    assert first.newest() == 1
    first.rollback("a", 0)
    (told, _) = first.managers.of("forget")
    taken = from_list(told["taken"])
    assert taken == {(0, "first-0"): 1, (1, "first-1"): 1}

    # The main manager dies, and comes back at checkpoint 0 without what b wrote at 1.
    second = make(2, committed=0, sealed=(0,), expected=("a", "b"), taken=taken)
    second.managers.incarnations = ["second-0", "first-1"]
    second.join("a", 0)
    second.join("b", 2)
    second.move("a", 2)
    with pytest.raises(DDictWritesLostError) as raised:
        move_until_told(second, "b", 3)
    assert raised.value.checkpoint_id == 0
    assert second.coordinator.state()["committed"] == 0


def test_what_was_taken_back_and_committed_anew_is_not_passed_on(make: Make) -> None:
    play = make(1)
    play.join("a")
    play.move("a", 2)
    assert play.newest() == 1
    play.rollback("a", 0)
    assert from_list(play.managers.of("forget")[-1]["taken"])
    assert play.newest() == 0, "which it had moved past"
    play.managers.incarnations[0] = "second"  # and nothing that a has written is lost
    play.move("a", 3)
    assert play.newest() == 2
    await_that(lambda: play.managers.of("settle")[-1]["committed"] == 2)
    assert play.managers.of("settle")[-1]["taken"] == []


def test_one_who_takes_over_has_managers_forget_what_not_all_have_sealed(make: Make) -> None:
    play = make(1, committed=4, sealed=(4,), takes_over=True)
    play.join("a", 6)
    assert play.newest() == 5
    operations = [operation for _, operation, _ in play.managers.asked]
    assert operations.index("forget") < operations.index("prepare")
    assert play.managers.of("forget") == [{"above": 4, "taken": []}]
    assert not play.managers.removed_above, "what is on disk stays"


def test_one_who_takes_over_persists_what_was_due(make: Make) -> None:
    play = make(1, persist_freq=2, committed=4, sealed=(3, 4), to_persist=(3,))
    await_that(lambda: play.managers.persisted == [3])


# ---- handles that leave -----------------------------------------------------------------------------------


def test_what_a_handle_had_moved_past_counts_also_if_it_leaves_a_main_manager_that_does_not_know_it(make: Make) -> None:
    play = make(committed=4, sealed=(4,), expected=("a",))
    play.coordinator.leave("a", 7, [Write(0, play.managers.incarnations[0], 6)])
    assert play.newest() == 6

    play = make(committed=4, sealed=(4,), expected=("a",))
    play.coordinator.leave("a", 7, [Write(0, "an incarnation that is gone", 6)])
    with pytest.raises(DDictWritesLostError):
        play.newest()


def test_a_move_that_waits_does_not_bring_back_a_handle_that_has_left(make: Make) -> None:
    play = make(working_set_size=1, wait_for_writers=True)
    for handle in "ab":
        play.coordinator.lease_began(f"lease of {handle}", handle)
        play.join(handle)
    moving = threading.Thread(target=play.move, args=("a", 1))
    moving.start()  # has to wait for b
    await_that(lambda: play.coordinator._writers["a"].moving_to == 1)
    play.coordinator.leave("a", 0, ())
    play.move("b", 1)
    moving.join(DEADLINE_S)
    assert play.coordinator.writers().keys() == {"b"}
    play.join("a", 0)  # sent before it left
    assert play.coordinator.writers().keys() == {"b"}
    play.move("b", 2, timeout_s=SHORT_S)


# ---- a rollback to what was skipped -----------------------------------------------------------------------


def test_a_loss_after_a_rollback_to_what_commits_skipped_can_be_gone_back_from(make: Make) -> None:
    play = make(2, working_set_size=4)
    play.join("a")
    play.join("b")
    for position in (4, 8):  # 3 and 7 are committed, what is between is not
        with play.coordinator._changed:  # between the two, b is out of the working set and holds up less
            play.move("a", position)
            play.move("b", position)
        assert play.newest() == position - 1
    gate = play.managers.close_gate("prepare")
    back = threading.Thread(target=play.rollback, args=("a", 6))
    back.start()
    await_that(lambda: play.coordinator.state()["committed"] == 3)
    assert all(fields["oldest"] <= 3 for fields in play.managers.of("settle")), "managers cannot go back there"
    play.coordinator.recovering(1, "second")
    play.managers.incarnations[1] = "second"
    gate.set()
    back.join(DEADLINE_S)
    for name, position in (("a", 8), ("b", 9)):
        with pytest.raises(DDictWritesLostError) as raised:
            move_until_told(play, name, position)
        assert (raised.value.manager, raised.value.checkpoint_id) == (1, 3)
    play.rollback("b", 3, lost=[1])
    play.rollback("a", 3, lost=[1])
    for position in (4, 5):
        play.move("a", position)
        play.move("b", position)
    assert play.newest() == 4


def test_what_is_committed_is_not_prepared_again_for_a_rollback_above_it(make: Make) -> None:
    play = make(1)
    play.join("a")
    play.join("b", 5)
    play.move("a", 8)
    assert play.newest() == 4
    gate = play.managers.close_gate("seal")
    play.move("b", 8)
    await_that(lambda: play.managers.of("seal")[-1]["checkpoint_id"] == 7)
    back = threading.Thread(target=play.rollback, args=("a", 6))
    back.start()
    await_that(lambda: play.coordinator._held_up > 0)
    gate.set()
    back.join(DEADLINE_S)
    assert play.managers.of("forget")
    assert [fields["checkpoint_id"] for fields in play.managers.of("prepare")].count(4) == 1


def test_who_goes_back_before_its_process_is_attached_is_asked_for_what_is_left_then(make: Make) -> None:
    play = make(1, working_set_size=1, committed=4, sealed=(4,), expected=("slow", "fast"))
    refused: list[BaseException] = []

    def go_back() -> None:
        try:
            play.rollback("slow", 4)
        except DDictCheckpointRetiredError as error:
            refused.append(error)

    back = threading.Thread(target=go_back)
    back.start()
    play.join("fast", 6)
    assert play.coordinator.state()["committed"] == 4, "it is expected as long as it is not attached"
    play.coordinator.lease_began("lease of slow", "connection")
    back.join(DEADLINE_S)
    assert not refused
    assert play.coordinator.state()["committed"] == 4
    assert play.coordinator.writers().keys() == {"slow", "fast"}


def test_a_handle_that_has_left_does_not_move(make: Make) -> None:
    play = make(1)
    play.coordinator.lease_began("lease of a", "connection")
    play.join("a")
    play.coordinator.leave("a", 0, ())
    play.move("a", 3)
    assert not play.coordinator.writers()


def test_what_was_restored_before_a_takeover_is_committed_by_who_takes_over(make: Make) -> None:
    play = make(1, takes_over=True, restored=50)
    assert play.newest() == 50
    play.join("a", 50)
    play.move("a", 51)
    assert play.newest() == 50


def test_a_manager_that_comes_back_before_what_was_restored_is_committed_has_it(make: Make) -> None:
    play = make(2)
    gate = play.managers.close_gate("seal")
    restoring = threading.Thread(target=play.coordinator.restore, args=(50, {"checkpoint_id": 50}, DEADLINE_S))
    restoring.start()
    play.managers.await_asked("seal", 2)
    play.join("a", 50)
    lost = play.write(1, 50)
    play.coordinator.recovering(1, "second")
    play.managers.incarnations[1] = "second"
    gate.set()
    restoring.join(DEADLINE_S)
    play.move("a", 51, lost)
    with pytest.raises(DDictWritesLostError) as raised:
        move_until_told(play, "a", 52, lost)
    assert raised.value.checkpoint_id == 50
    play.rollback("a", 50)
    play.move("a", 51)
    assert play.newest() == 50


def test_nothing_retires_before_there_is_something_to_fall_back_to(make: Make) -> None:
    play = make(1, working_set_size=3)
    play.join("a")
    play.move("a", 3)
    assert play.newest() == 2
    assert play.coordinator.state()["oldest"] == 0
    play.move("a", 5)
    assert play.newest() == 4
    assert play.coordinator.state()["oldest"] == 2


def test_one_who_takes_over_does_not_wait_for_processes_that_end_meanwhile(make: Make) -> None:
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
    process.start()
    assert process.pid is not None
    play = make(1, committed=4, sealed=(4,), expected=("a",), pids={"a": process.pid})
    with pytest.raises(DDictTimeoutError, match="1 handle"):
        play.newest(SHORT_S)
    process.kill()
    process.join(DEADLINE_S)

    within(5.0, play.newest)

    assert play.coordinator.state()["committed"] == 4
