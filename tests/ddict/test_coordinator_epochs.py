"""How epochs begin, and what handles are told of it. The managers are played by the test."""

from __future__ import annotations

import threading

import pytest

from ml_flashpoint.ddict.errors import (
    DDictManagerLostError,
    DDictTimeoutError,
    DDictWritesLostError,
    StaleEpochError,
)
from ml_flashpoint.ddict.wire.written import NOTHING
from tests.ddict.coordination import DEADLINE_S, SHORT_S, Make, Play
from tests.support.dictionaries import await_that


def committed_up_to(play: Play, checkpoint_id: int, *handles: str) -> None:
    for handle in handles:
        play.join(handle)
    for position in range(1, checkpoint_id + 2):
        play.move_all(position, *handles)
        assert play.newest() == position - 1


def test_a_lost_manager_begins_an_epoch_at_what_is_committed(make: Make) -> None:
    play = make()
    committed_up_to(play, 1, "a")
    play.lose(1)

    for call in (lambda: play.move("a", 3), lambda: play.join("a", 2), lambda: play.rollback("a", 1)):
        with pytest.raises(StaleEpochError):
            call()
    answer = play.catch_up("a", 2, written=2)

    assert (answer["epoch"], answer["manager"], answer["base"]) == (1, 1, 1)
    assert "manager 1 was lost" in answer["lost"]
    begun = play.managers.of("begin")
    assert [(fields["e"], fields["base"]) for fields in begun] == [(1, 1)] * 2


def test_who_lost_something_holds_up_commits_until_it_goes_back(make: Make) -> None:
    play = make()
    committed_up_to(play, 0, "a", "b")
    play.move("b", 2)
    play.lose(1)
    assert play.catch_up("a", 1, written=1)["lost"]
    assert not play.catch_up("b", 2, written=-1)["lost"]
    play.move("b", 3)
    assert play.newest() == 0

    play.rollback("a", 0)
    play.move("a", 2)

    assert play.newest() == 1


@pytest.mark.parametrize("written", [-1, 0])
def test_who_lost_nothing_goes_on_where_it_is(make: Make, written: int) -> None:
    play = make()
    committed_up_to(play, 0, "a")
    play.lose(0)
    assert play.catch_up("a", 1, written)["lost"] is None
    play.move("a", 2)
    assert play.newest() == 1


def test_before_anything_was_committed_all_begin_anew(make: Make) -> None:
    play = make()
    play.join("a")
    play.lose(0)
    answer = play.catch_up("a", 0, written=0)
    assert (answer["base"], answer["committed"]) == (-1, -1)
    assert "the beginning" in answer["lost"]
    assert play.managers.of("begin")[0]["keep"] == []


def test_several_epochs_are_heard_of_at_once(make: Make) -> None:
    play = make(3)
    committed_up_to(play, 0, "a")
    gate = play.managers.close_gate("begin")
    for manager in range(3):
        play.lose(manager)
    gate.set()
    answer = play.catch_up("a", 1, written=1)
    assert (answer["epoch"], answer["base"]) == (3, 0)
    assert answer["lost"]


def test_what_is_lost_is_not_forgotten_for_a_commit_by_others_meanwhile(make: Make) -> None:
    play = make()
    committed_up_to(play, 0, "a")
    play.epochs["late"] = 0  # wrote something lasting at 0 since, which nobody waits for
    play.lose(1)
    play.catch_up("a", 1)
    play.move("a", 3)
    assert play.newest() == 2
    assert play.catch_up("late", 0, written=1)["lost"]


def test_a_manager_that_says_twice_that_it_is_back_begins_one_epoch(make: Make) -> None:
    play = make()
    committed_up_to(play, 0, "a")
    play.lose(1)
    play.catch_up("a", 1)
    play.lose(1)
    assert play.coordinator.epoch == 1


def test_a_commit_that_is_under_way_when_a_manager_is_lost_is_off(make: Make) -> None:
    play = make()
    play.join("a")
    gate = play.managers.close_gate("seal")
    play.move("a", 1)
    play.managers.await_asked("seal", 2)
    play.lose(1)
    gate.set()

    assert play.catch_up("a", 1, written=0)["lost"], "whatever was sealed meanwhile"
    assert play.newest() == -1


def test_an_epoch_is_told_of_when_all_managers_that_are_there_have_begun_it(make: Make) -> None:
    play = make(3)
    committed_up_to(play, 0, "a")
    gates = threading.Event()

    def refuse(manager: int, fields: dict) -> DDictManagerLostError | None:
        return DDictManagerLostError("it stays down", manager=2) if manager == 2 and not gates.is_set() else None

    play.managers.refusals["begin"] = refuse
    gate = play.managers.close_gate("begin")
    play.lose(1)
    with pytest.raises(DDictTimeoutError, match="not all managers have begun epoch 1"):
        play.catch_up("a", 1, timeout_s=SHORT_S)
    gate.set()
    play.catch_up("a", 1)
    play.move("a", 2)
    with pytest.raises(DDictTimeoutError, match="stays down"):
        play.newest(SHORT_S)

    gates.set()

    assert play.newest() == 1


def test_who_waits_hears_of_an_epoch_at_once(make: Make) -> None:
    play = make()
    committed_up_to(play, 0, "a", "b")
    play.move("a", 2)
    refused: list[BaseException] = []

    def wait() -> None:
        with pytest.raises(StaleEpochError) as raised:
            play.coordinator.await_commit("a", 1, 0, 10 * DEADLINE_S)
        refused.append(raised.value)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    play.lose(1)
    waiting.join(DEADLINE_S)
    assert refused


# ---- what handles had written that are gone ---------------------------------------------------------------


def lose_writes_of_one_that_is_gone(play: Play) -> None:
    """Checkpoint 0 is committed, and a manager was lost with what a handle wrote at 1 that has left."""
    committed_up_to(play, 0, "gone", "writer")
    play.leave("gone", written=1)
    play.lose(1)
    play.catch_up("writer", 1)


def test_lost_writes_of_a_handle_that_is_gone_are_told_once(make: Make) -> None:
    play = make()
    lose_writes_of_one_that_is_gone(play)

    with pytest.raises(DDictWritesLostError) as raised:
        play.move("writer", 2)

    assert (raised.value.manager, raised.value.checkpoint_id) == (1, 0)
    play.move("writer", 2)
    assert play.newest() == 1


def test_who_loses_something_itself_is_not_told_twice(make: Make) -> None:
    play = make()
    committed_up_to(play, 0, "gone", "writer")
    play.leave("gone", written=1)
    play.lose(1)
    assert play.catch_up("writer", 1, written=1)["lost"]
    play.rollback("writer", 0)
    play.move("writer", 2)
    assert play.newest() == 1


def test_a_reader_that_waits_for_a_commit_leaves_such_a_loss_to_those_who_write(make: Make) -> None:
    play = make()
    lose_writes_of_one_that_is_gone(play)
    play.catch_up("a reader", 0)

    with pytest.raises(DDictTimeoutError):
        play.coordinator.await_commit("a reader", 1, 1, SHORT_S)

    with pytest.raises(DDictWritesLostError):
        play.coordinator.await_commit("writer", 1, 1, DEADLINE_S)


def test_where_nobody_writes_whoever_asks_is_told(make: Make) -> None:
    play = make()
    lose_writes_of_one_that_is_gone(play)
    play.leave("writer")

    with pytest.raises(DDictWritesLostError):
        play.newest()
    assert play.newest() == 0


def test_one_that_is_gone_while_it_waits_takes_no_loss_with_it(make: Make) -> None:
    play = make()
    lose_writes_of_one_that_is_gone(play)
    play.coordinator.await_commit("writer", 1, 1, DEADLINE_S, is_gone=lambda: True)
    play.coordinator.newest(1, DEADLINE_S, is_gone=lambda: True)

    with pytest.raises(DDictWritesLostError):
        play.move("writer", 2)


def test_a_handle_that_leaves_without_having_heard_loses_what_it_wrote(make: Make) -> None:
    play = make()
    committed_up_to(play, 0, "a")
    play.lose(0)
    await_that(lambda: play.coordinator._epochs.is_open)
    play.leave("a", written=2)

    with pytest.raises(DDictWritesLostError):
        play.newest()
    assert play.newest() == 0, "what it had moved past is not whole"


def test_lost_writes_of_a_killed_handle_are_told(make: Make) -> None:
    play = make()
    committed_up_to(play, 0, "a", "b")
    play.attach("a")
    play.move("a", 3)  # 1 and 2 are finished, and not committed, as b is not
    play.kill("a")
    play.lose(1)
    play.catch_up("b", 1)

    with pytest.raises(DDictWritesLostError):
        play.move("b", 2)


def test_a_commit_of_what_is_gone_back_to_is_called_off(make: Make) -> None:
    play = make()
    committed_up_to(play, 0, "a")
    gate = play.managers.close_gate("prepare")
    play.move("a", 2)
    play.managers.await_asked("prepare", 3)  # some managers may have noted what belongs to it, and others not
    play.rollback("a", 1)
    gate.set()
    assert play.newest() == 0
    play.move("a", 2)
    assert play.newest() == 1


def test_a_killed_handle_had_nothing_below_where_it_began(make: Make) -> None:
    play = make()
    committed_up_to(play, 0, "a")
    play.attach("b")
    play.join("b", 2)
    play.kill("b")
    play.lose(0)
    assert play.catch_up("a", 1)["lost"] is None
    play.move("a", 2)
    assert play.newest() == 1


def test_where_a_handle_stood_before_it_went_back_does_not_count(make: Make) -> None:
    play = make()
    committed_up_to(play, 1, "a")
    play.rollback("a", 0)
    play.lose(0)
    play.coordinator.catch_up("a", 2, NOTHING, 0, DEADLINE_S)  # sent before it went back
    assert play.newest() == 0
