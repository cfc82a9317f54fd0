"""One connection between two sides: its socket, the handshake, messages and payloads, and every wait for them.

Sockets are blocking, with timeouts in the kernel (`SO_RCVTIMEO`, `SO_SNDTIMEO`). Python's own timeouts make a socket
non-blocking, which turns one 8 MiB `MSG_WAITALL` receive into hundreds of small ones, each of which has to win the GIL
back from training.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from ml_flashpoint.format.errors import AuthenticationError, FlashpointError, ProtocolError, ReplicationError
from ml_flashpoint.format.files import close_in_children
from ml_flashpoint.net import handshake
from ml_flashpoint.net.messages import HEAD_BYTES, Dialect, Fields, Message, parse_text

if TYPE_CHECKING:
    from typing_extensions import Buffer

Cancelled: TypeAlias = Callable[[], bool]

STALL_S: Final = 30.0
"""Default time without progress after which a wait is given up."""
SEND_CHUNK_BYTES: Final = 16 << 20
"""Most bytes given to one `send`. Each call gives up the GIL and must win it back, which takes up to 5 ms while
training holds it, so few large calls are worth more than a warm cache."""
RECEIVE_CHUNK_BYTES: Final = 8 << 20
"""Most bytes asked of one `recv_into`: half a block, as the kernel opens the window for the sender less often
within a longer call. While the GIL is held by others, 8 MiB are 1.4 times as fast as 4."""
NO_ANSWER: Final = frozenset(
    {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN, errno.EAGAIN}
)
"""Errors of a socket that mean that nobody was heard, in place of somebody who refuses."""

_FIRST_READ: Final = 64 << 10
_JOIN_BELOW: Final = 64 << 10
_READ_AT_ONCE: Final = 4 << 20
_IOVECS: Final = 512
_SEND_NOW: Final = int(socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)  # as a plain number: joining flags takes time
_LONGEST_SLICE_S: Final = 1.0
_IDLE_SLICE_S: Final = 30.0


class ConnectionLostError(ReplicationError):
    """The connection broke or was closed; a new one may work."""


class TransferCancelledError(ReplicationError):
    """The caller's own `cancelled` asked for the transfer to stop."""


class Channel:
    """Messages and payloads over one connected socket, which it owns.

    One thread receives. Any thread may send messages or call `interrupt`. After an error only `close` is of use. A wait
    ends at ``until`` (of ``time.monotonic``) or, without one, after ``stall_s`` seconds of silence. It raises

    * `ConnectionLostError`: the connection broke or was closed;
    * `Dialect.timeout`, a `DeadlineError`: the other side took too long;
    * `AuthenticationError`, `ProtocolError`: what came is no proof, or no valid message;
    * `TransferCancelledError`: ``cancelled`` returned true. It is called about every second and 16 MiB.
    """

    def __init__(self, sock: socket.socket, dialect: Dialect, *, peer: str, stall_s: float = STALL_S) -> None:
        close_in_children(sock)
        self.peer = peer
        self.local = sock.family == socket.AF_UNIX
        self._sock = sock
        self._dialect = dialect
        self._stall_s = stall_s
        self._slice_s = min(_LONGEST_SLICE_S, max(0.01, stall_s / 8))
        self._timeouts = {socket.SO_RCVTIMEO: -1.0, socket.SO_SNDTIMEO: -1.0}
        self._send_lock = threading.Lock()
        self._authenticated = False
        self._payload = b""  # came along with the message before
        self.payloads = 0  # begun: sent, or awaited within a request
        sock.settimeout(None)
        if not self.local:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # A peer that vanishes without a FIN is noticed by unacknowledged data (user timeout) while sending, and by
            # probes while idle. Buffer sizes are left to the kernel: setting them switches its auto-tuning off.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(stall_s * 1000)))
            probe_s = max(1, int(stall_s / 4))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, probe_s)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe_s)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)

    def handshake_as_client(self, secret: bytes, until: float) -> None:
        """Prove the secret, and have the server prove it. Raise an `AuthenticationError` if it does not."""
        secret = handshake.proved_secret(secret, self._dialect.purpose)
        nonce = secrets.token_bytes(handshake.NONCE_BYTES)
        self._send_parts([handshake.greeting(nonce)], until)
        server_nonce = handshake.parse_greeting(self._exactly(handshake.GREETING_BYTES, until))
        self._send_parts([handshake.client_proof(secret, nonce, server_nonce)], until)
        proof = self._exactly(handshake.MAC_BYTES, until)
        if proof == handshake.REFUSED:
            raise AuthenticationError(f"{self.peer} has another secret, or runs for another purpose")
        if not hmac.compare_digest(proof, handshake.server_proof(secret, nonce, server_nonce)):
            raise AuthenticationError(f"{self.peer} does not know the secret")
        self._authenticated = True

    def handshake_as_server(self, secret: bytes, until: float) -> None:
        """Have the client prove the secret (of `handshake.proved_secret`), and prove it. Raise an
        `AuthenticationError` if the client has another one."""
        client_nonce = handshake.parse_greeting(self._exactly(handshake.GREETING_BYTES, until))
        nonce = secrets.token_bytes(handshake.NONCE_BYTES)
        self._send_parts([handshake.greeting(nonce)], until)
        proof = self._exactly(handshake.MAC_BYTES, until)
        is_known = hmac.compare_digest(proof, handshake.client_proof(secret, client_nonce, nonce))
        answer = handshake.server_proof(secret, client_nonce, nonce) if is_known else handshake.REFUSED
        self._send_parts([answer], until)
        if not is_known:
            raise AuthenticationError(f"{self.peer} does not know the secret")
        self._authenticated = True

    def send(
        self,
        subject: str | dict[str, Any] | None,
        fields: Fields,
        blobs: Sequence[Buffer] = (),
        *,
        payload_bytes: int = 0,
        until: float | None = None,
    ) -> None:
        """Send one message; its payload, if it has one, is the caller's next `send_payload`. Raise an
        `InvalidArgumentError` if the message cannot be sent; nothing was."""
        parts: list[Any] = [
            blob if type(blob) is bytes else memoryview(blob).cast("B")
            for blob in blobs  # bytes are common, and views take time
        ]
        parts.insert(0, self._dialect.begin_message(subject, fields, [len(part) for part in parts], payload_bytes))
        self.payloads += payload_bytes > 0
        with self._send_lock:
            self._send_parts(parts, until)

    def receive(
        self,
        *,
        request: bool,
        until: float | None = None,
        idle_s: float | None = None,
        stall_s: float | None = None,
        cancelled: Cancelled | None = None,
    ) -> Message:
        """Return the next message, a request or a reply. Its first byte may take ``idle_s`` seconds if that is given.

        ``stall_s`` is the time without progress, for another side that has work to do.
        """
        if not self._authenticated:
            raise ProtocolError("messages need a handshake first")
        self.payloads += 1
        wait = _Wait(self, until if idle_s is None else time.monotonic() + idle_s, cancelled, stall_s)
        data = self._some(_FIRST_READ, 0, wait)
        wait.until = until
        data = self._filled(data, HEAD_BYTES, wait)
        text_bytes, count, payload_bytes = self._dialect.parse_head(data)
        begin = HEAD_BYTES + 4 * count
        data = self._filled(data, begin, wait)
        lengths = self._dialect.parse_lengths(data, count)
        end = begin + text_bytes
        total = end + sum(lengths)
        data = self._filled(data, total if total <= _READ_AT_ONCE else end, wait)
        blobs, at = [], end
        for length in lengths:
            blobs.append(self._filled(data[at : at + length], length, wait))
            at += length
        subject, fields = parse_text(data[begin:end], request=request)
        self._payload = data[total:]
        if len(self._payload) > payload_bytes:
            raise ProtocolError(f"{self.peer} sent more than one message at once")
        return Message(subject, fields, blobs, payload_bytes)

    def send_payload(self, view: memoryview, *, cancelled: Cancelled | None = None) -> None:
        """Send all bytes of a view, straight from its memory."""
        with self._send_lock:
            sent, wait = 0, _Wait(self, None, cancelled)
            while sent < len(view):
                with view[sent : sent + SEND_CHUNK_BYTES] as piece:
                    sent += self._try(socket.SO_SNDTIMEO, wait, self._sock.send, piece, socket.MSG_NOSIGNAL)

    def receive_payload(self, into: memoryview, *, cancelled: Cancelled | None = None) -> None:
        """Fill a view, straight from the kernel's buffers except for what came along with the message before."""
        received, wait = min(len(self._payload), len(into)), _Wait(self, None, cancelled)
        into[:received] = self._payload[:received]
        self._payload = self._payload[received:]
        while received < len(into):
            with into[received : received + RECEIVE_CHUNK_BYTES] as piece:
                received += self._try(socket.SO_RCVTIMEO, wait, self._sock.recv_into, piece, 0, socket.MSG_WAITALL)

    def interrupt(self) -> None:
        """Make the calls that other threads have under way on this channel, and all later ones, fail. Thread-safe."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection. Safe to call twice."""
        self._sock.close()

    def _send_parts(self, parts: list[Any], until: float | None) -> None:
        if sum(map(len, parts)) <= _JOIN_BELOW:
            data = b"".join(parts)
            try:  # nearly always there is room for it, and nothing to wait for
                sent = self._sock.send(data, _SEND_NOW)
            except BlockingIOError:
                sent = 0
            except OSError as error:
                raise self._lost(error) from error
            parts = [memoryview(data)[sent:]] if sent < len(data) else []
        wait = _Wait(self, until)
        while parts:
            some = parts[:_IOVECS]
            sent = self._try(socket.SO_SNDTIMEO, wait, self._sock.sendmsg, some, (), socket.MSG_NOSIGNAL)
            done = 0
            while done < len(parts) and sent >= len(parts[done]):
                sent -= len(parts[done])
                done += 1
            del parts[:done]
            if sent:
                parts[0] = memoryview(parts[0])[sent:]

    def _exactly(self, count: int, until: float | None) -> bytes:
        return self._filled(b"", count, _Wait(self, until))

    def _filled(self, data: bytes, count: int, wait: _Wait) -> bytes:
        """Return data with as much behind it as makes it ``count`` bytes long, if it is shorter."""
        missing = count - len(data)
        if missing <= 0:
            return data
        pieces = [data]
        while missing:
            pieces.append(self._some(missing, socket.MSG_WAITALL, wait))
            missing -= len(pieces[-1])
        return b"".join(pieces)

    def _some(self, most: int, flags: int, wait: _Wait) -> bytes:
        while not (data := self._try(socket.SO_RCVTIMEO, wait, self._sock.recv, most, flags)):
            pass
        return data  # type: ignore[no-any-return]

    def _try(self, option: int, wait: _Wait, call: Callable[..., Any], *args: Any) -> Any:
        """Return what one call moved, bytes or their number; 0 if it could move none for a while."""
        self._limit(option, wait.slice_s())
        try:
            moved = call(*args)
        except BlockingIOError:
            moved = 0
        except OSError as error:
            raise self._lost(error) from error
        else:
            if not moved and option == socket.SO_RCVTIMEO:
                raise ConnectionLostError(f"{self.peer} closed the connection")
        wait.note(bool(moved))
        return moved

    def _limit(self, option: int, seconds: float) -> None:
        """Have the kernel wait no longer. Setting it anew for some ms less is not worth the calls."""
        if not seconds <= self._timeouts[option] <= seconds * 1.01 + 1e-3:
            self._timeouts[option] = seconds * 1.005 + 5e-4
            try:
                self._sock.setsockopt(socket.SOL_SOCKET, option, timeval(self._timeouts[option]))
            except OSError as error:
                raise self._lost(error) from error

    def _lost(self, error: OSError) -> FlashpointError:
        if error.errno in NO_ANSWER:
            return self._dialect.timeout(f"{self.peer} does not answer: {error.strerror}")
        return ConnectionLostError(f"connection to {self.peer} broke: {error.strerror or error}")

    def too_late(self, text: str) -> FlashpointError:
        """Return the error for another side that takes too long."""
        return self._dialect.timeout(f"{self.peer} {text}")


class _Wait:
    """One wait for the other side: until a time, or else for as long as something moves. Silence counts only while
    this process waits: one that was held up itself would else blame a peer whose bytes have been there for long."""

    __slots__ = ("_began", "_cancelled", "_channel", "_silent_s", "_stall_s", "until")

    def __init__(
        self, channel: Channel, until: float | None, cancelled: Cancelled | None = None, stall_s: float | None = None
    ) -> None:
        self.until = until
        self._channel, self._cancelled = channel, cancelled
        self._stall_s = channel._stall_s if stall_s is None else stall_s
        self._silent_s = self._began = 0.0

    def slice_s(self) -> float:
        """Return how long the kernel may wait now."""
        self._began, most = time.monotonic(), self._channel._slice_s
        if self.until is None:
            return most
        left = self.until - self._began
        if left <= 0:
            what = "answer in time" if self._channel._authenticated else "complete the handshake in time"
            raise self._channel.too_late(f"did not {what}")
        return min(left, _IDLE_SLICE_S if self._cancelled is None else most)

    def note(self, moved: bool) -> None:
        """Take note that a call has moved something, or nothing for a while."""
        if self.until is None:
            slice_s = self._channel._slice_s
            waited_s = min(time.monotonic() - self._began, 2 * slice_s)
            self._silent_s = 0.0 if moved else self._silent_s + waited_s
            # One slice early, because bytes that came early in a slice were only counted at its end.
            if self._silent_s >= self._stall_s - slice_s:
                raise self._channel.too_late(f"was silent for {self._stall_s:g} s")
        if self._cancelled is not None and self._cancelled():
            raise TransferCancelledError("the transfer was cancelled")


def timeval(seconds: float) -> bytes:
    """Return what the kernel takes for a timeout, which is never 0: that would be none."""
    whole = int(seconds)
    return struct.pack("ll", whole, int((seconds - whole) * 1e6) or (not whole))
