"""One authenticated connection between two peers: sockets, deadlines and the handshake.

Owns the socket options, the rule that no wait is unbounded, the order of the handshake, and what happens to
connections when the process forks. Bytes are laid out by `wire`; requests are served by `transfer_service`
and made by `transfer_client`.

Sockets are blocking, with a kernel timeout (`SO_RCVTIMEO`, `SO_SNDTIMEO`) of a slice of the deadline, rather
than Python's own timeouts: those make the socket non-blocking, which turns one 16 MiB `MSG_WAITALL` receive
into hundreds of small ones, each of which has to win the GIL back from training.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import random
import secrets
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import TypeAlias

from ml_flashpoint.format.errors import (
    AuthenticationError,
    DeadlineError,
    FlashpointError,
    ProtocolError,
    ReplicationError,
)
from ml_flashpoint.replication import wire
from ml_flashpoint.replication.wire import Frame, FrameKind

Address: TypeAlias = tuple[str, int]
Cancelled: TypeAlias = Callable[[], bool]

_PAUSES_S = (0.05, 0.1, 0.2, 0.4)
_NO_ANSWER = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN})

_open_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


class ConnectionLostError(ReplicationError):
    """The connection broke or was closed; a new one may work."""


class TurnedAwayError(AuthenticationError):
    """The server hung up on our proof: it is another secret's, or there were too many others at the door."""


class TransferCancelledError(ReplicationError):
    """The caller's own `cancelled` asked for the transfer to stop."""


def track(sock: socket.socket) -> None:
    """Have ``sock`` closed in children that this process forks.

    A child (a data loader's worker, say) would otherwise keep the port in use and the connection open after
    this process has died, and the peer would not notice until its deadline.
    """
    _open_sockets.add(sock)


def _close_inherited_sockets() -> None:
    for sock in list(_open_sockets):
        # Not shutdown(), which would reach the parent's connection as well.
        descriptor = sock.detach()
        if descriptor >= 0:
            os.close(descriptor)
    _open_sockets.clear()


os.register_at_fork(after_in_child=_close_inherited_sockets)


class Channel:
    """Frames and payloads over one connected socket, which it owns.

    Args:
        sock: connected TCP socket.
        deadline_s: A send or receive that makes no progress for about so long raises `DeadlineError`.
        peer: how errors name the other side.

    One thread receives. Frames may be sent by several threads, and `interrupt` called by any; everything else
    is for the thread that owns the channel. After an error only `close` is of use.
    """

    def __init__(self, sock: socket.socket, *, deadline_s: float, peer: str) -> None:
        self._sock = sock
        self._deadline_s = deadline_s
        self._slice_s = min(1.0, max(0.01, deadline_s / 8))
        self._peer = peer
        self._send_lock = threading.Lock()
        self._encoder: wire.FrameEncoder | None = None
        self._decoder: wire.FrameDecoder | None = None
        track(sock)
        sock.settimeout(None)
        interval = _timeval(self._slice_s)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, interval)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, interval)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A peer that vanishes without a FIN is noticed by unacknowledged data (user timeout) while sending,
        # and by probes while idle. Buffer sizes are left to the kernel: setting them switches its auto-tuning
        # off.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(deadline_s * 1000)))
        probe_s = max(1, int(deadline_s / 4))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, probe_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)

    # --- Handshake ------------------------------------------------------------------------------------------

    def handshake_as_client(self, secret: bytes, within_s: float) -> None:
        """Prove the secret, have the server prove it, and take the connection's keys into use.

        Raises:
            AuthenticationError: the server did not prove that it knows the secret, or hung up on our proof.
            DeadlineError: all this took longer than ``within_s``.
            ReplicationError: the connection broke, or the peer speaks something else.
        """
        until = time.monotonic() + within_s
        client_nonce = secrets.token_bytes(wire.NONCE_BYTES)
        self._send_bytes(wire.greeting(client_nonce))
        server_nonce = wire.parse_greeting(self._receive_bytes(wire.GREETING_BYTES, until=until))
        self._send_bytes(wire.client_proof(secret, client_nonce, server_nonce))
        try:
            proof = self._receive_bytes(wire.MAC_BYTES, until=until)
        except ConnectionLostError as exc:
            raise TurnedAwayError(
                f"{self._peer} hung up during the handshake",
                hint="the job's secret probably differs between the two",
            ) from exc
        if not hmac.compare_digest(proof, wire.server_proof(secret, client_nonce, server_nonce)):
            raise AuthenticationError(f"{self._peer} does not know the job's secret")
        keys = wire.session_keys(secret, client_nonce, server_nonce)
        self._encoder = wire.FrameEncoder(keys.client_to_server)
        self._decoder = wire.FrameDecoder(keys.server_to_client)

    def take_keys_as_server(self, keys: wire.SessionKeys) -> None:
        """Take the keys into use that a handshake by `wire.ServerHandshake` has given."""
        self._encoder = wire.FrameEncoder(keys.server_to_client)
        self._decoder = wire.FrameDecoder(keys.client_to_server)

    # --- Frames ---------------------------------------------------------------------------------------------

    def send(self, frame: Frame) -> None:
        """Send one frame (its payload, if any, is the caller's next `send_payload`). Thread-safe.

        Raises:
            DeadlineError: the peer took no byte for `deadline_s`.
            ReplicationError: the connection broke.
        """
        if self._encoder is None:
            raise ProtocolError("frames need a handshake first")
        with self._send_lock:
            self._send_bytes(self._encoder.encode(frame))

    def receive(self, *, idle_s: float | None = None, cancelled: Cancelled | None = None) -> Frame:
        """The next frame, of which the first byte may take ``idle_s`` (default: the deadline).

        Raises:
            AuthenticationError, ProtocolError: it is not the frame that the peer sent next, or not a valid
                one.
            ConnectionLostError: the connection broke or was closed.
            DeadlineError: no frame began in ``idle_s``, or one did and then stalled.
            TransferCancelledError: ``cancelled`` returned true.
        """
        if self._decoder is None:
            raise ProtocolError("frames need a handshake first")
        start = self._receive_bytes(wire.FRAME_START_BYTES, idle_s=idle_s, cancelled=cancelled)
        preamble = wire.parse_preamble(start[: wire.PREAMBLE_BYTES])
        rest = self._receive_bytes(preamble.header_bytes + preamble.body_bytes, cancelled=cancelled)
        return self._decoder.decode(start, rest)

    def receive_reply(self, *, cancelled: Cancelled | None = None) -> Frame:
        """The server's answer, however many keepalives come before. Raises as `receive` does."""
        while (frame := self.receive(cancelled=cancelled)).kind is FrameKind.KEEPALIVE:
            pass
        return frame

    @contextlib.contextmanager
    def working(self, *, every_s: float, limit_s: float) -> Iterator[None]:
        """Send a keepalive every ``every_s``, for at most ``limit_s``, while the peer's request is worked on."""
        finished = threading.Event()

        def keep_alive() -> None:
            until = time.monotonic() + limit_s
            while not finished.wait(every_s) and time.monotonic() < until:
                try:
                    self.send(Frame(FrameKind.KEEPALIVE))
                except FlashpointError:
                    return  # the owner of the channel meets the same error at its next send

        keeping = threading.Thread(target=keep_alive, name="flashpoint-transfer-keepalive", daemon=True)
        keeping.start()
        try:
            yield
        finally:
            finished.set()
            keeping.join()

    # --- Payloads -------------------------------------------------------------------------------------------

    def send_payload(self, view: memoryview, *, cancelled: Cancelled | None = None) -> None:
        """Send all bytes of ``view``, straight from its memory. Raises as `send` and `receive` do."""
        with self._send_lock:
            self._send_all(view, cancelled)

    def receive_payload(self, into: memoryview, *, cancelled: Cancelled | None = None) -> None:
        """Fill ``into``, straight from the kernel's buffers. Raises as `receive` does."""
        self._receive_all(into, cancelled=cancelled)

    def interrupt(self) -> None:
        """Make the calls that other threads have under way on this channel, and all later ones, fail.
        Thread-safe."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._sock.close()

    # --- Bytes ----------------------------------------------------------------------------------------------

    def _send_bytes(self, data: bytes) -> None:
        with memoryview(data) as view:
            self._send_all(view, None)

    def _receive_bytes(
        self,
        count: int,
        *,
        idle_s: float | None = None,
        until: float | None = None,
        cancelled: Cancelled | None = None,
    ) -> bytes:
        data = bytearray(count)
        with memoryview(data) as view:
            self._receive_all(view, idle_s=idle_s, until=until, cancelled=cancelled)
        return bytes(data)

    def _send_all(self, view: memoryview, cancelled: Cancelled | None) -> None:
        sent = 0
        idle = _IdleTimer(self._slice_s)
        while sent < len(view):
            with view[sent : sent + wire.SEND_CHUNK_BYTES] as piece:
                try:
                    count = self._sock.send(piece, socket.MSG_NOSIGNAL)
                except BlockingIOError:  # SO_SNDTIMEO: nothing could be sent for a slice
                    count = 0
                except OSError as exc:
                    raise self._lost(exc) from exc
            sent += count
            if idle.silent_s(count) >= self._deadline_s - self._slice_s:
                raise DeadlineError(f"{self._peer} took nothing for {self._deadline_s:g} s")
            _check_cancelled(cancelled)

    def _receive_all(
        self,
        into: memoryview,
        *,
        idle_s: float | None = None,
        until: float | None = None,
        cancelled: Cancelled | None = None,
    ) -> None:
        received = 0
        idle = _IdleTimer(self._slice_s)
        while received < len(into):
            with into[received : received + wire.RECEIVE_CHUNK_BYTES] as piece:
                try:
                    count = self._sock.recv_into(piece, 0, socket.MSG_WAITALL)
                except BlockingIOError:  # SO_RCVTIMEO: nothing arrived for a slice
                    count = 0
                except OSError as exc:
                    raise self._lost(exc) from exc
                else:
                    if count == 0:
                        raise ConnectionLostError(f"{self._peer} closed the connection")
            received += count
            allowed_s = idle_s if idle_s is not None and received == 0 else self._deadline_s
            # One slice early, because bytes that came early in a slice were only counted at its end.
            if idle.silent_s(count) >= allowed_s - self._slice_s:
                raise DeadlineError(f"{self._peer} sent nothing for {allowed_s:g} s")
            # A handshake is bounded as a whole: an attacker could otherwise dribble it in, a byte a deadline.
            if until is not None and received < len(into) and time.monotonic() >= until:
                raise DeadlineError(f"{self._peer} did not complete the handshake in time")
            _check_cancelled(cancelled)

    def _lost(self, exc: OSError) -> FlashpointError:
        if exc.errno in _NO_ANSWER:
            return DeadlineError(f"{self._peer} does not answer: {exc.strerror}")
        return ConnectionLostError(f"connection to {self._peer} broke: {exc.strerror or exc}")


class _IdleTimer:
    """How long nothing has moved, as far as the peer is to blame: a process that was held up itself, between two calls,
    would otherwise blame a peer whose bytes have been there for long.

    Args:
        slice_s: what one call waits at most.
    """

    def __init__(self, slice_s: float) -> None:
        self._longest_s = 2 * slice_s
        self._looked_at = time.monotonic()
        self._silent_s = 0.0

    def silent_s(self, count: int) -> float:
        """Seconds of silence, after a call that moved ``count`` bytes."""
        now = time.monotonic()
        self._silent_s = 0.0 if count else self._silent_s + min(now - self._looked_at, self._longest_s)
        self._looked_at = now
        return self._silent_s


def connect(address: Address, secret: bytes, *, deadline_s: float, connect_timeout_s: float, peer: str) -> Channel:
    """Connect to a transfer service and authenticate, each within ``connect_timeout_s``. A service that hangs up in the
    handshake, as one does that too many connect to, is asked some times more.

    Raises:
        AuthenticationError: the two sides do not share the secret.
        DeadlineError: no answer in time.
        ReplicationError: the connection was refused or broke.
    """
    until = time.monotonic() + connect_timeout_s
    for longest_pause_s in (*_PAUSES_S, None):
        sock = _open(address, connect_timeout_s, peer)
        try:
            channel = Channel(sock, deadline_s=deadline_s, peer=peer)
            channel.handshake_as_client(secret, connect_timeout_s)
            return channel
        except (TurnedAwayError, ConnectionLostError):
            sock.close()
            # Those who were turned away together come back one by one.
            pause_s = None if longest_pause_s is None else random.uniform(0, longest_pause_s)
            if pause_s is None or time.monotonic() + pause_s >= until:
                raise
        except BaseException:
            sock.close()
            raise
        time.sleep(pause_s)
    raise AssertionError


def _open(address: Address, connect_timeout_s: float, peer: str) -> socket.socket:
    try:
        return socket.create_connection(address, timeout=connect_timeout_s)
    except OSError as exc:
        if isinstance(exc, TimeoutError) or exc.errno in _NO_ANSWER:
            raise DeadlineError(f"no connection to {peer} within {connect_timeout_s:g} s: {exc}") from exc
        raise ConnectionLostError(f"cannot connect to {peer}: {exc}") from exc


def _timeval(seconds: float) -> bytes:
    whole = int(seconds)
    return struct.pack("ll", whole, int((seconds - whole) * 1_000_000))


def _check_cancelled(cancelled: Cancelled | None) -> None:
    if cancelled is not None and cancelled():
        raise TransferCancelledError("the transfer was cancelled")


@contextlib.contextmanager
def error_context(*, step: int | None, rank: int | None = None, node: str | None = None) -> Iterator[None]:
    """Have the errors raised inside name the step, rank and node concerned, unless they name some already."""
    try:
        yield
    except FlashpointError as exc:
        exc.step = step if exc.step is None else exc.step
        exc.rank = rank if exc.rank is None else exc.rank
        exc.node = node if exc.node is None else exc.node
        raise
