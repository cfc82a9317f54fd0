"""Pools hand out free slots of real files, and nothing that is retained or read."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ml_flashpoint.format.errors import ObjectNotFoundError, PrunedError, SaveError
from ml_flashpoint.format.files import open_regular
from ml_flashpoint.format.names import SaveId
from ml_flashpoint.memory.container import BaseContainer, Owner
from ml_flashpoint.memory.pool import Pool, SlotRequest, slot_size
from ml_flashpoint.memory.slot import PAGE, Slot, State
from tests.memory.support import commit, fill, fill_up, layout_of, slot_files, taken, value_in, value_of
from tests.support.descriptors import NoDescriptors
from tests.support.forked import Child, Report
from tests.support.tmpfs import SMALL_TMPFS_BYTES

ME = Owner(4, 0)
SIZE = layout_of().size


Opened = Callable[..., Pool]


@pytest.fixture
def opened() -> Iterator[Opened]:
    """Opens pools, and closes them in the end."""
    pools: list[Pool] = []

    def open_pool(base: Path, owner: Owner = ME, **options: object) -> Pool:
        pools.append(Pool(BaseContainer(base), owner, **{"keep": 1, "owners": (), **options}))  # type: ignore[arg-type]
        return pools[-1]

    yield open_pool
    for pool in pools:
        pool.close()


def request(step: int, *retained: int, of_round: bool = True, spare: int = 0, may_grow: bool = False) -> SlotRequest:
    return SlotRequest(SaveId(1, step), [SaveId(1, each) for each in retained], of_round, spare, may_grow)


def save(pool: Pool, step: int, *retained: int, **terms: bool) -> Slot | None:
    slot = pool.take(SIZE, request(step, *retained, **terms))
    if slot is not None:
        commit(pool, slot, SaveId(1, step))
    return slot


def test_slots_are_made_once_and_then_taken_in_turn(tmpfs: Path, opened: Opened) -> None:
    pool = opened(tmpfs)
    slots = [save(pool, step, step - 1) for step in range(1, 6)]
    assert slots == [slots[0], slots[1], slots[0], slots[1], slots[0]]
    assert sorted(pool.container.list_versions()) == [(1, 4), (1, 5)]
    assert slot_files(tmpfs) == ["00004-00000/0", "00004-00000/1"]
    assert value_in(pool.container, SaveId(1, 4)) == value_of(SaveId(1, 4))


def test_what_is_retained_is_written_or_newest_is_not_taken(tmpfs: Path, opened: Opened) -> None:
    pool = opened(tmpfs)
    save(pool, 1)
    assert pool.take(SIZE, request(2, 1, of_round=False, spare=1)) is None, "the last slot is for the round's save"
    writing = taken(pool, SIZE, request(2, 1))
    assert pool.take(SIZE, request(3, 1)) is None
    pool.free(writing)
    assert pool.slot_of(SaveId(1, 2)) is None
    save(pool, 3, 1)
    assert pool.take(SIZE, request(4, 1, of_round=False)) is None, "step 3 is the newest committed part"
    assert save(pool, 4, 1) is writing, "the round's save takes it"


def test_slots_are_made_ahead_and_more_once_saves_are_verified(tmpfs: Path, opened: Opened) -> None:
    pool = opened(tmpfs, extra=2)
    assert [pool.prepare(SIZE, request(1)) for _ in range(3)] == [True, True, False]
    for step in range(1, 5):
        assert save(pool, step, step - 1, may_grow=step > 2) is not None
    assert len(slot_files(tmpfs)) == 2, "a save that finds a free slot waits for no new one"
    assert [pool.prepare(SIZE, request(5, 4, may_grow=True)) for _ in range(3)] == [True, True, False]
    assert len(pool.slots) == 4


def test_what_cannot_be_committed_fails_one_save_and_no_later_one(tmpfs: Path, opened: Opened) -> None:
    pool = opened(tmpfs)
    (tmpfs / "step-1_ckpt").write_bytes(b"")
    with pytest.raises(SaveError):
        save(pool, 1)
    (slot,) = pool.slots
    assert (slot.state, slot.save) == (State.EMPTY, None)
    (tmpfs / "step-1_ckpt").unlink()
    assert save(pool, 1) is slot
    lost = save(pool, 2, 1)
    assert lost is not None
    lost.path.unlink()  # no part can ever be committed in it
    with pytest.raises(SaveError, match="cannot commit"):
        save(pool, 3, 1)
    assert lost not in pool.slots
    assert save(pool, 4, 1) is not None
    assert value_in(pool.container, SaveId(1, 4)) == value_of(SaveId(1, 4))
    assert len(slot_files(tmpfs)) == len(pool.slots) == 2


def test_a_process_without_descriptors_loses_no_slot_that_is_to_grow(tmpfs: Path, opened: Opened) -> None:
    pool = opened(tmpfs)
    save(pool, 1)
    save(pool, 2)
    with NoDescriptors():
        for step in (3, 4):
            with pytest.raises(OSError, match="Too many open files"):
                pool.take(2 * SIZE, request(step, 2))
    assert pool.take(2 * SIZE, request(5, 2)) is not None


# ---- readers ----------------------------------------------------------------------------------------------------


def read(report: Report, base: str, step: int) -> float:
    container = BaseContainer(Path(base))
    with container.open_part(SaveId(1, step), 0) as part:
        report("locked")
        report.listen()
        begin, end = place()
        return float(memoryview(part.buffer[begin:end]).cast("f")[0])


def test_a_frozen_reader_costs_one_slot_and_reads_what_it_opened(tmpfs: Path, opened: Opened) -> None:
    pool = opened(tmpfs, keep=2)
    for step in (1, 2, 3):
        save(pool, step)
    with Child(read, str(tmpfs), 1) as reader:
        reader.next_report("locked")
        reader.stop()
        used = {save(pool, step, of_round=True) for step in range(4, 9)}
        assert len(used) == 2
        assert SaveId(1, 1) in pool.container.list_versions()
        assert pool.take(SIZE, request(9, 7, 8)) is None
        reader.go_on()
        reader.say("go on")
        assert reader.result() == value_of(SaveId(1, 1))
    slot = save(pool, 9, 7, 8)
    assert slot not in used


def test_a_reader_that_comes_too_late_is_told(tmpfs: Path, opened: Opened) -> None:
    """Between reading the manifest and locking the slot, the owner has reused it."""
    pool = opened(tmpfs)
    save(pool, 1)
    stop, seen = threading.Event(), []

    def reuse() -> None:
        for step in range(2, 200):
            save(pool, step)
        stop.set()

    thread = threading.Thread(target=reuse)
    thread.start()
    while not stop.is_set():
        for found in sorted(pool.container.list_versions()):
            with contextlib.suppress(PrunedError, ObjectNotFoundError):
                seen.append(value_in(pool.container, found) == value_of(found))
    thread.join()
    assert all(seen)


def test_a_part_whose_slot_is_reused_between_its_open_and_its_lock_is_not_read(
    tmpfs: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = opened(tmpfs)
    save(pool, 1)

    def open_first(path: Path, flags: int) -> int:
        monkeypatch.undo()
        descriptor = open_regular(path, flags)
        for step in (2, 3):
            save(pool, step)
        return descriptor

    monkeypatch.setattr("ml_flashpoint.memory.container.open_regular", open_first)
    with pytest.raises(PrunedError), pool.container.open_part(SaveId(1, 1), 0):
        pass


def test_what_this_process_reads_is_not_reused(tmpfs: Path, opened: Opened) -> None:
    pool = opened(tmpfs)
    save(pool, 1)
    with pool.reading(SaveId(1, 1)) as slot:
        save(pool, 2)
        assert pool.take(SIZE, request(3, 2)) is None
        assert slot.view(*place(), torch.float32, (1,)).item() == value_of(SaveId(1, 1))
    assert pool.saves == {(1, 1), (1, 2)}
    assert save(pool, 3, 2) is slot
    assert pool.saves == {(1, 2), (1, 3)}
    with pytest.raises(PrunedError), pool.reading(SaveId(1, 1)):
        pass
    with pool.reading(SaveId(1, 3)):
        pool.clear()
        assert pool.slots == (slot,)


def place() -> tuple[int, int]:
    begin = layout_of().by_key["w"].begin
    return begin, begin + 4


# ---- sizes and room ---------------------------------------------------------------------------------------------


def test_all_slots_grow_to_what_one_save_needed_and_copies_take_just_their_size(tmpfs: Path, opened: Opened) -> None:
    pool = opened(tmpfs, Owner(4, 1))
    for step, size in ((1, 16 * PAGE), (2, 16 * PAGE), (3, 20 * PAGE), (4, 16 * PAGE)):
        copy = taken(pool, size, request(step, step - 1), exact=True)
        assert copy.size == size
        commit(pool, copy, SaveId(1, step))
    assert len(pool.slots) == 2
    pool.close()
    pool = opened(tmpfs)
    large = 10 * SIZE
    for step, size in ((1, SIZE), (2, large), (3, SIZE), (4, SIZE)):
        commit(pool, taken(pool, size, request(step, step - 1)), SaveId(1, step))
    assert [slot.size for slot in pool.slots] == [slot_size(large)] * 2
    for slot in [taken(pool, SIZE, request(step)) for step in (5, 6)]:
        pool.remove(slot)
    assert taken(pool, SIZE, request(7)).size == slot_size(SIZE)


def test_a_larger_slot_needs_no_room_beside_the_one_that_it_replaces(small_tmpfs: Path, opened: Opened) -> None:
    pool = opened(small_tmpfs)
    for step in (1, 2):
        taken(pool, 3 * SMALL_TMPFS_BYTES // 8, request(step), exact=True)
    for slot in pool.slots:
        pool.free(slot)
    taken(pool, 4 * SMALL_TMPFS_BYTES // 8, request(3), exact=True)
    assert pool.take(5 * SMALL_TMPFS_BYTES // 8, request(4), exact=True) is None, "without room the smaller one stays"
    assert sorted(slot.size * 8 // SMALL_TMPFS_BYTES for slot in pool.slots) == [3, 4]


def test_without_room_to_grow_what_is_large_enough_is_taken(small_tmpfs: Path, opened: Opened) -> None:
    pool = opened(small_tmpfs, keep=2)
    for step in (1, 2):
        taken(pool, SMALL_TMPFS_BYTES // 8, request(step))
    large = taken(pool, SMALL_TMPFS_BYTES // 2, request(3))
    for slot in pool.slots:
        pool.free(slot)
    sizes = {taken(pool, SMALL_TMPFS_BYTES // 8, request(step)).size for step in (4, 5, 6)}
    assert sizes > {large.size}


def test_what_is_retained_while_a_slot_was_made_in_vain_is_not_taken(small_tmpfs: Path, opened: Opened) -> None:
    pool = opened(small_tmpfs)
    for step in (1, 2):
        save(pool, step)
    fill_up(small_tmpfs)
    terms = iter([request(3), request(3, 2)])
    assert pool.take(4 * SIZE, lambda: next(terms)) is None, "the slot of step 1 cannot grow, and step 2 is retained"
    assert value_in(pool.container, SaveId(1, 2)) == value_of(SaveId(1, 2))


def test_the_last_page_is_left_for_manifests(small_tmpfs: Path, opened: Opened) -> None:
    pool = opened(small_tmpfs, keep=9)
    for step in range(1, 100):
        slot = pool.take(SMALL_TMPFS_BYTES // 5, request(step))
        if slot is None:
            break
        commit(pool, slot, SaveId(1, step))
    assert 3 <= len(pool.container.list_versions()) == len(pool.slots) < 5


# ---- what others left -------------------------------------------------------------------------------------------


def test_the_next_process_goes_on_with_the_slots_and_their_parts(tmpfs: Path, opened: Opened) -> None:
    pool = opened(tmpfs)
    save(pool, 1)
    save(pool, 2, 1)
    files = slot_files(tmpfs)
    pool.close()
    pool = opened(tmpfs)
    assert [(slot.state, slot.save) for slot in pool.slots] == [(State.COMMITTED, (1, 1)), (State.COMMITTED, (1, 2))]
    assert [slot.is_prepared for slot in pool.slots] == [False, False]
    assert [pool.prepare(SIZE, request(1)) for _ in range(3)] == [True, True, False]
    assert [slot.is_prepared for slot in pool.slots] == [True, True]
    oldest = pool.slots[0]
    assert save(pool, 3, 2) is oldest
    assert slot_files(tmpfs) == files


def test_a_slot_that_cannot_be_opened_just_now_stays(tmpfs: Path, opened: Opened) -> None:
    pool = opened(tmpfs)
    save(pool, 1)
    pool.close()
    fails = mock.patch("ml_flashpoint.memory.slot.open_own", side_effect=OSError(errno.EMFILE, "too many open files"))
    with fails, pytest.raises(OSError, match="too many open files"):
        opened(tmpfs)
    assert opened(tmpfs).saves == {(1, 1)}


def test_slots_of_another_number_of_ranks_do_not_count_and_go_when_room_is_needed(
    small_tmpfs: Path, opened: Opened
) -> None:
    size = SMALL_TMPFS_BYTES // 5
    old = opened(small_tmpfs, Owner(2, 0))
    for step in (1, 2):
        slot = taken(old, size, request(step))
        old.commit(slot, fill(slot, SaveId(1, step), 0, 2))
    old.close()
    pool = opened(small_tmpfs, Owner(1, 0))
    slot = taken(pool, 3 * size, request(3, 2))
    pool.commit(slot, fill(slot, SaveId(1, 3), 0, 1))
    assert sorted(pool.container.list_versions()) == [(1, 2), (1, 3)], "step 2 is retained, the room of step 1 needed"
    assert pool.take(3 * size, request(4, 2, 3)) is None
    pool.remove_left([SaveId(1, 3)])
    assert sorted(pool.container.list_versions()) == [(1, 3)]
    assert pool.container.slot_owners() == {Owner(1, 0)}


def test_slots_of_ranks_that_are_elsewhere_now_go_when_room_is_needed(small_tmpfs: Path, opened: Opened) -> None:
    size = SMALL_TMPFS_BYTES // 4
    gone = opened(small_tmpfs, Owner(4, 3))
    for step in (1, 2):
        commit(gone, taken(gone, size, request(step), exact=True), SaveId(1, step))
    gone.close()
    pools = [opened(small_tmpfs, Owner(4, rank), owners=[Owner(4, 0), Owner(4, 1)]) for rank in (0, 1)]
    for pool in pools:
        commit(pool, taken(pool, size, request(3, 2), exact=True), SaveId(1, 3))
    assert pools[0].container.list_versions() == {(1, 2): {3}, (1, 3): {0, 1}}, "step 2 is retained"
    assert value_in(pools[0].container, SaveId(1, 2), 3) == value_of(SaveId(1, 2), 3)


# ---- any schedule -----------------------------------------------------------------------------------------------


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), st.booleans(), st.integers(0, 1)), max_size=25))
def test_what_is_retained_stays_whole_in_every_schedule(
    tmpfs: Path, opened: Opened, moves: list[tuple[int, int, bool, int]]
) -> None:
    """Saves begin, end, fail; verdicts list any two of the committed saves; sizes change; processes begin anew."""
    base = tmpfs / os.urandom(4).hex()
    pool, writing, retained, step = opened(base, keep=2, extra=2), [], set(), 0
    for what, which, flag, spare in moves:
        if what < 4:
            step += 1
            name = SaveId(1, step)
            slot = pool.take(SIZE * (1 + (what == 3)), SlotRequest(name, retained | {name}, flag, spare, which == 0))
            if slot is not None:
                writing.append((slot, name))
        elif what < 7 and writing:
            slot, name = writing.pop(which % len(writing))
            commit(pool, slot, name) if flag or spare else pool.free(slot)
        elif what < 9:
            there = sorted(pool.container.list_versions())
            retained = set(there[which % len(there) :][:2]) if there else set()
        else:
            pool.close()
            pool, writing = opened(base, keep=2, extra=2), []
        for name in retained:
            assert value_in(pool.container, name) == value_of(name)
        assert len(pool.slots) <= 5
