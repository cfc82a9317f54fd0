"""Real managers that die, or hang, in the middle of a restore or a rollback."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ml_flashpoint.ddict import DDict
from ml_flashpoint.ddict.errors import (
    DDictCheckpointRetiredError,
    DDictError,
    DDictTimeoutError,
    DDictWritesLostError,
)
from ml_flashpoint.ddict.wire.requests import Prepare
from tests.support.dictionaries import DEADLINE_S, await_that, kill_manager, pid_of, stopped
from tests.workers.ddict_persisters import FLAG, KilledWhileRestoring

pytestmark = pytest.mark.slow


def keys_of(dictionary: DDict, manager: int) -> list[int]:
    return [key for key in range(40) if dictionary.which_manager(key) == manager]


def test_a_manager_that_dies_while_it_takes_up_what_is_restored_takes_it_up_after_all(
    tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag = tmpfs / "flag"
    monkeypatch.setenv(FLAG, str(flag))
    named: dict[str, Any] = {
        "replication": "ring",
        "persister_class": KilledWhileRestoring,
        "persist_path": str(tmpfs / "persisted"),
        "name": "restored",
        "timeout": DEADLINE_S,
    }
    with DDict(1, 3, 64 << 20, **named) as earlier:
        for number in range(4):
            for key in range(40):
                earlier[key] = number
            earlier.checkpoint()
        earlier.sync_to_newest_checkpoint()
        assert earlier.persist() == 3
    with DDict(1, 3, 64 << 20, **named) as dictionary:
        for key in range(40):
            dictionary[key] = "fresh"
        dictionary.checkpoint()
        dictionary.sync_to_newest_checkpoint()
        assert dictionary.committed_checkpoint_id == 0
        flag.touch()

        dictionary.restore(3)

        assert not flag.exists(), "no manager was killed"
        assert dictionary.committed_checkpoint_id == 3
        assert {key: dictionary[key] for key in range(40)} == dict.fromkeys(range(40), 3)


def test_a_rollback_below_what_is_committed_sends_everyone_back() -> None:
    with DDict(1, 3, 64 << 20, working_set_size=4, replication="ring", timeout=DEADLINE_S) as one:
        other, reader = copy.copy(one), copy.copy(one)
        for number in range(4):
            for key in range(40):
                other[key] = number
            one["one", number] = number
            with ThreadPoolExecutor(2) as pool:  # each waits for the other
                list(pool.map(DDict.checkpoint, (other, one)))
            assert one.wait_for_commit() == number
        reader.sync_to_newest_checkpoint()
        assert (reader.checkpoint_id, reader[0]) == (3, 3)

        one.rollback(to=2)

        assert one.checkpoint_id == 2
        with pytest.raises(DDictWritesLostError) as raised:
            other.checkpoint()
        assert raised.value.checkpoint_id == 2
        with pytest.raises(DDictCheckpointRetiredError):  # where it stands is no more: told once
            reader[0]
        other.rollback(to=2)
        for handle in (one, other, reader):
            assert {handle[key] for key in range(40)} == {2}
            assert ("one", 3) not in handle
        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(DDict.checkpoint, (other, one))) == [3, 3]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(DDict.checkpoint, (other, one)))
        assert one.wait_for_commit() == 3


Call = Callable[[DDict], object]


@pytest.mark.parametrize("then", [DDict.checkpoint, lambda handle: handle.put("key", 1), DDict.detach])
def test_a_rollback_that_does_not_reach_a_manager_is_finished_before_anything_else(
    then: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DDict(3, 1, 64 << 20, working_set_size=8, timeout=DEADLINE_S) as dictionary:
        keys = [keys_of(dictionary, manager)[0] for manager in range(3)]
        dictionary["key"] = 0  # and stays at 0, so that nothing is committed
        handle = copy.copy(dictionary)
        for number in range(4):
            for key in keys:
                handle[key] = number
            handle.checkpoint()
        with stopped(pid_of(dictionary, 1)), monkeypatch.context() as impatient:
            impatient.setattr(handle._access, "timeout_s", 3.0)
            with pytest.raises(DDictTimeoutError):
                handle.rollback(to=1)
        assert handle.checkpoint_id == 1

        then(handle)

        dictionary.checkpoint_id = 3
        assert [dictionary[key] for key in keys] == [1, 1, 1]


def test_what_a_manager_hears_too_late_of_a_commit_takes_nothing_away_that_was_committed_since() -> None:
    with DDict(1, 2, 64 << 20, working_set_size=3, replication="ring", timeout=DEADLINE_S) as dictionary:
        for number in range(3):
            dictionary["key"] = number
            dictionary.checkpoint()
            assert dictionary.wait_for_commit() == number
        await_that(lambda: {its.sealed for its in dictionary.stats()} == {(1, 2)})  # all have heard of the last commit
        manager, links = dictionary.which_manager("key"), dictionary._access.client.links
        late = Prepare(epoch=0, checkpoint_id=1, cut=2, committed=1)

        with pytest.raises(DDictError, match="has been asked for since"):
            links.call(manager, late, deadline=time.monotonic() + DEADLINE_S)

        kill_manager(dictionary, manager)
        assert dictionary.sync_to_newest_checkpoint() == 2
        assert dictionary["key"] == 2
