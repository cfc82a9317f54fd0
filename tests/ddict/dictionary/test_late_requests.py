"""Requests that arrive late: what a handle has given up changes nothing once it has been answered something later.

The network is played: a request is kept on its way, while the handle hears that the connection broke, and arrives when
the test says so. Managers and coordinator are real.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ml_flashpoint.ddict import DDict, PosixCheckpointPersister
from ml_flashpoint.ddict.errors import DDictTimeoutError
from ml_flashpoint.ddict.links import Links
from ml_flashpoint.ddict.options import COORDINATOR
from ml_flashpoint.ddict.wire.requests import decode
from ml_flashpoint.format.errors import FlashpointError
from ml_flashpoint.net.client import Connection, Reply, RequestLostError
from tests.ddict.dictionary.support import Make
from tests.support.dictionaries import DEADLINE_S


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


def key_of(dictionary: DDict) -> str:
    return next(key for key in map(str, range(100)) if dictionary.which_manager(key) == 0)


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


def test_a_late_write_does_not_return_after_a_sync(d: DDict, network: Network) -> None:
    key = key_of(d)
    d[key] = 0
    d.checkpoint()
    with network.losing("put"), pytest.raises(DDictTimeoutError):
        d[key] = "old"
    d.sync_to_newest_checkpoint()
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
