"""What handles are told when managers die. The managers are played by the test."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest

from ml_flashpoint.ddict.accounts import Write
from ml_flashpoint.ddict.errors import (
    DDictManagerLostError,
    DDictTimeoutError,
    DDictWritesLostError,
)
from tests.ddict.coordination import DEADLINE_S, SHORT_S, Make, Play, move_until_told
from tests.support.dictionaries import await_that


def test_a_handle_is_told_when_a_manager_comes_back_without_its_writes(make: Make) -> None:
    play = make()
    play.join("a")
    play.move("a", 1)
    assert play.newest() == 0
    lost = play.write(1, 1)
    play.managers.incarnations[1] = "second"
    play.move("a", 2, lost)

    with pytest.raises(DDictWritesLostError) as raised:
        move_until_told(play, "a", 3, lost)

    assert (raised.value.manager, raised.value.checkpoint_id) == (1, 0)
    assert play.newest() == 0
    play.rollback("a", 0)
    play.move("a", 2)
    assert play.newest() == 1


def test_a_handle_that_waits_for_its_commit_is_told_of_a_loss_at_once(make: Make) -> None:
    play = make()
    play.join("a")
    gate = play.managers.close_gate("prepare")
    play.move("a", 1, play.write(1, 0))
    play.managers.incarnations[1] = "second"
    told: list[DDictWritesLostError] = []

    def wait() -> None:
        with pytest.raises(DDictWritesLostError) as raised:
            play.coordinator.await_commit("a", 0, 10 * DEADLINE_S)
        told.append(raised.value)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    gate.set()
    waiting.join(DEADLINE_S)
    assert [error.manager for error in told] == [1]


CONNECTION = "of the writer"


def lose_writes_of_one_that_is_gone(play: Play) -> None:
    """Checkpoint 0 is committed, 1 is not, since a manager died with what a handle wrote there that is gone now."""
    play.coordinator.lease_began("lease of writer", CONNECTION)
    for handle in ("gone", "writer"):
        play.join(handle)
        play.move(handle, 1)
    assert play.newest() == 0
    gate = play.managers.close_gate("prepare")
    wrote = play.write(0, 1, fresh=False)
    play.move("gone", 2, wrote)
    play.coordinator.leave("gone", 2, [wrote])
    play.managers.incarnations[0] = "second"
    play.move("writer", 2)
    gate.set()


def test_a_writer_that_waits_for_a_commit_is_told_of_lost_writes_of_handles_that_are_gone(make: Make) -> None:
    play = make()
    lose_writes_of_one_that_is_gone(play)

    for _ in range(2):  # until it acts on it
        with pytest.raises(DDictWritesLostError):
            play.coordinator.await_commit("writer", 1, DEADLINE_S)
        assert play.newest() == 0

    play.rollback("writer", 0)
    play.move("writer", 3)
    assert play.coordinator.await_commit("writer", 2, DEADLINE_S)["committed"] == 2


def test_a_reader_that_waits_for_a_commit_leaves_such_a_loss_to_those_who_write(make: Make) -> None:
    play = make()
    lose_writes_of_one_that_is_gone(play)
    await_that(lambda: play.coordinator._orphaned is not None)

    with pytest.raises(DDictTimeoutError):
        play.coordinator.await_commit("a reader", 1, SHORT_S)

    with pytest.raises(DDictWritesLostError):
        play.move("writer", 3)
    play.coordinator.leave("writer", 2, [])
    play.join("another")
    play.move("another", 3)
    assert play.newest() == 2


def test_a_reader_that_waits_for_a_commit_is_told_where_nobody_writes(make: Make) -> None:
    play = make()
    lose_writes_of_one_that_is_gone(play)
    play.coordinator.leave("writer", 2, [])

    with pytest.raises(DDictWritesLostError):
        play.coordinator.await_commit("a reader", 1, DEADLINE_S)


def test_one_that_is_gone_while_it_waits_takes_no_loss_with_it(make: Make) -> None:
    play = make()
    play.coordinator.lease_began("lease of a", "connection of a")
    for handle in ("a", "b"):
        play.join(handle)
        play.move(handle, 1)
    assert play.newest() == 0
    is_gone = threading.Event()
    gate = play.managers.close_gate("prepare")
    wrote = play.write(1, 1, fresh=False)
    play.move("a", 2, wrote)
    found: list[int] = []

    def wait(handle: str) -> None:
        state = play.coordinator.await_commit(handle, 1, 10 * DEADLINE_S, is_gone.is_set)
        found.append(state["committed"])

    waiting = [threading.Thread(target=wait, args=(handle,), daemon=True) for handle in ("a", "a reader")]
    for each in waiting:
        each.start()
    is_gone.set()
    play.coordinator.lease_ended("lease of a", "connection of a")
    play.managers.incarnations[1] = "second"
    play.move("b", 2)
    gate.set()
    for each in waiting:
        each.join(DEADLINE_S)
    assert found == [0, 0]

    with pytest.raises(DDictWritesLostError):
        move_until_told(play, "b", 3)


def test_a_loss_is_told_again_if_who_was_told_dies_before_it_goes_on(make: Make) -> None:
    play = make()
    lose_writes_of_one_that_is_gone(play)
    with pytest.raises(DDictWritesLostError):
        play.coordinator.await_commit("writer", 1, DEADLINE_S)
    play.coordinator.lease_ended("lease of writer", CONNECTION)

    with pytest.raises(DDictWritesLostError):
        play.newest()

    assert play.newest() == 0


def test_a_handle_is_told_until_it_has_gone_back_far_enough(make: Make) -> None:
    play = make()
    play.join("a")
    play.move("a", 1)
    assert play.newest() == 0
    lost = Write(1, "an incarnation that is gone", 1, True)
    play.move("a", 3, lost)
    for _ in range(2):
        with pytest.raises(DDictWritesLostError):
            move_until_told(play, "a", 4, lost)

    play.rollback("a", 1, lost)

    with pytest.raises(DDictWritesLostError):
        move_until_told(play, "a", 4, lost)


def test_a_handle_is_not_told_of_the_death_of_a_manager_that_lost_nothing_of_it(make: Make) -> None:
    play = make()
    play.join("a")
    wrote = play.write(1, 0)
    play.move("a", 1, wrote)
    assert play.newest() == 0
    play.managers.incarnations[1] = "second"

    # It still names the writes, since it has not heard of the commit.
    play.move("a", 2, wrote._replace(fresh=False))

    assert play.newest() == 1


def test_a_late_write_is_covered_by_the_next_commit_only(make: Make) -> None:
    play = make()
    gate = play.managers.close_gate("seal")
    play.join("a")
    play.move("a", 1)
    play.managers.await_asked("seal", 2)
    state = play.rollback("a", 0)
    assert state["fixed"] == 0
    late = play.write(1, 0)
    play.move("a", 1, late)
    gate.set()
    assert play.newest() == 0
    play.managers.incarnations[1] = "second"
    play.move("a", 2, late._replace(need=1, fresh=False))

    with pytest.raises(DDictWritesLostError):
        move_until_told(play, "a", 3, late)


def test_what_another_handles_rollback_made_uncommitted_is_told_too_when_it_is_lost(make: Make) -> None:
    play = make()
    play.join("a")
    play.join("b")
    for handle in "ab":
        play.move(handle, 5, play.write(1, 3))
    assert play.newest() == 4
    play.rollback("a", 2)
    assert play.newest() == 2
    play.managers.incarnations[1] = "second"
    play.move("a", 5)

    with pytest.raises(DDictWritesLostError) as raised:
        move_until_told(play, "b", 6)

    assert raised.value.checkpoint_id == 2
    play.rollback("b", 2)
    play.move("b", 6)
    assert play.newest() == 4


def test_lost_writes_of_handles_that_are_gone_are_told_once_and_not_committed(make: Make) -> None:
    play = make()
    play.join("a")
    play.move("a", 1)
    assert play.newest() == 0
    gate = play.managers.close_gate("prepare")
    wrote = play.write(0, 1, fresh=False)
    play.move("a", 2, wrote)
    play.coordinator.leave("a", 0, [wrote])
    play.managers.incarnations[0] = "second"
    gate.set()

    with pytest.raises(DDictWritesLostError):
        play.newest()

    assert play.newest() == 0
    play.join("b")
    play.move("b", 3)
    assert play.newest() == 2  # whoever goes on writes anew what was lost


@pytest.mark.parametrize("is_known", [True, False])
def test_what_a_handle_wrote_where_it_left_can_be_lost_too(make: Make, is_known: bool) -> None:
    play = make()
    play.join("b")
    if is_known:
        play.join("a")
    play.coordinator.leave("a", 0, [play.write(0, 0)])
    play.managers.incarnations[0] = "second"
    play.move("b", 1)

    with pytest.raises(DDictWritesLostError):
        play.newest()


def test_who_is_told_of_lost_writes_of_a_handle_that_is_gone_can_go_back_from_there(make: Make) -> None:
    play = make(working_set_size=1)
    play.join("a")
    play.move("a", 1)
    assert play.newest() == 0
    play.coordinator.note([Write(0, "an incarnation that is gone", 1)])
    play.move("a", 2)
    play.managers.await_asked("abort", 2)
    with pytest.raises(DDictWritesLostError) as raised:
        move_until_told(play, "a", 3)
    time.sleep(SHORT_S)  # nothing happens: there is no event to wait for

    assert raised.value.checkpoint_id == 0
    play.rollback("a", 0)
    play.move("a", 2)
    assert play.newest() == 1


def test_a_loss_that_a_handle_would_have_been_told_is_told_once_when_it_is_gone(make: Make) -> None:
    play = make()
    for handle in ("a", "b"):
        play.coordinator.lease_began(f"lease of {handle}", handle)
        play.join(handle)
        play.move(handle, 1)
    assert play.newest() == 0
    lost = play.write(1, 1)
    play.managers.incarnations[1] = "second"
    play.move("a", 2, lost)
    play.move("b", 2)
    play.managers.await_asked("abort", 2)

    play.coordinator.lease_ended("lease of a", "a")

    with pytest.raises(DDictWritesLostError):
        play.newest()
    play.move("b", 9)
    assert play.newest() == 8


@pytest.mark.parametrize("begun", [True, False])
def test_a_move_that_waits_while_its_process_dies_does_not_bring_the_handle_back(make: Make, begun: bool) -> None:
    play = make(working_set_size=2, wait_for_writers=True)
    for handle in ("a", "b"):
        play.coordinator.lease_began(f"lease of {handle}", handle)
        play.join(handle)
    play.move("a", 1)

    def wait() -> None:
        with contextlib.suppress(DDictTimeoutError):
            play.move("a", 2, timeout_s=1.0)

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(SHORT_S if begun else 0)  # it waits already, or may come when nobody is there any more
    play.coordinator.lease_ended("lease of a", "a")
    play.move("b", 1)
    waiting.join(DEADLINE_S)

    assert not waiting.is_alive()
    assert play.coordinator.state()["writers"] == 1
    play.move("b", 9)  # nobody is waited for


def test_lost_writes_of_handles_that_are_gone_do_not_keep_the_coordinator_busy(make: Make) -> None:
    play = make()
    play.join("a")
    play.join("b")
    play.coordinator.note([Write(0, "an incarnation that is gone", 0)])
    play.move("a", 1)
    play.move("b", 1)
    play.managers.await_asked("abort", 2)
    before = len(play.managers.asked)
    time.sleep(0.5)  # nothing happens: there is no event to wait for
    assert len(play.managers.asked) - before < 20

    with pytest.raises(DDictWritesLostError):
        play.move("b", 2)

    play.move("b", 2)
    assert play.newest() == 0


def test_of_two_handles_that_are_gone_each_ones_losses_count(make: Make) -> None:
    play = make()
    play.join("a")
    play.join("b")
    gate = play.managers.close_gate("prepare")
    wrote = Write(0, "an incarnation that is gone", 0), play.write(0, 0)
    play.move("a", 1, wrote[0])
    play.move("b", 1, wrote[1])
    play.coordinator.leave("a", 0, wrote[:1])
    play.coordinator.leave("b", 0, wrote[1:])
    gate.set()

    with pytest.raises(DDictWritesLostError):
        play.newest()


def test_a_loss_before_anything_was_committed_names_a_checkpoint_to_go_back_to(make: Make) -> None:
    play = make()
    play.join("a")
    lost = Write(0, "an incarnation that is gone", 0, True)
    play.move("a", 1, lost)

    with pytest.raises(DDictWritesLostError) as raised:
        move_until_told(play, "a", 2, lost)

    assert raised.value.checkpoint_id == 0


def test_a_manager_that_dies_between_prepare_and_seal_is_noticed(make: Make) -> None:
    play = make()
    gate = play.managers.close_gate("seal")
    play.join("a")
    wrote = play.write(1, 0)
    play.move("a", 1, wrote)
    play.managers.await_asked("seal", 2)
    play.managers.incarnations[1] = "second"
    gate.set()

    with pytest.raises(DDictWritesLostError):
        move_until_told(play, "a", 2, wrote)
    assert play.coordinator.state()["committed"] == -1


def test_a_manager_that_agreed_on_an_earlier_checkpoint_after_it_had_sealed_undoes_the_commit(make: Make) -> None:
    play = make()
    gate = play.managers.close_gate("seal")
    play.join("a")
    wrote = play.write(1, 0)
    play.move("a", 1, wrote)
    play.managers.await_asked("seal", 2)
    # Its answers still name the incarnation that sealed, as those of the dead that were on their way do.
    assert play.coordinator.recovering(1, "second")["committed"] == -1
    gate.set()
    play.managers.await_asked("prepare", 4)
    assert play.coordinator.state()["committed"] == -1
    play.managers.incarnations[1] = "second"

    with pytest.raises(DDictWritesLostError):
        move_until_told(play, "a", 2, wrote)


@pytest.mark.parametrize("during", ["prepare", "seal"])
def test_a_rollback_below_a_commit_that_is_under_way_calls_it_off(make: Make, during: str) -> None:
    play = make(1)
    play.join("one")
    play.move("one", 1)
    assert play.newest() == 0
    gate = play.managers.close_gate(during)
    play.move("one", 2, play.write(0, 1))
    play.managers.await_asked(during, 2)
    if during == "prepare":
        # It comes back without what was written, and is asked again; the handle has found that out by itself.
        play.managers.incarnations[0] = "second"
        play.coordinator.recovering(0, "second")
    back = threading.Thread(target=play.rollback, args=("one", 0))
    back.start()
    await_that(lambda: play.coordinator._held_up > 0)
    gate.set()
    back.join(DEADLINE_S)
    assert not back.is_alive()
    assert play.coordinator.state()["committed"] == 0
    assert len(play.managers.of("seal")) == (1 if during == "prepare" else 2), "what is not whole was sealed"
    committed = [fields["committed"] for fields in play.managers.of("settle")]
    assert max(committed) == 0, "it was committed for a while"
    play.move("one", 1)
    play.move("one", 2)
    assert play.newest() == 1


@pytest.mark.parametrize("during", ["prepare", "seal"])
def test_what_was_lost_before_the_first_commit_is_not_committed_by_it(make: Make, during: str) -> None:
    """There is nothing below to go back to: the handle goes back to the very checkpoint that is being committed."""
    play = make()
    play.join("one")
    gate = play.managers.close_gate(during)
    play.move("one", 1, play.write(1, 0))
    play.managers.await_asked(during, 2)
    # It comes back empty before it answers; the handle finds that out by itself, and counts those writes no more.
    if during == "prepare":
        play.managers.incarnations[1] = "second"
    back = threading.Thread(target=play.rollback, args=("one", 0), kwargs={"lost": [1]})
    back.start()
    await_that(lambda: play.coordinator._writers["one"].position == 0)
    await_that(lambda: play.coordinator._held_up > 0 or not back.is_alive())
    gate.set()
    back.join(DEADLINE_S)
    assert not back.is_alive()
    with play.coordinator._changed:
        assert play.coordinator._changed.wait_for(lambda: not play.coordinator._busy, DEADLINE_S)
        assert play.coordinator.state()["committed"] == -1
    # Who takes over must not find it either.
    assert [fields["above"] for fields in play.managers.of("forget")] == [-1, -1]
    play.managers.incarnations[1] = "second"
    play.move("one", 1, play.write(1, 0))
    assert play.newest() == 0


def test_a_rollback_to_what_is_being_committed_does_not_wait_for_that(make: Make) -> None:
    play = make()
    play.join("one")
    play.move("one", 1, play.write(1, 0))
    assert play.newest() == 0
    gate = play.managers.close_gate("seal")
    play.move("one", 2, play.write(1, 1))
    play.managers.await_asked("seal", 4)
    # What is above goes, at a manager where it had written nothing else, too.
    play.move("one", 3, play.write(1, 1), play.write(0, 2))
    play.rollback("one", 1, play.write(1, 1, fresh=False), timeout_s=SHORT_S)
    gate.set()
    play.move("one", 2)
    assert play.newest() == 1
    assert play.managers.of("forget") == []


def below_the_first_commit(make: Make) -> Play:
    """Commits began at 5; one has gone back to 2, which is whole, as all had moved past it, but not committed yet."""
    play = make(2, working_set_size=9)
    for name in ("one", "other"):
        play.join(name)
    with play.coordinator._changed:
        for name in ("one", "other"):
            play.move(name, 6)
    assert play.newest() == 5
    gate = play.managers.close_gate("prepare")
    play.rollback("one", 2)
    play.managers.await_asked("prepare", 4)
    play.managers.incarnations[1] = "second"
    play.coordinator.recovering(1, "second")
    gate.set()
    return play


def test_what_was_lost_below_the_first_commit_is_told_to_who_went_back_there_and_once(make: Make) -> None:
    play = below_the_first_commit(make)
    for name, position in (("one", 3), ("other", 7)):
        with pytest.raises(DDictWritesLostError) as raised:
            move_until_told(play, name, position)
        assert (raised.value.manager, raised.value.checkpoint_id) == (1, 0)
    for name in ("one", "other"):
        play.rollback(name, 0, lost=[1])
    assert play.coordinator.state()["committed"] == -1, "nobody has written again what was lost"
    for name in ("one", "other"):
        play.move(name, 1)
    assert play.newest() == 0


def test_what_was_lost_is_not_committed_for_having_been_whole_before(make: Make) -> None:
    play = make()
    play.join("one")
    play.move("one", 6)
    assert play.newest() == 5
    gate = play.managers.close_gate("seal")
    play.rollback("one", 0)
    play.managers.await_asked("seal", 4)  # of 0, which it had moved past
    play.move("one", 1, play.write(1, 0))
    back = threading.Thread(target=play.rollback, args=("one", 0), kwargs={"lost": [1]})
    back.start()
    await_that(lambda: play.coordinator._held_up > 0 or not back.is_alive())
    play.managers.incarnations[1] = "second"
    gate.set()
    back.join(DEADLINE_S)
    await_that(lambda: not play.coordinator._busy)
    assert play.coordinator.state()["committed"] == -1
    assert play.managers.of("forget")[-1]["above"] == -1
    play.move("one", 1, play.write(1, 0))
    assert play.newest() == 0


@pytest.mark.parametrize("how", ["in vain", "in between"])
def test_what_was_sealed_without_what_was_lost_is_forgotten(make: Make, how: str) -> None:
    """Although the first rollback was not in time, or no commit is under way now. Who takes over would find it."""
    play = make()
    play.join("one")
    if how == "in vain":
        gate = play.managers.close_gate("seal")
        play.move("one", 1, play.write(1, 0))
        play.managers.await_asked("seal", 2)
        with pytest.raises(DDictTimeoutError):
            play.rollback("one", 0, timeout_s=SHORT_S, lost=[1])
        play.managers.incarnations[1] = "second"
        gate.set()
    else:
        play.managers.refusals["seal"] = lambda manager, fields: DDictManagerLostError("away") if manager else None
        play.move("one", 1, play.write(1, 0))
        play.managers.await_asked("seal", 2)
        play.managers.incarnations[1] = "second"
        del play.managers.refusals["seal"]
        await_that(lambda: play.coordinator._writers["one"].lost is not None and not play.coordinator._busy)
    play.rollback("one", 0, lost=[1])
    assert [fields["above"] for fields in play.managers.of("forget")][-2:] == [-1, -1]
    assert play.coordinator.state()["committed"] == -1
