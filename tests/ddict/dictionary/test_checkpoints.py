"""Checkpoints of a dictionary as a handle goes through them, and what waits for others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from ml_flashpoint.ddict import DDict
from ml_flashpoint.ddict.errors import (
    DDictCheckpointRetiredError,
    DDictKeyError,
    DDictTimeoutError,
    DDictWritesLostError,
)
from ml_flashpoint.format.errors import InvalidArgumentError
from tests.ddict.dictionary.support import BIG, WORKING_SET, Make, other, waits_in_vain
from tests.support.dictionaries import (
    DEADLINE_S,
    await_that,
    kill_manager,
)

# ---- checkpoints ------------------------------------------------------------------------------------------


def test_a_read_sees_the_newest_value_at_or_below_its_checkpoint(d: DDict) -> None:
    start = d.checkpoint_id
    d["a"] = 0
    assert d.checkpoint() == start + 1
    d["b"] = 1
    d.checkpoint()
    d["a"] = 2
    del d["b"]
    reader = other(d)
    seen = []
    for checkpoint_id in range(start, start + 4):
        reader.checkpoint_id = checkpoint_id
        seen.append(dict(reader))

    assert seen == [{"a": 0}, {"a": 0, "b": 1}, {"a": 2}, {"a": 2}]


def test_a_rollback_discards_what_this_handle_wrote_and_nothing_else(d: DDict) -> None:
    d["mine"] = "kept"
    colleague = other(d)
    d.checkpoint()
    d["mine"], d["shared"] = "gone", "gone"
    colleague.checkpoint()
    colleague["shared"] = "theirs"
    d["shared"] = "gone"
    at = d.checkpoint_id

    assert d.rollback() == at - 1

    assert d.checkpoint_id == at - 1
    assert dict(colleague) == {"mine": "kept", "shared": "theirs"}
    d.checkpoint()
    assert d.items() == colleague.items()


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


def test_the_newest_committed_checkpoint_is_what_all_writers_have_moved_past(d: DDict) -> None:
    start = d.checkpoint_id
    fast, slow = other(d), other(d)
    d.detach()
    fast["fast"] = slow["slow"] = 0
    fast.checkpoint_id = start + 3
    slow.checkpoint_id = start + 2

    assert slow.sync_to_newest_checkpoint() == start + 1
    assert slow.committed_checkpoint_id == start + 1
    assert slow["fast"] == 0


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


def test_what_was_written_late_is_committed_again_and_not_lost(make: Make) -> None:
    d = make(1, 2, working_set_size=4, replication="ring")
    d["key"] = "old"
    d.checkpoint()
    assert d.wait_for_commit() == 0
    assert d.sync_to_newest_checkpoint() == 0
    d["key"] = "late"  # 0 is committed without it
    d.checkpoint()
    assert d.wait_for_commit() == 0
    d["key"] = "open"
    kill_manager(d, d.which_manager("key"))
    with pytest.raises(DDictWritesLostError):
        d["key"]
    assert d.rollback(to=0) == 0
    assert d["key"] == "late"


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
