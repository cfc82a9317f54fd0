"""Servers and clients of requests for tests, also in processes of their own."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ml_flashpoint.ddict.errors import REQUESTS, DDictCheckpointRetiredError, DDictKeyError
from ml_flashpoint.format.errors import CapacityError, InvalidArgumentError
from ml_flashpoint.net import handshake
from ml_flashpoint.net.client import Address, Connection
from ml_flashpoint.net.server import Peer, RequestServer

SECRET = b"a secret of the test"
DEADLINE_S = 20.0


class Echo:
    """Answers with what it was asked, and does a few other things."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.opened: list[Peer] = []
        self.closed_sessions: list[int] = []
        self.handled: list[tuple[int, str]] = []
        self.go_on = threading.Event()

    def open(self, peer: Peer) -> int:
        with self.condition:
            self.opened.append(peer)
            return len(self.opened) - 1

    def handle(
        self, session: int, op: str, fields: dict[str, Any], blobs: list[bytes]
    ) -> tuple[dict[str, Any], Sequence[Any]]:
        with self.condition:
            self.handled.append((session, op))
            self.condition.notify_all()
        if op == "wait":
            assert self.go_on.wait(DEADLINE_S)
        elif op == "retired":
            raise DDictCheckpointRetiredError("too old", checkpoint_id=7, manager=2, hint="read a newer one")
        elif op == "no key":
            raise DDictKeyError("there is no such key")
        elif op == "full":
            raise CapacityError("no room", needed_bytes=10, available_bytes=3)
        elif op == "bad argument":
            raise InvalidArgumentError("no", argument="timeout", value=-1)
        elif op == "own error":
            raise OwnError("a subclass")
        elif op == "bug":
            raise ZeroDivisionError("a bug")
        elif op == "not json":
            return {"x": {1, 2}}, []
        return fields, blobs

    def closed(self, session: int) -> None:
        with self.condition:
            self.closed_sessions.append(session)
            self.condition.notify_all()

    def wait_for(self, what: Callable[[], bool]) -> bool:
        with self.condition:
            return self.condition.wait_for(what, DEADLINE_S)


class OwnError(DDictKeyError):
    """No type that a client knows."""


def connect(address: Address, secret: bytes = SECRET) -> Connection:
    return Connection(address, secret, REQUESTS, connect_timeout_s=DEADLINE_S)


def raw(address: Address) -> socket.socket:
    """A connected socket, without handshake."""
    if address[0] == "unix":
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(DEADLINE_S)
        sock.connect(str(address[1]))
        return sock
    return socket.create_connection(address[1:], timeout=DEADLINE_S)  # type: ignore[arg-type]


def is_hung_up(sock: socket.socket) -> bool:
    """Whether the other side closes the connection, whatever it sends before."""
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


def impostor_greeting() -> bytes:
    return handshake.greeting(b"n" * handshake.NONCE_BYTES)


def serve(report: Any, folder: str) -> None:
    """A server in a process of its own, until that is killed."""
    server = RequestServer(SECRET, Echo(), REQUESTS, unix_path=str(Path(folder, "s")), tcp_host="127.0.0.1")
    report("addresses", server.addresses)
    while True:
        time.sleep(60)
