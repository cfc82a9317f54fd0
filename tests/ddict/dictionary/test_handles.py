"""Handles of a dictionary: in other processes, in children, copied, and forgotten."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from ml_flashpoint.ddict import DDict, PosixCheckpointPersister
from ml_flashpoint.ddict.coordinator import Coordinator
from ml_flashpoint.ddict.errors import (
    DDictDestroyedError,
    DDictReadOnlyError,
    DDictWritesLostError,
)
from ml_flashpoint.ddict.links import Exchange
from ml_flashpoint.ddict.wire.requests import Abandon, Allocate, Put, Whose
from ml_flashpoint.format.errors import InvalidArgumentError, ProtocolError
from tests.ddict.dictionary.support import BIG, WORKING_SET, Make, other
from tests.support.dictionaries import (
    DEADLINE_S,
    await_that,
    kill_manager,
)
from tests.workers import ddict_handles

# ---- handles in other processes ---------------------------------------------------------------------------


@pytest.mark.parametrize("how", [pytest.param("spawn", marks=pytest.mark.slow), "fork"])
def test_a_handle_travels_to_another_process(d: DDict, how: str) -> None:
    context: Any = multiprocessing.get_context(how)
    d["parent"], d["tensor"] = "here", torch.ones(BIG)
    at = d.checkpoint_id
    ours, theirs = context.Pipe()
    child = context.Process(target=ddict_handles.answer, args=(d, theirs))
    child.start()
    theirs.close()
    try:
        assert ours.poll(2 * DEADLINE_S)
        assert ours.recv() == {
            "pid": child.pid,
            "from the parent": "here",
            "tensor": BIG,
            "checkpoint_id": at,
            "managers": [0, 1],
        }
        assert ours.poll(DEADLINE_S)
        assert ours.recv() == at + 1
        assert d["child"] == child.pid
        assert d.checkpoint_id == at, "its handle is another one"
    finally:
        child.join(DEADLINE_S)
        child.kill()
    assert child.exitcode == 0


def test_a_child_cannot_destroy_the_dictionary(shared: DDict, d: DDict) -> None:
    context = multiprocessing.get_context("fork")
    d["key"] = 1
    for handle in (shared, d):
        ours, theirs = context.Pipe()
        child = context.Process(target=ddict_handles.try_to_destroy, args=(handle, theirs))
        child.start()
        assert ours.poll(DEADLINE_S)
        assert ours.recv() == "DDictError"
        child.join(DEADLINE_S)

    assert d["key"] == 1


def test_a_killed_process_holds_up_no_commits(make: Make) -> None:
    dictionary = make(working_set_size=2, timeout=10)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=ddict_handles.write_and_wait, args=(dictionary, "theirs", 1, theirs))
    child.start()
    try:
        assert ours.poll(DEADLINE_S)
        assert ours.recv() == 1
        dictionary["ours"] = 1
        dictionary.checkpoint_id = 2
        assert dictionary.committed_checkpoint_id == 0
    finally:
        child.kill()
        child.join(DEADLINE_S)

    # What it died in is not whole, so it is committed only with a later one.
    dictionary.checkpoint_id = 3
    await_that(lambda: dictionary.committed_checkpoint_id == 2)


def test_a_handle_that_nobody_has_any_more_holds_up_no_commits(d: DDict) -> None:
    behind = other(d)
    behind["key"] = 1
    at = d.checkpoint_id
    d.checkpoint_id = at + 2
    assert d.committed_checkpoint_id < at
    del behind
    gc.collect()

    await_that(lambda: d.committed_checkpoint_id == at + 1)


def test_a_text_makes_a_handle(d: DDict) -> None:
    d["key"] = 1
    d.checkpoint()
    attached = DDict.attach(d.serialize(), timeout=5)

    assert attached["key"] == 1
    assert attached.checkpoint_id == d.checkpoint_id
    part = DDict.attach(d.manager(1).serialize())
    part["anything"] = 2
    assert d.manager(1)["anything"] == 2


@pytest.mark.parametrize("text", ["", "abc", "e30=", "ää", "W10="])
def test_other_text_does_not(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="serialized"):
        DDict.attach(text)


def test_a_detached_handle_is_of_no_use_and_the_others_are(d: DDict) -> None:
    d["key"] = 1
    handle = other(d)
    handle["key"] = 2
    handle.detach()
    handle.detach()

    for call in (lambda: handle["key"], lambda: handle.put("key", 3), handle.checkpoint, handle.keys, handle.stats):
        with pytest.raises(DDictDestroyedError):
            call()
    assert d["key"] == 2


def test_a_thread_that_moves_a_handle_is_told_that_another_one_detaches_it(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    dictionary = make(working_set_size=1, wait_for_writers=True)
    handle = other(dictionary)
    dictionary["a"] = handle["b"] = 0
    move, has_begun = Coordinator.move, threading.Event()

    def watched(*args: Any) -> Any:
        has_begun.set()
        return move(*args)

    monkeypatch.setattr(Coordinator, "move", watched)
    with ThreadPoolExecutor(1) as pool:
        moving = pool.submit(handle.checkpoint)
        assert has_begun.wait(DEADLINE_S)
        handle.detach()
        dictionary.checkpoint()
        with pytest.raises(DDictDestroyedError, match="detached"):
            moving.result(2 * DEADLINE_S)


@pytest.mark.parametrize("leave", ["detach", "forget"])
def test_what_a_handle_wrote_before_it_left_is_not_lost_without_a_word(make: Make, leave: str) -> None:
    dictionary = make(2, 2, replication="ring")
    ours, theirs = (next(key for key in range(100) if dictionary.which_manager(key) == each) for each in (0, 1))
    dictionary[ours] = 0  # so the checkpoint is not finished when the other handle leaves
    handle = other(dictionary)
    handle[theirs] = 1
    if leave == "detach":
        handle.detach()
    else:
        del handle
        gc.collect()
        await_that(lambda: dictionary._access.state()["writers"] == 1)
    kill_manager(dictionary, 1)

    dictionary.checkpoint()

    with pytest.raises(DDictWritesLostError):
        dictionary.sync_to_newest_checkpoint()


def test_a_handle_whose_batch_cannot_be_sent_is_detached_all_the_same(make: Make) -> None:
    dictionary = make(n_nodes=1)
    handle = other(dictionary)
    handle.start_batch_put()
    handle["key"] = 1
    dictionary.freeze()

    with pytest.raises(DDictReadOnlyError):
        handle.detach()

    handle.detach()
    dictionary.unfreeze()
    dictionary.checkpoint()
    with pytest.raises(DDictDestroyedError):
        handle["key"] = 2
    assert dictionary._access.state()["writers"] == 0


def test_a_value_that_comes_with_bad_fields_takes_no_memory(d: DDict) -> None:
    links, deadline = d._access.client.links, d._access.deadline()

    def send(exchange: Exchange) -> None:
        whose: Any = Whose("me", d.checkpoint_id, d._access.standing.epoch)
        room = exchange.request(Allocate(whose, 1 << 20), b"key")
        with pytest.raises(ProtocolError):
            exchange.request(Put(whose._replace(checkpoint_id="none"), 0, room.fields["v"]), b"key")
        exchange.request(Abandon(room.fields["v"]))

    # What the fixture left behind retires a little later.
    await_that(lambda: d.stats()[0].oldest == d.checkpoint_id - WORKING_SET + 1)
    before = d.stats()[0].used_bytes
    links.attempt(0, send, deadline=deadline)

    assert d.stats()[0].used_bytes == before


def test_a_rollback_removes_nothing_that_an_earlier_program_persisted(make: Make, tmpfs: Path) -> None:
    named: dict[str, Any] = {
        "name": "training",
        "persister_class": PosixCheckpointPersister,
        "persist_path": str(tmpfs),
        "persist_count": -1,
    }
    with make(**named, persist_freq=1) as earlier:
        for number in range(4):
            earlier["key"] = number
            earlier.checkpoint()
            earlier.sync_to_newest_checkpoint()
            earlier.checkpoint_id = number + 1
        await_that(lambda: earlier.persisted_ids() == [0, 1, 2, 3])

    dictionary = make(**named, working_set_size=4)
    for _ in range(3):
        dictionary["key"] = 0
        dictionary.checkpoint()
        dictionary.wait_for_commit()  # or it could not be gone back to
    dictionary.rollback(to=1)

    assert dictionary.persisted_ids() == [0, 1, 2, 3]
    dictionary.restore(3)
    assert dictionary["key"] == 3


def test_a_reader_that_goes_says_nothing_of_what_is_finished(make: Make) -> None:
    dictionary = make(2, 1)
    reader, writer = other(dictionary), other(dictionary)
    writer["key"] = 2
    reader.checkpoint_id = 5

    del reader
    gc.collect()
    del writer  # their process tells of them one after the other
    gc.collect()
    await_that(lambda: dictionary._access.state()["writers"] == 0)

    assert dictionary.sync_to_newest_checkpoint() == 0
    assert dictionary.committed_checkpoint_id == -1


def test_a_pickled_handle_is_another_one(d: DDict) -> None:
    d["key"] = 1
    again = pickle.loads(pickle.dumps(d))
    again.checkpoint()

    assert again["key"] == 1
    assert d.checkpoint_id == again.checkpoint_id - 1
    assert again != d
    assert again == again
    assert len({again, d}) == 2
