"""One connection between two sides: its socket, the client's handshake, messages and payloads, and every wait for them.

Owns the socket options, the rule that no wait is unbounded, and that no forked child keeps sockets open. Bytes
are laid out by `messages`; requests are made by `client` and served by `server`.

Sockets are blocking, with timeouts in the kernel (`SO_RCVTIMEO`, `SO_SNDTIMEO`), rather than with Python's own: those
make the socket non-blocking, which turns one 8 MiB `MSG_WAITALL` receive into hundreds of small ones, each of which has
to win the GIL back from training.
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
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from ml_flashpoint.format.at_exit import close_in_children
from ml_flashpoint.format.errors import AuthenticationError, FlashpointError, ProtocolError, ReplicationError
from ml_flashpoint.net import handshake
from ml_flashpoint.net.messages import (
    CODE_BYTES,
    HEAD_BYTES,
    WORKING,
    Dialect,
    Fields,
    Message,
    MessageCode,
    parse_text,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

Cancelled: TypeAlias = Callable[[], bool]

STALL_S: Final = 30.0
"""What has begun and makes no progress for so long is given up, unless somebody said until when to wait."""
SEND_CHUNK_BYTES: Final = 16 << 20
"""Most bytes given to one `send`. Each call gives up the GIL and must win it back, which takes up to 5 ms while
training holds it, so few large calls are worth more than a warm cache."""
RECEIVE_CHUNK_BYTES: Final = 8 << 20
"""Most bytes asked of one `recv_into`: half a block, as the kernel opens the window for the sender less often
within a longer call. While the GIL is held by others, 8 MiB are 1.4 times as fast as 4."""

_FIRST_READ: Final = 64 << 10
_JOIN_BELOW: Final = 64 << 10
_READ_AT_ONCE: Final = 4 << 20
_IOVECS: Final = 512
_SEND_NOW: Final = int(socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)  # as a plain number: joining flags takes time
_LONGEST_SLICE_S: Final = 1.0
_IDLE_SLICE_S: Final = 30.0
NO_ANSWER: Final = frozenset(
    {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN, errno.EAGAIN}
)
"""Errors of a socket that mean that nobody was heard, in place of somebody who refuses."""


class ConnectionLostError(ReplicationError):
    """The connection broke or was closed; a new one may work."""


class TurnedAwayError(AuthenticationError):
    """The server hung up on our proof: it is another secret's, or there were too many others at the door."""


class TransferCancelledError(ReplicationError):
    """The caller's own `cancelled` asked for the transfer to stop."""


class Channel:
    """Messages and payloads over one connected socket, which it owns.

    Args:
        sock: connected, TCP or Unix.
        dialect: what is spoken.
        peer: how errors name the other side.
        stall_s: seconds without progress after which a wait is given up that has no ``until``.

    ``until`` is a time of ``time.monotonic``. One thread receives. Messages may be sent by several threads, and
    `interrupt` called by any; everything else is for the thread that owns the channel. After an error only `close` is
    of use. Everything that waits raises

    * `ConnectionLostError`: the connection broke or was closed;
    * `Dialect.timeout`, a `DeadlineError`: the other side took too long;
    * `AuthenticationError`, `ProtocolError`: what came is not what was sent next, or no valid message;
    * `TransferCancelledError`: ``cancelled`` returned true, which is asked about every second and 16 MiB.
    """

    def __init__(self, sock: socket.socket, dialect: Dialect, *, peer: str, stall_s: float = STALL_S) -> None:
        close_in_children(sock)
        self.peer = peer
        self.local = sock.family == socket.AF_UNIX
        """Whether the other side is a process of this machine, of which it can be told who it is."""
        self._sock = sock
        self._dialect = dialect
        self._stall_s = stall_s
        self._slice_s = min(_LONGEST_SLICE_S, max(0.01, stall_s / 8))
        self._timeouts = {socket.SO_RCVTIMEO: -1.0, socket.SO_SNDTIMEO: -1.0}
        self._send_lock = threading.Lock()
        self._sending: MessageCode | None = None
        self._receiving: MessageCode | None = None
        self._authenticated = False
        self._payload = b""
        """What came along with a message: of its payload, or of the one after a word that it is still to come."""
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

    # ---- handshake ----------------------------------------------------------------------------------------

    def handshake_as_client(self, secret: bytes, until: float) -> None:
        """Prove the secret, have the server prove it, and take the connection's keys into use.

        Raises:
            TurnedAwayError: the server hung up on our proof.
            AuthenticationError: it has another secret, or did not prove that it knows this one.
        """
        secret = handshake.proved_secret(secret, self._dialect.purpose)
        nonce = secrets.token_bytes(handshake.NONCE_BYTES)
        self._send_parts([handshake.greeting(nonce)], until)
        server_nonce = handshake.parse_greeting(self._exactly(handshake.GREETING_BYTES, until))
        self._send_parts([handshake.client_proof(secret, nonce, server_nonce)], until)
        try:
            proof = self._exactly(handshake.MAC_BYTES, until)
        except ConnectionLostError as error:
            raise TurnedAwayError(
                f"{self.peer} hung up during the handshake", hint="the secret probably differs between the two"
            ) from error
        if proof == handshake.REFUSED:
            raise AuthenticationError(f"{self.peer} has another secret, or runs for another purpose")
        if not hmac.compare_digest(proof, handshake.server_proof(secret, nonce, server_nonce)):
            raise AuthenticationError(f"{self.peer} does not know the secret")
        keys = handshake.session_keys(secret, nonce, server_nonce)
        self._use(keys.client_to_server, keys.server_to_client)

    def take_keys_as_server(self, keys: handshake.SessionKeys) -> None:
        """Take the keys into use that a `handshake.ServerHandshake` has given."""
        self._use(keys.server_to_client, keys.client_to_server)

    def _use(self, sending: bytes, receiving: bytes) -> None:
        self._authenticated = True
        if not self.local:
            self._sending, self._receiving = MessageCode(sending), MessageCode(receiving)

    # ---- messages -----------------------------------------------------------------------------------------

    def send(
        self,
        subject: str | dict[str, Any] | None,
        fields: Fields,
        blobs: Sequence[Buffer] = (),
        *,
        payload_bytes: int = 0,
        until: float | None = None,
    ) -> None:
        """Send one message; its payload, if it has one, is the caller's next `send_payload`. Thread-safe.

        Raises:
            InvalidArgumentError: it cannot be sent; nothing was.
        """
        if not self._authenticated:
            raise ProtocolError("messages need a handshake first")
        begin = self._dialect.begin_message
        if not blobs:
            parts: list[Any] = [begin(subject, fields, (), payload_bytes)]
        elif all(type(blob) is bytes for blob in blobs):
            sizes = [len(blob) for blob in blobs]  # type: ignore[arg-type]
            parts = [begin(subject, fields, sizes, payload_bytes), *blobs]
        else:
            views = [memoryview(blob).cast("B") for blob in blobs]
            parts = [begin(subject, fields, [view.nbytes for view in views], payload_bytes), *views]
        with self._send_lock:
            if self._sending is not None:
                parts.append(self._sending.next(parts))
            self._send_parts(parts, until)

    def receive(
        self,
        *,
        request: bool,
        until: float | None = None,
        idle_s: float | None = None,
        cancelled: Cancelled | None = None,
    ) -> Message:
        """The next message, a request or a reply; ``idle_s``: what its first byte may take instead."""
        if not self._authenticated:
            raise ProtocolError("messages need a handshake first")
        wait = _Wait(self, until if idle_s is None else time.monotonic() + idle_s, cancelled)
        data, self._payload = self._payload, b""
        data = data or self._some(_FIRST_READ, 0, wait)
        if idle_s is not None:
            wait.go_on(until)
        if len(data) < HEAD_BYTES:
            data += self._rest(HEAD_BYTES - len(data), wait)
        text_bytes, count, payload_bytes = self._dialect.parse_head(data)
        at = HEAD_BYTES + 4 * count
        if len(data) < at:
            data += self._rest(at - len(data), wait)
        lengths = self._dialect.parse_lengths(data, count)
        end = at + text_bytes
        total = end + sum(lengths)
        coded = total if self._receiving is None else total + CODE_BYTES
        if len(data) > coded:
            data, self._payload = data[:coded], data[coded:]
        elif len(data) < coded <= _READ_AT_ONCE:
            data += self._rest(coded - len(data), wait)
        elif len(data) < end:
            data += self._rest(end - len(data), wait)
        blobs = []
        start = end
        for length in lengths:
            blob = data[start : start + length]
            start += length
            blobs.append(blob if len(blob) == length else blob + self._rest(length - len(blob), wait))
        if self._receiving is not None:
            code = data[total:]
            code += self._rest(CODE_BYTES - len(code), wait)
            self._receiving.check((data[:end], *blobs), code)
        subject, fields = parse_text(data[at:end], request=request)
        if len(self._payload) > payload_bytes and subject != WORKING:
            raise ProtocolError(f"{self.peer} sent more than one message at once")
        return Message(subject, fields, blobs, payload_bytes)

    def receive_reply(self, *, until: float | None = None, cancelled: Cancelled | None = None) -> Message:
        """The server's answer, however often it says before that it is at work. Raises what the server answered, too,
        after which the connection is in step and of use."""
        while (reply := self.receive(request=False, until=until, cancelled=cancelled)).subject == WORKING:
            pass
        return reply

    @contextlib.contextmanager
    def working(self, *, every_s: float, limit_s: float) -> Iterator[None]:
        """Say every ``every_s``, for at most ``limit_s``, that the other side's request is worked on meanwhile."""
        finished = threading.Event()

        def keep_alive() -> None:
            until = time.monotonic() + limit_s
            while not finished.wait(every_s) and time.monotonic() < until:
                try:
                    self.send(WORKING, {})
                except FlashpointError:
                    return  # the owner of the channel meets the same error at its next send

        keeping = threading.Thread(target=keep_alive, name="flashpoint-keepalive", daemon=True)
        keeping.start()
        try:
            yield
        finally:
            finished.set()
            keeping.join()

    # ---- payloads -----------------------------------------------------------------------------------------

    def send_payload(self, view: memoryview, *, cancelled: Cancelled | None = None) -> None:
        """Send all bytes of ``view``, straight from its memory."""
        with self._send_lock:
            sent, wait = 0, _Wait(self, None, cancelled)
            while sent < len(view):
                with view[sent : sent + SEND_CHUNK_BYTES] as piece:
                    sent += self._try(socket.SO_SNDTIMEO, wait, self._sock.send, piece, socket.MSG_NOSIGNAL)

    def receive_payload(self, into: memoryview, *, cancelled: Cancelled | None = None) -> None:
        """Fill ``into``, straight from the kernel's buffers but for what came along with the message before."""
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
        """Close the connection. Idempotent."""
        self._sock.close()

    # ---- bytes --------------------------------------------------------------------------------------------

    def _send_parts(self, parts: list[Any], until: float | None) -> None:
        if sum(map(len, parts)) <= _JOIN_BELOW:
            data = b"".join(parts)
            try:  # nearly always there is room for it, and nothing to wait for
                sent = self._sock.send(data, _SEND_NOW)
            except BlockingIOError:
                sent = 0
            except OSError as error:
                raise self._lost(error) from error
            if sent == len(data):
                return
            parts = [memoryview(data)[sent:]]
        wait = _Wait(self, until, None)
        while parts:
            if len(parts) == 1:
                sent = self._try(socket.SO_SNDTIMEO, wait, self._sock.send, parts[0], socket.MSG_NOSIGNAL)
            else:
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
        return self._rest(count, _Wait(self, until, None))

    def _rest(self, count: int, wait: _Wait) -> bytes:
        data = self._some(count, socket.MSG_WAITALL, wait) if count else b""
        if len(data) == count:
            return data
        pieces, missing = [data], count - len(data)
        while missing:
            pieces.append(self._some(missing, socket.MSG_WAITALL, wait))
            missing -= len(pieces[-1])
        return b"".join(pieces)

    def _some(self, most: int, flags: int, wait: _Wait) -> bytes:
        while True:
            self._limit(socket.SO_RCVTIMEO, wait.slice_s())
            try:
                data = self._sock.recv(most, flags)
            except BlockingIOError:
                wait.note(0)
                continue
            except OSError as error:
                raise self._lost(error) from error
            if not data:
                raise ConnectionLostError(f"{self.peer} closed the connection")
            if not wait.is_plain:
                wait.note(len(data))
            return data

    def _try(self, option: int, wait: _Wait, call: Callable[..., int], *args: Any) -> int:
        """How many bytes one call moved; 0 if it could move none for a while."""
        self._limit(option, wait.slice_s())
        try:
            count = call(*args)
        except BlockingIOError:
            count = 0
        except OSError as error:
            raise self._lost(error) from error
        else:
            if not count and option == socket.SO_RCVTIMEO:
                raise ConnectionLostError(f"{self.peer} closed the connection")
        wait.note(count)
        return count

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
        """The error for an other side that takes too long."""
        return self._dialect.timeout(f"{self.peer} {text}")


class _Wait:
    """How long one wait for the other side goes on: until a time, or else for as long as something moves. Silence
    counts as far as the other side is to blame for it: a process that was held up itself, between two calls, would
    otherwise blame a peer whose bytes have been there for long."""

    __slots__ = ("_cancelled", "_channel", "_looked_at", "_silent_s", "_until", "is_plain")

    def __init__(self, channel: Channel, until: float | None, cancelled: Cancelled | None) -> None:
        self._channel = channel
        self._until = until
        self._cancelled = cancelled
        self._silent_s = 0.0
        self._looked_at = time.monotonic() if until is None else 0.0
        self.is_plain = until is not None and cancelled is None
        """Whether `note` has nothing to do."""

    def slice_s(self) -> float:
        """How long the kernel may wait now."""
        if self._until is None:
            return self._channel._slice_s
        left = self._until - time.monotonic()
        if left <= 0:
            known = self._channel._authenticated
            raise self._channel.too_late(
                "did not answer in time" if known else "did not complete the handshake in time"
            )
        return min(left, _IDLE_SLICE_S if self._cancelled is None else self._channel._slice_s)

    def go_on(self, until: float | None) -> None:
        """What was waited for has begun. From now on, wait until then for the rest."""
        self._until, self._looked_at = until, time.monotonic()
        self.is_plain = until is not None and self._cancelled is None

    def note(self, count: int) -> None:
        """A call has moved so many bytes."""
        if self._until is None:
            now, slice_s, stall_s = time.monotonic(), self._channel._slice_s, self._channel._stall_s
            self._silent_s = 0.0 if count else self._silent_s + min(now - self._looked_at, 2 * slice_s)
            self._looked_at = now
            # One slice early, because bytes that came early in a slice were only counted at its end.
            if self._silent_s >= stall_s - slice_s:
                raise self._channel.too_late(f"was silent for {stall_s:g} s")
        if self._cancelled is not None and self._cancelled():
            raise TransferCancelledError("the transfer was cancelled")


def timeval(seconds: float) -> bytes:
    """What the kernel takes for a timeout, which is never 0: that would be none."""
    whole = int(seconds)
    return struct.pack("ll", whole, int((seconds - whole) * 1e6) or (not whole))
