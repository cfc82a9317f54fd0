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
from ml_flashpoint.net.messages import HEAD_BYTES, MessageCode
from ml_flashpoint.net.peer import PeerConnection
from ml_flashpoint.net.reception import MAX_HANDSHAKES, Reception
from ml_flashpoint.net.transfer_service import TransferService
from ml_flashpoint.net.transfers import TRANSFERS
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


def test_a_frame_injected_into_a_session_is_refused() -> None:
    store = MemoryStore({PART: b"x"})
    ping = TRANSFERS.begin_message("ping", {})
    forged = ping + MessageCode(b"guessed key".ljust(32)).next([ping])
    with serving(store) as service:
        channel = channel_to(service)
        channel.send_payload(memoryview(forged))
        with pytest.raises(ConnectionLostError):
            channel.receive(request=False)
        channel.close()


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


def test_a_stranger_costs_no_thread() -> None:
    with serving(handshake_deadline_s=60, deadline_s=60) as service, contextlib.ExitStack() as opened:
        strangers = [opened.enter_context(raw_connection(service)) for _ in range(MAX_HANDSHAKES // 2)]
        with connection_to(service) as peer:
            peer.ping()  # by now it has accepted those before
            names = {thread.name for thread in threading.enumerate()}
        for sock in strangers:
            assert not [name for name in names if name.endswith(f"port {sock.getsockname()[1]}")]


def test_peers_that_come_all_at_once_get_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that read from one holder, say: more than there are places to authenticate in."""
    count = MAX_HANDSHAKES + 60
    at_the_door, opened = threading.Semaphore(0), threading.Event()
    greet, serve = Channel.handshake_as_client, Reception.serve

    def greet_and_tell(*args: object) -> None:
        at_the_door.release()
        greet(*args)  # type: ignore[arg-type]

    def serve_when_all_are_here(reception: Reception) -> None:
        opened.wait()
        serve(reception)

    monkeypatch.setattr(Channel, "handshake_as_client", greet_and_tell)
    monkeypatch.setattr(Reception, "serve", serve_when_all_are_here)

    def come() -> None:
        with connection_to(service, connect_timeout_s=60, deadline_s=60) as peer:
            peer.ping()

    options = {"handshake_deadline_s": 60, "deadline_s": 60, "max_connections": count}
    with serving(**options) as service, ThreadPoolExecutor(count) as pool:
        coming = [pool.submit(come) for _ in range(count)]
        try:
            assert all(at_the_door.acquire(timeout=60) for _ in range(count))
        finally:
            opened.set()
        for each in coming:
            each.result()


def test_a_flood_from_one_host_is_at_its_own_cost() -> None:
    """The handshake of a host that a peer was authenticated from goes on, however many others come after it."""
    with serving(handshake_deadline_s=60, deadline_s=60) as service, contextlib.ExitStack() as opened:
        with connection_to(service) as peer:
            peer.ping()
        known = opened.enter_context(raw_connection(service))
        known.sendall(handshake.greeting(b"c" * 32))
        server_nonce = handshake.parse_greeting(receive_exactly(known, handshake.GREETING_BYTES))
        flood = [
            opened.enter_context(socket.create_connection(service.address, 10, source_address=("127.0.0.2", 0)))
            for _ in range(2 * MAX_HANDSHAKES)
        ]
        assert all(is_hung_up(sock) for sock in flood[:MAX_HANDSHAKES])
        secret = handshake.proved_secret(SECRET, TRANSFERS.purpose)
        known.sendall(handshake.client_proof(secret, b"c" * 32, server_nonce))
        assert receive_exactly(known, handshake.MAC_BYTES) == handshake.server_proof(secret, b"c" * 32, server_nonce)


def test_a_handshake_that_is_dribbled_in_is_dropped() -> None:
    with serving(handshake_deadline_s=0.5, deadline_s=1) as service, raw_connection(service) as sock:
        pause = threading.Event()
        with ends_within(0.5 + SLACK_S), contextlib.suppress(ConnectionError):
            for byte in handshake.greeting(b"c" * 32):  # would take 4 s
                sock.sendall(bytes([byte]))
                pause.wait(0.1)
            pytest.fail("the stranger was not dropped")
