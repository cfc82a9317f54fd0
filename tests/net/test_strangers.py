"""Strangers: whoever does not belong to the job gets nothing, changes nothing, and is in nobody's way.

Every server of this package is a `RequestServer`; the one here speaks the dialect of dictionaries.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ml_flashpoint.ddict.errors import REQUESTS, DDictError
from ml_flashpoint.format.errors import AuthenticationError, FlashpointError, InvalidArgumentError, ProtocolError
from ml_flashpoint.net import client, handshake, messages
from ml_flashpoint.net.channel import Channel, ConnectionLostError
from ml_flashpoint.net.client import Address, Connection
from ml_flashpoint.net.messages import HEAD_BYTES
from ml_flashpoint.net.server import MAX_HANDSHAKES, RequestServer
from ml_flashpoint.net.transfers import TRANSFERS
from tests.net.support import (
    DEADLINE_S,
    SECRET,
    SLACK_S,
    Echo,
    Proxy,
    connect,
    ends_within,
    impostor,
    is_hung_up,
    last_words,
    raw,
    receive_exactly,
)
from tests.support.forked import wait_until


def echoes(address: Address) -> bool:
    """Whether a client of the job is served."""
    with contextlib.closing(connect(address)) as connection:
        return connection.request("echo", {"a": 1}, [b"x"], timeout_s=DEADLINE_S) == ({"a": 1}, [b"x"])


def channel_to(address: Address) -> Channel:
    return client.connect(address, SECRET, REQUESTS, within_s=DEADLINE_S, stall_s=DEADLINE_S)


@contextlib.contextmanager
def listening(echo: Echo, **options: Any) -> Iterator[Address]:
    with RequestServer(SECRET, echo, REQUESTS, tcp_host="127.0.0.1", **options) as server:
        yield server.addresses[0]


# ---- without the secret -----------------------------------------------------------------------------------------


def test_another_secret_or_the_same_for_another_purpose_is_refused(address: Address, echo: Echo) -> None:
    with pytest.raises(AuthenticationError, match="secret"):
        connect(address, b"another secret!!")
    with pytest.raises(AuthenticationError, match="another purpose"):
        Connection(address, SECRET, TRANSFERS, connect_timeout_s=DEADLINE_S)
    assert echo.opened == []


def test_a_server_must_prove_the_secret_too() -> None:
    def reflecting(sock: socket.socket) -> None:
        sock.sendall(receive_exactly(sock, handshake.GREETING_BYTES))
        sock.sendall(receive_exactly(sock, handshake.MAC_BYTES))

    def guessing(sock: socket.socket) -> None:
        receive_exactly(sock, handshake.GREETING_BYTES)
        sock.sendall(handshake.greeting(b"s" * 32))
        receive_exactly(sock, handshake.MAC_BYTES)
        sock.sendall(b"\1" * handshake.MAC_BYTES)

    def another(sock: socket.socket) -> None:
        sock.sendall(b"220 something else listens here" + bytes(40))

    answers: tuple[tuple[Callable[[socket.socket], None], type[FlashpointError]], ...] = (
        (reflecting, AuthenticationError),
        (guessing, AuthenticationError),
        (another, ProtocolError),
    )
    for answer, error in answers:
        with impostor(answer) as (host, port), pytest.raises(error):
            connect(("tcp", host, port))


def test_nothing_is_proved_to_a_stranger_whatever_it_says(address: Address, echo: Echo) -> None:
    """Neither to one that guesses, nor to one that reflects, nor to one that has listened."""
    spoken = bytearray()
    if address[0] == "tcp":
        with Proxy(address[1:]) as proxy:  # type: ignore[arg-type]
            assert echoes(("tcp", *proxy.address))
            spoken = proxy.recorded
        assert echo.wait_for(lambda: echo.closed_sessions == [0])
    opened = len(echo.opened)
    hello = handshake.greeting(b"c" * 32)
    sayings: list[Callable[[bytes], bytes]] = [
        lambda nonce: hmac.digest(b"guess", nonce, "sha256"),
        lambda nonce: handshake.client_proof(SECRET, b"c" * 32, nonce),  # of no purpose
        lambda nonce: handshake.server_proof(SECRET, b"c" * 32, nonce),
        lambda nonce: handshake.greeting(nonce),
        lambda nonce: bytes(spoken[handshake.GREETING_BYTES :]) or os.urandom(100),
    ]
    for say in sayings:
        with raw(address) as sock:
            sock.sendall(bytes(spoken[: handshake.GREETING_BYTES]) or hello)
            sock.sendall(say(handshake.parse_greeting(receive_exactly(sock, handshake.GREETING_BYTES))))
            assert last_words(sock) in (b"", handshake.REFUSED)
    assert len(echo.opened) == opened


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_another_user_is_refused_although_it_knows_the_secret(server: RequestServer, echo: Echo, tmpfs: Path) -> None:
    os.chmod(tmpfs, 0o755)
    os.chmod(tmpfs / "s", 0o666)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setresuid(65534, 65534, 65534)
            with raw(server.addresses[0]) as sock:
                channel = Channel(sock, REQUESTS, peer="the server", stall_s=DEADLINE_S)
                channel.handshake_as_client(SECRET, time.monotonic() + DEADLINE_S)
        except ConnectionLostError:
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert echo.opened == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to listen as another user")
def test_a_server_of_another_user_is_refused_whatever_it_knows() -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0flashpoint-test-{secrets.token_hex(8)}")
        os.seteuid(65534)
        try:
            listener.listen()
        finally:
            os.seteuid(0)
        with pytest.raises(AuthenticationError, match="runs as user 65534"):
            connect(("unix", os.fsdecode(listener.getsockname())))


# ---- in nobody's way --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_strangers_are_dropped_in_time_and_logged_sparingly(echo: Echo, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with listening(echo, handshake_deadline_s=1) as address, contextlib.ExitStack() as opened:
        said = (b"", handshake.greeting(b"n" * 32), *[b"GET / HTTP/1.1\r\n\r\n" + bytes(40)] * 10)
        strangers = [opened.enter_context(raw(address)) for _ in said]
        for sock, words in zip(strangers, said, strict=True):
            sock.sendall(words)
        assert echoes(address)
        assert all(is_hung_up(sock) for sock in strangers)
        with raw(address) as sock, ends_within(1 + SLACK_S), contextlib.suppress(ConnectionError):
            for byte in handshake.greeting(b"c" * 32):  # would take 8 s
                sock.sendall(bytes([byte]))
                threading.Event().wait(0.2)
            pytest.fail("the stranger was not dropped")
    assert len(echo.opened) == 1
    assert len(caplog.records) == 1


@pytest.mark.slow
def test_silent_strangers_lock_nobody_out(echo: Echo) -> None:
    with listening(echo, handshake_deadline_s=60) as address, contextlib.ExitStack() as opened:
        strangers = [opened.enter_context(raw(address)) for _ in range(2 * MAX_HANDSHAKES)]
        assert echoes(address)
        assert all(is_hung_up(sock) for sock in strangers[:MAX_HANDSHAKES])


@pytest.mark.slow
def test_peers_that_come_all_at_once_get_in(echo: Echo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that read from one holder, say: more than there are places to authenticate in."""
    count = MAX_HANDSHAKES + 60
    at_the_door = threading.Barrier(count)
    greet = Channel.handshake_as_client

    def greet_together(*args: object) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):  # those who come again do not wait
            at_the_door.wait(60)
        at_the_door.abort()
        greet(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(Channel, "handshake_as_client", greet_together)
    with listening(echo, handshake_deadline_s=60, max_connections=count) as address, ThreadPoolExecutor(count) as pool:

        def come(_: int) -> bool:
            with contextlib.closing(Connection(address, SECRET, REQUESTS, connect_timeout_s=60)) as connection:
                return connection.request("echo", {}, timeout_s=60).fields == {}

        assert all(pool.map(come, range(count)))


def test_more_connections_than_allowed_are_told_so(echo: Echo) -> None:
    with listening(echo, max_connections=2) as address:
        kept = [connect(address) for _ in range(2)]
        for connection in kept:
            connection.request("echo", {}, timeout_s=DEADLINE_S)
        with pytest.raises(DDictError, match="as many connections"):
            connect(address).request("echo", {}, timeout_s=DEADLINE_S)
        kept.pop().close()
        assert echo.wait_for(lambda: len(echo.closed_sessions) == 1)

        def gets_in() -> bool:  # the place is free a moment after the session was closed
            with contextlib.suppress(FlashpointError):
                return echoes(address)
            return False

        wait_until(gets_in, "there is a place again")


# ---- with the secret, and nonsense ------------------------------------------------------------------------------


def _head(text: int, blobs: int, magic: bytes = b"MLFm", payload: int = 0) -> bytes:
    return struct.pack(">4sIIQ", magic, text, blobs, payload)


NONSENSE = [
    _head(8, 0, b"MLFd") + b'["a",{}]',
    _head(messages.JSON_BYTES + 1, 0),
    _head(2, messages.BLOBS + 1),
    _head(2, 1) + struct.pack(">I", messages.BLOB_BYTES + 1) + b"{}",
    _head(2, 0) + b"{}",
    _head(5, 0) + b"[1,2]",
    _head(8, 0) + b'["a",[]]',
    _head(9, 0) + b"[null,{}]",
    _head(4, 0) + b"\xff\xfe\xff\xfe",
    _head(20000, 0) + b"[" * 20000,
    _head(8, 0) + b'["a",{}]' + b"more",
    _head(8, 0, payload=1 << 63) + b'["a",{}]',
    _head(8, 0, payload=3) + b'["a",{}]',
    _head(8, 0, payload=3) + b'["a",{}]' + b"more",
]


def test_what_is_no_request_ends_the_connection_and_nothing_else(address: Address, echo: Echo) -> None:
    for sent in NONSENSE:
        with contextlib.closing(channel_to(address)) as channel:
            channel.send_payload(memoryview(sent))
            with pytest.raises(ConnectionLostError):
                channel.receive(request=False)
    assert echo.wait_for(lambda: len(echo.closed_sessions) == len(NONSENSE))
    assert echo.handled == []
    assert echoes(address)


def test_a_request_that_breaks_off_is_not_carried_out(address: Address, echo: Echo) -> None:
    channel = channel_to(address)
    channel.send_payload(memoryview(_head(20, 1) + struct.pack(">I", 1 << 20) + b'["put",{}]' + bytes(5000)))
    channel.close()
    assert echo.wait_for(lambda: echo.closed_sessions == [0])
    assert echo.handled == []


@pytest.fixture(scope="module")
def lasting() -> Iterator[Address]:
    """One server for all examples: it must get over every one of them."""
    with listening(Echo()) as address:
        yield address


@settings(max_examples=40)
@example(garbage=b"MLFm", greeted=False, authenticated=True)
@given(garbage=st.binary(min_size=1, max_size=300), greeted=st.booleans(), authenticated=st.booleans())
def test_garbage_is_dropped_and_never_kills_the_service(
    lasting: Address, garbage: bytes, greeted: bool, authenticated: bool
) -> None:
    if authenticated:
        with contextlib.closing(channel_to(lasting)) as channel:
            # What begins as a message does must not be awaited to its end: no message is as long as this one says.
            channel.send_payload(memoryview(garbage + b"\xff" * HEAD_BYTES))
            with pytest.raises(ConnectionLostError):
                channel.receive(request=False)
    else:
        with raw(lasting) as sock:
            greeting = handshake.greeting(b"c" * 32) if greeted else b""
            sock.sendall(greeting + garbage.ljust(handshake.GREETING_BYTES, b"\0"))
            if greeted:
                receive_exactly(sock, handshake.GREETING_BYTES)
            assert last_words(sock) in (b"", handshake.REFUSED)
    assert echoes(lasting)


# ---- processes and arguments ------------------------------------------------------------------------------------


def test_a_forked_child_does_not_serve_and_takes_nothing_along(server: RequestServer) -> None:
    ask, answer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            server.close()
            os.close(answer)
            os.read(ask, 1)  # until the parent is done
        finally:
            os._exit(0)
    try:
        assert echoes(server.addresses[0])
        _, _, port = server.addresses[1]  # type: ignore[misc]
        server.close()
        with listening(Echo(), tcp_port=port) as again:
            assert echoes(again)
    finally:
        os.close(answer)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_addresses_and_secrets_are_checked(tmpfs: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="107"):
        RequestServer(SECRET, Echo(), REQUESTS, unix_path=str(tmpfs / ("x" * 108)))
    with pytest.raises(InvalidArgumentError, match="nothing to listen on"):
        RequestServer(SECRET, Echo(), REQUESTS)
    with pytest.raises(InvalidArgumentError, match="secret"):
        RequestServer(b"short", Echo(), REQUESTS, unix_path=str(tmpfs / "s"))
    for address in (("unix",), ("tcp", "x"), ("udp", "x", 1), ("unix", "x" * 108)):
        with pytest.raises(InvalidArgumentError, match="address"):
            Connection(address, SECRET, REQUESTS, connect_timeout_s=1)  # type: ignore[arg-type]
    with pytest.raises(ConnectionLostError):
        connect(("unix", str(tmpfs / "none")))
