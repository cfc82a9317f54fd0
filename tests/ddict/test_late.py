"""What was given up, or arrives late, takes no effect after what the same handle does next."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ml_flashpoint.ddict import DDict, PosixCheckpointPersister, links
from ml_flashpoint.ddict.client import session
from ml_flashpoint.ddict.errors import (
    DDictDestroyedError,
    DDictError,
    DDictManagerLostError,
    DDictTimeoutError,
    DDictWritesLostError,
)
from ml_flashpoint.ddict.links import Links
from ml_flashpoint.ddict.options import COORDINATOR
from ml_flashpoint.ddict.wire.requests import Clear, Prepare, decode
from ml_flashpoint.format.errors import FlashpointError
from ml_flashpoint.net.client import Connection, Reply, RequestLostError
from tests.ddict.support import Make, key_of, keys_of_all
from tests.support.dictionaries import DEADLINE_S, Created, await_that, kill_manager, pid_of, stopped
from tests.support.processes import suspend
from tests.workers.ddict_persisters import FLAG, KilledWhileRestoring


class Network:
    """Keeps requests on their way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._sent: list[tuple[Connection, str, dict[str, Any], list[bytes]]] = []

    @contextlib.contextmanager
    def losing(self, operation: str, error: type[FlashpointError] = DDictTimeoutError) -> Iterator[None]:
        """Keep the first of these requests. Its connection breaks."""
        request, sent = Connection.request, self._sent

        def lose(
            connection: Connection, op: str, fields: dict[str, Any], blobs: Sequence[Any] = (), **named: Any
        ) -> Reply:
            if op != operation or sent:
                return request(connection, op, fields, blobs, **named)
            sent.append((connection, op, {**fields, "t": DEADLINE_S}, [bytes(blob) for blob in blobs]))
            connection.close()
            raise error("the connection broke")

        with self._monkeypatch.context() as patched:
            patched.setattr(Connection, "request", lose)
            yield
        assert sent

    def deliver(self, dictionary: DDict) -> None:
        """Have it arrive."""
        connection, operation, fields, blobs = self._sent.pop()
        configuration = dictionary._configuration
        manager = COORDINATOR if connection._channel.peer.endswith("c.sock") else 0
        network = Links(dictionary._access.client.links.locator, configuration.secret)
        with contextlib.suppress(FlashpointError):
            request, _ = decode(operation, fields)
            network.call(manager, request, *blobs, deadline=dictionary._access.deadline())
        network.close()


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    return Network(monkeypatch)


GIVEN_UP: dict[str, tuple[str, Callable[[DDict, str], Any]]] = {
    "update": ("put_many", lambda handle, key: handle.update({key: "old", "more": "old"})),
    "put": ("put", lambda handle, key: handle.put(key, "old")),
    "pput": ("put", lambda handle, key: handle.pput(key, "old")),
    "bput": ("put", lambda handle, key: handle.bput(key, "old")),
    "delete": ("delete", lambda handle, key: handle.__delitem__(key)),
    "clear": ("clear", lambda handle, key: handle.clear()),
    "fetch_add": ("add", lambda handle, key: handle.fetch_add(key, 1_000)),
}


@pytest.mark.parametrize("name", GIVEN_UP)
def test_a_late_write_does_not_cover_a_later_one(d: DDict, network: Network, name: str) -> None:
    (operation, call), key = GIVEN_UP[name], key_of(d)
    d[key] = 0
    with network.losing(operation), pytest.raises(DDictTimeoutError):
        call(d, key)
    d[key] = 1
    network.deliver(d)

    assert d[key] == 1


@pytest.mark.parametrize("read", [DDict.__getitem__, DDict.__contains__, lambda handle, key: handle.items()])
def test_a_late_write_does_not_change_what_was_read_after_it(
    d: DDict, network: Network, read: Callable[[DDict, str], Any]
) -> None:
    key = key_of(d)
    d[key] = 0
    with network.losing("put"), pytest.raises(DDictTimeoutError):
        d[key] = "old"
    read(d, key)
    network.deliver(d)

    assert d[key] == 0


@pytest.mark.parametrize("name", GIVEN_UP)
def test_a_late_write_does_not_return_after_a_rollback(d: DDict, network: Network, name: str) -> None:
    (operation, call), key = GIVEN_UP[name], key_of(d)
    d[key] = 0
    d.checkpoint()
    with network.losing(operation), pytest.raises(DDictTimeoutError):
        call(d, key)
    d.rollback()
    network.deliver(d)
    d.checkpoint()

    assert dict(d) == {key: 0}


def test_what_a_call_has_sent_twice_does_not_cover_what_others_write_after_it(d: DDict, network: Network) -> None:
    key, colleague = key_of(d), copy.copy(d)
    with network.losing("put", RequestLostError):
        d[key] = "old"  # sent again
    colleague[key] = "new"
    network.deliver(d)

    assert d[key] == "new"


def test_a_late_freeze_does_not_freeze_what_was_thawed(d: DDict, network: Network) -> None:
    with network.losing("set_frozen"), pytest.raises(DDictTimeoutError):
        d.freeze()
    d.unfreeze()
    network.deliver(d)

    assert not d.is_frozen
    d["key"] = 1


def test_a_late_move_does_not_commit_what_is_being_written(d: DDict, network: Network) -> None:
    key, at = key_of(d), d.checkpoint_id
    d[key] = 0
    with network.losing("move"), pytest.raises(DDictTimeoutError):
        d.checkpoint()
    d[key] = "half a step"
    network.deliver(d)

    assert d.committed_checkpoint_id < at
    assert d.checkpoint() == at + 1
    assert d.wait_for_commit() == at


def test_a_late_rollback_does_not_discard_what_was_written_after_it(d: DDict, network: Network) -> None:
    key, at = key_of(d), d.checkpoint_id
    d[key] = 0
    d.checkpoint()
    d[key] = "old"
    with network.losing("go_back"), pytest.raises(DDictTimeoutError):
        d.rollback()
    d.checkpoint()
    d[key] = "new"
    network.deliver(d)

    assert (d.checkpoint_id, d[key]) == (at + 1, "new")
    assert d.committed_checkpoint_id == at


def test_a_handle_is_where_it_says_last_however_often_it_had_to_say_so(d: DDict, network: Network) -> None:
    handle, at = copy.copy(d), d.checkpoint_id
    d["key"] = 0
    handle.checkpoint_id = at + 2
    with network.losing("join"), pytest.raises(DDictTimeoutError):
        handle["half"] = 0
    network.deliver(handle)
    handle.checkpoint_id = at
    handle["half"] = 1
    d.checkpoint()

    assert d.committed_checkpoint_id < at
    handle.checkpoint()
    assert d.wait_for_commit() == at


def test_a_late_restore_does_not_replace_a_later_one(make: Make, network: Network, tmp_path: Path) -> None:
    named: dict[str, Any] = {"persister_class": PosixCheckpointPersister, "persist_path": str(tmp_path)}
    dictionary = make(persist_freq=1, persist_count=-1, **named)
    for number in range(2):
        dictionary["key"] = number
        dictionary.checkpoint()
        assert dictionary.persist() == number
    with network.losing("restore"), pytest.raises(DDictTimeoutError):
        dictionary.restore(0)
    dictionary.restore(1)
    network.deliver(dictionary)

    assert dictionary.sync_to_newest_checkpoint() == 1
    assert dictionary["key"] == 1


# ---- managers that are stopped ---------------------------------------------------------------------------------------


IMPATIENT_S = 0.05


def test_threads_of_a_handle_do_not_lose_what_they_write_while_another_gives_up(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their requests are of an earlier generation than one that has overtaken them, and are made again."""
    dictionary = make(2, timeout=DEADLINE_S)
    keys = keys_of_all(dictionary)
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
    keys = keys_of_all(dictionary)
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
    keys = keys_of_all(dictionary)
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


# ---- creators that are stopped, and killed ---------------------------------------------------------------------------


WATCH_S = 1
STALL_S = 4.0
PATIENT_S = 600.0


def test_a_creator_that_is_stopped_costs_no_writer_its_open_step(
    creator: Created, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_WATCH_S", WATCH_S)
    writer = DDict.attach(creator.serialized, timeout=DEADLINE_S)
    writer.checkpoint_id = 1
    writer["open"] = 1
    suspend(creator.pid)
    time.sleep(STALL_S)  # longer than a watch may take, and its answer
    os.kill(creator.pid, signal.SIGCONT)
    writer["open too"] = 1

    assert writer.checkpoint() == 2
    assert writer.wait_for_commit() == 1
    reader = DDict.attach(creator.serialized, timeout=DEADLINE_S)
    assert reader.sync_to_newest_checkpoint() == 1
    assert {key: reader[key] for key in ("open", "open too")} == {"open": 1, "open too": 1}
    writer.detach()


def test_calls_of_a_dictionary_whose_creator_was_killed_say_at_once_that_it_is_gone(creator: Created) -> None:
    d = DDict.attach(creator.serialized, timeout=PATIENT_S)  # by far longer than a test may take
    d.checkpoint_id = 1
    d["key"] = 1
    creator.kill()

    def write_on() -> None:
        while True:  # its managers serve for a moment yet
            d["key"] = 1

    with pytest.raises(DDictDestroyedError):
        write_on()
    for call in (lambda: d["key"], lambda: len(d), d.checkpoint, d.rollback, d.sync_to_newest_checkpoint, d.stats):
        with pytest.raises(DDictDestroyedError):
            call()
    d.detach()


def test_a_creator_that_is_stopped_is_not_taken_for_gone(creator: Created, monkeypatch: pytest.MonkeyPatch) -> None:
    d = DDict.attach(creator.serialized, timeout=DEADLINE_S)
    suspend(creator.pid)
    with monkeypatch.context() as impatient:
        impatient.setattr(links, "GRACE_S", 0.05)
        impatient.setattr(d._access, "timeout_s", 0.1)
        for _ in range(2):
            with pytest.raises((DDictTimeoutError, DDictManagerLostError)):
                _ = d.committed_checkpoint_id
    os.kill(creator.pid, signal.SIGCONT)
    assert d.committed_checkpoint_id == 0


# ---- managers that die, or hang, in the middle of a restore or a rollback --------------------------------------------


@pytest.mark.slow
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


Call = Callable[[DDict], object]


@pytest.mark.slow
@pytest.mark.parametrize("then", [DDict.checkpoint, lambda handle: handle.put("key", 1), DDict.detach])
def test_a_rollback_that_does_not_reach_a_manager_is_finished_before_anything_else(
    then: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DDict(3, 1, 64 << 20, working_set_size=8, timeout=DEADLINE_S) as dictionary:
        keys = keys_of_all(dictionary)
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


@pytest.mark.slow
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
