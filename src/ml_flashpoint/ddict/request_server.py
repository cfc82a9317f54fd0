"""Serves requests of clients, and of other managers: one thread a connection, once that is authenticated.

Owns listening sockets and the threads behind them. Strangers are `replication.reception`'s, messages `connection`'s,
and what a request means its handler's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from ml_flashpoint.ddict.connection import (
    REFUSED,
    Address,
    MessageSocket,
    Peer,
    check_address,
    check_credentials,
    handshake_secret,
    is_hung_up,
)
from ml_flashpoint.ddict.errors import DDictError
from ml_flashpoint.ddict.messages import Fields, describe_error
from ml_flashpoint.format.errors import FlashpointError, InvalidArgumentError
from ml_flashpoint.replication import wire
from ml_flashpoint.replication.channel import ConnectionLostError, track
from ml_flashpoint.replication.reception import Reception, internet_peer

if TYPE_CHECKING:
    from typing_extensions import Buffer

_log = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 1024
"""Authenticated connections served at once."""
HANDSHAKE_DEADLINE_S: Final = 5.0
"""Time for the whole handshake."""

_BACKLOG: Final = 1024
_JOIN_S: Final = 2.0
_LOG_EVERY_S: Final = 10.0


class RequestHandler(Protocol):
    """What requests mean. Called on the connection's thread; calls of one connection never overlap."""

    def open(self, peer: Peer) -> Any:
        """An authenticated connection was made. Returns the session that the other calls get."""

    def handle(self, session: Any, op: str, fields: Fields, blobs: list[bytes]) -> tuple[Fields, Sequence[Buffer]]:
        """Carry out a request, which was well formed as JSON and nothing else. What it raises is raised at the
        client, see `messages.describe_error`."""

    def closed(self, session: Any) -> None:
        """The connection is gone, for whatever reason. The last call of a session; called once for each."""


@dataclass(eq=False, slots=True)
class _Admitted:
    """One authenticated connection."""

    sock: socket.socket
    thread: threading.Thread | None = None
    refused: bool = False

    def interrupt(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)


class RequestServer:
    """Listens from construction until `close`. In a forked child it is closed.

    Args:
        secret: the dictionary's, 16 bytes or more.
        handler: see `RequestHandler`.
        unix_path: where to make a Unix socket; one that is there is replaced, so that this path must be the caller's.
        tcp_host: address of this machine to listen on as well.
        tcp_port: 0 takes a free one.
        max_connections: more are refused, with an error.
        handshake_deadline_s: a stranger is dropped after so long.

    Raises:
        InvalidArgumentError: the secret or the path cannot be used, or there is nothing to listen on.
        OSError: it cannot listen there.
    """

    def __init__(
        self,
        secret: bytes,
        handler: RequestHandler,
        *,
        unix_path: str | None = None,
        tcp_host: str | None = None,
        tcp_port: int = 0,
        max_connections: int = MAX_CONNECTIONS,
        handshake_deadline_s: float = HANDSHAKE_DEADLINE_S,
    ) -> None:
        self._secret = wire.check_secret(secret)
        self._handler = handler
        self._max_connections = max_connections
        self._handshake_deadline_s = handshake_deadline_s
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._connections: set[_Admitted] = set()
        self._logged_at: dict[str, float] = {}
        self._unix: tuple[str, int] | None = None
        listeners: list[tuple[Address, socket.socket]] = []
        try:
            if unix_path is not None:
                listeners.append(self._listen_unix(unix_path))
            if tcp_host is not None:
                listeners.append(_listen_tcp(tcp_host, tcp_port))
        except BaseException:
            for _, listener in listeners:
                listener.close()
            raise
        if not listeners:
            raise InvalidArgumentError("nothing to listen on", argument="unix_path", value=unix_path)
        self._listeners = [listener for _, listener in listeners]
        self.addresses: tuple[Address, ...] = tuple(address for address, _ in listeners)
        """Where clients reach it, the Unix socket first."""
        self._acceptors = [
            threading.Thread(target=self._accept, args=(listener,), name="flashpoint-ddict-accept", daemon=True)
            for listener in self._listeners
        ]
        for acceptor in self._acceptors:
            acceptor.start()
        _live_servers.add(self)

    def _listen_unix(self, path: str) -> tuple[Address, socket.socket]:
        address = check_address(("unix", path))
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            track(listener)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            listener.bind(path)
            os.chmod(path, 0o600)
            self._unix = (path, os.stat(path).st_ino)
            listener.listen(_BACKLOG)
        except BaseException:
            listener.close()
            raise
        return address, listener

    def __enter__(self) -> RequestServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening, break connections off, and wait for their threads for at most about 2 s. Idempotent."""
        with self._lock:
            self._closed.set()
            connections = list(self._connections)
            for connection in connections:
                connection.interrupt()  # under the lock, so that none is closed and its descriptor reused
        _live_servers.discard(self)
        if self._unix is not None:
            path, inode = self._unix
            with contextlib.suppress(OSError):
                if os.stat(path).st_ino == inode:
                    os.unlink(path)
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread; close() alone would not
        until = time.monotonic() + _JOIN_S
        for thread in (*self._acceptors, *(connection.thread for connection in connections)):
            if thread is not None and thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))
        for listener in self._listeners:
            listener.close()

    # ---- connections --------------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        is_local = listener.family == socket.AF_UNIX
        reception = Reception(
            listener,
            handshake_secret(self._secret),
            deadline_s=self._handshake_deadline_s,
            admit=self._admit,
            report=self._report_dropped,
            identify=_local_peer if is_local else internet_peer,
            refusal=REFUSED,
        )
        reception.run(self._closed, lambda error: self._warn("cannot accept a connection", error))

    def _report_dropped(self, peer: str, error: FlashpointError | OSError) -> None:
        if isinstance(error, ConnectionLostError):
            _log.debug("connection from %s ended: %s", peer, error)
        elif not self._closed.is_set():
            self._warn(f"connection from {peer} dropped", error)

    def _admit(self, sock: socket.socket, name: str, keys: wire.SessionKeys) -> None:
        admitted = _Admitted(sock)
        try:
            pid = check_credentials(sock, name) if sock.family == socket.AF_UNIX else None
            admitted.thread = threading.Thread(
                target=self._run,
                args=(admitted, Peer(name, pid, partial(is_hung_up, sock)), keys),
                name=f"flashpoint-ddict {name}",
                daemon=True,
            )
            with self._lock:
                if self._closed.is_set():
                    sock.close()
                    return
                admitted.refused = len(self._connections) >= self._max_connections
                admitted.thread.start()  # under the lock, so that close() only joins threads that were started
                self._connections.add(admitted)
        except (FlashpointError, OSError, RuntimeError) as error:
            self._warn("cannot serve a connection", error)
            sock.close()

    def _run(self, admitted: _Admitted, peer: Peer, keys: wire.SessionKeys) -> None:
        try:
            messages = MessageSocket(admitted.sock, peer.text)
            messages.take_keys_as_server(keys)
            if admitted.refused:
                messages.receive(time.monotonic() + self._handshake_deadline_s, request=True)
                error = DDictError("the manager serves as many connections as it may")
                messages.send(describe_error(error), {}, (), time.monotonic() + self._handshake_deadline_s)
                return
            session = self._handler.open(peer)
            try:
                self._serve(messages, session)
            finally:
                self._handler.closed(session)
        except (FlashpointError, OSError) as error:
            self._report_dropped(peer.text, error)
        except Exception:
            _log.exception("connection from %s failed", peer.text)
        finally:
            with self._lock:
                self._connections.discard(admitted)
            admitted.sock.close()

    def _serve(self, messages: MessageSocket, session: Any) -> None:
        handle = self._handler.handle
        while True:
            op, fields, blobs = messages.receive(None, request=True)
            try:
                found, answer = handle(session, op, fields, blobs)  # type: ignore[arg-type]
                problem = None
            except FlashpointError as error:
                problem = describe_error(error)
            except Exception as error:
                _log.exception("request %s failed", op)
                problem = describe_error(error)
            if problem is not None:
                messages.send(problem, {}, (), None)
                continue
            try:
                messages.send(None, found, answer, None)
            except InvalidArgumentError as error:  # nothing was sent
                messages.send(describe_error(error), {}, (), None)

    def _warn(self, text: str, error: BaseException) -> None:
        """Log what strangers can cause at will: the same kind of thing once in 10 s."""
        kind = type(error).__name__
        now = time.monotonic()
        if now >= self._logged_at.get(kind, 0.0):
            self._logged_at[kind] = now + _LOG_EVERY_S
            _log.warning("%s: %s", text, error)

    def _become_closed(self) -> None:
        # In a forked child: threads do not exist there, locks may be held, and sockets are closed by `track`.
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._closed.set()
        self._connections = set()
        self._listeners, self._acceptors, self._unix = [], [], None


def _local_peer(sock: socket.socket, address: Any) -> tuple[str, str]:
    """As `internet_peer`, for Unix sockets."""
    return "", f"process {check_credentials(sock, 'a process')}"


def _listen_tcp(host: str, port: int) -> tuple[Address, socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    track(listener)
    return ("tcp", host, listener.getsockname()[1]), listener


_live_servers: weakref.WeakSet[RequestServer] = weakref.WeakSet()


def _disown_servers() -> None:
    for server in list(_live_servers):
        server._become_closed()
    _live_servers.clear()


os.register_at_fork(after_in_child=_disown_servers)
