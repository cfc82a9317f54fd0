"""Strangers: whoever does not know the job's secret gets nothing, changes nothing, and is in nobody's way."""

from __future__ import annotations

import contextlib
import hmac
import logging
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ml_flashpoint.format.errors import (
    AuthenticationError,
)
from ml_flashpoint.net import handshake
from ml_flashpoint.net.channel import Channel, ConnectionLostError
from ml_flashpoint.net.messages import HEAD_BYTES
from ml_flashpoint.net.server import MAX_HANDSHAKES
from ml_flashpoint.net.transfers import PeerConnection, TransferService
from tests.net.transfer_support import (
    PART,
    SECRET,
    SLACK_S,
    MemoryStore,
    Proxy,
    channel_to,
    connection_to,
    ends_within,
    impostor,
    is_hung_up,
    push,
    raw_connection,
    receive_exactly,
    serving,
)

# --- Strangers ----------------------------------------------------------------------------------------------


def test_peers_with_another_secret_get_and_give_nothing() -> None:
    store = MemoryStore({PART: b"x"}, manifests={PART: b"m"})
    with serving(store) as service:
        for _ in range(3):
            with (
                pytest.raises(AuthenticationError) as caught,
                connection_to(service, b"another secret!!") as peer,
            ):
                peer.ping()
            assert caught.value.node == "n2"
            assert "secret" in str(caught.value)
    assert store.calls == []


def test_a_server_must_prove_the_secret_too() -> None:
    def reflecting(sock: socket.socket) -> None:
        sock.sendall(receive_exactly(sock, handshake.GREETING_BYTES))
        sock.sendall(receive_exactly(sock, handshake.MAC_BYTES))

    def guessing(sock: socket.socket) -> None:
        receive_exactly(sock, handshake.GREETING_BYTES)
        sock.sendall(handshake.greeting(b"s" * 32))
        receive_exactly(sock, handshake.MAC_BYTES)
        sock.sendall(b"\1" * handshake.MAC_BYTES)

    for answer in (reflecting, guessing):
        with impostor(answer) as address, pytest.raises(AuthenticationError, match="does not know"):
            PeerConnection(address, SECRET).ping()


def test_a_server_does_not_prove_anything_to_a_client_that_reflects_its_nonce() -> None:
    with serving() as service, raw_connection(service) as sock:
        sock.sendall(handshake.greeting(b"c" * 32))
        server_nonce = handshake.parse_greeting(receive_exactly(sock, handshake.GREETING_BYTES))
        sock.sendall(hmac.digest(b"guess", server_nonce, "sha256"))
        assert is_hung_up(sock)


def test_a_recorded_session_cannot_be_replayed() -> None:
    store = MemoryStore()
    with serving(store) as service:
        with Proxy(service.address) as proxy:
            with PeerConnection(proxy.address, SECRET) as peer:
                push(peer, b"x" * 1000)
            recorded = bytes(proxy.recorded)
        assert len(store.committed) == 1
        with raw_connection(service) as sock:
            sock.sendall(recorded)
            assert len(receive_exactly(sock, handshake.GREETING_BYTES)) == handshake.GREETING_BYTES
            assert is_hung_up(sock)
    assert store.calls == [f"receive {PART}"]


@settings(max_examples=40)
@example(garbage=b"MLFm", greeted=False, authenticated=True)
@given(garbage=st.binary(min_size=1, max_size=300), greeted=st.booleans(), authenticated=st.booleans())
def test_garbage_is_dropped_and_never_kills_the_service(garbage: bytes, greeted: bool, authenticated: bool) -> None:
    service = GARBAGE_SERVICE.service
    if authenticated:
        channel = channel_to(service)
        # What begins as a message does must not be awaited to its end: no message is as long as this one says.
        channel.send_payload(memoryview(garbage + b"\xff" * HEAD_BYTES))
        with pytest.raises(ConnectionLostError):
            channel.receive(request=False)
        channel.close()
    else:
        with raw_connection(service) as sock:
            greeting = handshake.greeting(b"c" * 32) if greeted else b""
            sock.sendall(greeting + garbage.ljust(handshake.GREETING_BYTES, b"\0"))
            if greeted:
                receive_exactly(sock, handshake.GREETING_BYTES)
            assert is_hung_up(sock)
    with connection_to(service) as peer:
        peer.ping()
    assert GARBAGE_SERVICE.store.calls == []


class _GarbageService:
    """One service for all examples: it must get over every one of them."""

    store = MemoryStore()
    service: TransferService


GARBAGE_SERVICE = _GarbageService()


@pytest.fixture(autouse=True, scope="module")
def _garbage_service() -> Iterator[None]:
    with serving(GARBAGE_SERVICE.store) as GARBAGE_SERVICE.service:
        yield


def test_strangers_are_logged_sparingly(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with serving() as service:
        for _ in range(20):
            with raw_connection(service) as sock:
                sock.sendall(b"?" * handshake.GREETING_BYTES)
                assert is_hung_up(sock)
    assert len(caplog.records) == 1
    assert "another protocol" in caplog.text


def test_silent_strangers_are_dropped_and_lock_nobody_out() -> None:
    with serving(handshake_deadline_s=60, deadline_s=60) as service, contextlib.ExitStack() as opened:
        strangers = [opened.enter_context(raw_connection(service)) for _ in range(2 * MAX_HANDSHAKES)]
        with connection_to(service) as peer:
            peer.ping()
        assert all(is_hung_up(sock) for sock in strangers[:MAX_HANDSHAKES])
    with (
        serving(handshake_deadline_s=0.2, deadline_s=1) as service,
        raw_connection(service) as sock,
        ends_within(0.2 + SLACK_S),
    ):
        assert is_hung_up(sock)


def test_peers_that_come_all_at_once_get_in(monkeypatch: pytest.MonkeyPatch) -> None:
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

    def come() -> None:
        with connection_to(service, connect_timeout_s=60, deadline_s=60) as peer:
            peer.ping()

    options = {"handshake_deadline_s": 60, "deadline_s": 60, "max_connections": count}
    with serving(**options) as service, ThreadPoolExecutor(count) as pool:
        for each in [pool.submit(come) for _ in range(count)]:
            each.result()


def test_a_handshake_that_is_dribbled_in_is_dropped() -> None:
    with serving(handshake_deadline_s=0.5, deadline_s=1) as service, raw_connection(service) as sock:
        pause = threading.Event()
        with ends_within(0.5 + SLACK_S), contextlib.suppress(ConnectionError):
            for byte in handshake.greeting(b"c" * 32):  # would take 4 s
                sock.sendall(bytes([byte]))
                pause.wait(0.1)
            pytest.fail("the stranger was not dropped")
