"""Real managers: nobody reads an older value without a word, and what is committed is made of whole steps."""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import pytest

from ml_flashpoint.ddict import DDict, PosixCheckpointPersister, links
from ml_flashpoint.ddict.errors import (
    DDictCheckpointRetiredError,
    DDictError,
    DDictTimeoutError,
    DDictWritesLostError,
)
from ml_flashpoint.ddict.native import ProcessGroup, ProcessTemplate, this_process
from ml_flashpoint.ddict.runtime import embedded
from ml_flashpoint.net.client import Connection
from tests.support.dictionaries import DEADLINE_S, await_that, kill_manager, pid_of, runtime_of, stopped

pytestmark = pytest.mark.slow


@pytest.fixture
def make() -> Iterator[Callable[..., DDict]]:
    made: list[DDict] = []

    def make_one(nodes: int = 2, **options: Any) -> DDict:
        given = {"working_set_size": 8, "replication": "ring", "timeout": DEADLINE_S, **options}
        made.append(DDict(1, nodes, 64 << 20, **given))
        return made[-1]

    yield make_one
    for each in made:
        each.destroy()


def key_of(dictionary: DDict, manager: int) -> str:
    return next(key for key in map(str, range(100)) if dictionary.which_manager(key) == manager)


def keys_of_all(dictionary: DDict) -> list[str]:
    return [key_of(dictionary, manager) for manager in range(dictionary._configuration.managers)]


def test_no_handle_reads_an_older_value_silently(make: Callable[..., DDict]) -> None:
    d = make()
    key = key_of(d, 0)
    d[key] = 0
    d.checkpoint()
    assert d.wait_for_commit() == 0
    with stopped(pid_of(d, 1)):  # so that commits fall behind: at most that of 1 has begun, and 2 is skipped
        for number in range(1, 4):
            d[key] = number
            d.checkpoint()
    assert d.wait_for_commit() == 3
    readers = {at: copy.copy(d) for at in range(5)}
    for at, reader in readers.items():
        reader.checkpoint_id = at
    kill_manager(d, 0)

    assert {at: readers[at][key] for at in (0, 3, 4)} == {0: 0, 3: 3, 4: 3}
    with contextlib.suppress(DDictCheckpointRetiredError):
        assert readers[1][key] == 1
    for call in (lambda: readers[2][key], lambda: d.rollback(to=2)):
        with pytest.raises(DDictCheckpointRetiredError) as raised:
            call()
        assert raised.value.checkpoint_id == 3
    assert d.checkpoint_id == 4


def test_after_a_loss_everyone_sees_one_cut(make: Callable[..., DDict]) -> None:
    d = make(3)
    keys, reader = keys_of_all(d), copy.copy(d)
    for number in range(3):
        d.update(dict.fromkeys(keys, number))
        d.checkpoint()
    assert d.wait_for_commit() == 2
    d.update(dict.fromkeys(keys, "half a step"))
    reader.checkpoint_id = 3
    kill_manager(d, 1)
    assert reader[keys[1]] == 2, "it has written nothing, so it is told nothing"

    assert [reader[key] for key in keys] == [2, 2, 2], "what was written at managers that live stayed"
    for _ in range(2):  # until it goes back
        with pytest.raises(DDictWritesLostError) as raised:
            d[keys[0]] = "the other half"
        assert (raised.value.manager, raised.value.checkpoint_id) == (1, 2)
    assert d.rollback(to=2) == 2
    d.checkpoint()
    d.update(dict.fromkeys(keys, 3))
    d.checkpoint()
    assert d.wait_for_commit() == 3
    assert [d[key] for key in keys] == [3, 3, 3]


def lose_a_manager_after(reader: DDict, d: DDict, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have the last manager be lost when the first has answered with values that are not committed."""
    keys = keys_of_all(d)
    d.update(dict.fromkeys(keys, "whole"))
    d.checkpoint()
    d.wait_for_commit()
    d.update(dict.fromkeys(keys, "half a step"))
    reader.checkpoint_id = d.checkpoint_id
    access = reader._access
    get_many, epoch = access._get_many, d._access.state()["epoch"]

    def get_and_lose(*args: Any, **named: Any) -> Any:
        monkeypatch.undo()
        found = get_many(*args, **named)
        kill_manager(d, len(keys) - 1)
        await_that(lambda: d._access.state()["epoch"] > epoch)
        return found

    monkeypatch.setattr(access, "_get_many", get_and_lose)
    return keys


@pytest.mark.parametrize("look", [lambda d: dict(d.items()), lambda d: dict(zip(d, d.values(), strict=True))])
def test_all_items_are_of_one_epoch(
    make: Callable[..., DDict], monkeypatch: pytest.MonkeyPatch, look: Callable[[DDict], dict[str, str]]
) -> None:
    d = make()
    reader = copy.copy(d)
    keys = lose_a_manager_after(reader, d, monkeypatch)
    assert look(reader) == dict.fromkeys(keys, "whole")


def test_a_filter_does_not_go_on_in_another_epoch(make: Callable[..., DDict], monkeypatch: pytest.MonkeyPatch) -> None:
    d = make()
    reader = copy.copy(d)
    keys = lose_a_manager_after(reader, d, monkeypatch)
    found = reader.filter(lambda key, value: True)
    assert next(found) == (keys[0], "half a step")
    with pytest.raises(DDictError, match="one cut") as raised:
        next(found)
    assert raised.value.retryable
    assert dict(reader.filter(lambda key, value: True)) == dict.fromkeys(keys, "whole")


def test_what_is_put_for_all_checkpoints_late_is_lost_with_a_word(make: Callable[..., DDict]) -> None:
    d = make()
    keys = keys_of_all(d)
    d[keys[0]] = 0
    d.checkpoint()
    assert d.wait_for_commit() == 0
    other = DDict.attach(d.serialize())
    other.sync_to_newest_checkpoint()
    other.pput(keys[1], "late")
    kill_manager(d, 1)

    with pytest.raises(DDictWritesLostError):
        other[keys[1]]
    other.rollback(to=0)
    assert keys[1] not in other


def test_what_was_committed_before_a_restore_is_not_lost_by_what_comes_after(
    make: Callable[..., DDict], tmp_path: Path
) -> None:
    stored = {"persister_class": PosixCheckpointPersister, "persist_path": str(tmp_path), "persist_count": -1}
    d = make(**stored)
    key, other = key_of(d, 0), copy.copy(d)
    for number in range(3):
        d["mine"] = other["theirs"] = number
        d.checkpoint()
        other.checkpoint()
        assert d.wait_for_commit() == number  # the other one does not hear of it
        d.persist()
    d.restore(0)
    assert other.sync_to_newest_checkpoint() == 0
    epoch = d._access.state()["epoch"]

    kill_manager(d, 0)
    await_that(lambda: d._access.state()["epoch"] > epoch)

    assert other.get(key) is None
    assert (other["theirs"], other.checkpoint()) == (0, 1)


def test_late_writes_are_lost_with_the_rest(make: Callable[..., DDict]) -> None:
    d = make()
    keys = keys_of_all(d)
    d.update(dict.fromkeys(keys, "committed"))
    d.checkpoint()
    assert d.sync_to_newest_checkpoint() == 0
    d.update(dict.fromkeys(keys, "late"))
    kill_manager(d, 1)

    with pytest.raises(DDictWritesLostError) as raised:
        d[keys[1]]
    with pytest.raises(DDictWritesLostError):
        d.checkpoint()

    assert raised.value.checkpoint_id == 0
    assert [d[key] for key in keys] == ["committed", "committed"]
    assert d.sync_to_newest_checkpoint() == 0
    assert d.checkpoint() == 1


def test_a_writer_that_does_nothing_holds_up_nobody_after_a_loss(make: Callable[..., DDict]) -> None:
    d = make()
    idle, keys = copy.copy(d), keys_of_all(d)
    for handle in (d, idle):
        handle[keys[0]] = 0
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(DDict.checkpoint, (d, idle)))
    assert d.wait_for_commit() == 0
    idle.checkpoint_id = 5  # where it has written nothing
    kill_manager(d, 1)
    assert d.get(keys[1]) is None

    for number in range(3):
        d[keys[1]] = number
        d.checkpoint()

    assert d.wait_for_commit() == 3


def test_a_stuck_writer_holds_up_others_until_the_timeout_and_is_named(make: Callable[..., DDict]) -> None:
    d = make(working_set_size=2, timeout=2.0)
    stuck = copy.copy(d)
    d["a"] = stuck["b"] = 0
    d.checkpoint()

    with pytest.raises(DDictTimeoutError, match=f"{stuck._access.standing.handle} of process {os.getpid()} is at 0"):
        d.checkpoint()

    assert d.checkpoint_id == 1
    with pytest.raises(DDictTimeoutError, match=f"{stuck._access.standing.handle} of process {os.getpid()} is at 0"):
        d.wait_for_commit()
    stuck.detach()
    assert d.checkpoint() == 2
    assert d.wait_for_commit() == 1


def test_a_manager_that_does_not_answer_is_named_in_time(make: Callable[..., DDict]) -> None:
    d = make(timeout=2.0)
    d["a"] = 0
    with stopped(pid_of(d, 1)):
        d.checkpoint()
        for call in (d.wait_for_commit, d.sync_to_newest_checkpoint):
            with pytest.raises(DDictTimeoutError, match="manager 1 has not answered 'prepare' yet"):
                call()
    assert d.wait_for_commit(timeout=DEADLINE_S) == 0


def test_a_manager_that_stays_down_is_named_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "MOST_DEATHS", 0)
    stored = {"persister_class": PosixCheckpointPersister, "persist_path": str(tmp_path), "persist_count": -1}
    options = {"working_set_size": 8, "replication": "ring", **stored}
    d = DDict(1, 2, 64 << 20, timeout=DEADLINE_S, **options)
    try:
        d[key_of(d, 0)] = 1
        d.checkpoint()
        assert d.persist() == 0
        kill_manager(d, 1)
        await_that(lambda: 1 in runtime_of(d).down)
        d[key_of(d, 0)] = 2
        d.checkpoint()
        d._access.timeout_s = 2.0

        for call in (d.wait_for_commit, d.sync_to_newest_checkpoint):
            began = time.monotonic()
            with pytest.raises(
                DDictTimeoutError, match=r"manager 1.*make the dictionary anew, and restore\(\)"
            ) as told:
                call()
            assert told.value.manager == 1
            assert time.monotonic() - began < 2.0 + DEADLINE_S / 4
    finally:
        with pytest.raises(DDictTimeoutError):  # what is newest could not be persisted
            d.destroy()
    with DDict(1, 2, 64 << 20, **options) as anew:
        anew.restore(anew.persisted_ids()[-1])
        assert anew.values() == [1]


def test_a_manager_that_is_stopped_for_a_while_is_waited_for(
    make: Callable[..., DDict], monkeypatch: pytest.MonkeyPatch
) -> None:
    d = make()
    key, pid = key_of(d, 1), pid_of(d, 1)
    d[key] = 1
    tries = 0

    class Tried(Connection):
        def __init__(self, *args: Any, **named: Any) -> None:
            nonlocal tries
            tries += 1
            if tries == 3:
                os.kill(pid, signal.SIGCONT)
            super().__init__(*args, **named)

    monkeypatch.setattr(links, "Connection", Tried)
    monkeypatch.setattr(links, "_CONNECT_S", 0.2)
    d._access.client.links._drop_idle(1)
    with stopped(pid):
        assert d[key] == 1
    assert tries >= 3


def test_checkpoints_are_made_of_whole_steps_with_a_persister_too(tmp_path: Any) -> None:
    stored = {"persister_class": PosixCheckpointPersister, "persist_path": str(tmp_path), "timeout": 2.0}
    with DDict(1, 1, 64 << 20, **stored) as d:
        stuck = copy.copy(d)
        d["a"] = stuck["b"] = 0
        with pytest.raises(DDictTimeoutError, match="cannot retire"):
            d.checkpoint()
        stuck.detach()


def _write(dictionary: DDict, pipe: Pipe, how: str) -> None:
    dictionary["done"] = 1
    dictionary.checkpoint()
    dictionary["open"] = 1
    pipe.send("written")
    if how == "killed":
        signal.pause()
    elif how == "failed":
        raise SystemError("in the middle of a step")


@pytest.mark.parametrize("how", ["orderly", "killed", "failed"])
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_who_is_killed_loses_what_it_had_open_and_who_ends_does_not(
    make: Callable[..., DDict], how: str, method: str
) -> None:
    d = make(working_set_size=2)
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_write, args=(d, theirs, how))
    child.start()
    theirs.close()
    assert ours.poll(DEADLINE_S)
    ours.recv()
    if how == "killed":
        child.kill()
    child.join(DEADLINE_S)
    assert child.exitcode is not None
    await_that(lambda: d._access.state()["writers"] == 0)
    d.checkpoint_id = 1

    for number in range(1, 4):  # others leave it behind
        d["mine"] = number
        d.checkpoint()
        d.checkpoint_id = number + 1
    assert d.wait_for_commit() == 3

    assert d["done"] == 1
    assert ("open" in d) == (how == "orderly")


def _write_late(dictionary: DDict, pipe: Any) -> None:
    dictionary.sync_to_newest_checkpoint()
    dictionary["late"] = 1
    pipe.send(dictionary.checkpoint_id)
    signal.pause()


def test_what_a_killed_process_wrote_at_a_committed_checkpoint_is_there_or_its_loss_is_told(
    make: Callable[..., DDict],
) -> None:
    d = make(working_set_size=2)
    d["key"] = 0
    d.checkpoint()
    assert d.wait_for_commit() == 0
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_write_late, args=(copy.copy(d), theirs))
    child.start()
    assert ours.poll(DEADLINE_S)
    assert ours.recv() == 0
    child.kill()
    child.join(DEADLINE_S)
    await_that(lambda: d._access.state()["writers"] == 1)
    kill_manager(d, d.which_manager("late"))
    await_that(lambda: d._access.state()["epoch"] > 0)

    with contextlib.suppress(DDictWritesLostError):
        d.sync_to_newest_checkpoint()
        assert d["late"] == 1


def test_a_first_step_that_was_not_finished_is_not_committed(make: Callable[..., DDict]) -> None:
    d = make(working_set_size=2)
    child = multiprocessing.get_context("fork").Process(target=_write_once, args=(d,))
    child.start()
    child.join(DEADLINE_S)
    assert child.exitcode == -signal.SIGKILL
    await_that(lambda: d._access.state()["writers"] == 0)
    for _ in range(3):
        d["mine"] = 1
        d.checkpoint()
    assert d.wait_for_commit() == 2
    assert "key" not in d


def _write_once(dictionary: DDict) -> None:
    dictionary["key"] = 1
    os.kill(os.getpid(), signal.SIGKILL)


def test_who_goes_on_after_all_were_killed_sees_nothing_of_what_they_had_begun(make: Callable[..., DDict]) -> None:
    d = make()
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_write, args=(d, theirs, "killed"))
    child.start()
    assert ours.poll(DEADLINE_S)
    child.kill()
    child.join(DEADLINE_S)

    assert d.sync_to_newest_checkpoint() == 0

    assert d["done"] == 1
    d.checkpoint()
    assert "open" not in d


def test_what_was_left_and_is_not_committed_for_one_who_was_killed_is_told(make: Callable[..., DDict]) -> None:
    d = make()
    leaves, context = copy.copy(d), multiprocessing.get_context("fork")
    leaves["left"] = 1
    child = context.Process(target=_write_once, args=(d,))  # at 0, which is never whole now
    child.start()
    child.join(DEADLINE_S)
    leaves.checkpoint()
    leaves.detach()

    with pytest.raises(DDictWritesLostError, match="killed"):
        d.sync_to_newest_checkpoint()

    assert (d.sync_to_newest_checkpoint(), d.items()) == (0, [])


def _write_and_return(dictionary: DDict) -> None:
    dictionary[f"result of {this_process.my_puid}"] = 1


def test_what_members_of_a_group_write_counts_when_they_return(make: Callable[..., DDict]) -> None:
    d = make()
    with ProcessGroup() as group:
        group.add_process(nproc=2, template=ProcessTemplate(target=_write_and_return, args=(d,)))
        group.init()
        group.start()
        group.join()
    await_that(lambda: d._access.state()["writers"] == 0)
    assert d.values() == [1, 1]
    d.checkpoint()
    assert d.sync_to_newest_checkpoint() == 0
    assert d.values() == [1, 1]
