"""Large values between processes: nobody's bytes change while they are looked at, whoever dies or sleeps when."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from ml_flashpoint.ddict.client.values import ValueWriter, encode, object_blobs, object_size, read_object, read_value
from ml_flashpoint.ddict.errors import StaleValueError
from ml_flashpoint.ddict.manager.shard import StoredValue
from ml_flashpoint.ddict.manager.store import PartStore, ValueSlots, in_pieces
from ml_flashpoint.format.errors import InvalidArgumentError, JobInUseError
from tests.ddict import value_support
from tests.ddict.value_support import INCARNATION, open_store, put
from tests.support import forked
from tests.support.forked import Child

forked.preload("tests.ddict.value_support")

COUNT = 100_000
"""Elements of the values here: 400 kB."""


@pytest.fixture
def store(tmpfs: Path) -> Iterator[PartStore]:
    store = open_store(tmpfs)
    yield store
    store.close()


@pytest.fixture
def slots(store: PartStore) -> ValueSlots:
    return ValueSlots(store, INCARNATION)


@pytest.fixture
def writer() -> Iterator[ValueWriter]:
    writer = ValueWriter()
    yield writer
    writer.close()


def full(number: float) -> torch.Tensor:
    return torch.full((COUNT,), number)


def paths(store: PartStore) -> list[str]:
    return sorted(path.name for path in store.folder.iterdir())


def let_go(slots: ValueSlots, value: StoredValue) -> None:
    """As if nothing referred to it any more."""
    value.__del__()
    value.unused = None
    slots.collect()


def used_bytes(slots: ValueSlots) -> int:
    """Of slots that hold values, or are promised to some."""
    return slots._store.resident_bytes()[0]


# ---- one process ------------------------------------------------------------------------------------------------


def test_a_slot_is_reused_only_when_nobody_looks_at_it(
    store: PartStore, slots: ValueSlots, writer: ValueWriter
) -> None:
    first = put(slots, writer, full(1))
    view = read_value(str(first.slot.path), first.value_id)
    let_go(slots, first)
    second = put(slots, writer, full(2))
    assert second.slot is not first.slot
    assert torch.equal(view, full(1))  # type: ignore[arg-type]
    del view
    third = put(slots, writer, full(3))
    assert third.slot is first.slot
    assert len(paths(store)) == 2
    with pytest.raises(StaleValueError):
        read_value(str(first.slot.path), first.value_id)
    assert torch.equal(read_value(str(third.slot.path), third.value_id), full(3))  # type: ignore[arg-type]
    assert used_bytes(slots) == second.nbytes + third.nbytes


# ---- promises ---------------------------------------------------------------------------------------------------


def test_free_slots_are_given_back_for_others_within_the_limit(store: PartStore) -> None:
    slots = ValueSlots(store, INCARNATION, limit_bytes=4 << 20)
    small = [slots.allocate(200_000) for _ in range(10)]
    slots.abandon([room.value_id for room in small])
    assert len(paths(store)) == 10
    large = slots.allocate(3_000_000)
    assert sum(store.resident_bytes()) <= (4 << 20) + (1 << 16)
    assert 0 < len(paths(store)) < 10
    assert used_bytes(slots) == large.size


@pytest.mark.parametrize("piece_bytes", [1 << 30, 70_000])  # a value of 400 kB travels whole, or as one of 2 GiB does
def test_values_from_another_node_are_filled_in(
    slots: ValueSlots, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    monkeypatch.setattr("ml_flashpoint.ddict.manager.store._PIECE_BYTES", piece_bytes)
    value = {"a": torch.randn(COUNT), "b": np.arange(10)}
    encoded = encode(value)
    room = slots.allocate(object_size(encoded))
    blobs = [bytes(blob) for blob in object_blobs(encoded, room.value_id)]
    with pytest.raises(InvalidArgumentError):
        slots.fill(room.value_id, [*blobs, bytes(room.size)])
    with pytest.raises(StaleValueError):
        slots.fill("v-x", blobs)
    slots.fill(room.value_id, blobs)
    stored = slots.adopt(room.value_id)
    sent = bytes(stored.slot.buffer[: stored.size])
    assert len(sent) == stored.size
    assert b"".join(in_pieces(memoryview(sent))) == sent
    assert max(map(len, blobs)) <= piece_bytes
    for found in (
        read_value(room.path, room.value_id),
        read_object(sent, room.value_id),
    ):
        assert isinstance(found, dict)
        assert torch.equal(found["a"], value["a"])
        assert np.array_equal(found["b"], value["b"])


# ---- several processes ------------------------------------------------------------------------------------------


def test_a_reader_in_another_process_keeps_its_bytes(store: PartStore, slots: ValueSlots, writer: ValueWriter) -> None:
    stored = put(slots, writer, full(1))
    with Child(value_support.hold_a_view, str(stored.slot.path), stored.value_id) as child:
        assert child.next_report("holding") == ("holding", 1.0)
        let_go(slots, stored)
        others = [put(slots, writer, full(i)) for i in range(2, 5)]
        assert stored.slot not in [other.slot for other in others]
        child.say("go on")
        assert child.next_report("still") == ("still", 1.0, 1.0)
        assert child.next_report("let go") == ("let go", True)
        assert put(slots, writer, full(9)).slot is stored.slot


@pytest.mark.parametrize("how", ["killed", "killed while stopped"])
def test_the_lock_of_a_reader_goes_with_it(slots: ValueSlots, writer: ValueWriter, how: str) -> None:
    stored = put(slots, writer, full(1))
    with Child(value_support.hold_a_view, str(stored.slot.path), stored.value_id) as child:
        child.next_report("holding")
        let_go(slots, stored)
        if how == "killed while stopped":
            child.stop()
        assert put(slots, writer, full(2)).slot is not stored.slot
        child.kill()
        assert put(slots, writer, full(3)).slot is stored.slot


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_writer_that_is_stopped_keeps_its_slot_and_one_that_is_killed_does_not(
    slots: ValueSlots, writer: ValueWriter, when: str
) -> None:
    room = slots.allocate(object_size(encode(full(7))))
    with Child(value_support.write_and_wait, room.path, room.value_id, when) as child:
        child.next_report("locked")
        child.stop()
        slots.abandon([room.value_id])  # its connection is gone, as far as the manager can see
        assert slots.allocate(room.size).path != room.path
        child.kill()
    assert slots.allocate(room.size - 4096).path == room.path
    with pytest.raises(StaleValueError):
        read_value(room.path, room.value_id)


def test_a_writer_that_comes_late_is_refused_and_spoils_nothing(slots: ValueSlots, writer: ValueWriter) -> None:
    room = slots.allocate(object_size(encode(full(1))))
    with Child(value_support.write_late, room.path, room.value_id) as child:
        child.next_report("ready")
        slots.abandon([room.value_id])
        stored = put(slots, writer, full(2))
        assert str(stored.slot.path) == room.path
        child.say("go on")
        assert child.next_report("refused")
        assert torch.equal(read_value(room.path, stored.value_id), full(2))  # type: ignore[arg-type]
        pending = slots.allocate(room.size)
        let_go(slots, stored)
    with Child(value_support.write_late, pending.path, room.value_id) as child:
        child.next_report("ready")
        child.say("go on")  # and another's promise is as safe as another's value
        assert child.next_report("refused")


def test_a_writer_that_is_killed_at_any_moment_leaves_a_whole_value_or_none(slots: ValueSlots) -> None:
    value = [torch.full((1 << 20,), 7.0), "text"]
    whole = 0
    for i in range(12):
        room = slots.allocate(object_size(encode(value)))
        with Child(value_support.write_and_wait, room.path, room.value_id, "before") as child:
            child.next_report("locked")
            child.say("go on")
            if i % 4:
                time.sleep(0.0003 * i)  # any moment is what this is about
            else:
                child.join()
            child.kill()
        try:
            stored = slots.adopt(room.value_id)
        except StaleValueError:
            slots.abandon([room.value_id])
            continue
        found = read_value(room.path, room.value_id)
        assert isinstance(found, list)
        assert torch.equal(found[0], value[0])  # type: ignore[arg-type]
        del found
        let_go(slots, stored)
        whole += 1
    assert whole >= 3
    assert used_bytes(slots) == 0


def test_readers_race_with_reuse_and_see_whole_values_only(slots: ValueSlots, writer: ValueWriter) -> None:
    current = put(slots, writer, full(0))
    seen = 0
    for i in range(1, 6):
        with (
            Child(value_support.read_for_ever, str(current.slot.path), current.value_id, float(i - 1)) as one,
            Child(value_support.read_for_ever, str(current.slot.path), current.value_id, float(i - 1)) as other,
        ):
            one.next_report("reading")
            other.next_report("reading")
            let_go(slots, current)
            used = current.slot
            for _ in range(10_000):  # until the slot was free at the moment that it was asked for
                current = put(slots, writer, full(i))
                if current.slot is used:
                    break
                let_go(slots, current)
            assert current.slot is used
            seen += one.next_report("gone")[1] + other.next_report("gone")[1]
    assert seen > 0


@pytest.mark.slow
def test_a_manager_that_comes_back_respects_readers_from_before(tmpfs: Path, writer: ValueWriter) -> None:
    first = open_store(tmpfs)
    stored = put(ValueSlots(first, "a" * 16), writer, full(1))
    path, value_id = str(stored.slot.path), stored.value_id
    view = read_value(path, value_id)
    del stored
    first.close()
    second = open_store(tmpfs)
    slots = ValueSlots(second, "b" * 16)
    other = put(slots, writer, full(2))
    assert str(other.slot.path) != path
    assert torch.equal(view, full(1))  # type: ignore[arg-type]
    del view
    gc.collect()
    assert str(put(slots, writer, full(3)).slot.path) == path
    second.close()


# ---- odds and ends ----------------------------------------------------------------------------------------------


def test_what_is_no_slot_is_not_read(tmpfs: Path) -> None:
    for path in (tmpfs / "none", tmpfs / "empty"):
        (tmpfs / "empty").touch()
        with pytest.raises(StaleValueError):
            read_value(str(path), "v-1")
    os.symlink("/dev/zero", tmpfs / "link")
    with pytest.raises(OSError, match="symbolic"):
        read_value(str(tmpfs / "link"), "v-1")


def test_more_views_than_files_may_be_open(slots: ValueSlots, writer: ValueWriter) -> None:
    stored = put(slots, writer, full(1))
    with Child(value_support.hold_many_views, str(stored.slot.path), stored.value_id, 100) as child:
        assert "copy=True" in child.next_report("refused")[1]
        child.join()


def test_the_slots_of_a_manager_are_one_process_alone(store: PartStore, tmpfs: Path) -> None:
    with pytest.raises(JobInUseError, match="manager 0"):
        PartStore(tmpfs, 0, 1, lock_deadline_s=0)
    PartStore(tmpfs, 1, 2).close()
    store.close()
    PartStore(tmpfs, 0, 1, lock_deadline_s=0).close()
