"""Requests between clients and managers: whoever does not belong there, and limits."""

from __future__ import annotations

import os
import socket
import struct
import time
from pathlib import Path

import pytest

from ml_flashpoint.ddict.errors import REQUESTS, DDictError
from ml_flashpoint.format.errors import (
    AuthenticationError,
    FlashpointError,
    InvalidArgumentError,
)
from ml_flashpoint.net import handshake, messages
from ml_flashpoint.net.channel import Channel, ConnectionLostError
from ml_flashpoint.net.client import Address, Connection
from ml_flashpoint.net.server import RequestServer
from ml_flashpoint.net.transfers import TRANSFERS
from tests.net.requests_support import (
    DEADLINE_S,
    SECRET,
    Echo,
    connect,
    impostor_greeting,
    is_hung_up,
    raw,
)
from tests.support import forked

forked.preload("tests.net.requests_support")


def test_a_transfer_services_proof_is_no_proof_here(address: Address, echo: Echo) -> None:
    # The same secret, but another purpose, or none: neither can be taken for the other.
    with pytest.raises(AuthenticationError, match="another purpose"):
        Connection(address, SECRET, TRANSFERS, connect_timeout_s=DEADLINE_S)
    with raw(address) as sock:
        nonce = b"c" * handshake.NONCE_BYTES
        sock.sendall(handshake.greeting(nonce))
        server_nonce = handshake.parse_greeting(sock.recv(handshake.GREETING_BYTES, socket.MSG_WAITALL))
        sock.sendall(handshake.client_proof(SECRET, nonce, server_nonce))
        assert is_hung_up(sock)
    assert echo.opened == []


@pytest.mark.slow
def test_strangers_are_dropped_in_time_and_are_in_nobodys_way(echo: Echo, tmpfs: Path) -> None:
    said = (b"", b"GET / HTTP/1.1\r\n\r\n" + bytes(40), impostor_greeting(), os.urandom(4096))
    with RequestServer(
        SECRET, echo, REQUESTS, unix_path=str(tmpfs / "s"), tcp_host="127.0.0.1", handshake_deadline_s=3
    ) as server:
        strangers = []
        for address in server.addresses:
            for words in said:
                strangers.append(raw(address))
                strangers[-1].sendall(words)
        for address in server.addresses:
            assert connect(address).request("echo", {}, [b"x"], timeout_s=DEADLINE_S).blobs == [b"x"]
        assert all(is_hung_up(sock) for sock in strangers)
        for sock in strangers:
            sock.close()
    assert len(echo.opened) == 2


def _greeted(address: Address) -> tuple[socket.socket, Channel]:
    sock = raw(address)
    spoken = Channel(sock, REQUESTS, peer="test")
    spoken.handshake_as_client(SECRET, time.monotonic() + DEADLINE_S)
    return sock, spoken


def _head(text: int, blobs: int, magic: bytes = b"MLFm", payload: int = 0) -> bytes:
    return struct.pack(">4sIIQ", magic, text, blobs, payload)


@pytest.mark.parametrize(
    "sent",
    [
        _head(10, 0, b"XXXX") + bytes(20),
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
    ],
)
def test_what_is_no_request_ends_the_connection_and_nothing_else(address: Address, echo: Echo, sent: bytes) -> None:
    sock, _ = _greeted(address)
    sock.sendall(sent)
    assert is_hung_up(sock)
    assert echo.handled == []
    assert echo.wait_for(lambda: echo.closed_sessions == [0])
    assert connect(address).request("echo", {}, timeout_s=DEADLINE_S).fields == {}
    sock.close()


def test_a_request_that_breaks_off_is_not_carried_out(address: Address, echo: Echo) -> None:
    sock, _ = _greeted(address)
    sock.sendall(_head(20, 1) + struct.pack(">I", 1 << 20) + b'["put",{}]' + bytes(5000))
    sock.close()
    assert echo.wait_for(lambda: echo.closed_sessions == [0])
    assert echo.handled == []


def test_a_forked_child_does_not_serve_and_takes_nothing_along(server: RequestServer, tmpfs: Path) -> None:
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
        assert connect(server.addresses[0]).request("echo", {"a": 1}, timeout_s=DEADLINE_S).fields == {"a": 1}
        _, _, port = server.addresses[1]  # type: ignore[misc]
        server.close()
        with RequestServer(SECRET, Echo(), REQUESTS, tcp_host="127.0.0.1", tcp_port=port) as again:
            assert connect(again.addresses[0]).request("echo", {"a": 2}, timeout_s=DEADLINE_S).fields == {"a": 2}
    finally:
        os.close(answer)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_more_connections_than_allowed_are_told_so(echo: Echo, tmpfs: Path) -> None:
    with RequestServer(SECRET, echo, REQUESTS, unix_path=str(tmpfs / "s"), max_connections=2) as server:
        kept = [connect(server.addresses[0]) for _ in range(2)]
        for connection in kept:
            connection.request("echo", {}, timeout_s=DEADLINE_S)
        with pytest.raises(DDictError, match="as many connections"):
            connect(server.addresses[0]).request("echo", {}, timeout_s=DEADLINE_S)
        kept.pop().close()
        assert echo.wait_for(lambda: len(echo.closed_sessions) == 1)
        give_up = time.monotonic() + DEADLINE_S
        while True:  # the place is free a moment after the session was closed
            try:
                assert connect(server.addresses[0]).request("echo", {}, timeout_s=DEADLINE_S).fields == {}
                break
            except FlashpointError:
                assert time.monotonic() < give_up


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
                status = 0 if is_hung_up(sock) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert echo.opened == []


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
