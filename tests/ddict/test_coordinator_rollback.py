"""What retires, and what a rollback takes back: the coordinator, with managers that the test plays."""

from __future__ import annotations

import threading
import time

import pytest

from ml_flashpoint.ddict.errors import (
    DDictCheckpointRetiredError,
    DDictManagerLostError,
    DDictTimeoutError,
)
from ml_flashpoint.ddict.wire.written import NOTHING
from tests.ddict.coordination import DEADLINE_S, SHORT_S, Make, raises_in_time, within

PLAIN = {"snapshots": False, "replicated": False}


def test_the_working_set_follows_the_newest_handle_but_keeps_what_is_committed(make: Make) -> None:
    play = make(working_set_size=2)
    for handle in "ab":
        play.join(handle)
    play.move_all(1, "a", "b")
    assert play.newest() == 0
    gate = play.managers.close_gate("seal")
    play.move_all(7, "a", "b")

    assert play.coordinator.state()["oldest"] == 0
    gate.set()
    assert play.newest() == 6
    assert play.coordinator.state()["oldest"] == 6


@pytest.mark.parametrize("rules", [{"wait_for_writers": True, **PLAIN}, {}], ids=["asked for", "implied by snapshots"])
def test_a_checkpoint_retires_when_the_last_writer_has_moved_past_it(make: Make, rules: dict[str, bool]) -> None:
    play = make(working_set_size=2, **rules)
    play.attach("b")
    play.join("a")
    play.join("b")
    play.move("a", 1)

    def wait() -> None:
        with pytest.raises(DDictTimeoutError, match="handle b of process of b is at 0"):
            play.move("a", 2, timeout_s=SHORT_S)

    within(SHORT_S, wait)
    moved = threading.Thread(target=lambda: play.move("a", 2))
    moved.start()
    play.move("b", 1)
    moved.join(DEADLINE_S)

    assert not moved.is_alive()
    assert play.coordinator.state()["newest"] == 2


def test_one_that_leaves_is_not_waited_for(make: Make) -> None:
    play = make(working_set_size=1)
    play.join("a")
    play.join("b")
    moved = threading.Thread(target=lambda: play.move("a", 1))
    moved.start()
    play.leave("b")
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


def test_a_rollback_above_what_is_committed_is_the_handles_own(make: Make) -> None:
    play = make()
    for handle in "ab":
        play.join(handle)
    play.move("a", 2)
    play.move("b", 3)
    assert play.newest() == 1

    assert play.rollback("b", 2)["epoch"] == 0

    assert [fields["to"] for fields in play.managers.of("discard")] == [2, 2]
    play.move("a", 4)
    assert play.newest() == 1
    play.move("b", 3)
    assert play.newest() == 2


def test_a_rollback_below_a_commit_that_is_under_way_calls_it_off(make: Make) -> None:
    play = make()
    play.join("a")
    gate = play.managers.close_gate("seal")
    play.move("a", 3)
    play.managers.await_asked("seal")

    assert play.rollback("a", 1)["epoch"] == 0

    gate.set()
    assert play.newest() == 0
    play.move("a", 4)
    assert play.newest() == 3


def test_a_rollback_below_what_is_committed_begins_an_epoch(make: Make) -> None:
    play = make(managers=1)
    play.join("a")
    for position in (1, 2, 3):
        play.move("a", position)
        play.newest()

    state = play.rollback("a", 1)

    assert (state["committed"], state["epoch"]) == (1, 1)
    (begun,) = play.managers.of("begin")
    assert (begun["e"], begun["base"]) == (1, 1)
    play.move("a", 3)
    assert play.newest() == 2


def test_a_rollback_to_what_commits_skipped_is_refused_and_changes_nothing(make: Make) -> None:
    play = make(managers=1, working_set_size=9)
    gate = play.managers.close_gate("seal")
    play.join("a")
    play.move("a", 1)
    play.managers.await_asked("seal")
    play.move("a", 6)
    gate.set()
    assert play.newest() == 5

    for to in (1, 4):
        with pytest.raises(DDictCheckpointRetiredError) as raised:
            play.rollback("a", to)
        assert raised.value.checkpoint_id == 5

    assert not play.managers.of("begin")
    assert play.newest() == 5
    assert play.rollback("a", 0)["committed"] == 0


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


def test_a_rollback_below_what_is_committed_takes_no_longer_than_its_time(make: Make) -> None:
    play = make(managers=1)
    play.join("a")
    for position in (1, 2):
        play.move(
            "a",
            position,
        )
        play.newest()
    gate = play.managers.close_gate("begin")

    raises_in_time(DDictTimeoutError, lambda seconds: play.rollback("a", 0, timeout_s=seconds))

    gate.set()
    play.catch_up("a", 0)
    assert play.newest() == 0


def test_while_managers_begin_an_epoch_the_coordinator_answers(make: Make) -> None:
    play = make(managers=1)
    play.join("a")
    play.move("a", 1)
    play.newest()
    gate = play.managers.close_gate("begin")
    began = time.monotonic()
    play.lose(0)
    play.managers.await_asked("begin")

    within(0, lambda: play.coordinator.state())

    gate.set()
    assert play.catch_up("a", 1)["epoch"] == 1
    assert time.monotonic() - began < DEADLINE_S


def test_a_rollback_that_does_not_reach_a_manager_can_be_made_again(make: Make) -> None:
    play = make()
    play.join("a")
    play.move("a", 3)
    assert play.newest() == 2
    play.move("a", 5)
    play.join("b", 3)  # so that nothing more is committed
    failures = [DDictManagerLostError("away")]
    play.managers.refusals["discard"] = lambda manager, fields: failures.pop() if manager == 1 and failures else None
    with pytest.raises(DDictManagerLostError):
        play.rollback("a", 4)

    play.rollback("a", 4)

    numbers = [fields["n"] for fields in play.managers.of("discard")]
    assert numbers == [1, 1, 2, 2], "the first one may come late, and must not discard what is written by then"


def test_a_handle_that_leaves_with_a_rollback_unfinished_has_it_finished(make: Make) -> None:
    """Where what it abandoned is committed by then, all go back, as the rollback would have had them do."""
    play = make(managers=1, working_set_size=8)
    for handle in "ab":
        play.join(handle)
    for position in (1, 2, 3):
        play.move_all(position, "a", "b")
        play.newest()
    play.move_all(5, "a", "b")
    play.coordinator.leave("a", NOTHING, 0, 1, back=4)
    play.managers.await_asked("discard")

    assert play.managers.of("discard")[-1]["to"] == 4
    assert (play.newest(), play.coordinator.epoch) == (4, 0)
    play.coordinator.leave("b", NOTHING, 0, 1, back=1)
    assert play.catch_up("a reader", 0)["epoch"] == 1
    assert play.newest() == 1
    assert play.managers.of("begin")[-1]["base"] == 1


def test_a_handle_that_leaves_on_its_way_to_what_has_retired_takes_nothing_back(make: Make) -> None:
    play = make(managers=1, working_set_size=2)
    for handle in "ab":
        play.join(handle)
    play.move_all(1, "a", "b")
    assert play.newest() == 0
    play.move_all(9, "a", "b")
    assert play.newest() == 8
    for back in ({"back": 3}, {"back": 3, "onwards": True}):
        play.coordinator.leave("a" if len(back) == 1 else "b", NOTHING, 0, 1, **back)  # type: ignore[arg-type]
    play.managers.await_asked("discard", 2)

    assert [fields["to"] for fields in play.managers.of("discard")] == [8, 8]
    assert (play.newest(), play.coordinator.epoch) == (8, 0)
