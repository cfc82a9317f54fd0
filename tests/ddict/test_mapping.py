"""The dictionary as a mapping, several who write at once, and what it refuses."""

from __future__ import annotations

import itertools
import multiprocessing
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ml_flashpoint import ddict
from ml_flashpoint.ddict import DDict, PosixCheckpointPersister, Unreadable
from ml_flashpoint.ddict.errors import (
    REQUESTS,
    DDictError,
    DDictFullError,
    DDictKeyError,
    DDictManagerLostError,
    DDictPersistError,
    DDictReadOnlyError,
    DDictTimeoutError,
)
from ml_flashpoint.ddict.options import Options
from ml_flashpoint.format.errors import InvalidArgumentError
from ml_flashpoint.ranks.strategies import Topology
from tests.ddict.support import BIG, Make, other
from tests.support.dictionaries import (
    DEADLINE_S,
)
from tests.support.processes import child_environment
from tests.workers import ddict_handles

# ---- the mapping ------------------------------------------------------------------------------------------


def test_a_key_that_is_not_there(d: DDict) -> None:
    for call in (lambda: d["none"], lambda: d.pop("none"), lambda: d.__delitem__("none")):
        with pytest.raises(KeyError) as raised:
            call()
        assert isinstance(raised.value, DDictKeyError)
        assert "'none'" in str(raised.value)
    assert d.get("none") is None
    assert d.get("none", 5) == 5
    assert d.pop("none", 6) == 6
    assert d.pop("none", None) is None


def test_a_key_that_cannot_be_hashed(d: DDict) -> None:
    with pytest.raises(TypeError):
        d[[1]] = 1
    with pytest.raises(TypeError):
        [1] in d  # noqa: B015


def test_the_whole_of_a_mapping(d: DDict) -> None:
    expected = {f"key {number}": number for number in range(50)}
    d.update(expected)
    d.update([("pair", 1)], named=2)
    expected |= {"pair": 1, "named": 2}

    assert len(d) == 52
    assert dict(d) == dict(d.items()) == expected
    assert sorted(d.keys()) == sorted(d) == sorted(expected)
    assert sorted(d.values()) == sorted(expected.values())
    assert sorted(d.filter(lambda key, value: value > 47)) == [("key 48", 48), ("key 49", 49)]
    d.clear()
    assert not len(d)
    assert not d.items()


def test_deletion_and_its_kin(d: DDict) -> None:
    d.update(a=1, b=2, c=3)
    del d["a"]
    assert d.pop("b") == 2
    assert d.popitem() == ("c", 3)
    with pytest.raises(DDictKeyError):
        d.popitem()
    assert d.setdefault("d", 4) == 4
    assert d.setdefault("d", 5) == 4
    assert d.items() == [("d", 4)]


def test_keys_are_dealt_out_to_managers(d: DDict) -> None:
    d.update({number: number for number in range(40)})
    parts = [d.manager(manager) for manager in d.local_managers]

    assert [sorted(part.keys()) for part in parts] == [
        sorted(key for key in range(40) if d.which_manager(key) == manager) for manager in range(2)
    ]
    assert sum(map(len, parts)) == len(d) == d.local_length() == 40
    assert sorted(d.local_keys()) == sorted(d.local_values()) == list(range(40))
    assert sorted(d.local_items()) == sorted(d.items())
    assert (d.local_manager, d.main_manager) == (0, 0)


def test_a_handle_of_one_manager_writes_there_whatever_the_key(d: DDict) -> None:
    for manager in range(2):
        part = d.manager(manager)
        part["same key"] = manager
        assert part.which_manager("same key") == manager
        assert part["same key"] == manager

    assert len(d) == 2


def test_what_every_manager_has_counts_once(d: DDict) -> None:
    d.bput("everywhere", 7)

    assert d.bget("everywhere") == 7
    assert [d.manager(manager)["everywhere"] for manager in range(2)] == [7, 7]
    assert d.items() == [("everywhere", 7)]
    assert len(d) == 1
    with pytest.raises(DDictKeyError):
        d.bget("nowhere")


@pytest.mark.parametrize(
    ("change", "value"),
    [
        (lambda d: d.put("key", 5), 5),
        (lambda d: d.put("key", torch.ones(BIG)), BIG),
        (lambda d: d.update(key=5), 5),
        (lambda d: d.fetch_add("key", 3), 4),
        (lambda d: d.pop("key"), None),
        (lambda d: d.__delitem__("key"), None),
    ],
)
def test_what_every_manager_has_changes_at_every_manager(
    d: DDict, change: Callable[[DDict], object], value: int | None
) -> None:
    d.bput("key", 1)
    change(d)

    found = [d.manager(manager).get("key") for manager in range(2)]
    assert [each.sum() if isinstance(each, torch.Tensor) else each for each in found] == [value, value]
    assert len(d) == (value is not None)


def test_what_cannot_be_imported_hides_nothing_else(d: DDict, tmp_path: Path) -> None:
    (tmp_path / "away.py").write_text(
        "import dataclasses\n@dataclasses.dataclass(frozen=True)\nclass Away:\n    number: int\n"
    )
    program = """
        import sys; sys.path.insert(0, sys.argv[1])
        from away import Away
        from ml_flashpoint.ddict import DDict
        d = DDict.attach(sys.argv[2])
        d["value"], d[Away(1)] = Away(2), 3
        d.detach()
    """
    argv = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path), d.serialize()]
    subprocess.run(argv, check=True, timeout=DEADLINE_S, env=child_environment())
    d["here"] = 4

    assert list(d.filter(lambda key, value: True)) == [("here", 4)]
    found = {key: value for key, value in d.items() if not isinstance(key, Unreadable)}
    assert found["here"] == 4
    assert "away" in repr(found["value"])
    assert len(d.values()) == len(d) == 3
    (hidden,) = (key for key in d if isinstance(key, Unreadable))
    assert d[hidden] == 3
    for read in (d.__getitem__, d.get, d.pop):
        with pytest.raises(DDictError, match="cannot be made here: ModuleNotFoundError"):
            read("value")
    del d[hidden]
    assert set(d.keys()) == {"value", "here"}


class Refusing:
    """An object that is not made again."""

    def __init__(self, error: type[Exception], size: int) -> None:
        self.error, self.array = error, np.zeros(size)

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise state["error"]("an older state")


@pytest.mark.parametrize("size", [1, BIG])
@pytest.mark.parametrize("error", [ValueError, TypeError, IndexError, RecursionError, EOFError])
def test_a_value_whose_class_refuses_its_state_hides_nothing_else(d: DDict, error: type[Exception], size: int) -> None:
    d["refused"], d["here"] = Refusing(error, size), 4

    assert list(d.filter(lambda key, value: True)) == [("here", 4)]
    found = dict(d.items())
    assert found["here"] == 4
    assert isinstance(found["refused"], Unreadable)
    assert len(d.values()) == 2
    with pytest.raises(DDictError, match=f"cannot be made here: {error.__name__}: an older state"):
        d["refused"]


def test_instances_of_classes_of_a_script_are_keys(d: DDict, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        textwrap.dedent("""
            import dataclasses, multiprocessing, sys
            from ml_flashpoint.ddict import DDict

            @dataclasses.dataclass(frozen=True)
            class Key:
                number: int

            def look(d):
                sys.exit(d[Key(1)] != 5 or d.keys() != [Key(1)])

            if __name__ == "__main__":
                d = DDict.attach(sys.argv[1])
                d[Key(1)] = 5
                child = multiprocessing.get_context("spawn").Process(target=look, args=(d,))
                child.start()
                child.join()
                d.detach()
                sys.exit(child.exitcode)
        """)
    )
    argv = [sys.executable, str(tmp_path / "script.py"), d.serialize()]
    subprocess.run(argv, check=True, timeout=DEADLINE_S, env=child_environment())
    assert len(d) == 1


def test_a_batch_is_seen_when_it_ends(d: DDict) -> None:
    d.start_batch_put()
    for number in range(3000):
        d[number] = -number
    d["big"] = torch.ones(BIG)
    d["twice"] = torch.ones(3)
    d["twice"] = 2
    d.end_batch_put()

    assert len(d) == 3002
    assert d[2999] == -2999
    assert d["twice"] == 2
    assert d["big"].sum() == BIG


@pytest.mark.parametrize(
    ("overtake", "left"),
    [
        (lambda d: d.pop("key"), None),
        (lambda d: d.__delitem__("key"), None),
        (lambda d: d.setdefault("key", 2), 1),
        (lambda d: d.fetch_add("key", 2), 3),
        (lambda d: d.pput("key", 3), 3),
        (lambda d: d.bput("key", 3), 3),
    ],
)
def test_what_does_not_wait_comes_after_what_waits_in_a_batch(
    d: DDict, overtake: Callable[[DDict], object], left: int | None
) -> None:
    d.start_batch_put()
    d["key"] = 1
    overtake(d)
    d.end_batch_put()

    assert d.get("key") == left


def test_a_batch_goes_before_its_handle_moves_on(d: DDict) -> None:
    at = d.checkpoint_id
    d.start_batch_put()
    d["key"] = 1
    d.checkpoint()
    reader = other(d)
    reader.checkpoint_id = at

    assert reader["key"] == 1
    d.end_batch_put()


def test_views_stay_what_they_were(d: DDict) -> None:
    first = torch.arange(BIG, dtype=torch.float32)
    d["tensor"], d["array"] = first, first.numpy()
    tensor, array = d["tensor"], d["array"]
    for round_ in range(20):
        d["tensor"] = d["array"] = torch.full((BIG,), float(round_))
    del d["tensor"], d["array"]
    d["another"] = torch.zeros(BIG)

    assert torch.equal(tensor, first)
    assert np.array_equal(array, first.numpy())


def test_writing_to_a_view_never_reaches_the_dictionary(d: DDict) -> None:
    d["tensor"] = torch.zeros(BIG)
    view = d["tensor"]
    view += 1
    d["array"] = np.zeros(BIG)
    with pytest.raises(ValueError, match="read-only"):
        d["array"][0] = 1
    own = d.get("array", copy=True)
    own[0] = 1

    assert d["tensor"].sum() == d["array"].sum() == 0


def test_views_outlive_the_dictionary(make: Make) -> None:
    dictionary = make()
    dictionary["tensor"] = torch.arange(BIG)
    view = dictionary["tensor"]

    dictionary.destroy()

    assert torch.equal(view, torch.arange(BIG))


# ---- several at once --------------------------------------------------------------------------------------


def test_threads_may_share_a_handle(d: DDict) -> None:
    def work(thread: int) -> None:
        for number in range(50):
            d[thread, number] = number
            assert d[thread, number] == number
            d.fetch_add("sum")
            if number % 10 == 0:
                d[thread, "big"] = torch.full((BIG,), float(number))

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))

    assert d["sum"] == 300
    assert len(d) == 6 * 51 + 1
    assert all(d[thread, "big"].sum() == 40 * BIG for thread in range(6))


def test_only_one_of_many_gets_what_is_popped(d: DDict) -> None:
    d.update({number: number for number in range(60)})
    handles = [other(d) for _ in range(4)]

    def take(handle: DDict) -> list[int]:
        found = []
        while True:
            try:
                found.append(handle.popitem()[0])
            except DDictKeyError:
                return found

    with ThreadPoolExecutor(4) as pool:
        taken = list(pool.map(take, handles))

    assert sorted(itertools.chain(*taken)) == list(range(60))


def test_only_one_of_many_sets_a_default(d: DDict) -> None:
    handles = [other(d) for _ in range(6)]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda number: handles[number].setdefault("key", number), range(6)))

    assert len(set(found)) == 1
    assert d["key"] == found[0]


def test_additions_of_four_processes_all_count(d: DDict) -> None:
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=ddict_handles.add, args=(d, "sum", 250)) for _ in range(4)]
    for child in children:
        child.start()
    for child in children:
        child.join(DEADLINE_S)

    assert [child.exitcode for child in children] == [0] * 4
    assert d["sum"] == 1000


def test_adding_to_what_is_no_number_is_refused(d: DDict) -> None:
    d["text"] = "a"
    with pytest.raises(DDictError):
        d.fetch_add("text")
    with pytest.raises(InvalidArgumentError, match="amount"):
        d.fetch_add("number", "1")  # type: ignore[arg-type]
    assert d.fetch_add("number", 2, default=40) == 40
    assert d.fetch_add("number", 0.5) == 42
    assert d["number"] == 42.5


def test_waiting_for_a_value(d: DDict) -> None:
    writer = other(d)

    def write() -> None:
        for number in (1, 2, 3):
            time.sleep(0.05)
            writer["key"] = number

    writing = threading.Thread(target=write)
    writing.start()

    assert d.wait_for("key") in (1, 2, 3)
    assert d.wait_for("key", lambda value: value >= 2) in (2, 3)
    assert d.wait_for("key", 3) == 3
    began = time.monotonic()
    with pytest.raises(DDictTimeoutError):
        d.wait_for("key", 4, timeout=0.1)
    assert 0.1 <= time.monotonic() - began < 10
    writing.join()


# ---- refusals --------------------------------------------------------------------------------------------------------


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


# ---- what a dictionary is made with ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ring", "pairwise", "clique"])
@pytest.mark.parametrize("managers_per_node", [1, 3])
@pytest.mark.parametrize("nodes", [2, 3, 4])
def test_each_strategy_that_has_a_name_survives_a_node(name: str, managers_per_node: int, nodes: int) -> None:
    strategy = Options(managers_per_node, nodes, replication=name).make_strategy()
    topology = Topology(tuple(f"node-{node}" for node in range(nodes) for _ in range(managers_per_node)))
    assert strategy.survivable_losses(topology) >= 1


@pytest.mark.parametrize("retryable", [True, False])
def test_whether_to_try_again_is_what_the_manager_says(retryable: bool) -> None:
    error = DDictManagerLostError("gone", manager=3)
    error.retryable = retryable
    rebuilt = REQUESTS.rebuild(REQUESTS.describe(error))
    assert isinstance(rebuilt, DDictManagerLostError)
    assert rebuilt.retryable is retryable


def test_all_that_is_exported_is_there() -> None:
    other_names = {"NULLCheckpointPersister": "NullCheckpointPersister"}
    assert all(getattr(ddict, name).__name__ == other_names.get(name, name) for name in ddict.__all__)
