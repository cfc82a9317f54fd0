"""Checkpoints and handles of a dictionary: what waits for others, who leaves, and how a dictionary ends."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from ml_flashpoint.ddict import DDict, PosixCheckpointPersister
from ml_flashpoint.ddict.coordinator import Coordinator
from ml_flashpoint.ddict.errors import (
    DDictCheckpointRetiredError,
    DDictDestroyedError,
    DDictError,
    DDictKeyError,
    DDictManagerLostError,
    DDictReadOnlyError,
    DDictTimeoutError,
    DDictWritesLostError,
)
from ml_flashpoint.format.errors import InvalidArgumentError
from tests.ddict.support import BIG, WORKING_SET, Make, other, waits_in_vain
from tests.support.dictionaries import (
    DEADLINE_S,
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
from tests.workers import ddict_handles

# ---- checkpoints ------------------------------------------------------------------------------------------


def test_a_rollback_may_keep_what_was_written(d: DDict) -> None:
    start = d.checkpoint_id
    d.checkpoint()
    d["key"] = 1
    d.rollback(discard=False)

    assert "key" not in d
    d.checkpoint_id = start + 1
    assert d["key"] == 1


def test_a_rollback_of_a_lasting_value_takes_it_back(d: DDict) -> None:
    d.checkpoint()
    d.pput("key", 1)
    d.rollback()
    d.checkpoint()

    assert "key" not in d


def test_a_rollback_drops_a_batch(d: DDict) -> None:
    d.checkpoint()
    d.start_batch_put()
    d["key"] = 1
    d.rollback()
    d.end_batch_put()
    d.checkpoint()

    assert "key" not in d


def test_what_has_left_the_working_set_raises_one_error(d: DDict) -> None:
    start = d.checkpoint_id
    d["key"] = 1
    late = other(d)
    d.checkpoint_id = start + WORKING_SET

    def has_retired() -> bool:
        try:
            late["key"]
        except DDictCheckpointRetiredError as error:
            return error.checkpoint_id == start + 1
        return False

    await_that(has_retired)
    calls: list[Callable[[], Any]] = [
        lambda: late.put("key", 2),
        lambda: late.put("key", torch.ones(BIG)),
        lambda: late.get("key"),
        lambda: late.keys(),
        lambda: late.items(),
        lambda: len(late),
        lambda: "key" in late,
        lambda: late.pop("key"),
        lambda: late.clear(),
        lambda: late.fetch_add("key"),
        lambda: late.wait_for("key"),
        lambda: d.rollback(to=start),
    ]
    for call in calls:
        with pytest.raises(DDictCheckpointRetiredError):
            call()
    assert d["key"] == 1


def test_a_commit_is_waited_for(d: DDict) -> None:
    colleague, start = other(d), d.checkpoint_id
    d["mine"], colleague["theirs"] = 1, 1
    with pytest.raises(InvalidArgumentError, match="checkpoint_id"):
        d.wait_for_commit(start)
    d.checkpoint()
    with pytest.raises(DDictTimeoutError):
        d.wait_for_commit(timeout=0.1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(d.wait_for_commit)
        colleague.checkpoint()
        assert waiting.result(DEADLINE_S) == start
    assert other(d).wait_for_commit(start) == start
    colleague.detach()
    for timeout in (-1, "soon", True):
        with pytest.raises(InvalidArgumentError, match="timeout"):
            d.wait_for_commit(timeout=timeout)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentError, match="timeout"):
            d.wait_for("mine", timeout=timeout)  # type: ignore[arg-type]
    assert d.wait_for("mine", timeout=0) == 1


@pytest.mark.parametrize("replication", [None, "ring"])
def test_a_lone_writer_waits_for_its_commits(make: Make, replication: str | None) -> None:
    d = make(replication=replication, n_nodes=2)
    for step in range(3):
        d["step"] = step
        d.checkpoint()
        assert d.wait_for_commit() == step
    d.checkpoint()  # nothing was written there
    assert d.wait_for_commit() == 3


def test_where_nobody_writes_no_commit_is_waited_for(make: Make) -> None:
    d = make()
    assert d.wait_for_commit() == -1
    d.checkpoint()
    assert d.wait_for_commit() == -1
    with pytest.raises(DDictTimeoutError):  # by its id, it is waited for: somebody may come and write
        d.wait_for_commit(0, timeout=0.1)
    colleague = other(d)
    colleague["key"] = 1
    with pytest.raises(DDictTimeoutError):
        d.wait_for_commit(timeout=0.1)
    colleague.checkpoint()
    assert d.wait_for_commit() >= 0


def test_a_reader_does_not_hold_up_commits(d: DDict) -> None:
    start = d.checkpoint_id
    reader = other(d)
    d["key"] = 1
    assert reader["key"] == 1
    d.checkpoint()

    assert d.sync_to_newest_checkpoint() == start


def test_managers_without_keys_advance_too(make: Make) -> None:
    dictionary = make(3, working_set_size=2)
    for _ in range(5):
        dictionary["the only key"] = 1
        dictionary.checkpoint()

    await_that(lambda: [each.oldest for each in dictionary.stats()] == [4, 4, 4])


@pytest.mark.parametrize("to", [-1, 1.0, True, "1", 1 << 62])
def test_a_checkpoint_id_must_be_one(d: DDict, to: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="checkpoint_id"):
        d.checkpoint_id = to
    with pytest.raises(InvalidArgumentError, match="to"):
        d.rollback(to=to)


def test_a_rollback_does_not_go_ahead(d: DDict) -> None:
    with pytest.raises(InvalidArgumentError, match="ahead"):
        d.rollback(to=d.checkpoint_id + 1)


# ---- waiting for others -----------------------------------------------------------------------------------


def test_wait_for_keys_takes_two_checkpoints(make: Make) -> None:
    with pytest.raises(InvalidArgumentError, match="working_set_size"):
        make(wait_for_keys=True)


def test_with_wait_for_keys_a_read_waits_for_its_checkpoint(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    dictionary = make(working_set_size=2, wait_for_keys=True, timeout=10)
    dictionary["key"] = 0
    dictionary.pput("lasting", "always")
    reader = other(dictionary)
    reader.checkpoint_id = 1
    timer = threading.Timer(0.2, lambda: (dictionary.checkpoint(), dictionary.put("key", 1)))
    began = time.monotonic()
    timer.start()

    assert reader["lasting"] == "always"
    assert reader.get("key") in (None, 1)
    assert reader["key"] == 1
    assert time.monotonic() - began >= 0.1
    timer.join()
    reader.checkpoint_id = 2
    waits_in_vain(reader, lambda: reader["key"], "not written at checkpoint 2", monkeypatch)
    waits_in_vain(reader, lambda: reader["never written"], "no such key", monkeypatch, DDictKeyError)


def test_with_wait_for_keys_no_call_shows_a_key_that_a_read_waits_for(make: Make) -> None:
    dictionary = make(2, working_set_size=2, wait_for_keys=True)
    dictionary.update({number: number for number in range(10)})
    dictionary.pput("lasting", 1)
    dictionary.checkpoint()
    dictionary[3] = 4

    assert dict(dictionary.items()) == {3: 4, "lasting": 1}
    assert (len(dictionary), set(dictionary.keys())) == (2, {3, "lasting"})
    assert (5 in dictionary, dictionary.get(5), 3 in dictionary) == (False, None, True)
    assert dictionary.setdefault(5, 6) == 6
    assert dictionary[5] == 6


def test_with_wait_for_keys_a_checkpoint_retires_when_its_keys_are_written_again(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    dictionary = make(working_set_size=2, wait_for_keys=True)
    dictionary["key"] = 0
    dictionary.pput("lasting", 0)
    dictionary.checkpoint()
    waits_in_vain(dictionary, dictionary.checkpoint, "cannot retire", monkeypatch)
    assert dictionary.checkpoint_id == 1

    dictionary["key"] = 1

    assert dictionary.checkpoint() == 2
    assert dictionary.get("key") is None, "it has to be written at 2 again"
    assert dictionary["lasting"] == 0


def test_with_wait_for_writers_a_checkpoint_retires_when_all_have_moved_on(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    dictionary = make(working_set_size=1, wait_for_writers=True)
    colleague = other(dictionary)
    dictionary["a"] = colleague["b"] = 0
    waits_in_vain(
        dictionary, dictionary.checkpoint, f"handle {colleague._access.standing.handle} of process", monkeypatch
    )
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(DDict.checkpoint, (dictionary, colleague))) == [1, 1]


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


# ---- managers that do not answer --------------------------------------------------------------------------


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


def test_a_value_of_every_manager_is_read_from_one_that_answers(make: Make) -> None:
    dictionary = make(2)
    dictionary.bput("everywhere", 1)
    impatient = DDict.attach(dictionary.serialize(), timeout=3.0)
    with stopped(pid_of(dictionary, 1)):  # which is asked first half of the time, and gets half of the timeout
        assert [impatient.bget("everywhere") for _ in range(4)] == [1] * 4
