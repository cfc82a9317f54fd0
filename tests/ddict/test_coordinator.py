"""When checkpoints are committed and retire, and what handles are told. The managers are played by the test."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ml_flashpoint.core.errors import FlashpointError
from ml_flashpoint.ddict.accounts import Rules, Write
from ml_flashpoint.ddict.coordinator import Coordinator
from ml_flashpoint.ddict.errors import (
    DDictCheckpointRetiredError,
    DDictError,
    DDictManagerLostError,
    DDictPersistError,
    DDictTimeoutError,
    DDictWritesLostError,
)
from tests.support.dictionaries import await_that

DEADLINE_S = 20.0
SHORT_S = 0.1


class Managers:
    """What the coordinator asks of managers, and what they answer."""

    def __init__(self, count: int) -> None:
        self.incarnations = [f"first-{manager}" for manager in range(count)]
        self.asked: list[tuple[int, str, dict[str, Any]]] = []
        self.refusals: dict[str, Callable[[int, dict[str, Any]], FlashpointError | None]] = {}
        self.gates: dict[str, threading.Event] = {}
        self.changed = threading.Condition()
        self.persisted: list[int] = []
        self.removed_above: list[int] = []

    def call(self, manager: int, operation: str, fields: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        with self.changed:
            self.asked.append((manager, operation, fields))
            self.changed.notify_all()
        gate = self.gates.get(operation)
        if gate is not None and not gate.wait(min(timeout_s, DEADLINE_S)):
            raise DDictTimeoutError("the test kept it waiting")
        refuse = self.refusals.get(operation)
        error = None if refuse is None else refuse(manager, fields)
        if error is not None:
            raise error
        return {"incarnation": self.incarnations[manager], "receipt": f"receipt of {manager}"}

    def persist(self, checkpoint_id: int, receipts: list[str]) -> None:
        assert receipts == [f"receipt of {manager}" for manager in range(len(self.incarnations))]
        self.persisted.append(checkpoint_id)

    def await_asked(self, operation: str, count: int = 1) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.of(operation)) >= count, DEADLINE_S)

    def of(self, operation: str) -> list[dict[str, Any]]:
        return [fields for _, asked, fields in self.asked if asked == operation]

    def committed(self) -> list[int]:
        """Ids that snapshots were taken of, in order, each once for a try."""
        return [fields["checkpoint_id"] for m, operation, fields in self.asked if (m, operation) == (0, "prepare")]

    def close_gate(self, operation: str) -> threading.Event:
        self.gates[operation] = threading.Event()
        return self.gates[operation]


class Play:
    """A coordinator with managers, and handles that keep to the protocol."""

    def __init__(self, coordinator: Coordinator, managers: Managers) -> None:
        self.coordinator = coordinator
        self.managers = managers

    def join(self, handle: str, position: int = 0, *wrote: Write) -> dict[str, Any]:
        return self.coordinator.join(handle, f"lease of {handle}", position, wrote)

    def move(self, handle: str, position: int, *wrote: Write, timeout_s: float = DEADLINE_S) -> dict[str, Any]:
        return self.coordinator.move(handle, f"lease of {handle}", position, wrote, timeout_s)

    def rollback(self, handle: str, to: int, *wrote: Write, timeout_s: float = DEADLINE_S) -> dict[str, Any]:
        return self.coordinator.rollback(handle, f"lease of {handle}", to, wrote, timeout_s)

    def newest(self, timeout_s: float = DEADLINE_S) -> int:
        return int(self.coordinator.newest(timeout_s)["committed"])

    def write(self, manager: int, need: int, *, fresh: bool = True) -> Write:
        return Write(manager, self.managers.incarnations[manager], need, fresh)


Make = Callable[..., Play]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Play] = []

    def make_one(
        managers: int = 2,
        *,
        committed: int = -1,
        sealed: tuple[int, ...] = (),
        expected: tuple[str, ...] = (),
        died: tuple[str, ...] = (),
        **rules: Any,
    ) -> Play:
        given = {
            "working_set_size": 4,
            "wait_for_keys": False,
            "wait_for_writers": False,
            "replicated": True,
            "snapshots": True,
            "persist_freq": 0,
        }
        played = Managers(managers)
        coordinator = Coordinator(
            Rules(managers=managers, **{**given, **rules}),
            played.call,
            played.persist,
            unpersist=played.removed_above.append,
            committed=committed,
            sealed=sealed,
            expected=expected,
            died=died,
        )
        made.append(Play(coordinator, played))
        return made[-1]

    yield make_one
    for each in made:
        for gate in each.managers.gates.values():
            gate.set()
        each.coordinator.close()


def within(seconds: float, call: Callable[[], object]) -> float:
    """Time that a call took; fails if that is much more than it may."""
    began = time.monotonic()
    call()
    took = time.monotonic() - began
    assert took < seconds + 1.0
    return took


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
    play.managers.await_asked("prepare", 3)
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
    play.coordinator.leave("a", ())
    assert play.newest() == 4
    play.move("b", 7)
    play.coordinator.leave("b", ())

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
        _move_until_told(play, "a", 3, lost)
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


def test_a_handle_that_left_counts_no_more(make: Make) -> None:
    play = make()
    play.join("a")
    play.join("b")
    play.move("b", 2)
    play.coordinator.leave("a", ())
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
    coordinator = Coordinator(rules, managers.call, committed=4, sealed=(3, 4), settle_s=0.5)
    try:
        began = time.monotonic()
        coordinator.join("fast", "x", 9, ())
        coordinator.join("slow", "y", 6, ())
        assert coordinator.newest(DEADLINE_S)["committed"] == 5
        assert time.monotonic() - began >= 0.4
        assert managers.committed() == [5]
    finally:
        coordinator.close()


# ---- retirement -------------------------------------------------------------------------------------------


def test_with_wait_for_writers_one_that_takes_over_retires_nothing_before_they_are_back() -> None:
    managers = Managers(1)
    coordinator = Coordinator(
        Rules(1, 2, False, True, True, True, 0), managers.call, committed=4, sealed=(3, 4), settle_s=0.5
    )
    try:
        coordinator.join("fast", "x", 6, ())
        late = threading.Timer(0.2, lambda: coordinator.join("slow", "y", 5, ()))
        late.start()
        with pytest.raises(DDictTimeoutError, match="1 other handle"):
            coordinator.move("fast", "x", 7, (), 0.8)
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
    play.coordinator.leave("b", ())
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
    assert play.managers.of("forget") == [{"above": 1}]
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

    def wait() -> None:
        with pytest.raises(DDictTimeoutError):
            play.rollback("a", 1, timeout_s=SHORT_S)

    within(SHORT_S, wait)


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
    assert play.managers.of("forget") == [{"above": -1}]


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


# ---- losses -----------------------------------------------------------------------------------------------


def test_a_handle_is_told_when_a_manager_comes_back_without_its_writes(make: Make) -> None:
    play = make()
    play.join("a")
    play.move("a", 1)
    assert play.newest() == 0
    lost = play.write(1, 1)
    play.managers.incarnations[1] = "second"
    play.move("a", 2, lost)

    with pytest.raises(DDictWritesLostError) as raised:
        _move_until_told(play, "a", 3, lost)

    assert (raised.value.manager, raised.value.checkpoint_id) == (1, 0)
    assert play.newest() == 0
    play.rollback("a", 0)
    play.move("a", 2)
    assert play.newest() == 1


def test_a_handle_is_told_until_it_has_gone_back_far_enough(make: Make) -> None:
    play = make()
    play.join("a")
    play.move("a", 1)
    assert play.newest() == 0
    lost = Write(1, "an incarnation that is gone", 1, True)
    play.move("a", 3, lost)
    for _ in range(2):
        with pytest.raises(DDictWritesLostError):
            _move_until_told(play, "a", 4, lost)

    play.rollback("a", 1, lost)

    with pytest.raises(DDictWritesLostError):
        _move_until_told(play, "a", 4, lost)


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
        _move_until_told(play, "a", 3, late)


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
        _move_until_told(play, "b", 6)

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
    play.coordinator.leave("a", [wrote])
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
    play.coordinator.leave("a", [play.write(0, 0)])
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
        _move_until_told(play, "a", 3)
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
    play.coordinator.leave("a", wrote[:1])
    play.coordinator.leave("b", wrote[1:])
    gate.set()

    with pytest.raises(DDictWritesLostError):
        play.newest()


def test_a_loss_before_anything_was_committed_names_a_checkpoint_to_go_back_to(make: Make) -> None:
    play = make()
    play.join("a")
    lost = Write(0, "an incarnation that is gone", 0, True)
    play.move("a", 1, lost)

    with pytest.raises(DDictWritesLostError) as raised:
        _move_until_told(play, "a", 2, lost)

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
        _move_until_told(play, "a", 2, wrote)
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
        _move_until_told(play, "a", 2, wrote)


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


def _move_until_told(play: Play, handle: str, position: int, *wrote: Write) -> None:
    """The loss is noticed by the next commit, which is on its way."""
    give_up = time.monotonic() + DEADLINE_S
    while time.monotonic() < give_up:
        play.move(handle, position, *wrote)
        play.newest()
        position += 1


# ---- persistence ------------------------------------------------------------------------------------------


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


def test_persisting_takes_no_longer_than_the_time_given(make: Make) -> None:
    play = make(replicated=False)
    play.managers.close_gate("persist")
    play.join("a")
    play.move("a", 1)

    def wait() -> None:
        with pytest.raises(DDictTimeoutError):
            play.coordinator.persist_newest(SHORT_S)

    within(SHORT_S, wait)


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

    play.coordinator.restore(5, {"checkpoint_id": 5}, DEADLINE_S)

    assert play.coordinator.state()["committed"] == 5
    assert play.newest() == 5
    play.move("a", 7)
    assert play.newest() == 6


def test_what_is_rolled_back_while_it_is_persisted_does_not_stay(make: Make) -> None:
    play = make(working_set_size=4, persist_freq=2)
    gate = play.managers.close_gate("persist")
    play.join("a")
    play.move("a", 2)
    play.managers.await_asked("persist", 2)
    play.rollback("a", 0)
    before = len(play.managers.removed_above)

    gate.set()

    await_that(lambda: len(play.managers.removed_above) > before)
    assert play.managers.removed_above[-1] == 0


def test_what_is_committed_anew_while_it_is_persisted_in_vain_is_persisted_after_all(make: Make) -> None:
    play = make(1, persist_freq=2)
    gate = play.managers.close_gate("persist")
    first = [DDictPersistError("nothing of the kind was prepared")]
    play.managers.refusals["persist"] = lambda manager, fields: first.pop() if first else None
    play.join("a")
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

    def die(manager: int, fields: dict[str, Any]) -> FlashpointError | None:
        return DDictManagerLostError("away", manager=manager) if manager == 1 else None

    play.managers.refusals["restore_commit"] = die
    with pytest.raises(DDictPersistError, match="only some"):
        play.coordinator.restore(5, {"checkpoint_id": 5}, SHORT_S)
    with pytest.raises(DDictPersistError, match="only some"):
        play.move("a", 1)
    with pytest.raises(DDictPersistError, match="only some"):
        play.newest()
    assert not play.managers.of("prepare")

    play.managers.refusals.clear()
    play.coordinator.restore(5, {"checkpoint_id": 5}, DEADLINE_S)
    play.move("a", 6)
    assert play.newest() == 5


def test_a_manager_that_cannot_read_what_is_to_be_restored_leaves_all_as_it_was(make: Make) -> None:
    play = make()
    play.join("a")
    play.move("a", 9)
    assert play.newest() == 8
    play.managers.refusals["restore_prepare"] = lambda manager, fields: (
        DDictPersistError("damaged") if manager == 1 else None
    )

    with pytest.raises(DDictPersistError, match="damaged"):
        play.coordinator.restore(5, {"checkpoint_id": 5}, DEADLINE_S)

    assert not play.managers.of("restore_commit")
    assert len(play.managers.of("restore_abort")) == 2
    assert play.newest() == 8
    play.move("a", 10)
    assert play.newest() == 9


def test_restoring_waits_for_a_commit_no_longer_than_the_time_given(make: Make) -> None:
    play = make()
    play.managers.close_gate("seal")
    play.join("a")
    play.move("a", 3)
    play.managers.await_asked("seal")

    def wait() -> None:
        with pytest.raises(DDictError):
            play.coordinator.restore(1, {"checkpoint_id": 1}, SHORT_S)

    within(SHORT_S, wait)


# ---- handles that begin anew ------------------------------------------------------------------------------


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
