"""Connecting to a server, and asking it one thing after the other."""

from __future__ import annotations

import contextlib
import math
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ml_flashpoint.format.errors import AuthenticationError, FlashpointError, InvalidArgumentError, ProtocolError
from ml_flashpoint.net.channel import NO_ANSWER, STALL_S, Cancelled, Channel, ConnectionLostError, timeval
from ml_flashpoint.net.handshake import check_secret
from ml_flashpoint.net.messages import Dialect, Fields, Message

if TYPE_CHECKING:
    from typing_extensions import Buffer

Address = tuple[str, str] | tuple[str, str, int]
"""``("unix", path)``, of which the path may be an abstract name with a null byte first, or ``("tcp", host, port)``."""

MAX_UNIX_PATH: Final = 107
"""Longest path of a Unix socket, in bytes."""

_PAUSES_S = (0.05, 0.1, 0.2, 0.4)
_LONGEST_S: Final = 1e6
_LAST_WORDS_S: Final = 5.0
_CREDENTIALS: Final = struct.Struct("3i")


class RequestLostError(ConnectionLostError):
    """The connection broke after the request was sent: it may have been carried out, or not."""


class Reply(NamedTuple):
    """The answer of a server."""

    fields: Fields
    blobs: list[bytes]


def check_address(address: Sequence[Any]) -> Address:
    """Return an address as a tuple. Raise `InvalidArgumentError` if it is none."""
    if len(address) == 2 and address[0] == "unix" and isinstance(address[1], str):
        if len(os.fsencode(address[1])) > MAX_UNIX_PATH:
            text = f"the path of a Unix socket must not exceed {MAX_UNIX_PATH} bytes"
            raise InvalidArgumentError(text, argument="address", value=address[1])
        return "unix", address[1]
    if len(address) == 3 and address[0] == "tcp" and isinstance(address[1], str) and isinstance(address[2], int):
        return "tcp", address[1], address[2]
    raise InvalidArgumentError("must be (unix, path) or (tcp, host, port)", argument="address", value=address)


def check_credentials(sock: socket.socket, peer: str) -> int:
    """Return the process at the other end of a Unix socket. Raise `AuthenticationError` if another user runs it."""
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if uid != os.geteuid():
        raise AuthenticationError(f"{peer} runs as user {uid}, not {os.geteuid()}")
    return int(pid)


def connect(
    address: Sequence[Any], secret: bytes, dialect: Dialect, *, within_s: float, stall_s: float = STALL_S
) -> Channel:
    """Connect and authenticate, within so many seconds. Ask a server that hangs up in the handshake, because too many
    connect to it, some times more. A numeric host is best: resolving a name has no deadline.

    Raises:
        ConnectionLostError: nobody is at this address, or the connection broke.
        DeadlineError: no answer in time; it is `Dialect.timeout`.
        AuthenticationError: the two sides do not share the secret, or the other is another user's.
        ProtocolError: something else listens there, or another version of this protocol.
        InvalidArgumentError: address, secret or seconds cannot be used.
    """
    checked = check_address(address)
    check_secret(secret)
    if not within_s > 0:
        raise InvalidArgumentError("must be positive", argument="connect_timeout_s", value=within_s)
    until = time.monotonic() + min(within_s, _LONGEST_S)
    pauses = iter(_PAUSES_S)
    while True:
        sock, peer = _open(checked, dialect, until)
        try:
            channel = Channel(sock, dialect, peer=peer, stall_s=stall_s)
            if channel.local:
                check_credentials(sock, peer)
            channel.handshake_as_client(secret, until)
            return channel
        except BaseException as error:
            sock.close()
            pause_s = random.uniform(0.5, 1) * next(pauses, math.inf)
            if not isinstance(error, ConnectionLostError) or time.monotonic() + pause_s >= until:
                raise
        time.sleep(pause_s)  # those who were turned away together come back one by one


def _open(address: Address, dialect: Dialect, until: float) -> tuple[socket.socket, str]:
    left = max(1e-3, until - time.monotonic())
    sock = None
    peer = f"{address[1]} port {address[2]}" if len(address) == 3 else f"the server at {address[1]}"
    try:
        if len(address) == 3:
            sock = socket.create_connection(address[1:], timeout=left)
        else:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            # Not by Python's own timeout, with which a server that is slow to accept looks like one that never will.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval(left))
            sock.connect(address[1])
    except OSError as error:
        if sock is not None:
            sock.close()
        if isinstance(error, TimeoutError) or error.errno in NO_ANSWER:
            raise dialect.timeout(f"no connection to {peer} within {left:g} s: {error}") from error
        raise ConnectionLostError(f"cannot connect to {peer}: {error.strerror or error}") from error
    return sock, peer


class Connection:
    """A connection of a client, by `connect`. Thread-safe: one request at a time. In a forked child it is closed."""

    def __init__(
        self,
        address: Sequence[Any],
        secret: bytes,
        dialect: Dialect,
        *,
        connect_timeout_s: float,
        stall_s: float = STALL_S,
    ) -> None:
        self._dialect = dialect
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._closed = False
        self._channel = connect(address, secret, dialect, within_s=connect_timeout_s, stall_s=stall_s)
        self.local = self._channel.local

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        """True once it broke, a call timed out or `close` was called, and in a forked child."""
        return self._closed or self._process != os.getpid()

    def request(self, op: str, fields: Fields, blobs: Sequence[Buffer] = (), *, timeout_s: float) -> Reply:
        """Send one request and return the answer, within so many seconds. Raises what `exchange` does."""
        with self.exchange(op, fields, blobs, until=time.monotonic() + min(timeout_s, _LONGEST_S)) as (_, reply):
            return Reply(reply.fields, reply.blobs)

    @contextlib.contextmanager
    def exchange(
        self,
        op: str,
        fields: Fields,
        blobs: Sequence[Buffer] = (),
        *,
        until: float | None = None,
        payload_bytes: int = 0,
        work_s: float | None = None,
        cancelled: Cancelled | None = None,
    ) -> Iterator[tuple[Channel, Message]]:
        """Send one request, once other threads' have ended, and yield the channel with the answer, for payloads.

        ``until``, ``cancelled`` and ``work_s``, the longest silence while the server works, are as in `Channel`. Errors
        close this connection, those within the context too; a busy one, and the server's answers, do not.

        Raises:
            ConnectionLostError: the request was not carried out.
            RequestLostError: nobody knows whether the request was carried out.
            DeadlineError: no answer in time, as `Dialect.timeout`.
            FlashpointError: the server's answer.
        """
        if self.closed:  # before the lock: a thread that does not exist in a forked child may have it
            raise ConnectionLostError(f"the connection to {self._channel.peer} is closed")
        if not self._lock.acquire(timeout=-1 if until is None else max(0.0, until - time.monotonic())):
            raise self._channel.too_late("was busy with other requests of this process")
        sent = answered = in_step = False
        try:
            if self._closed:
                raise ConnectionLostError(f"the connection to {self._channel.peer} is closed")
            self._channel.send(op, fields, blobs, until=until)
            sent = True
            reply = self._channel.receive(request=False, until=until, stall_s=work_s, cancelled=cancelled)
            answered = True
            if isinstance(reply.subject, dict):
                in_step = True
                raise self._dialect.rebuild(reply.subject)
            if reply.payload_bytes != payload_bytes:
                text = f"{self._channel.peer} sends {reply.payload_bytes:,} bytes instead of {payload_bytes:,}"
                raise ProtocolError(text)
            yield self._channel, reply
        except BaseException as error:
            if not in_step and (sent or not isinstance(error, InvalidArgumentError)):
                self._closed = True
                self._channel.close()
            if sent and not answered and type(error) is ConnectionLostError:
                raise RequestLostError(error.message) from error
            raise
        finally:
            self._lock.release()

    def close(self) -> None:
        """Close it; a request under way in another thread fails. Safe to call twice."""
        if self.closed:
            return
        self._closed = True
        self._channel.interrupt()
        # Its descriptor must not be closed, and then reused, while another thread reads from it.
        if self._lock.acquire(blocking=False):
            try:
                self._channel.close()
            finally:
                self._lock.release()

    def leave(self, op: str) -> None:
        """Send a last request, whose answer nobody waits for, and close. Raises nothing."""
        if not self.closed:
            with contextlib.suppress(FlashpointError):
                self._channel.send(op, {}, until=time.monotonic() + _LAST_WORDS_S)
        self.close()
