"""When checkpoints are committed and retire, and how one goes back. The managers are played by the test."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from ml_flashpoint.ddict.accounts import Rules, Write
from ml_flashpoint.ddict.coordinator import Coordinator
from ml_flashpoint.ddict.errors import (
    DDictCheckpointRetiredError,
    DDictManagerLostError,
    DDictTimeoutError,
    DDictWritesLostError,
)
from ml_flashpoint.format.errors import FlashpointError
from tests.ddict.coordination import DEADLINE_S, SHORT_S, Make, Managers, move_until_told, raises_in_time, within
from tests.support.dictionaries import await_that

# ---- commits ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("snapshots", [True, False])
def test_a_checkpoint_is_committed_when_every_writer_has_moved_past_it(make: Make, snapshots: bool) -> None:
    play = make(snapshots=snapshots, replicated=snapshots)
    play.join("a")
    play.join("b")
    play.move("a", 3)
    assert play.newest() == -1

    play.move("b", 2)

    assert play.newest() == 1


def test_managers_seal_what_they_prepared_and_then_settle(make: Make) -> None:
    play = make()
    play.join("a")
    play.move("a", 1)
    assert play.newest() == 0
    play.managers.await_asked("settle", 2)

    order = [operation for manager, operation, _ in play.managers.asked if manager == 1]
    assert order[:3] == ["prepare", "seal", "settle"]
    assert play.managers.of("settle")[0]["keep"] == [0]


def test_checkpoints_in_between_are_skipped(make: Make) -> None:
    play = make(working_set_size=9)
    gate = play.managers.close_gate("seal")
    play.join("a")
    play.move("a", 1)
    play.managers.await_asked("seal", 2)
    for position in range(2, 8):
        play.move("a", position)
    gate.set()

    assert play.newest() == 6
    assert play.managers.committed() == [0, 6]


def test_checkpoints_that_are_due_to_be_persisted_are_not_skipped(make: Make) -> None:
    play = make(persist_freq=3, working_set_size=9)
    gate = play.managers.close_gate("seal")
    play.join("a")
    play.move("a", 1)
    play.managers.await_asked("seal", 2)
    play.move("a", 10)
    gate.set()

    assert play.newest() == 9
    assert play.managers.committed() == [0, 2, 5, 8, 9]
    assert play.coordinator.persist_newest(DEADLINE_S) == 9
    assert play.managers.persisted == [2, 5, 8, 9]


def test_a_handle_does_not_run_away_from_commits(make: Make) -> None:
    # What is not committed stays in memory.
    play = make(working_set_size=2)
    gate = play.managers.close_gate("seal")
    play.join("a")
    for position in range(1, 4):
        play.move("a", position)

    def wait() -> None:
        with pytest.raises(DDictTimeoutError, match="not committed yet"):
            play.move("a", 9, timeout_s=SHORT_S)

    within(SHORT_S, wait)
    gate.set()
    play.move("a", 9)
    assert play.newest() == 8


def test_a_handle_that_others_keep_from_being_committed_goes_on(make: Make) -> None:
    play = make(working_set_size=2)
    play.join("slow")
    play.join("fast")

    within(0, lambda: play.move("fast", 9))


def test_a_commit_that_failed_is_tried_again(make: Make) -> None:
    play = make()
    failures = [DDictManagerLostError("away"), DDictManagerLostError("still away")]
    play.managers.refusals["seal"] = lambda manager, fields: failures.pop() if manager == 1 and failures else None
    play.join("a")
    play.move("a", 1)

    assert play.newest() == 0
    assert play.managers.committed() == [0, 0, 0]


def test_an_unexpected_error_does_not_end_commits(make: Make) -> None:
    play = make()
    failures: list[Any] = [ValueError("a bug")]

    def refuse(manager: int, fields: dict[str, Any]) -> FlashpointError | None:
        if failures and manager == 1:
            raise failures.pop()
        return None

    play.managers.refusals["prepare"] = refuse
    play.join("a")
    play.move("a", 1)

    assert play.newest() == 0


def test_the_newest_is_awaited_no_longer_than_the_time_given(make: Make) -> None:
    play = make()
    play.managers.close_gate("seal")
    play.join("a")
    play.move("a", 1)

    def wait() -> None:
        with pytest.raises(DDictTimeoutError) as raised:
            play.newest(SHORT_S)
        assert raised.value.checkpoint_id == 0

    assert within(SHORT_S, wait) >= SHORT_S


def test_a_checkpoint_is_awaited_until_it_is_committed_and_no_longer_than_the_time_given(make: Make) -> None:
    play = make()
    gate = play.managers.close_gate("seal")
    play.join("a")
    play.move("a", 1)

    def wait() -> None:
        with pytest.raises(DDictTimeoutError) as raised:
            play.coordinator.await_commit("a", 0, SHORT_S)
        assert raised.value.checkpoint_id == 0

    assert within(SHORT_S, wait) >= SHORT_S
    found: list[int] = []
    waiting = threading.Thread(target=lambda: found.append(play.coordinator.await_commit("a", 0, 60.0)["committed"]))
    waiting.start()
    gate.set()
    waiting.join(DEADLINE_S)
    assert found == [0]


def test_waiting_for_the_newest_ends_when_a_rollback_means_that_it_will_not_come(make: Make) -> None:
    play = make()
    play.join("a")
    play.join("b")
    play.move("a", 6)
    play.move("b", 4)
    assert play.newest() == 3
    gate = play.managers.close_gate("prepare")
    found: list[int] = []
    play.move("b", 6)
    await_that(lambda: play.coordinator._committing == 5)
    waiting = threading.Thread(target=lambda: found.append(play.newest(DEADLINE_S)))
    waiting.start()
    going_back = threading.Thread(target=lambda: play.rollback("a", 4))
    going_back.start()
    await_that(lambda: play.coordinator._held_up > 0)
    gate.set()

    waiting.join(DEADLINE_S / 2)
    going_back.join(DEADLINE_S)

    assert not waiting.is_alive()
    assert found
    assert play.newest() == 3
    play.move("a", 5)
    assert play.newest() == 4


def test_a_handle_that_left_holds_up_nothing_and_what_it_moved_past_is_committed(make: Make) -> None:
    play = make()
    play.join("a")
    play.join("b")
    play.move("b", 5)
    play.coordinator.leave("a", 0, ())
    assert play.newest() == 4
    play.move("b", 7)
    play.coordinator.leave("b", 0, ())

    assert play.newest() == 6
    assert play.coordinator.state()["writers"] == 0


def test_a_handle_outside_the_working_set_holds_up_nothing(make: Make) -> None:
    play = make(working_set_size=2)
    play.join("slow")
    play.join("fast")
    play.move("fast", 10)

    assert play.newest() == 8


def test_a_handle_that_goes_back_is_not_outside_the_working_set(make: Make) -> None:
    # It writes again what was lost. Until it has, the checkpoints after that must not be committed.
    play = make(working_set_size=2, managers=1)
    play.join("a")
    play.join("b")
    for handle in "ab":
        play.move(handle, 1)
    assert play.newest() == 0
    lost = Write(0, "an incarnation that is gone", 1, True)
    play.move("a", 2, lost)
    play.move("b", 3)
    with pytest.raises(DDictWritesLostError):
        move_until_told(play, "a", 3, lost)
    play.rollback("a", 0)

    assert play.newest() == 0
    play.move("a", 1)
    assert play.newest() == 0
    play.move("a", 2)
    assert play.newest() == 1


# ---- leases -----------------------------------------------------------------------------------------------


def test_what_a_process_died_in_is_committed_once_others_have_left_it_behind(make: Make) -> None:
    play = make(working_set_size=2)
    play.coordinator.lease_began("lease of a", "connection")
    play.join("a", 1)
    play.join("b")
    play.move("b", 2)
    assert play.newest() == 0

    play.coordinator.lease_ended("lease of a", "connection")

    assert play.newest() == 0  # b has passed checkpoint 1, but a has not finished it
    play.move("b", 3)
    assert play.newest() == 2


def test_after_the_death_of_all_one_goes_on_from_what_all_had_finished(make: Make) -> None:
    play = make()
    for handle, position in (("a", 3), ("b", 4)):
        play.coordinator.lease_began(f"lease of {handle}", handle)
        play.join(handle, position)
    for handle in ("b", "a"):
        play.coordinator.lease_ended(f"lease of {handle}", handle)

    assert play.newest() == 2
    play.join("c", 2)
    play.move("c", 5)
    assert play.newest() == 4  # what died before does not hold up those who go on


def test_a_death_that_is_only_about_to_be_noticed_counts_for_who_goes_on(make: Make) -> None:
    play = make()
    for handle in "ab":
        play.coordinator.lease_began(f"lease of {handle}", handle, is_gone=lambda: True)
        play.join(handle)
        play.move(handle, 3)

    assert play.newest() == 2

    play.join("c", 3)
    play.move("c", 4)
    assert play.newest() == 3


def test_who_waits_for_what_a_process_died_in_is_told_so(make: Make) -> None:
    play = make()
    for handle in ("a", "b"):
        play.coordinator.lease_began(f"lease of {handle}", handle)
        play.join(handle)
    play.coordinator.lease_ended("lease of a", "a")
    play.move("b", 1)

    with pytest.raises(DDictTimeoutError, match="1 process\\(es\\) died there") as raised:
        play.coordinator.await_commit("b", 0, SHORT_S)

    assert raised.value.checkpoint_id == 0
    play.move("b", 4)
    assert play.coordinator.await_commit("b", 0, DEADLINE_S)["committed"] >= 0


def test_a_handle_that_left_counts_no_more(make: Make) -> None:
    play = make()
    play.join("a")
    play.join("b")
    play.move("b", 2)
    play.coordinator.leave("a", 0, ())
    assert play.newest() == 1


def test_the_end_of_an_earlier_connection_does_not_end_a_lease(make: Make) -> None:
    play = make()
    play.coordinator.lease_began("lease of a", "first")
    play.join("a")
    play.coordinator.lease_began("lease of a", "second")

    play.coordinator.lease_ended("lease of a", "first")

    assert play.coordinator.state()["writers"] == 1
    play.coordinator.lease_ended("lease of a", "second")
    assert play.coordinator.state()["writers"] == 0


def test_a_handle_that_joins_again_does_not_go_back_to_where_it_was(make: Make) -> None:
    # What its lease sends after the main manager's death can arrive after the move that follows it.
    play = make()
    play.join("a")
    play.move("a", 3)
    play.join("a", 0)

    assert play.newest() == 2


def test_one_that_takes_over_waits_for_handles_to_come_back() -> None:
    managers = Managers(1)
    rules = Rules(1, 4, False, False, True, True, 0)
    began = time.monotonic()
    coordinator = Coordinator(rules, managers.call, committed=4, sealed=(3, 4), settle_s=2)
    try:
        coordinator.join("fast", "x", 9, ())
        coordinator.join("slow", "y", 6, ())
        assert coordinator.newest(DEADLINE_S)["committed"] == 5
        assert time.monotonic() - began >= 1.9
        assert managers.committed() == [5]
    finally:
        coordinator.close()


# ---- retirement -------------------------------------------------------------------------------------------


def test_with_wait_for_writers_one_that_takes_over_retires_nothing_before_they_are_back() -> None:
    managers = Managers(1)
    coordinator = Coordinator(
        Rules(1, 2, False, True, True, True, 0), managers.call, committed=4, sealed=(3, 4), settle_s=DEADLINE_S
    )

    def come_back_late() -> None:
        await_that(lambda: coordinator._writers["fast"].moving_to == 7)
        coordinator.join("slow", "y", 5, ())

    try:
        coordinator.join("fast", "x", 6, ())
        late = threading.Thread(target=come_back_late)
        late.start()
        with pytest.raises(DDictTimeoutError, match="1 other handle"):
            coordinator.move("fast", "x", 7, (), 2.0)
        late.join()
    finally:
        coordinator.close()


def test_the_working_set_follows_the_newest_handle_but_keeps_what_is_committed(make: Make) -> None:
    play = make(working_set_size=2)
    play.join("a")
    play.join("b")
    play.move("a", 1)
    play.move("b", 1)
    assert play.newest() == 0
    gate = play.managers.close_gate("seal")
    play.move("a", 7)
    play.move("b", 7)

    assert play.coordinator.state()["oldest"] == 0
    gate.set()
    assert play.newest() == 6
    assert play.coordinator.state()["oldest"] == 6


def test_with_wait_for_writers_a_checkpoint_retires_when_the_last_has_moved_past_it(make: Make) -> None:
    play = make(working_set_size=2, wait_for_writers=True, snapshots=False, replicated=False)
    play.join("a")
    play.join("b")
    play.move("a", 1)

    def wait() -> None:
        with pytest.raises(DDictTimeoutError, match="1 other handle"):
            play.move("a", 2, timeout_s=SHORT_S)

    within(SHORT_S, wait)
    moved = threading.Thread(target=lambda: play.move("a", 2))
    moved.start()
    play.move("b", 1)
    moved.join(DEADLINE_S)

    assert not moved.is_alive()
    assert play.coordinator.state()["newest"] == 2


def test_with_wait_for_writers_one_that_leaves_is_not_waited_for(make: Make) -> None:
    play = make(working_set_size=1, wait_for_writers=True)
    play.join("a")
    play.join("b")
    moved = threading.Thread(target=lambda: play.move("a", 1))
    moved.start()
    play.coordinator.leave("b", 0, ())
    moved.join(DEADLINE_S)

    assert not moved.is_alive()


def test_with_wait_for_keys_managers_are_asked_before_a_checkpoint_retires(make: Make) -> None:
    play = make(working_set_size=2, wait_for_keys=True)
    play.join("a")
    play.move("a", 1)
    assert not play.managers.of("complete")
    play.managers.refusals["complete"] = lambda manager, fields: DDictTimeoutError("not all keys", manager=manager)

    with pytest.raises(DDictTimeoutError, match="not all keys"):
        play.move("a", 2, timeout_s=SHORT_S)

    assert play.managers.of("complete")[0] == {"checkpoint_id": 0}
    assert play.coordinator.state()["newest"] == 1


# ---- rollback ---------------------------------------------------------------------------------------------


def test_a_rollback_takes_back_what_was_committed_above(make: Make) -> None:
    play = make(managers=1)
    play.join("a")
    for position in (1, 2, 3):
        play.move("a", position)
        play.newest()
    assert play.newest() == 2

    state = play.rollback("a", 1)

    assert state["committed"] == 1
    assert play.managers.of("forget") == [{"above": 1, "taken": [[0, "first-0", 2]]}]
    assert play.managers.removed_above == [1]
    play.move("a", 3)
    assert play.newest() == 2


def test_what_all_had_moved_past_is_committed_after_a_rollback_to_it_even_if_it_was_skipped(make: Make) -> None:
    play = make(managers=1)
    play.join("a")
    play.move("a", 9)
    assert play.newest() == 8

    play.rollback("a", 6)

    assert play.newest() == 6
    assert play.managers.committed() == [8, 6]


def test_a_rollback_to_what_has_retired_is_refused_and_changes_nothing(make: Make) -> None:
    play = make(managers=1, working_set_size=2)
    play.join("a")
    play.move("a", 9)
    assert play.newest() == 8
    gate = play.managers.close_gate("settle")

    with pytest.raises(DDictCheckpointRetiredError) as raised:
        play.rollback("a", 3)

    assert raised.value.checkpoint_id == 8
    gate.set()
    assert play.newest() == 8


def test_a_rollback_waits_for_a_commit_that_is_under_way_and_no_longer_than_its_time(make: Make) -> None:
    play = make()
    play.managers.close_gate("seal")
    play.join("a")
    play.move("a", 3)
    play.managers.await_asked("seal")

    raises_in_time(DDictTimeoutError, lambda seconds: play.rollback("a", 1, timeout_s=seconds))


def test_managers_that_could_not_forget_are_asked_again_before_the_next_commit(make: Make) -> None:
    play = make(managers=1)
    play.join("a")
    play.move("a", 4)
    assert play.newest() == 3
    failures = [DDictManagerLostError("away")]
    play.managers.refusals["forget"] = lambda manager, fields: failures.pop() if failures else None
    with pytest.raises(DDictManagerLostError):
        play.rollback("a", 2)

    assert play.newest() == 2
    operations = [operation for _, operation, _ in play.managers.asked]
    assert operations.count("forget") == 2
    assert operations.index("forget") < len(operations) - 1 - operations[::-1].index("prepare")


def test_a_checkpoint_below_one_that_was_tried_in_vain_is_sealed_only_after_that_is_forgotten(make: Make) -> None:
    # Managers that have sealed the higher one refuse the lower.
    play = make(managers=1)
    refused = threading.Event()

    def refuse(manager: int, fields: dict[str, Any]) -> FlashpointError | None:
        if fields["checkpoint_id"] == 5:
            refused.set()
            return DDictManagerLostError("a holder is away")
        return None

    play.managers.refusals["seal"] = refuse
    play.join("a")
    play.move("a", 6)
    assert refused.wait(DEADLINE_S)
    play.join("b", 0)
    play.move("b", 3)

    assert play.newest() == 2
    assert play.managers.of("forget") == [{"above": -1, "taken": []}]


def test_while_managers_are_asked_to_forget_the_coordinator_answers(make: Make) -> None:
    # A manager that recovers asks where the dictionary is, and forgets only then.
    play = make(managers=1)
    play.join("a")
    play.move("a", 4)
    assert play.newest() == 3
    gate = play.managers.close_gate("forget")
    going_back = threading.Thread(target=lambda: play.rollback("a", 1))
    going_back.start()
    play.managers.await_asked("forget")

    within(0, lambda: play.coordinator.state())

    gate.set()
    going_back.join(DEADLINE_S)
    assert not going_back.is_alive()
