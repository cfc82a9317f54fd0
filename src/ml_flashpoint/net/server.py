"""A server of requests: one thread for each connection, from the handshake to the end."""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from ml_flashpoint.format.errors import DeadlineError, FlashpointError, InvalidArgumentError, ProtocolError
from ml_flashpoint.format.files import close_in_children
from ml_flashpoint.net.channel import STALL_S, Channel, ConnectionLostError
from ml_flashpoint.net.client import Address, check_address, check_credentials
from ml_flashpoint.net.handshake import proved_secret
from ml_flashpoint.net.messages import Dialect, Fields

if TYPE_CHECKING:
    from typing_extensions import Buffer

_log = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 1024
"""Default for the authenticated connections served at once."""
MAX_HANDSHAKES: Final = 128
"""Connections in the handshake at once. More wait until one is done, or has had `PATIENCE_S` and is dropped."""
PATIENCE_S: Final = 1.0
HANDSHAKE_DEADLINE_S: Final = 5.0
"""Default time for the whole handshake."""

_BACKLOG: Final = 1024  # what finds no place there comes back after a second
_JOIN_S: Final = 2.0
_LOG_EVERY_S: Final = 10.0
_PAUSE_S: Final = 0.1


def reachable_host() -> str:
    """Return ``FLASHPOINT_HOST`` if that is set, else the source address of the route to ``MASTER_ADDR``."""
    given = os.environ.get("FLASHPOINT_HOST")
    if given:
        return given
    master = os.environ.get("MASTER_ADDR", "localhost")
    try:
        family, kind, _, _, target = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # UDP: nothing is sent
            return str(probe.getsockname()[0])
    except OSError as error:
        _log.warning("cannot find the route to MASTER_ADDR=%s (%s): using this host's name", master, error)
        return socket.gethostbyname(socket.gethostname())


class Peer(NamedTuple):
    """The other side of a connection, by the name that logs have for it.

    ``is_gone()`` returns True once nobody waits for the answer any more. ``channel`` is for handlers that answer by
    themselves; None where there is none.
    """

    text: str
    is_gone: Callable[[], bool] = lambda: False
    channel: Channel | None = None


class RequestHandler(Protocol):
    """The meaning of requests. Called on the connection's thread; calls of one connection never overlap."""

    def open(self, peer: Peer) -> Any:
        """Return the session that the other calls get, for an authenticated connection that was made."""

    def handle(
        self, session: Any, op: str, fields: Fields, blobs: list[bytes]
    ) -> tuple[Fields, Sequence[Buffer]] | None:
        """Carry out a request, which was well formed as JSON and nothing else. Return fields and blobs of the reply;
        None if the handler has replied itself, or will, by the channel. An error is raised at the client, see
        `Dialect.describe`. It ends the connection if the handler has begun with a payload."""

    def closed(self, session: Any) -> None:
        """Take note that the connection is gone, for whatever reason. The last call of a session; one for each."""


class RequestServer:
    """A server that listens from construction until `close`. In a forked child it is closed.

    Listens on a Unix socket (whose path must be the caller's; an abstract name has a null byte first), on a TCP address
    (port 0 takes a free one), or on both. Connections without requests are closed after ``idle_s``, those over
    ``max_connections`` are refused.

    Attributes:
        addresses: where clients reach it, the Unix socket first.

    Raises:
        InvalidArgumentError: the secret or the path cannot be used, or there is nothing to listen on.
        OSError: it cannot listen there.
        RuntimeError: there are no threads to be had.
    """

    addresses: tuple[Address, ...] = ()

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
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._strangers: dict[socket.socket, float] = {}  # in the handshake since when, oldest first
        self._connections: dict[socket.socket, threading.Thread] = {}  # with those
        self._quiet_until: dict[str, float] = {}
        self._unix: tuple[str, int] | None = None
        self._listeners: list[socket.socket] = []
        self._acceptors: list[threading.Thread] = []
        if unix_path is None and tcp_host is None:
            raise InvalidArgumentError("there is nothing to listen on", argument="unix_path", value=None)
        try:
            if unix_path is not None:
                self._listen_unix(unix_path)
            if tcp_host is not None:
                self._listen_tcp(tcp_host, tcp_port)
            for listener in self._listeners:
                close_in_children(listener)
                name = "flashpoint-net-accept"
                acceptor = threading.Thread(target=self._accept, args=(listener,), name=name, daemon=True)
                acceptor.start()
                self._acceptors.append(acceptor)
        except BaseException:
            self.close()
            raise
        _live_servers.add(self)

    def _listen_unix(self, path: str) -> None:
        address = check_address(("unix", path))
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listeners.append(listener)
        if not path.startswith("\0"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        listener.bind(path)
        if not path.startswith("\0"):
            os.chmod(path, 0o600)
            self._unix = (path, os.stat(path).st_ino)
        listener.listen(_BACKLOG)
        self.addresses += (address,)

    def _listen_tcp(self, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        self._listeners.append(listener)
        self.addresses += (("tcp", host, listener.getsockname()[1]),)

    def __enter__(self) -> RequestServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening, break connections off, and wait for their threads for at most about 2 s. Safe to call
        twice."""
        if self._process != os.getpid():  # threads do not exist in a forked child, and the lock may be held
            return
        with self._changed:
            self._closed.set()
            self._changed.notify_all()
            threads = [*self._acceptors, *self._connections.values()]
            for sock in self._connections:
                _hang_up(sock)  # under the lock, so that none is closed and its descriptor reused
        _live_servers.discard(self)
        if self._unix is not None:
            path, inode = self._unix
            with contextlib.suppress(OSError):
                if os.stat(path).st_ino == inode:
                    os.unlink(path)
        for listener in self._listeners:
            _hang_up(listener)  # wakes the accepting thread; close() alone would not
        until = time.monotonic() + _JOIN_S
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))
        for listener in self._listeners:
            listener.close()

    def _accept(self, listener: socket.socket) -> None:
        while not self._closed.is_set():
            try:
                sock, address = listener.accept()
            except OSError as error:
                if not self._closed.is_set():
                    self._warn("cannot accept a connection: %s", error)
                    self._closed.wait(_PAUSE_S)  # out of descriptors, say: trying again at once would only spin
                continue
            close_in_children(sock)
            name = f"{address[0]} port {address[1]}" if address else "a process"
            thread = threading.Thread(target=self._run, args=(sock, name), name=f"flashpoint-net {name}", daemon=True)
            with self._changed:
                self._make_way()
                if self._closed.is_set():
                    sock.close()
                    return
                try:
                    thread.start()  # under the lock, so that close() only joins threads that were started
                    self._strangers[sock] = time.monotonic()
                    self._connections[sock] = thread
                except RuntimeError as error:
                    self._warn("cannot serve a connection from %s: %s", name, error)
                    sock.close()

    def _make_way(self) -> None:
        """Wait while there are as many handshakes as there may be. Drop the oldest if it takes longer than it needs."""
        while len(self._strangers) >= MAX_HANDSHAKES and not self._closed.is_set():
            oldest, since = next(iter(self._strangers.items()))
            left_s = since + PATIENCE_S - time.monotonic()
            if left_s > 0:
                self._changed.wait(left_s)
            else:
                del self._strangers[oldest]
                _hang_up(oldest)

    def _run(self, sock: socket.socket, name: str) -> None:
        try:
            pid = check_credentials(sock, name) if sock.family == socket.AF_UNIX else None
            peer = name if pid is None else f"process {pid}"
            channel = Channel(sock, self._dialect, peer=peer, stall_s=self._stall_s)
            channel.handshake_as_server(self._secret, time.monotonic() + self._handshake_deadline_s)
            with self._changed:
                self._strangers.pop(sock, None)
                self._changed.notify_all()
                is_one_too_many = len(self._connections) - len(self._strangers) > self._max_connections
            if is_one_too_many:
                channel.receive(request=True, idle_s=self._handshake_deadline_s)
                text = f"serves as many connections as it may, {self._max_connections}: try again later"
                channel.send(self._dialect.describe(self._dialect.failure(text)), {})
                return
            session = self._handler.open(Peer(peer, partial(_is_hung_up, sock), channel))
            try:
                self._serve(channel, session)
            finally:
                self._handler.closed(session)
        except ConnectionLostError as error:
            _log.debug("connection from %s ended: %s", name, error)
        except (FlashpointError, OSError) as error:
            if not self._closed.is_set():
                self._warn("connection from %s dropped: %s", name, error)
        except Exception as error:
            self._warn("connection from %s failed", name, exc_info=error)
        finally:
            with self._changed:
                self._strangers.pop(sock, None)
                self._connections.pop(sock, None)
                self._changed.notify_all()
            sock.close()

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
            payloads = channel.payloads
            try:
                answer = handle(session, op, fields, blobs)  # type: ignore[arg-type]
            except Exception as error:
                if channel.payloads == payloads:
                    self._refuse(channel, error)
                    continue
                with contextlib.suppress(FlashpointError):  # the two sides do not agree any more on what comes next
                    self._refuse(channel, error)
                raise
            if answer is not None:
                try:
                    channel.send(None, *answer)
                except InvalidArgumentError as error:  # nothing was sent
                    self._refuse(channel, error)

    def _refuse(self, channel: Channel, error: BaseException) -> None:
        if isinstance(error, FlashpointError):
            _log.debug("request refused: %s", error)
        else:
            self._warn("a request failed", exc_info=error)
        channel.send(self._dialect.describe(error), {})

    def _warn(self, text: str, *args: object, exc_info: BaseException | None = None) -> None:
        """Log a warning that strangers, or a failing handler, can cause at will: each text once in 10 s."""
        now = time.monotonic()
        if now >= self._quiet_until.get(text, 0.0):
            self._quiet_until[text] = now + _LOG_EVERY_S
            _log.warning(text, *args, exc_info=exc_info)


def _hang_up(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _is_hung_up(sock: socket.socket) -> bool:
    """Return True if the other side has closed the connection, or died. For the server, which is owed nothing now."""
    try:
        return not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


_live_servers: weakref.WeakSet[RequestServer] = weakref.WeakSet()


def _close_live_servers() -> None:
    # Before the interpreter is torn down: a daemon thread that logs just then can bring it down hard. A child of
    # multiprocessing, which forgets this since Python 3.13, ends without that.
    for server in list(_live_servers):
        server.close()


atexit.register(_close_live_servers)
