"""Authenticated requests and replies between clients and managers, over a Unix socket or TCP.

Owns sockets, the handshake, deadlines, and what a fork does to connections. The bytes are `messages`', the serving
side is `request_server`'s, what a request means its handler's.

Both sides prove that they know the dictionary's secret, as in `replication.wire`, under a key of its own, so that
neither can be taken for a transfer service. On a Unix socket each side also checks that the other runs as the same
user. On TCP each message carries a code, so that it can be neither altered nor replayed; nothing is encrypted.

Sockets are blocking with timeouts in the kernel (see `replication.channel` for why).
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import secrets
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ml_flashpoint.ddict.errors import DDictTimeoutError
from ml_flashpoint.ddict.messages import (
    CODE_BYTES,
    HEAD_BYTES,
    Fields,
    Message,
    MessageCode,
    begin_message,
    parse_head,
    parse_lengths,
    parse_text,
    rebuild_error,
)
from ml_flashpoint.format.errors import AuthenticationError, FlashpointError, InvalidArgumentError, ProtocolError
from ml_flashpoint.replication import wire
from ml_flashpoint.replication.channel import ConnectionLostError, track

if TYPE_CHECKING:
    from typing_extensions import Buffer

Address = tuple[str, str] | tuple[str, str, int]
"""``("unix", path)`` or ``("tcp", host, port)``."""

MAX_UNIX_PATH: Final = 107
"""Longest path of a Unix socket, in bytes."""
STALL_LIMIT_S: Final = 30.0
"""A message that has begun and makes no progress for so long is given up by the server."""

_PURPOSE: Final = b"ml_flashpoint.ddict requests"
REFUSED: Final = bytes(wire.MAC_BYTES)
"""Said to a client with another secret, so that it can tell this from a manager that died just now."""
_FIRST_READ: Final = 64 << 10
_JOIN_BELOW: Final = 64 << 10
_READ_AT_ONCE: Final = 4 << 20
_IOVECS: Final = 512
_LONGEST_S: Final = 1e6
_CREDENTIALS: Final = struct.Struct("3i")
_NO_ANSWER: Final = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EAGAIN})


class RequestLostError(ConnectionLostError):
    """The connection broke after the request was sent: it may have been carried out, or not.

    A plain `ConnectionLostError` from `Connection.request` means that it was not.
    """


class Reply(NamedTuple):
    """What a manager answered."""

    fields: Fields
    blobs: list[bytes]


class Peer(NamedTuple):
    """The other side of a connection: how logs name it, and its process if that is on this machine.

    ``is_gone()`` tells, while a request is worked on, whether nobody waits for the answer any more.
    """

    text: str
    pid: int | None
    is_gone: Callable[[], bool] = lambda: False


class MessageSocket:
    """Messages over one connected socket, which it owns. For one thread at a time, but for `interrupt`.

    Waits are bounded by `until`, a time of `time.monotonic`. None: the first byte may take for ever, then no
    `STALL_LIMIT_S` may pass without progress. After an error only `close` is of use.
    """

    def __init__(self, sock: socket.socket, peer: str) -> None:
        track(sock)
        self.peer = peer
        self._sock = sock
        self._limit_s = -1.0
        self._sending: MessageCode | None = None
        self._receiving: MessageCode | None = None
        sock.settimeout(None)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # Noticing a machine that vanished, both while it should take bytes and while nothing is sent.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(STALL_LIMIT_S * 1000))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 8)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 8)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)

    # ---- handshake ----------------------------------------------------------------------------------------

    def handshake_as_client(self, secret: bytes, until: float) -> None:
        """Prove the secret and have the server prove it. Raises `AuthenticationError` if one does not know it."""
        secret = handshake_secret(secret)
        nonce = secrets.token_bytes(wire.NONCE_BYTES)
        self._send_all([wire.greeting(nonce)], until)
        server_nonce = wire.parse_greeting(self._exactly(wire.GREETING_BYTES, until))
        self._send_all([wire.client_proof(secret, nonce, server_nonce)], until)
        proof = self._exactly(wire.MAC_BYTES, until)
        if proof == REFUSED:
            raise AuthenticationError(f"{self.peer} has another secret")
        if not hmac.compare_digest(proof, wire.server_proof(secret, nonce, server_nonce)):
            raise AuthenticationError(f"{self.peer} does not know the dictionary's secret")
        keys = wire.session_keys(secret, nonce, server_nonce)
        self._use(keys.client_to_server, keys.server_to_client)

    def take_keys_as_server(self, keys: wire.SessionKeys) -> None:
        """Take the keys into use that the other side of a handshake, `replication.reception`'s, has given."""
        self._use(keys.server_to_client, keys.client_to_server)

    def _use(self, sending: bytes, receiving: bytes) -> None:
        if self._sock.family != socket.AF_UNIX:
            self._sending, self._receiving = MessageCode(sending), MessageCode(receiving)

    # ---- messages -----------------------------------------------------------------------------------------

    def send(
        self, subject: str | dict[str, Any] | None, fields: Fields, blobs: Sequence[Buffer], until: float | None
    ) -> None:
        """Send one message.

        Raises:
            InvalidArgumentError: it cannot be sent; nothing was.
            ConnectionLostError, DDictTimeoutError: it was not sent as a whole.
        """
        if not blobs:
            parts: list[Any] = [begin_message(subject, fields, ())]
        elif all(type(blob) is bytes for blob in blobs):
            parts = [begin_message(subject, fields, [len(blob) for blob in blobs]), *blobs]  # type: ignore[arg-type]
        else:
            views = [memoryview(blob).cast("B") for blob in blobs]
            parts = [begin_message(subject, fields, [view.nbytes for view in views]), *views]
        if self._sending is not None:
            parts.append(self._sending.next(parts))
        self._send_all(parts, until)

    def receive(self, until: float | None, *, request: bool) -> Message:
        """The next message, a request or a reply.

        Raises:
            ConnectionLostError, DDictTimeoutError: it did not come, or not as a whole.
            AuthenticationError, ProtocolError: it is not the one that was sent next, or not a valid one.
        """
        data = self._some(_FIRST_READ, 0, until, idle=until is None)
        if len(data) < HEAD_BYTES:
            data += self._exactly(HEAD_BYTES - len(data), until)
        text_bytes, count = parse_head(data)
        at = HEAD_BYTES + 4 * count
        if len(data) < at:
            data += self._exactly(at - len(data), until)
        lengths = parse_lengths(data, count)
        end = at + text_bytes
        total = end + sum(lengths)
        coded = total if self._receiving is None else total + CODE_BYTES
        if len(data) > coded:
            raise ProtocolError(f"{self.peer} sent more than one message at once")
        if len(data) < coded and coded <= _READ_AT_ONCE:
            data += self._exactly(coded - len(data), until)
        elif len(data) < end:
            data += self._exactly(end - len(data), until)
        blobs = []
        start = end
        for length in lengths:
            blob = data[start : start + length]
            start += length
            blobs.append(blob if len(blob) == length else blob + self._exactly(length - len(blob), until))
        if self._receiving is not None:
            code = data[total:]
            code += self._exactly(CODE_BYTES - len(code), until)
            self._receiving.check((data[:end], *blobs), code)
        subject, fields = parse_text(data[at:end], request=request)
        return Message(subject, fields, blobs)

    # ---- bytes --------------------------------------------------------------------------------------------

    def _send_all(self, parts: list[Any], until: float | None) -> None:
        if sum(map(len, parts)) <= _JOIN_BELOW:
            parts = [b"".join(parts)]
        while parts:
            self._limit(until)
            try:
                if len(parts) == 1:
                    sent = self._sock.send(parts[0], socket.MSG_NOSIGNAL)
                else:
                    sent = self._sock.sendmsg(parts[:_IOVECS], (), socket.MSG_NOSIGNAL)
            except BlockingIOError:
                self._stalled(until)
                continue
            except OSError as error:
                raise self._lost(error) from error
            done = 0
            while done < len(parts) and sent >= len(parts[done]):
                sent -= len(parts[done])
                done += 1
            del parts[:done]
            if sent:
                parts[0] = memoryview(parts[0])[sent:]

    def _exactly(self, count: int, until: float | None) -> bytes:
        data = self._some(count, socket.MSG_WAITALL, until) if count else b""
        if len(data) == count:
            return data
        pieces, missing = [data], count - len(data)
        while missing:
            pieces.append(self._some(missing, socket.MSG_WAITALL, until))
            missing -= len(pieces[-1])
        return b"".join(pieces)

    def _some(self, most: int, flags: int, until: float | None, *, idle: bool = False) -> bytes:
        while True:
            self._limit(until)
            try:
                data = self._sock.recv(most, flags)
            except BlockingIOError:
                if not idle:
                    self._stalled(until)
                continue
            except OSError as error:
                raise self._lost(error) from error
            if not data:
                raise ConnectionLostError(f"{self.peer} closed the connection")
            return data

    def _limit(self, until: float | None) -> None:
        """Have the kernel wait no longer than `until`. Setting it anew for some ms less is not worth the calls."""
        left = STALL_LIMIT_S if until is None else until - time.monotonic()
        if left <= 0:
            raise DDictTimeoutError(f"{self.peer} did not answer in time")
        if not left <= self._limit_s <= left * 1.01 + 1e-3:
            self._limit_s = left * 1.005 + 5e-4
            value = _timeval(self._limit_s)
            try:
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
            except OSError as error:
                raise self._lost(error) from error

    def _stalled(self, until: float | None) -> None:
        if until is None:
            raise DDictTimeoutError(f"{self.peer} was silent for {STALL_LIMIT_S:g} s in the middle of a message")

    def _lost(self, error: OSError) -> FlashpointError:
        return ConnectionLostError(f"connection to {self.peer} broke: {error.strerror or error}")

    def interrupt(self) -> None:
        """Make calls under way in other threads, and later ones, fail. Thread-safe."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._sock.close()


class Connection:
    """A client's connection to one manager. Thread-safe: one request at a time.

    In a forked child it is closed; the parent's stays as it is.

    Args:
        address: ``("unix", path)`` or ``("tcp", host, port)``; a list will do.
        secret: the dictionary's, 16 bytes or more.
        connect_timeout_s: for connecting and the handshake together.

    Raises:
        ConnectionLostError: there is nobody at this address, or the connection broke.
        DDictTimeoutError: no answer in time.
        AuthenticationError: the two sides do not share the secret, or the other is another user's.
        ProtocolError: something else listens there.
    """

    def __init__(self, address: Address, secret: bytes, *, connect_timeout_s: float) -> None:
        secret = wire.check_secret(secret)
        until = time.monotonic() + min(connect_timeout_s, _LONGEST_S)
        self._lock = threading.Lock()
        self._closed = False
        sock, peer = _connect(address, connect_timeout_s)
        self.local = sock.family == socket.AF_UNIX
        """Whether it is a Unix socket, and the other side so on this machine."""
        self._socket = MessageSocket(sock, peer)
        try:
            if sock.family == socket.AF_UNIX:
                check_credentials(sock, peer)
            self._socket.handshake_as_client(secret, until)
        except BaseException:
            self._socket.close()
            raise
        _live_connections.add(self)

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        """Whether it is of no more use: it broke, a call timed out, or `close` was called."""
        return self._closed

    def request(self, op: str, fields: Fields, blobs: Sequence[Buffer] = (), *, timeout_s: float) -> Reply:
        """Send one request and wait for the answer to it.

        Args:
            op: name of the operation.
            fields: anything that JSON can hold.
            blobs: sent as they are; do not change them meanwhile.
            timeout_s: for all of it, waiting for other threads' requests included.

        Raises:
            ConnectionLostError: it was not carried out; this connection is closed.
            RequestLostError: nobody knows whether it was carried out; this connection is closed.
            DDictTimeoutError: no answer in time; nobody knows; this connection is closed, unless it was in use by
                others for all of that time.
            FlashpointError: what the manager answered.
        """
        until = time.monotonic() + (timeout_s if timeout_s < _LONGEST_S else _LONGEST_S)
        if not self._lock.acquire(timeout=max(0.0, min(timeout_s, _LONGEST_S))):
            raise DDictTimeoutError(f"{self._socket.peer} was busy with other requests of this process")
        try:
            if self._closed:
                raise ConnectionLostError(f"the connection to {self._socket.peer} is closed")
            sent = False
            try:
                self._socket.send(op, fields, blobs, until)
                sent = True
                subject, found, answered = self._socket.receive(until, request=False)
            except InvalidArgumentError:
                if sent:
                    self._give_up()
                raise
            except ConnectionLostError as error:
                self._give_up()
                if sent:
                    raise RequestLostError(error.message) from error
                raise
            except BaseException:
                self._give_up()
                raise
        finally:
            self._lock.release()
        if subject is not None:
            raise rebuild_error(subject)  # type: ignore[arg-type]
        return Reply(found, answered)

    def _give_up(self) -> None:
        self._closed = True
        self._socket.close()

    def interrupt(self) -> None:
        """Make a request that another thread has under way fail at once, and all later ones."""
        self._socket.interrupt()

    def close(self) -> None:
        """Close it; a request under way in another thread fails. Idempotent."""
        self._closed = True
        self._socket.interrupt()
        # Its descriptor must not be closed, and then reused, while another thread reads from it.
        if self._lock.acquire(blocking=False):
            try:
                self._socket.close()
            finally:
                self._lock.release()

    def _disown(self) -> None:
        self._lock = threading.Lock()  # may have been held by a thread that does not exist here
        self._closed = True


def is_hung_up(sock: socket.socket) -> bool:
    """Whether the other side has closed the connection, or died. For the server, which is owed nothing meanwhile."""
    try:
        return not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def check_credentials(sock: socket.socket, peer: str) -> int:
    """The process at the other end of a Unix socket. Raises `AuthenticationError` if it runs as another user."""
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if uid != os.geteuid():
        raise AuthenticationError(f"{peer} runs as user {uid}, not {os.geteuid()}")
    return int(pid)


def check_address(address: Sequence[Any]) -> Address:
    """An address as a tuple. Raises `InvalidArgumentError` if it is none."""
    if len(address) == 2 and address[0] == "unix" and isinstance(address[1], str):
        if len(os.fsencode(address[1])) > MAX_UNIX_PATH:
            raise InvalidArgumentError(
                f"the path of a Unix socket must not exceed {MAX_UNIX_PATH} bytes", argument="address", value=address[1]
            )
        return "unix", address[1]
    if len(address) == 3 and address[0] == "tcp" and isinstance(address[1], str) and isinstance(address[2], int):
        return "tcp", address[1], address[2]
    raise InvalidArgumentError("must be (unix, path) or (tcp, host, port)", argument="address", value=address)


def _connect(address: Address, timeout_s: float) -> tuple[socket.socket, str]:
    checked = check_address(address)
    peer = f"manager at {':'.join(map(str, checked[1:]))}"
    if not timeout_s > 0:
        raise InvalidArgumentError("must be positive", argument="connect_timeout_s", value=timeout_s)
    timeout_s = min(timeout_s, _LONGEST_S)
    sock = None
    try:
        if len(checked) == 3:
            sock = socket.create_connection(checked[1:], timeout=timeout_s)
        else:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            # Not by Python's own timeout, with which a server that is slow to accept looks like one that never will.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(timeout_s))
            sock.connect(checked[1])
    except OSError as error:
        if sock is not None:
            sock.close()
        if isinstance(error, TimeoutError) or error.errno in _NO_ANSWER:
            raise DDictTimeoutError(f"no connection to the {peer} within {timeout_s:g} s: {error}") from error
        raise ConnectionLostError(f"cannot connect to the {peer}: {error.strerror or error}") from error
    return sock, peer


def _timeval(seconds: float) -> bytes:
    whole = int(seconds)
    return struct.pack("ll", whole, int((seconds - whole) * 1e6) or (not whole))


def handshake_secret(secret: bytes) -> bytes:
    """What is proved in a handshake of a dictionary with this secret."""
    return hmac.digest(secret, _PURPOSE, "sha256")


_live_connections: weakref.WeakSet[Connection] = weakref.WeakSet()


def _disown_connections() -> None:
    for connection in list(_live_connections):
        connection._disown()
    _live_connections.clear()


os.register_at_fork(after_in_child=_disown_connections)
