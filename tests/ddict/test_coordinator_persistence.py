"""What the coordinator persists and restores, and when. The managers are played by the test."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from ml_flashpoint.ddict.errors import (
    DDictError,
    DDictManagerLostError,
    DDictPersistError,
    DDictTimeoutError,
    DDictWritesLostError,
)
from ml_flashpoint.ddict.persistence import queue as persisting
from ml_flashpoint.format.errors import FlashpointError
from tests.ddict.coordination import DEADLINE_S, SHORT_S, Make, Play, raises_in_time
from tests.support.dictionaries import await_that


def restore(play: Play, checkpoint_id: int, timeout_s: float = DEADLINE_S) -> None:
    play.coordinator.restore(checkpoint_id, "", timeout_s)


def test_persisting_without_anything_committed_says_so(make: Make) -> None:
    assert make().coordinator.persist_newest(DEADLINE_S) == -1


def test_a_checkpoint_is_persisted_once(make: Make) -> None:
    play = make(replicated=False)
    play.join("a")
    play.move("a", 1)

    assert [play.coordinator.persist_newest(DEADLINE_S) for _ in range(2)] == [0, 0]
    assert play.managers.persisted == [0]


def test_what_prevents_persisting_is_raised_and_it_can_be_tried_again(make: Make) -> None:
    play = make(replicated=False)
    failures = [DDictPersistError("the disk is full")]
    play.managers.refusals["persist"] = lambda manager, fields: failures.pop() if failures else None
    play.join("a")
    play.move("a", 1)

    with pytest.raises(DDictPersistError, match="the disk is full"):
        play.coordinator.persist_newest(DEADLINE_S)

    assert play.coordinator.persist_newest(DEADLINE_S) == 0


def fail(play: Play, *checkpoint_ids: int) -> list[int]:
    """Have these fail to be persisted, each time that is asked for. Returns which was, of all."""
    tried: list[int] = []

    def refuse(manager: int, fields: dict[str, Any]) -> DDictPersistError | None:
        if manager == 0:
            tried.append(fields["checkpoint_id"])
        return DDictPersistError("the disk is full") if fields["checkpoint_id"] in checkpoint_ids else None

    play.managers.refusals["persist"] = refuse
    return tried


def test_what_was_due_is_tried_again_until_that_works(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persisting, "_FIRST_RETRY_S", 0.01)
    play = make(persist_freq=1)
    tried = fail(play, 0)
    play.join("a")
    play.move("a", 1)
    await_that(lambda: tried == [0] * 4)
    state = play.coordinator.whole_state()
    assert (state["persisted"], "the disk is full" in state["persist_error"]) == (-1, True)
    with pytest.raises(DDictPersistError, match="the disk is full"):
        play.coordinator.persist_newest(DEADLINE_S)

    fail(play)
    await_that(lambda: play.managers.persisted == [0])
    await_that(lambda: play.coordinator.whole_state()["persist_error"] is None)
    assert play.coordinator.whole_state()["persisted"] == 0


def test_what_is_due_next_takes_the_place_of_what_could_not_be_persisted(make: Make) -> None:
    play = make(persist_freq=2)
    tried = fail(play, 1)
    play.join("a")
    play.move("a", 2)
    await_that(lambda: tried == [1])
    await_that(lambda: play.coordinator.whole_state()["persist_error"] is not None)
    play.move("a", 3)
    play.move("a", 4)
    await_that(lambda: play.managers.persisted == [3])
    assert play.newest() == 3
    play.move("a", 5)
    await_that(lambda: play.managers.of("settle")[-1]["pinned"] == [])  # its values can be let go of


def test_what_could_not_be_persisted_holds_up_no_restore(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    play = make(persist_freq=1)
    tried = fail(play, 0)
    play.join("a")
    play.move("a", 1)
    await_that(lambda: tried == [0] and play.coordinator.whole_state()["persist_error"] is not None)
    restore(play, 7)
    assert play.coordinator.whole_state()["persisted"] == 7
    assert play.newest() == 7


def test_persisting_takes_no_longer_than_the_time_given(make: Make) -> None:
    play = make(replicated=False)
    play.managers.close_gate("persist")
    play.join("a")
    play.move("a", 1)

    raises_in_time(DDictTimeoutError, lambda seconds: play.coordinator.persist_newest(seconds))


def test_what_was_rolled_back_is_persisted_anew(make: Make) -> None:
    play = make(managers=1, replicated=False)
    play.join("a")
    for position in (1, 2):
        play.move("a", position)
        play.coordinator.persist_newest(DEADLINE_S)
    play.rollback("a", 0)
    play.move("a", 2)

    assert play.coordinator.persist_newest(DEADLINE_S) == 1
    assert play.managers.persisted == [0, 1, 1]
    assert play.managers.removed_above == [0]


@pytest.mark.parametrize("snapshots", [True, False])
def test_a_restored_checkpoint_is_the_newest_committed_one(make: Make, snapshots: bool) -> None:
    play = make(snapshots=snapshots, replicated=snapshots)
    play.join("a")
    play.move("a", 9)
    play.newest()

    restore(play, 5)

    assert play.coordinator.state()["committed"] == 5
    assert play.newest() == 5
    assert play.catch_up("a", 9, written=8)["lost"] is None
    play.move("a", 7)
    assert play.newest() == 6


def test_what_is_rolled_back_while_it_is_persisted_does_not_stay(make: Make) -> None:
    play = make(working_set_size=4, persist_freq=2)
    gate = play.managers.close_gate("persist")
    play.join("a")
    play.move("a", 1)
    assert play.newest() == 0
    play.move("a", 2)
    play.managers.await_asked("persist", 2)
    play.rollback("a", 0)
    assert play.managers.removed_above == [0]

    gate.set()

    assert play.coordinator.persist_newest(DEADLINE_S) == 0
    assert play.managers.persisted == [0]


def test_what_is_committed_anew_while_it_is_persisted_in_vain_is_persisted_after_all(make: Make) -> None:
    play = make(1, persist_freq=2)
    gate = play.managers.close_gate("persist")
    first = [DDictPersistError("nothing of the kind was prepared")]
    play.managers.refusals["persist"] = lambda manager, fields: first.pop() if first else None
    play.join("a")
    play.move("a", 1)
    assert play.newest() == 0
    play.move("a", 2)
    play.managers.await_asked("persist")
    play.rollback("a", 0)
    play.move("a", 2)
    assert play.newest() == 1

    gate.set()

    await_that(lambda: play.managers.persisted == [1])
    assert play.coordinator.persist_newest(DEADLINE_S) == 1
    assert play.managers.persisted == [1]


def test_what_only_some_managers_have_restored_is_not_committed(make: Make) -> None:
    play = make()
    play.join("a")
    away = threading.Event()
    away.set()

    def die(manager: int, fields: dict[str, Any]) -> FlashpointError | None:
        return DDictManagerLostError("away", manager=manager) if manager == 1 and away.is_set() else None

    play.managers.refusals["begin"] = die
    with pytest.raises(DDictTimeoutError, match="away"):
        restore(play, 5, 20 * SHORT_S)  # for one try at least, on a busy machine
    assert not play.managers.of("prepare")

    away.clear()

    assert play.newest() == 5, "as soon as all have taken it up"


def test_who_had_something_uncommitted_is_told_of_a_restore(make: Make) -> None:
    play = make(replicated=False)
    play.join("a")
    play.move("a", 2)
    assert play.newest() == 1
    restore(play, 0)
    answer = play.catch_up("a", 2, written=2)
    assert "checkpoint 0 was restored" in answer["lost"]
    assert answer["base"] == 0


def test_a_manager_that_cannot_read_what_is_to_be_restored_leaves_all_as_it_was(make: Make) -> None:
    play = make()
    play.join("a")
    play.move("a", 9)
    assert play.newest() == 8
    play.managers.refusals["restore_prepare"] = lambda manager, fields: (
        DDictPersistError("damaged") if manager == 1 else None
    )

    with pytest.raises(DDictPersistError, match="damaged"):
        restore(play, 5)

    assert not play.managers.of("begin")
    assert len(play.managers.of("restore_abort")) == 2
    assert play.newest() == 8
    play.move("a", 10)
    assert play.newest() == 9


@pytest.mark.parametrize("call", ["persist", "restore"])
def test_a_manager_that_is_lost_meanwhile_is_not_told_to_who_persists_or_restores(make: Make, call: str) -> None:
    """Copies of what is to be committed are not there yet, and another epoch begins."""
    play, waits, outcome = make(), threading.Event(), list[Any]()
    play.join("a")
    play.move("a", 1)
    assert play.newest() == 0
    sealed, gate = len(play.managers.of("seal")), play.managers.close_gate("seal")

    def run() -> None:
        try:
            if call == "restore":
                restore(play, 0)
            else:
                play.coordinator.persist_newest(DEADLINE_S, lambda: bool(waits.set()))
        except FlashpointError as error:
            outcome.append(error)

    if call == "persist":
        play.move("a", 2)
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    play.managers.await_asked("seal", sealed + 1)
    assert call == "restore" or waits.wait(DEADLINE_S)
    play.lose(1)
    gate.set()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    assert outcome == []


def test_restoring_waits_for_a_commit_no_longer_than_the_time_given(make: Make) -> None:
    play = make()
    play.managers.close_gate("seal")
    play.join("a")
    play.move("a", 3)
    play.managers.await_asked("seal")

    raises_in_time(DDictError, lambda seconds: restore(play, 1, seconds))


def test_what_is_persisted_anew_after_a_store_was_away_stays(make: Make) -> None:
    stored: set[int] = set()
    is_away = threading.Event()

    def persist(checkpoint_id: int, receipts: list[str]) -> None:
        if is_away.is_set():
            raise DDictPersistError("the store is away")
        stored.add(checkpoint_id)

    def remove(above: int) -> None:
        if is_away.is_set():
            raise DDictPersistError("the store is away")
        stored.difference_update([each for each in stored if each > above])

    play = make(1, persist_freq=1, persist=persist, remove_above=remove)
    play.join("a")
    for position in range(1, 6):
        play.move("a", position)
        play.newest()
    await_that(lambda: stored == {0, 1, 2, 3, 4})
    is_away.set()
    play.rollback("a", 3)
    play.move("a", 5)
    assert play.newest() == 4
    await_that(lambda: play.coordinator.whole_state()["persist_error"] is not None)
    is_away.clear()

    assert play.coordinator.persist_newest(DEADLINE_S) == 4
    play.move("a", 6)
    assert play.coordinator.persist_newest(DEADLINE_S) == 5

    assert stored == {0, 1, 2, 3, 4, 5}


def test_what_is_lost_is_not_told_to_who_persists(make: Make) -> None:
    play = make()
    play.attach("killed")
    for handle in ("leaves", "killed"):
        play.join(handle)
    play.move_all(1, "leaves", "killed")
    assert play.newest() == 0
    play.leave("leaves", written=1)
    play.kill("killed")

    assert play.coordinator.persist_newest(DEADLINE_S) == 0
    with pytest.raises(DDictWritesLostError):
        play.newest()
    assert play.newest() == 0


def test_who_restores_is_where_that_is_whatever_was_on_its_way(make: Make) -> None:
    play = make()
    play.join("a")
    play.move("a", 2)
    assert play.newest() == 1
    play.coordinator.restore(0, "a", DEADLINE_S)
    play.catch_up("a", 2)  # its process heard of the epoch before the handle knew that it is restored
    assert play.newest() == 0
