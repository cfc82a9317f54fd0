"""Managers that do not answer, and the end of a dictionary."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ml_flashpoint.ddict import DDict, PosixCheckpointPersister
from ml_flashpoint.ddict import dictionary as dictionary_module
from ml_flashpoint.ddict.client.handle import Found
from ml_flashpoint.ddict.dictionary import stats_of
from ml_flashpoint.ddict.errors import (
    DDictDestroyedError,
    DDictError,
    DDictManagerLostError,
    DDictTimeoutError,
)
from ml_flashpoint.ddict.options import Options
from ml_flashpoint.format.errors import JobInUseError
from tests.ddict.dictionary.support import BIG, Make, other
from tests.support.dictionaries import (
    await_that,
    files_in,
    is_running,
    kill_manager,
    pid_of,
    runtime_of,
    stopped,
    wait_until_ready,
)
from tests.support.forked import wait_until

# ---- managers that do not answer --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("manager", [0, 1])
def test_no_call_takes_longer_than_the_timeout(make: Make, manager: int) -> None:
    timeout_s = 5.0
    dictionary = make(2)
    key = next(key for key in range(100) if dictionary.which_manager(key) == manager)
    dictionary[key] = 1
    dictionary["lasting"] = torch.ones(BIG)
    calls: dict[str, Callable[[DDict], Any]] = {
        "get": lambda handle: handle[key],
        "put": lambda handle: handle.put(key, 1),
        "put big": lambda handle: handle.put(key, torch.ones(BIG)),
        "pput": lambda handle: handle.pput(key, 1),
        "bput": lambda handle: handle.bput(key, 1),
        "delete": lambda handle: handle.__delitem__(key),
        "contains": lambda handle: key in handle,
        "pop": lambda handle: handle.pop(key),
        "popitem": lambda handle: handle.popitem(),
        "setdefault": lambda handle: handle.setdefault(key, 1),
        "fetch_add": lambda handle: handle.fetch_add(key),
        "wait_for": lambda handle: handle.wait_for(key, 5),
        "update": lambda handle: handle.update(dict.fromkeys(range(50), 1)),
        "len": len,
        "keys": lambda handle: handle.keys(),
        "items": lambda handle: handle.items(),
        "clear": lambda handle: handle.clear(),
        "stats": lambda handle: handle.stats(),
    }
    text = dictionary.serialize()
    handles = {name: DDict.attach(text, timeout=timeout_s) for name in calls}
    writer = DDict.attach(text, timeout=timeout_s)
    writer[key] = 1
    calls["rollback"] = lambda handle: writer.rollback()

    def measure(name: str) -> tuple[str, str, float]:
        began = time.monotonic()
        try:
            calls[name](handles.get(name, dictionary))
            ended = "no error"
        except (DDictTimeoutError, DDictManagerLostError) as error:
            ended = "the right error" if error.retryable else "an error that says not to try again"
        return name, ended, time.monotonic() - began

    with stopped(pid_of(dictionary, manager)), ThreadPoolExecutor(len(calls)) as pool:
        found = list(pool.map(measure, calls))

    assert [name for name, ended, _ in found if ended != "the right error"] == []
    assert [(name, took) for name, _, took in found if took > timeout_s + 4.5] == [], "that of a call that waits twice"
    handles["put"][key] = 7
    assert dictionary[key] == 7, "the dictionary goes on, and so does the handle"


def test_a_value_of_every_manager_is_read_from_one_that_answers(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    dictionary = make(2)
    dictionary.bput("everywhere", 1)
    impatient = DDict.attach(dictionary.serialize(), timeout=3.0)
    left: list[tuple[int, float]] = []
    get = impatient._access.get

    def noting(manager: int, key: bytes, *, deadline: float, **named: Any) -> Found:
        left.append((manager, deadline - time.monotonic()))
        return get(manager, key, deadline=deadline, **named)

    monkeypatch.setattr(impatient._access, "get", noting)
    first = iter([1, 0])  # the numbers of both managers are drawn in their order: manager 1 is asked first
    monkeypatch.setattr(dictionary_module, "random", SimpleNamespace(random=lambda: next(first)))
    with stopped(pid_of(dictionary, 1)):
        assert impatient.bget("everywhere") == 1
    assert [manager for manager, _ in left] == [1, 0]
    # A request may take 0.5 s more than it is given: that is not taken from who is asked next.
    assert left[0][1] <= 3.0 / 2 - 0.5


def test_without_replication_a_lost_manager_is_lost(make: Make) -> None:
    dictionary = make(2, timeout=20)
    keys = {dictionary.which_manager(key): key for key in range(50)}
    dictionary.update(dict.fromkeys(keys.values(), 1))
    before = kill_manager(dictionary, 1)
    wait_until_ready(runtime_of(dictionary), 1, other_than=before)

    with pytest.raises(DDictManagerLostError) as raised:
        dictionary[keys[1]]
    assert not raised.value.retryable
    assert dictionary[keys[0]] == 1


# ---- the end ----------------------------------------------------------------------------------------------


def test_a_destroyed_dictionary_leaves_nothing(make: Make) -> None:
    dictionary = make(2, 2, replication="ring")
    handle, part = other(dictionary), dictionary.manager(1)
    dictionary["tensor"] = torch.ones(BIG)
    dictionary.checkpoint()
    assert dictionary.sync_to_newest_checkpoint() == 0
    pids = list(runtime_of(dictionary).pids().values())
    base = dictionary._configuration.base
    assert len(pids) == 4
    assert files_in(base)

    dictionary.destroy()
    dictionary.destroy()

    assert not files_in(base)
    wait_until(lambda: not any(map(is_running, pids)), "the end of all processes")
    for each in (dictionary, handle, part):
        with pytest.raises(DDictDestroyedError):
            each["tensor"]
        with pytest.raises(DDictDestroyedError):
            each["tensor"] = 1


def test_other_handles_cannot_destroy(d: DDict) -> None:
    with pytest.raises(DDictError, match="only the handle that made"):
        d.destroy()


def test_stats_say_what_there_is(d: DDict) -> None:
    d.update({number: number for number in range(20)})
    before = sum(each.used_bytes for each in d.stats())
    d["tensor"] = torch.ones(BIG)
    stats = d.stats()

    assert [each.manager for each in stats] == [0, 1]
    assert sum(each.keys for each in stats) == 21
    assert sum(each.used_bytes for each in stats) - before >= 4 * BIG
    assert {each.limit_bytes for each in stats} == {128 << 20}
    assert not any(each.frozen for each in stats)


def test_stats_say_how_the_copies_are(make: Make) -> None:
    d = make(1, 3, replication="ring")
    d.update({number: number for number in range(20)})
    d.checkpoint()
    assert d.wait_for_commit() == 0
    assert [(each.copies, each.missing_copies) for each in d.stats()] == [((1,), ()), ((2,), ()), ((0,), ())]
    assert {each.copies_on_same_node for each in d.stats()} == {()}
    kill_manager(d, 1, lose_node=True)
    await_that(lambda: d.stats()[0].copies == (1,) and d.stats()[1].copies == (2,))


def test_stats_tell_of_copies_that_share_a_node() -> None:
    told = {
        **dict.fromkeys(("keys", "used_bytes", "oldest"), 0),
        **{"sealed": [3], "frozen": False},
    }
    places = ["a", "b", "b"]
    answers = [{**told, "place": place, "holders": [(n + 1) % 3], "copies": [1, 2]} for n, place in enumerate(places)]
    found = stats_of(answers, {"persisted": 2, "persist_error": None}, Options(1, 3))
    assert [each.copies_on_same_node for each in found] == [(), (2,), ()]
    assert [each.missing_copies for each in found] == [(), (), (0,)]
    assert found[0].persisted == 2


def test_a_second_dictionary_of_one_name_and_path_is_refused(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHPOINT_LOCK_DEADLINE_S", "0.2")
    stored = {"persister_class": PosixCheckpointPersister, "persist_path": str(tmp_path), "name": "one"}
    make(**stored)
    with pytest.raises(JobInUseError, match="one"):
        make(**stored)
