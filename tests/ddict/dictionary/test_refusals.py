"""What a dictionary refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ml_flashpoint.ddict import DDict, PosixCheckpointPersister
from ml_flashpoint.ddict.errors import (
    DDictFullError,
    DDictPersistError,
    DDictReadOnlyError,
)
from ml_flashpoint.format.errors import InvalidArgumentError
from tests.ddict.dictionary.support import BIG, Make, other

# ---- refusals ---------------------------------------------------------------------------------------------


def test_a_frozen_dictionary_refuses_writes_of_all_handles(d: DDict) -> None:
    colleague = other(d)
    d["key"] = 1
    colleague.freeze()
    try:
        assert d.is_frozen
        writes: list[Callable[[], Any]] = [
            lambda: d.put("key", 2),
            lambda: d.put("big", torch.ones(BIG)),
            lambda: d.pput("key", 2),
            lambda: d.bput("key", 2),
            lambda: d.update(key=2),
            lambda: d.pop("key"),
            lambda: d.clear(),
            lambda: d.fetch_add("key"),
            lambda: d.setdefault("new", 2),
        ]
        for write in writes:
            with pytest.raises(DDictReadOnlyError, match="frozen"):
                write()
        assert d["key"] == 1
    finally:
        d.unfreeze()
    assert not colleague.is_frozen
    colleague["key"] = 2
    assert d["key"] == 2


def test_a_read_only_dictionary_replays_what_was_persisted(make: Make, tmp_path: Path) -> None:
    persisted = {"persister_class": PosixCheckpointPersister, "persist_path": str(tmp_path), "name": "replayed"}
    writer = make(persist_freq=1, persist_count=-1, working_set_size=2, **persisted)
    for number in range(3):
        writer["key"], writer["big"] = number, torch.full((BIG,), float(number))
        writer.checkpoint()
    writer.destroy()
    reader = make(2, read_only=True, restore_from=0, **persisted)

    assert reader.persisted_ids() == [0, 1, 2]
    assert [reader["key"], reader.advance(), reader["key"], reader.advance(), reader["big"].sum()] == [
        0,
        1,
        1,
        2,
        2 * BIG,
    ]
    with pytest.raises(DDictPersistError):
        reader.advance()
    for write in (lambda: reader.put("key", 1), lambda: reader.pop("key"), reader.clear, lambda: reader.pput("a", 1)):
        with pytest.raises(DDictReadOnlyError):
            write()
    assert reader["key"] == 2


def test_a_full_dictionary_refuses_and_has_room_again(make: Make) -> None:
    dictionary = make(1, 1, 4 << 20, working_set_size=1)
    big, small = torch.ones(BIG), bytes(100_000)
    with pytest.raises(DDictFullError) as raised:
        any(dictionary.put(number, big) for number in range(100))
    assert raised.value.manager == 0
    with pytest.raises(DDictFullError):
        any(dictionary.put(number, small) for number in range(1000, 1100))
    kept = [key for key in dictionary if key < 1000]
    assert len(kept) >= 2
    assert all(dictionary[key].sum() == BIG for key in kept)
    dictionary.clear()
    del kept

    for _ in range(8):
        dictionary["again"] = torch.ones(BIG)

    assert dictionary.stats()[0].used_bytes < 3 << 20


@pytest.mark.parametrize("elements", [BIG, 6 * BIG])
def test_a_full_dictionary_takes_what_is_written_over(make: Make, elements: int) -> None:
    dictionary = make(1, 1, 10 << 20)
    with pytest.raises(DDictFullError):
        any(dictionary.put(number, torch.ones(elements)) for number in range(100))
    with pytest.raises(DDictFullError):
        any(dictionary.put(f"small {number}", bytes(100_000)) for number in range(100))

    dictionary[0] = torch.full((elements,), 2.0)
    dictionary["small 0"] = bytes(99_999)
    assert dictionary[0].sum() == 2 * elements
    with pytest.raises(DDictFullError):
        dictionary["more"] = bytes(100_000)


@pytest.mark.parametrize("deletes", [False, True])
def test_keys_and_deletions_take_room(make: Make, deletes: bool) -> None:
    dictionary = make(1, 1, 2 << 20, working_set_size=2)
    dictionary.checkpoint()  # to where deletions are remembered
    done = []

    def fill() -> None:
        for number in range(1000):
            dictionary[f"{number:50000}"] = number
            if deletes:
                del dictionary[f"{number:50000}"]
            done.append(number)

    with pytest.raises(DDictFullError):
        fill()
    assert 20 <= len(done) <= 42


def test_a_batch_that_finds_no_room_is_not_lost_without_a_word(make: Make) -> None:
    dictionary = make(1, 1, 1 << 20)
    dictionary.start_batch_put()
    for number in range(10):
        dictionary[number] = bytes(200_000)
    for _ in range(2):
        with pytest.raises(DDictFullError):
            dictionary.checkpoint()
    assert dictionary.checkpoint_id == 0
    dictionary.clear()
    assert dictionary.checkpoint() == 1


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("managers_per_node", 0),
        ("n_nodes", 1.5),
        ("total_mem", 100),
        ("working_set_size", 0),
        ("wait_for_keys", 1),
        ("total_mem", 1 << 45),
        ("wait_for_writers", "yes"),
        ("persister_class", 5),
        ("persist_freq", -1),
        ("persist_count", -2),
        ("persist_path", 7),
        ("name", None),
        ("timeout", 0),
        ("timeout", float("nan")),
        ("read_only", None),
        ("restore_from", -1),
        ("replication", "triangle"),
        ("runtime", "dragon"),
    ],
)
def test_a_bad_argument_is_named_with_its_value(argument: str, value: Any) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        DDict(**{argument: value})

    assert argument in str(raised.value)
    assert repr(value) in str(raised.value)


def test_persisting_needs_a_persister(d: DDict) -> None:
    with pytest.raises(DDictPersistError):
        d.persist()
    with pytest.raises(DDictPersistError):
        d.restore(0)
    with pytest.raises(DDictPersistError):
        d.advance()
    assert d.persisted_ids() == []


@pytest.mark.parametrize("manager", [-1, 2, "0", True])
def test_a_manager_that_there_is_not(d: DDict, manager: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="manager"):
        d.manager(manager)
