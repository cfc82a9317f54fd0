"""A call that was given up, because a manager was stopped for longer than its timeout, takes no effect after what the
same handle does next: the manager reads it late, beside what came after it."""

from __future__ import annotations

import contextlib
import copy
import gc
from concurrent.futures import ThreadPoolExecutor

import pytest

from ml_flashpoint.ddict import links
from ml_flashpoint.ddict.errors import DDictManagerLostError, DDictTimeoutError, DDictWritesLostError
from ml_flashpoint.ddict.wire.requests import Clear
from tests.ddict.dictionary.support import Make
from tests.support.dictionaries import DEADLINE_S, await_that, pid_of, stopped

IMPATIENT_S = 0.05


def test_threads_of_a_handle_do_not_lose_what_they_write_while_another_gives_up(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their requests are of an earlier generation than one that has overtaken them, and are made again."""
    dictionary = make(2, timeout=DEADLINE_S)
    keys = [next(key for key in range(100) if dictionary.which_manager(key) == manager) for manager in range(2)]
    dictionary.update(dict.fromkeys(keys, -1))
    written: list[int] = []
    pid, access = pid_of(dictionary, 1), dictionary._access

    def write() -> None:
        for number in range(300):
            dictionary[keys[0]] = number
            assert dictionary[keys[0]] == number
            written.append(number)

    with ThreadPoolExecutor(2) as pool, stopped(pid):
        writing = pool.submit(write)
        monkeypatch.setattr(links, "GRACE_S", IMPATIENT_S)
        while not writing.done():
            with contextlib.suppress(DDictTimeoutError, DDictManagerLostError):
                access.change(1, lambda line, whose, _: line.request(Clear(whose)).fields, access.deadline(IMPATIENT_S))
        writing.result()
    assert written == list(range(300))


@pytest.mark.parametrize("is_forgotten", [True, False], ids=["forgotten", "detached"])
def test_a_handle_that_is_dropped_with_a_rollback_unfinished_leaves_nothing_above(
    make: Make, monkeypatch: pytest.MonkeyPatch, is_forgotten: bool
) -> None:
    dictionary = make(1, 2, working_set_size=4, replication="ring")
    keys = [next(key for key in range(100) if dictionary.which_manager(key) == manager) for manager in range(2)]
    handles = [copy.copy(dictionary)]
    dictionary["others"] = 0  # at 0: nothing is committed before it moves on
    for value in (0, "abandoned"):
        handles[0].update(dict.fromkeys(keys, value))
        handles[0].checkpoint()
    with stopped(pid_of(dictionary, 1)), monkeypatch.context() as impatient:
        impatient.setattr(links, "GRACE_S", IMPATIENT_S)
        impatient.setattr(handles[0]._access, "timeout_s", IMPATIENT_S)
        with pytest.raises((DDictTimeoutError, DDictManagerLostError)):
            handles[0].rollback(to=0)
        if not is_forgotten:
            handles[0].detach()
        handles.clear()
        impatient.undo()
        gc.collect()
        await_that(lambda: dictionary._access.state()["writers"] == 1)
    dictionary.checkpoint_id = 3

    assert dictionary.wait_for_commit(2) == 2
    reader = copy.copy(dictionary)
    assert reader.sync_to_newest_checkpoint() == 2
    assert {key: reader[key] for key in keys} == dict.fromkeys(keys, 0)


@pytest.mark.parametrize("replication", [None, "ring"])
def test_what_is_written_after_a_sync_is_not_covered_by_what_was_written_above(
    make: Make, replication: str | None
) -> None:
    dictionary = make(1, 2, working_set_size=8, replication=replication)
    slow = copy.copy(dictionary)
    dictionary["key"] = slow["slow"] = "first"
    dictionary.checkpoint()
    slow.checkpoint()
    assert slow.wait_for_commit() == 0
    for _ in range(2):
        dictionary["key"] = dictionary["only above"] = "abandoned"
        dictionary.checkpoint()
    slow["slow"] = "second"

    assert dictionary.sync_to_newest_checkpoint() == 0
    assert (dictionary["key"], dictionary["slow"]) == ("first", "first")
    dictionary["key"] = "anew"
    seen = []
    for _ in range(3):
        dictionary.checkpoint()
        seen.append((dictionary["key"], "only above" in dictionary))

    assert seen == [("anew", False)] * 3
    assert slow["slow"] == "second", "what others have written stays"


def test_a_sync_takes_back_nothing_that_others_have_committed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    dictionary = make(1, 2, working_set_size=8, replication="ring")
    colleague = copy.copy(dictionary)
    keys = [next(key for key in range(100) if dictionary.which_manager(key) == manager) for manager in range(2)]
    dictionary[keys[0]] = colleague[keys[1]] = 0
    dictionary.checkpoint()
    colleague.checkpoint()
    assert colleague.wait_for_commit() == 0
    dictionary.checkpoint()
    dictionary[keys[0]] = "abandoned"
    with stopped(pid_of(dictionary, 1)), monkeypatch.context() as impatient:
        impatient.setattr(links, "GRACE_S", IMPATIENT_S)
        impatient.setattr(dictionary._access, "timeout_s", 3 * IMPATIENT_S)
        with pytest.raises((DDictTimeoutError, DDictManagerLostError)):
            dictionary.sync_to_newest_checkpoint()
    epoch = colleague._access.state()["epoch"]
    colleague[keys[1]] = "theirs"
    colleague.checkpoint()

    assert dictionary.sync_to_newest_checkpoint() == dictionary.committed_checkpoint_id
    assert dictionary._access.state()["epoch"] == epoch
    assert colleague[keys[1]] == "theirs"
    assert "abandoned" not in dictionary.values()
    dictionary[keys[0]] = "anew"
    dictionary.checkpoint()
    colleague.checkpoint()
    assert dictionary[keys[0]] == "anew"


def test_a_handle_with_an_open_batch_goes_on_after_a_lost_epoch(make: Make) -> None:
    dictionary = make(1, working_set_size=4)
    handle = copy.copy(dictionary)
    for number in range(2):
        dictionary["key"] = handle["own"] = number
        dictionary.checkpoint()
        handle.checkpoint()
    handle.start_batch_put()
    handle["collected"] = 2
    dictionary.rollback(to=0)
    with pytest.raises(DDictWritesLostError):
        handle["collected too"] = handle["own"]

    assert handle.sync_to_newest_checkpoint() == 0
    handle["anew"] = 3
    handle.end_batch_put()
    assert dict(handle) == {"key": 0, "own": 0, "anew": 3}
