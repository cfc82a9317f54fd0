"""Requests between clients and managers: what arrives, what is refused, and that nothing waits for ever."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path

import pytest

from ml_flashpoint.ddict.errors import (
    REQUESTS,
    DDictCheckpointRetiredError,
    DDictError,
    DDictKeyError,
    DDictTimeoutError,
)
from ml_flashpoint.format.errors import CapacityError, FlashpointError, InvalidArgumentError
from ml_flashpoint.net import messages
from ml_flashpoint.net.channel import ConnectionLostError
from ml_flashpoint.net.client import Address, Connection, RequestLostError
from ml_flashpoint.net.server import RequestServer
from tests.net.support import DEADLINE_S, SECRET, SLACK_S, Echo, connect, ends_within, raw, serve_requests
from tests.support.forked import Child, wait_until


@pytest.mark.parametrize(
    "sizes", [(), (0,), (1, 0, 3), (65_500, 100), (5 << 20, 0, 7, 6 << 20), tuple([3] * 5000), tuple([1100] * 5000)]
)
def test_a_reply_is_what_was_asked(address: Address, sizes: tuple[int, ...]) -> None:
    blobs = [os.urandom(size) for size in sizes]
    fields = {"text": "ä€\ud800", "number": 1 << 70, "nested": [{"a": None}, 1.5, True]}
    words = memoryview(bytearray(range(240))).cast("I")
    connection = connect(address)
    for _ in range(2):
        reply = connection.request("echo", fields, [*blobs, words], timeout_s=DEADLINE_S)
        assert reply.fields == fields
        assert reply.blobs == [*blobs, bytes(words)]
        assert all(type(blob) is bytes for blob in reply.blobs)
    connection.close()


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


def asking(connection: Connection, raised: list[BaseException]) -> threading.Thread:
    """A thread that waits for an answer, and tells of the error that it gets."""

    def ask() -> None:
        try:
            connection.request("wait", {}, timeout_s=DEADLINE_S)
        except FlashpointError as error:
            raised.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    return thread


def test_close_breaks_a_request_of_another_thread_off_and_its_handler_can_tell(address: Address, echo: Echo) -> None:
    connection, raised = connect(address), list[BaseException]()
    thread = asking(connection, raised)
    assert echo.wait_for(lambda: bool(echo.handled))
    assert not echo.opened[0].is_gone()
    connection.close()
    thread.join(DEADLINE_S)
    assert [type(error) for error in raised] == [RequestLostError]
    wait_until(echo.opened[0].is_gone, "the handler can tell")
    echo.go_on.set()


def test_errors_of_the_handler_are_raised_at_the_client_and_the_connection_goes_on(address: Address) -> None:
    connection = connect(address)
    with pytest.raises(DDictCheckpointRetiredError) as retired:
        connection.request("retired", {}, timeout_s=DEADLINE_S)
    assert (retired.value.checkpoint_id, retired.value.manager, retired.value.hint) == (7, 2, "read a newer one")
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
    with ends_within(0.2 + SLACK_S), pytest.raises(DDictTimeoutError):
        connection.request("wait", {}, timeout_s=0.2)
    assert connection.closed
    with pytest.raises(ConnectionLostError):
        connection.request("echo", {}, timeout_s=DEADLINE_S)
    echo.go_on.set()
    assert echo.wait_for(lambda: echo.closed_sessions == [0])


def test_waiting_for_another_threads_request_ends_at_the_deadline_and_spoils_nothing(
    address: Address, echo: Echo
) -> None:
    connection = connect(address)
    thread = asking(connection, [])
    assert echo.wait_for(lambda: bool(echo.handled))
    with pytest.raises(DDictTimeoutError, match="busy"):
        connection.request("echo", {}, timeout_s=0.05)
    echo.go_on.set()
    thread.join(DEADLINE_S)
    assert connection.request("echo", {"a": 1}, timeout_s=DEADLINE_S).fields == {"a": 1}


def test_a_manager_that_hangs_is_waited_for_until_the_deadline(tmpfs: Path) -> None:
    with Child(serve_requests, str(tmpfs)) as child:
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
    with Child(serve_requests, str(tmpfs)) as child:
        (_, addresses) = child.next_report("addresses")
        idle, raised = [connect(address) for address in addresses], list[BaseException]()
        threads = [asking(connect(address), raised) for address in addresses]
        for _ in threads:
            child.next_report("waits")
        child.kill()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert len(raised) == 2
        assert all(isinstance(error, ConnectionLostError) for error in raised)
        for connection in idle:
            with pytest.raises(ConnectionLostError):
                connection.request("echo", {}, timeout_s=DEADLINE_S)
        for address in addresses:
            with pytest.raises(ConnectionLostError):
                connect(address)


def test_a_forked_child_has_no_connections_and_leaves_the_parents_alone(address: Address, echo: Echo) -> None:
    connection = connect(address)
    thread = asking(connection, [])  # holds what the child cannot wait for
    assert echo.wait_for(lambda: bool(echo.handled))
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
    echo.go_on.set()
    thread.join(DEADLINE_S)
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
