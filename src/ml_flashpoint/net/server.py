"""Serves requests: one thread a connection, once that is authenticated.

Owns listening sockets, the threads behind them, the order of requests and replies, and their end. Strangers are
`reception`'s, messages `channel`'s, and what a request means its handler's.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from ml_flashpoint.format.at_exit import at_exit, close_in_children
from ml_flashpoint.format.errors import DeadlineError, FlashpointError, InvalidArgumentError, ProtocolError
from ml_flashpoint.net.channel import STALL_S, Channel, ConnectionLostError
from ml_flashpoint.net.client import Address, check_address, check_credentials
from ml_flashpoint.net.handshake import SessionKeys, proved_secret
from ml_flashpoint.net.messages import Dialect, Fields
from ml_flashpoint.net.reception import Reception, internet_peer

if TYPE_CHECKING:
    from typing_extensions import Buffer

_log = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 1024
"""Authenticated connections served at once."""
HANDSHAKE_DEADLINE_S: Final = 5.0
"""Time for the whole handshake."""

_BACKLOG: Final = 1024  # what finds no place there comes back after a second
_JOIN_S: Final = 2.0
_LOG_EVERY_S: Final = 10.0


class Peer(NamedTuple):
    """The other side of a connection: how logs name it, and its process if that is on this machine.

    ``is_gone()`` tells, while a request is worked on, whether nobody waits for the answer any more. ``channel`` is for
    handlers that answer by themselves; None where there is none, as for who asks within the process.
    """

    text: str
    pid: int | None
    is_gone: Callable[[], bool] = lambda: False
    channel: Channel | None = None


class HangUp(Exception):
    """What a handler raises when the two sides are out of step: its cause is told, and the connection ends."""


class RequestHandler(Protocol):
    """What requests mean. Called on the connection's thread; calls of one connection never overlap."""

    def open(self, peer: Peer) -> Any:
        """An authenticated connection was made. Returns the session that the other calls get."""

    def handle(
        self, session: Any, op: str, fields: Fields, blobs: list[bytes]
    ) -> tuple[Fields, Sequence[Buffer]] | None:
        """Carry out a request, which was well formed as JSON and nothing else. Returns fields and blobs of the reply;
        None if the handler has replied itself, or will, by the channel. What it raises is raised at the client, see
        `Dialect.describe`."""

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
        secret: 16 bytes or more.
        handler: see `RequestHandler`.
        dialect: what is spoken.
        unix_path: where to make a Unix socket; one that is there is replaced, so that this path must be the caller's.
            With a null byte first it is an abstract name, which leaves no file.
        tcp_host: address of this machine to listen on as well.
        tcp_port: 0 takes a free one.
        max_connections: more are refused, with an error.
        handshake_deadline_s: a stranger is dropped after so long.
        idle_s: a connection without requests is closed after so long.
        stall_s: see `Channel`.

    Raises:
        InvalidArgumentError: the secret or the path cannot be used, or there is nothing to listen on.
        OSError: it cannot listen there.
        RuntimeError: there are no threads to be had.
    """

    def __init__(
        self,
        secret: bytes,
        handler: RequestHandler,
        dialect: Dialect,
        *,
        unix_path: str | None = None,
        tcp_host: str | None = None,
        tcp_port: int = 0,
        max_connections: int = MAX_CONNECTIONS,
        handshake_deadline_s: float = HANDSHAKE_DEADLINE_S,
        idle_s: float = math.inf,
        stall_s: float = STALL_S,
    ) -> None:
        self._secret = proved_secret(secret, dialect.purpose)
        self._handler = handler
        self._dialect = dialect
        self._max_connections = max_connections
        self._handshake_deadline_s = handshake_deadline_s
        self._idle_s = idle_s
        self._stall_s = stall_s
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._connections: set[_Admitted] = set()
        self._log = _SparingLog()
        self._unix: tuple[str, int] | None = None
        self._listeners: list[socket.socket] = []
        self._acceptors: list[threading.Thread] = []
        addresses: list[Address] = []
        try:
            if unix_path is not None:
                addresses.append(self._listen_unix(unix_path))
            if tcp_host is not None:
                addresses.append(self._listen_tcp(tcp_host, tcp_port))
            if not addresses:
                raise InvalidArgumentError("there is nothing to listen on", argument="unix_path", value=None)
            self.addresses: tuple[Address, ...] = tuple(addresses)
            """Where clients reach it, the Unix socket first."""
            for listener in self._listeners:
                acceptor = threading.Thread(
                    target=self._accept, args=(listener,), name="flashpoint-net-accept", daemon=True
                )
                acceptor.start()
                self._acceptors.append(acceptor)
        except BaseException:
            self.close()
            raise
        _live_servers.add(self)

    def _listen_unix(self, path: str) -> Address:
        address = check_address(("unix", path))
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        close_in_children(listener)
        self._listeners.append(listener)
        if path.startswith("\0"):
            listener.bind(path)
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            listener.bind(path)
            os.chmod(path, 0o600)
            self._unix = (path, os.stat(path).st_ino)
        listener.listen(_BACKLOG)
        return address

    def _listen_tcp(self, host: str, port: int) -> Address:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        close_in_children(listener)
        self._listeners.append(listener)
        return "tcp", host, listener.getsockname()[1]

    def __enter__(self) -> RequestServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening, break connections off, and wait for their threads for at most about 2 s. Idempotent.

        A thread that hangs in the handler is left behind; it cannot keep the process alive.
        """
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
        reception = Reception(
            listener,
            self._secret,
            deadline_s=self._handshake_deadline_s,
            admit=self._admit,
            report=self._report_dropped,
            identify=_local_peer if listener.family == socket.AF_UNIX else internet_peer,
        )
        reception.run(self._closed, lambda error: self._log.warning("cannot accept a connection: %s", error))

    def _report_dropped(self, peer: str, error: FlashpointError | OSError) -> None:
        if isinstance(error, ConnectionLostError):
            _log.debug("connection from %s ended: %s", peer, error)
        elif not self._closed.is_set():
            self._log.warning("connection from %s dropped: %s", peer, error)

    def _admit(self, sock: socket.socket, name: str, keys: SessionKeys) -> None:
        admitted = _Admitted(sock)
        try:
            pid = check_credentials(sock, name) if sock.family == socket.AF_UNIX else None
            channel = Channel(sock, self._dialect, peer=name, stall_s=self._stall_s)
            channel.take_keys_as_server(keys)
            peer = Peer(name, pid, partial(_is_hung_up, sock), channel)
            admitted.thread = threading.Thread(
                target=self._run, args=(admitted, channel, peer), name=f"flashpoint-net {name}", daemon=True
            )
            with self._lock:
                if self._closed.is_set():
                    sock.close()
                    return
                admitted.refused = len(self._connections) >= self._max_connections
                admitted.thread.start()  # under the lock, so that close() only joins threads that were started
                self._connections.add(admitted)
        except (FlashpointError, OSError, RuntimeError) as error:
            self._log.warning("cannot serve a connection from %s: %s", name, error)
            sock.close()

    def _run(self, admitted: _Admitted, channel: Channel, peer: Peer) -> None:
        try:
            if admitted.refused:
                channel.receive(request=True, idle_s=self._handshake_deadline_s)
                error = self._dialect.failure(
                    f"serves as many connections as it may, {self._max_connections}: try again later"
                )
                channel.send(self._dialect.describe(error), {})
                return
            session = self._handler.open(peer)
            try:
                self._serve(channel, session)
            finally:
                self._handler.closed(session)
        except (FlashpointError, OSError) as error:
            self._report_dropped(peer.text, error)
        except Exception as error:
            self._log.warning("connection from %s failed", peer.text, exc_info=error)
        finally:
            with self._lock:
                self._connections.discard(admitted)
            admitted.sock.close()

    def _serve(self, channel: Channel, session: Any) -> None:
        handle = self._handler.handle
        while True:
            try:
                op, fields, blobs, payload_bytes = channel.receive(request=True, idle_s=self._idle_s)
            except DeadlineError as error:
                _log.debug("idle connection closed: %s", error)
                return
            if payload_bytes:
                raise ProtocolError(f"{op} comes with a payload out of turn")
            try:
                answer = handle(session, op, fields, blobs)  # type: ignore[arg-type]
            except HangUp as hang_up:
                cause = hang_up.__cause__
                assert cause is not None
                if not isinstance(cause, ConnectionLostError):
                    with contextlib.suppress(FlashpointError):
                        self._refuse(channel, cause)
                raise cause from None
            except Exception as error:
                self._refuse(channel, error)
                continue
            if answer is not None:
                try:
                    channel.send(None, *answer)
                except InvalidArgumentError as error:  # nothing was sent
                    self._refuse(channel, error)

    def _refuse(self, channel: Channel, error: BaseException) -> None:
        if isinstance(error, FlashpointError):
            _log.debug("request refused: %s", error)
        else:
            self._log.warning("a request failed", exc_info=error)
        channel.send(self._dialect.describe(error), {})

    def _become_closed(self) -> None:
        # In a forked child: threads do not exist there, locks may be held, and `close_in_children` has closed sockets.
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._closed.set()
        self._connections = set()
        self._listeners, self._acceptors, self._unix = [], [], None


class _SparingLog:
    """Warnings that strangers, or a failing handler, can cause at will: each text once in 10 s.

    Without a lock: a race may count wrongly or let one more through, which is harmless.
    """

    def __init__(self) -> None:
        self._next_at: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def warning(self, text: str, *args: object, exc_info: BaseException | None = None) -> None:
        now = time.monotonic()
        if now < self._next_at.get(text, 0.0):
            self._left_out[text] = self._left_out.get(text, 0) + 1
            return
        self._next_at[text] = now + _LOG_EVERY_S
        left_out = self._left_out.pop(text, 0)
        more = f" (and {left_out} more such messages)" if left_out else ""
        _log.warning(text + more, *args, exc_info=exc_info)


def _local_peer(sock: socket.socket, address: Any) -> tuple[str, str]:
    """As `internet_peer`, for Unix sockets."""
    return "", f"process {check_credentials(sock, 'a process')}"


def _is_hung_up(sock: socket.socket) -> bool:
    """Whether the other side has closed the connection, or died. For the server, which is owed nothing meanwhile."""
    try:
        return not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


_live_servers: weakref.WeakSet[RequestServer] = weakref.WeakSet()


def _close_live_servers() -> None:
    # Before the interpreter is torn down: a daemon thread that logs just then can bring it down hard.
    for server in list(_live_servers):
        server.close()


def _disown_servers() -> None:
    for server in list(_live_servers):
        server._become_closed()
    _live_servers.clear()


at_exit(_close_live_servers)
os.register_at_fork(after_in_child=_disown_servers)
