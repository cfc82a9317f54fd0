"""When checkpoints are committed and retire, and how one goes back. The managers are played by the test."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from ml_flashpoint.ddict.checkpoints.managers import AllManagers
from ml_flashpoint.ddict.errors import (
    DDictCheckpointRetiredError,
    DDictManagerLostError,
    DDictTimeoutError,
    StaleEpochError,
)
from ml_flashpoint.ddict.manager.requests import asking
from ml_flashpoint.format.errors import FlashpointError, ProtocolError
from tests.ddict.coordination import DEADLINE_S, SHORT_S, Make, within
from tests.support.dictionaries import await_that

PLAIN = {"snapshots": False, "replicated": False}


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


def test_where_commits_are_only_a_number_a_slow_handle_is_left_behind(make: Make) -> None:
    play = make(working_set_size=2, **PLAIN)
    play.join("slow")
    play.join("fast")

    within(0, lambda: play.move("fast", 9))

    assert play.newest() == 7


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
            play.coordinator.await_commit("a", 0, 0, SHORT_S)
        assert raised.value.checkpoint_id == 0

    assert within(SHORT_S, wait) >= SHORT_S
    found: list[int] = []
    waiting = threading.Thread(target=lambda: found.append(play.coordinator.await_commit("a", 0, 0, 60.0)["committed"]))
    waiting.start()
    gate.set()
    waiting.join(DEADLINE_S)
    assert found == [0]


def test_a_manager_that_stays_away_is_named_by_who_waits_for_commits(make: Make) -> None:
    play = make()
    play.managers.refusals["prepare"] = lambda manager, fields: (
        DDictManagerLostError("manager 1 is not there", manager=1) if manager == 1 else None
    )
    play.join("a")
    play.move("a", 1)
    await_that(lambda: play.coordinator._trouble is not None)

    with pytest.raises(DDictTimeoutError, match=r"manager 1 is not there.*restore") as told:
        play.coordinator.await_commit("a", 0, 0, SHORT_S)
    assert told.value.manager == 1


def test_managers_that_did_not_hear_what_is_committed_are_told_again(make: Make) -> None:
    play = make()
    refused = threading.Event()

    def refuse_once(manager: int, fields: dict[str, Any]) -> FlashpointError | None:
        if manager == 0 or refused.is_set():
            return None
        refused.set()
        return DDictManagerLostError("away", manager=manager)

    play.managers.refusals["settle"] = refuse_once
    play.join("a")
    play.move("a", 2)
    assert play.newest() == 1

    play.managers.await_asked("settle", 4)  # both of them, twice

    assert {(fields["oldest"], fields["committed"]) for fields in play.managers.of("settle")} == {(0, 1)}


def test_what_one_manager_may_have_forgotten_cannot_be_gone_back_to(make: Make) -> None:
    play = make()
    for handle, position in (("a", 9), ("b", 4)):
        play.attach(handle)
        play.join(handle, position)
    assert play.newest() == 3
    play.managers.await_asked("settle", 2)
    play.managers.refusals["settle"] = lambda manager, fields: (
        DDictManagerLostError("away", manager=1) if manager == 1 else None
    )
    play.move("b", 6)
    assert play.newest() == 5
    play.managers.await_asked("settle", 4)
    for handle in ("a", "b"):
        play.kill(handle)
    assert play.newest() == 5, "all go on from there, and nobody is at 9 any more"

    play.epochs["c"] = play.coordinator.epoch
    with pytest.raises(DDictCheckpointRetiredError):
        play.rollback("c", 3)


def test_waiting_for_the_newest_ends_when_a_rollback_means_that_it_will_not_come(make: Make) -> None:
    play = make()
    for handle in "ab":
        play.join(handle, 3)
    play.move("a", 6)
    play.move("b", 4)
    assert play.newest() == 3
    gate = play.managers.close_gate("prepare")
    found: list[int] = []
    play.move("b", 6)
    await_that(lambda: play.coordinator._committing == 5)
    waiting = threading.Thread(target=lambda: found.append(play.newest(DEADLINE_S)))
    waiting.start()
    play.rollback("a", 4)

    waiting.join(DEADLINE_S / 2)
    assert found == [3]
    gate.set()
    assert play.newest() == 3, "what was under way is called off"
    play.move("a", 5)
    assert play.newest() == 4


def test_a_handle_that_left_holds_up_nothing_and_what_it_moved_past_is_committed(make: Make) -> None:
    play = make()
    play.join("a")
    play.join("b")
    play.move("b", 3)
    play.leave("a")
    assert play.newest() == 2
    play.move("b", 7)
    play.leave("b")

    assert play.newest() == 6
    assert play.coordinator.state()["writers"] == 0


@pytest.mark.parametrize("how", ["join", "move"])
def test_what_was_under_way_does_not_bring_back_a_handle_that_has_left(make: Make, how: str) -> None:
    play = make()
    play.join("a")
    play.leave("a")
    getattr(play, how)("a", 3)
    assert play.coordinator.state()["writers"] == 0


def test_what_a_process_was_killed_in_is_committed_once_others_have_left_it_behind(make: Make) -> None:
    play = make(working_set_size=2)
    play.attach("a")
    play.join("a", 1)
    play.join("b", 1)
    play.move("b", 2)
    assert play.newest() == 0

    play.kill("a")

    assert play.newest() == 0  # b has passed checkpoint 1, but a has not finished it
    play.move("b", 3)
    assert play.newest() == 2


def test_what_a_process_had_open_is_dropped_before_anything_else_is_committed(make: Make) -> None:
    play = make(working_set_size=2)
    play.attach("a")
    play.join("a", 1)
    play.join("b", 1)
    gate = play.managers.close_gate("discard")
    play.kill("a")
    play.move("b", 3)
    play.managers.await_asked("discard", 2)
    discarded = play.managers.of("discard")[0]
    assert (discarded["w"], discarded["to"], discarded["dead"]) == ("a", 0, True)
    assert not play.managers.of("prepare")
    gate.set()

    assert play.newest() == 2


def test_a_process_that_only_lost_its_connection_is_told_and_comes_back_by_going_back(make: Make) -> None:
    play = make()
    play.attach("a")
    play.join("a")
    play.move("a", 2)
    assert play.newest() == 1
    play.kill("a")
    play.attach("a")
    for call in (lambda: play.join("a", 2), lambda: play.move("a", 3)):
        with pytest.raises(StaleEpochError):
            call()
    answer = play.catch_up("a", 2)
    assert (answer["epoch"], answer["base"]) == (0, 1)
    assert "connection" in answer["lost"]

    play.rollback("a", 1)

    assert play.managers.of("discard")[-1]["dead"] is False
    play.move("a", 3)
    assert play.newest() == 2


def test_after_the_death_of_all_one_goes_on_from_what_all_had_finished(make: Make) -> None:
    play = make()
    for handle, position in (("a", 3), ("b", 4)):
        play.attach(handle)
        play.join(handle, position)
    for handle in ("b", "a"):
        play.kill(handle)

    assert play.newest() == 2
    assert play.managers.of("begin")[0]["base"] == 2, "nobody sees anything of what they had begun"
    play.join("c", 2)
    play.move("c", 5)
    assert play.newest() == 4  # what died before does not hold up those who go on


def test_a_death_that_is_only_about_to_be_noticed_counts_for_who_goes_on(make: Make) -> None:
    play = make()
    for handle in "ab":
        play.attach(handle, is_gone=lambda: True)
        play.join(handle)
    play.move_all(3, "a", "b")

    assert play.newest() == 2

    play.join("c", 3)
    play.move("c", 4)
    assert play.newest() == 3


def test_who_waits_for_what_a_process_was_killed_in_is_told_so(make: Make) -> None:
    play = make()
    for handle in ("a", "b"):
        play.attach(handle)
        play.join(handle)
    play.kill("a")
    play.move("b", 1)

    with pytest.raises(DDictTimeoutError, match=r"1 process\(es\) were killed there") as raised:
        play.coordinator.await_commit("b", 0, 0, SHORT_S)

    assert raised.value.checkpoint_id == 0
    play.move("b", 4)
    assert play.coordinator.await_commit("b", 0, 0, DEADLINE_S)["committed"] >= 0


def test_the_end_of_an_earlier_connection_does_not_end_a_session(make: Make) -> None:
    play = make()
    play.attach("a")
    play.join("a")
    first = play.sessions["a"]
    play.attach("a")

    play.coordinator.session_ended(first)

    assert play.coordinator.state()["writers"] == 1
    play.kill("a")
    assert play.coordinator.state()["writers"] == 0


def test_a_handle_that_joins_again_does_not_go_back_to_where_it_was(make: Make) -> None:
    # What its session sends after its connection broke can arrive after the move that follows it.
    play = make()
    play.join("a")
    play.move("a", 3)
    play.join("a", 0)

    assert play.newest() == 2


def test_managers_that_cannot_be_asked_as_the_program_ends_are_an_error_that_commits_are_tried_again_after() -> None:
    managers = AllManagers(lambda *_: {}, 2)
    assert managers.ask("prepare", {}) == [{}, {}]
    managers.close()  # as Python does with all threads of pools at its end, before `atexit`

    with pytest.raises(FlashpointError, match="cannot be asked to prepare"):
        managers.ask("prepare", {})


class Asked:
    def manager(self, manager: int) -> None: ...

    def of(self, of: int) -> None: ...

    def oldest(self, oldest: int) -> None: ...


@pytest.mark.parametrize("field", ["manager", "of", "oldest"])
def test_a_number_below_zero_is_refused_where_none_means_anything(field: str) -> None:
    with pytest.raises(ProtocolError, match=field):
        asking(field)(Asked(), None, {field: -1}, [])


@pytest.mark.parametrize("manager", [2, 10**9])
def test_what_is_no_manager_is_refused(make: Make, manager: int) -> None:
    play = make(2)
    epoch = play.coordinator.epoch
    with pytest.raises(ProtocolError, match="no manager"):
        play.coordinator.returned(manager, "x")
    with pytest.raises(ProtocolError, match="no manager"):
        play.coordinator.sealed_by(manager)
    assert play.coordinator.epoch == epoch
