"""Requests between clients and managers: what arrives, what is refused, and that nothing waits for ever."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ml_flashpoint.ddict.errors import (
    REQUESTS,
    DDictCheckpointRetiredError,
    DDictError,
    DDictKeyError,
    DDictTimeoutError,
)
from ml_flashpoint.format.errors import (
    CapacityError,
    FlashpointError,
    InvalidArgumentError,
    ProtocolError,
)
from ml_flashpoint.net import messages
from ml_flashpoint.net.channel import ConnectionLostError
from ml_flashpoint.net.client import Address, Connection, RequestLostError
from ml_flashpoint.net.server import RequestServer
from tests.net import requests_support
from tests.net.requests_support import (
    DEADLINE_S,
    SECRET,
    Echo,
    connect,
    is_hung_up,
    raw,
)
from tests.support import forked
from tests.support.forked import Child

forked.preload("tests.net.requests_support")


@pytest.mark.parametrize(
    "sizes",
    [
        (),
        (0,),
        (1, 0, 3),
        (1000,),
        (65_536,),
        (65_500, 100),
        (300_000, 5, 0),
        (5 << 20, 0, 7, 6 << 20),
        tuple([3] * 5000),
        tuple([1100] * 5000),
    ],
)
def test_a_reply_is_what_was_asked(address: Address, sizes: tuple[int, ...]) -> None:
    blobs = [os.urandom(size) for size in sizes]
    fields = {"text": "ä€\ud800", "number": 1 << 70, "nested": [{"a": None}, 1.5, True]}
    connection = connect(address)
    for _ in range(2):
        reply = connection.request("echo", fields, blobs, timeout_s=DEADLINE_S)
        assert reply.fields == fields
        assert reply.blobs == blobs
        assert all(type(blob) is bytes for blob in reply.blobs)
    connection.close()


def test_blobs_may_be_any_buffer(address: Address) -> None:
    words = memoryview(bytearray(range(240))).cast("I")
    reply = connect(address).request("echo", {}, [words, bytearray(b"x"), b"y"], timeout_s=DEADLINE_S)
    assert reply.blobs == [bytes(words), b"x", b"y"]


def test_many_threads_share_a_connection_and_many_have_their_own(address: Address, echo: Echo) -> None:
    shared = connect(address)
    wrong = []

    def ask(number: int, connection: Connection) -> None:
        for i in range(30):
            blob = f"{number} {i}".encode() * (1 + 3000 * (i % 3))
            if connection.request("echo", {"n": number}, [blob], timeout_s=DEADLINE_S) != ({"n": number}, [blob]):
                wrong.append(number)

    threads = [threading.Thread(target=ask, args=(n, shared if n % 2 else connect(address))) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)
    assert len(echo.handled) == 12 * 30
    assert len(echo.opened) == 7


def test_a_session_is_closed_once_when_its_connection_is_gone(address: Address, echo: Echo) -> None:
    first = connect(address)
    first.request("echo", {}, timeout_s=DEADLINE_S)  # a session begins some time after its connection
    second = connect(address)
    second.request("echo", {}, timeout_s=DEADLINE_S)
    first.close()
    assert echo.wait_for(lambda: echo.closed_sessions == [0])
    second.close()
    assert echo.wait_for(lambda: echo.closed_sessions == [0, 1])
    if address[0] == "unix":
        assert {peer.text for peer in echo.opened} == {f"process {os.getpid()}"}


def test_a_handler_can_tell_that_nobody_waits_any_more(address: Address, echo: Echo) -> None:
    connection = connect(address)
    thread = threading.Thread(target=_ask_in_vain, args=(connection,))
    thread.start()
    assert echo.wait_for(lambda: bool(echo.handled))
    assert not echo.opened[0].is_gone()
    connection.close()
    thread.join(DEADLINE_S)
    give_up = time.monotonic() + DEADLINE_S
    while not echo.opened[0].is_gone():
        assert time.monotonic() < give_up
    echo.go_on.set()


def _ask_in_vain(connection: Connection) -> None:
    with pytest.raises(RequestLostError):
        connection.request("wait", {}, timeout_s=DEADLINE_S)


def test_errors_of_the_handler_are_raised_at_the_client_and_the_connection_goes_on(address: Address) -> None:
    connection = connect(address)
    with pytest.raises(DDictCheckpointRetiredError) as retired:
        connection.request("retired", {}, timeout_s=DEADLINE_S)
    assert (retired.value.checkpoint_id, retired.value.manager, retired.value.hint) == (7, 2, "read a newer one")
    with pytest.raises(KeyError):
        connection.request("no key", {}, timeout_s=DEADLINE_S)
    with pytest.raises(CapacityError) as full:
        connection.request("full", {}, timeout_s=DEADLINE_S)
    assert (full.value.needed_bytes, full.value.available_bytes) == (10, 3)
    with pytest.raises(InvalidArgumentError) as bad:
        connection.request("bad argument", {}, timeout_s=DEADLINE_S)
    assert (bad.value.argument, bad.value.value) == ("timeout", "-1")
    with pytest.raises(DDictKeyError) as own:
        connection.request("own error", {}, timeout_s=DEADLINE_S)
    assert type(own.value) is DDictKeyError
    with pytest.raises(DDictError, match="ZeroDivisionError: a bug"):
        connection.request("bug", {}, timeout_s=DEADLINE_S)
    with pytest.raises(InvalidArgumentError, match="cannot be sent"):
        connection.request("not json", {}, timeout_s=DEADLINE_S)
    assert connection.request("echo", {"a": 1}, timeout_s=DEADLINE_S).fields == {"a": 1}


@pytest.mark.parametrize(
    "described",
    [
        {},
        {"error": "SystemExit", "message": "x"},
        {"error": 5, "message": ["x"]},
        {"error": "DDictKeyError", "message": "x", "__class__": "y", "manager": [1], "args": "z"},
    ],
)
def test_an_error_from_elsewhere_is_only_ever_one_of_ours(described: dict[str, object]) -> None:
    error = REQUESTS.rebuild(described)
    assert isinstance(error, DDictError)
    assert error.manager is None


def test_what_cannot_be_sent_is_refused_and_nothing_is_lost(address: Address) -> None:
    connection = connect(address)
    with pytest.raises(InvalidArgumentError, match="cannot be sent"):
        connection.request("echo", {"x": object()}, timeout_s=DEADLINE_S)
    with pytest.raises(InvalidArgumentError, match="blobs"):
        connection.request("echo", {}, [b""] * (messages.BLOBS + 1), timeout_s=DEADLINE_S)
    with pytest.raises(InvalidArgumentError, match="fields"):
        connection.request("echo", {"x": "a" * messages.JSON_BYTES}, timeout_s=DEADLINE_S)
    assert connection.request("echo", {}, [b"x"], timeout_s=DEADLINE_S).blobs == [b"x"]


def test_a_request_ends_at_its_deadline(address: Address, echo: Echo) -> None:
    connection = connect(address)
    began = time.monotonic()
    with pytest.raises(DDictTimeoutError):
        connection.request("wait", {}, timeout_s=0.2)
    assert 0.19 < time.monotonic() - began < 15
    assert connection.closed
    with pytest.raises(ConnectionLostError):
        connection.request("echo", {}, timeout_s=DEADLINE_S)
    echo.go_on.set()
    assert echo.wait_for(lambda: echo.closed_sessions == [0])


def test_waiting_for_another_threads_request_ends_at_the_deadline_and_spoils_nothing(
    address: Address, echo: Echo
) -> None:
    connection = connect(address)
    thread = threading.Thread(target=lambda: connection.request("wait", {}, timeout_s=DEADLINE_S))
    thread.start()
    assert echo.wait_for(lambda: bool(echo.handled))
    with pytest.raises(DDictTimeoutError, match="busy"):
        connection.request("echo", {}, timeout_s=0.05)
    echo.go_on.set()
    thread.join(DEADLINE_S)
    assert connection.request("echo", {"a": 1}, timeout_s=DEADLINE_S).fields == {"a": 1}


def test_close_breaks_a_request_of_another_thread_off(address: Address, echo: Echo) -> None:
    connection = connect(address)
    raised: list[BaseException] = []

    def ask() -> None:
        try:
            connection.request("wait", {}, timeout_s=DEADLINE_S)
        except FlashpointError as error:
            raised.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    assert echo.wait_for(lambda: bool(echo.handled))
    connection.close()
    thread.join(DEADLINE_S)
    assert [type(error) for error in raised] == [RequestLostError]
    echo.go_on.set()


def test_a_manager_that_hangs_is_waited_for_until_the_deadline(tmpfs: Path) -> None:
    with Child(requests_support.serve, str(tmpfs)) as child:
        (_, addresses) = child.next_report("addresses")
        connections = [connect(address) for address in addresses]
        child.stop()
        for connection in connections:
            with pytest.raises(DDictTimeoutError):
                connection.request("echo", {}, [bytes(8 << 20)], timeout_s=0.2)
        for address in addresses:
            with pytest.raises(DDictTimeoutError):
                Connection(address, SECRET, REQUESTS, connect_timeout_s=0.2)


def test_a_killed_manager_is_noticed_at_once(tmpfs: Path) -> None:
    with Child(requests_support.serve, str(tmpfs)) as child:
        (_, addresses) = child.next_report("addresses")
        waiting = [connect(address) for address in addresses]
        idle = [connect(address) for address in addresses]
        raised: list[BaseException] = []

        def ask(connection: Connection) -> None:
            try:
                connection.request("wait", {}, timeout_s=DEADLINE_S)
            except FlashpointError as error:
                raised.append(error)

        threads = [threading.Thread(target=ask, args=(connection,)) for connection in waiting]
        for thread in threads:
            thread.start()
        while not all(connection._lock.locked() for connection in waiting):
            time.sleep(0.001)
        child.kill()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert all(isinstance(error, ConnectionLostError) for error in raised)
        assert len(raised) == 2
        for connection in idle:
            with pytest.raises(ConnectionLostError):
                connection.request("echo", {}, timeout_s=DEADLINE_S)
        for address in addresses:
            with pytest.raises(ConnectionLostError):
                connect(address)


def test_a_forked_child_has_no_connections_and_leaves_the_parents_alone(address: Address, echo: Echo) -> None:
    connection = connect(address)
    connection.request("echo", {}, timeout_s=DEADLINE_S)
    with connection._lock:  # held by another thread, for all that the child knows
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                connection.request("echo", {}, timeout_s=1)
            except ConnectionLostError:
                own = connect(address)
                status = 0 if own.request("echo", {"a": 2}, timeout_s=DEADLINE_S).fields == {"a": 2} else 2
            finally:
                os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert connection.request("echo", {"a": 1}, timeout_s=DEADLINE_S).fields == {"a": 1}
    assert echo.wait_for(lambda: echo.closed_sessions == [1])


def test_close_ends_everything_and_takes_the_path_away(echo: Echo, tmpfs: Path) -> None:
    server = RequestServer(SECRET, echo, REQUESTS, unix_path=str(tmpfs / "s"), tcp_host="127.0.0.1")
    connections = [connect(address) for address in server.addresses]
    for connection in connections:
        connection.request("echo", {}, timeout_s=DEADLINE_S)
    server.close()
    server.close()
    assert not (tmpfs / "s").exists()
    assert echo.wait_for(lambda: sorted(echo.closed_sessions) == [0, 1])
    for connection in connections:
        with pytest.raises(ConnectionLostError):
            connection.request("echo", {}, timeout_s=DEADLINE_S)
    with RequestServer(SECRET, echo, REQUESTS, unix_path=str(tmpfs / "s")) as again:
        server.close()
        assert connect(again.addresses[0]).request("echo", {}, timeout_s=DEADLINE_S).fields == {}


def test_a_server_that_is_slow_to_accept_is_waited_for(tmpfs: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmpfs / "s"))
    listener.listen(0)
    before_us = raw(("unix", str(tmpfs / "s")))  # fills the queue
    began = time.monotonic()
    with pytest.raises(DDictTimeoutError, match="no connection"):
        Connection(("unix", str(tmpfs / "s")), SECRET, REQUESTS, connect_timeout_s=0.3)
    assert time.monotonic() - began > 0.29
    before_us.close()
    listener.close()


def test_something_else_at_the_address_is_told(tmpfs: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmpfs / "s"))
    listener.listen()
    listener.settimeout(DEADLINE_S)

    def pretend() -> None:
        sock, _ = listener.accept()
        sock.sendall(b"220 something else listens here" + bytes(40))
        assert is_hung_up(sock)

    thread = threading.Thread(target=pretend)
    thread.start()
    with pytest.raises(ProtocolError):
        connect(("unix", str(tmpfs / "s")))
    thread.join(DEADLINE_S)
    listener.close()


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(text=st.binary() | _JSON.map(lambda value: json.dumps(value).encode()), request=st.booleans())
def test_any_text_is_a_message_or_a_typed_error(text: bytes, request: bool) -> None:
    try:
        subject, fields = messages.parse_text(text, request=request)
    except ProtocolError:
        return
    assert isinstance(subject, str) if request else subject is None or isinstance(subject, dict)
    assert isinstance(fields, dict)


@given(st.dictionaries(st.sampled_from(["error", "message", "manager", "path", "value", "hint", "x"]), _JSON))
@example({"message": ""})
def test_any_description_is_an_error(described: dict[str, object]) -> None:
    error = REQUESTS.rebuild(described)
    assert isinstance(error, FlashpointError)
    assert str(error)
    assert type(REQUESTS.rebuild(REQUESTS.describe(error))) is type(error)
