"""The dictionary as a mapping, with managers in processes of their own; and several who write at once."""

from __future__ import annotations

import itertools
import multiprocessing
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ml_flashpoint.ddict import DDict, Unreadable
from ml_flashpoint.ddict.client import values
from ml_flashpoint.ddict.errors import (
    DDictError,
    DDictKeyError,
    DDictTimeoutError,
    StaleValueError,
)
from ml_flashpoint.format.errors import InvalidArgumentError
from tests.ddict.dictionary.support import BIG, Make, other
from tests.support.dictionaries import (
    DEADLINE_S,
)
from tests.support.processes import child_environment
from tests.workers import ddict_handles

# ---- the mapping ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [0, "text", b"bytes", None, 1.5, (1, ("a", None)), frozenset({1, 2})], ids=repr)
def test_keys_of_any_kind(d: DDict, key: Any) -> None:
    d[key] = 1

    assert key in d
    assert d.keys() == [key]
    del d[key]
    assert key not in d


def test_keys_that_are_equal_are_one(d: DDict) -> None:
    d[1] = "one"
    d[True] = "true"
    d[1.0] = "float"

    assert d.items() == [(1, "float")]


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


@pytest.mark.parametrize("overtake", ["pop", "setdefault", "fetch_add", "pput", "delete", "bput"])
def test_what_does_not_wait_comes_after_what_waits_in_a_batch(d: DDict, overtake: str) -> None:
    d.start_batch_put()
    d["key"] = 1
    if overtake == "pop":
        assert d.pop("key") == 1
    elif overtake == "setdefault":
        assert d.setdefault("key", 2) == 1
    elif overtake == "fetch_add":
        assert d.fetch_add("key", 2) == 1
    elif overtake == "pput":
        d.pput("key", 3)
    elif overtake == "bput":
        d.bput("key", 3)
    else:
        del d["key"]
    d.end_batch_put()

    assert (
        d.get("key") == {"pop": None, "setdefault": 1, "fetch_add": 3, "pput": 3, "bput": 3, "delete": None}[overtake]
    )


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


def test_a_large_value_that_is_deleted_while_all_are_read_is_left_out(
    d: DDict, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = other(d)
    d["gone"] = torch.ones(BIG)
    d["there"] = 1

    def delete_before(*args: Any, **named: Any) -> Any:
        monkeypatch.undo()
        del writer["gone"]
        raise StaleValueError("its slot is another value's by now")

    monkeypatch.setattr(values, "read_value", delete_before)
    assert d.items() == [("there", 1)]


def test_what_others_write_while_an_update_fails_is_there(d: DDict) -> None:
    def items() -> Iterator[tuple[str, int]]:
        yield "half an update", 1
        with ThreadPoolExecutor(1) as another:
            another.submit(d.put, "of another thread", 2).result(DEADLINE_S)
        raise RuntimeError("it has no more")

    with pytest.raises(RuntimeError):
        d.update(items())
    assert d["of another thread"] == 2


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
