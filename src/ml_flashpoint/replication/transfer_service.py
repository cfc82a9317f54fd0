"""Serves this node's objects to peers and takes copies in from them.

Owns the listening socket, the threads behind it and the order of each request. Bytes on the wire belong to
`wire`, waiting and authentication to `channel`; where objects live, and whether a copy is wanted, is for the
`TransferBackend`, which sees only authenticated requests with names that cannot leave a directory.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import socket
import threading
import time
import weakref
from dataclasses import dataclass

from ml_flashpoint.format import manifest as manifests
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId, validate_segment
from ml_flashpoint.format.errors import (
    DeadlineError,
    FlashpointError,
    InvalidArgumentError,
    InvalidNameError,
    ProtocolError,
    ReplicationError,
)
from ml_flashpoint.format.manifest import Manifest
from ml_flashpoint.replication import wire
from ml_flashpoint.replication.block_verifier import BlockTarget, BlockVerifier, receive_blocks
from ml_flashpoint.replication.channel import Address, Channel, ConnectionLostError, error_context, track
from ml_flashpoint.replication.reception import Reception
from ml_flashpoint.replication.transfer_backend import IncomingPart, TransferBackend
from ml_flashpoint.replication.wire import Frame, FrameKind

_logger = logging.getLogger(__name__)

_LOG_EVERY_S = 10.0
_JOIN_S = 2.0
_SHORTEST_KEEPALIVE_S, _LONGEST_KEEPALIVE_S = 0.02, 5.0


@dataclass(eq=False, slots=True)
class _Connection:
    """One authenticated connection."""

    sock: socket.socket
    thread: threading.Thread | None = None
    refused: bool = False

    def interrupt(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)


class TransferService:
    """Listens for peers that know the job's secret.

    Args:
        secret: the job's secret, 16 bytes or more.
        backend: where objects come from and go to.
        host: address to listen on; all of the node's by default.
        port: port to listen on; 0 takes a free one.
        advertise_host: host in `address`, if that differs from ``host``. By default a wildcard ``host`` is
            advertised as the address that this node reaches others from.
        deadline_s: A transfer without progress for so long is given up.
        handshake_deadline_s: an unauthenticated client is dropped after so long.
        idle_deadline_s: an authenticated connection without requests for so long is closed.
        work_limit_s: longest that clients are asked to wait for the backend.
        max_connections: authenticated connections served at once; more are refused.

    `start`, `close` and `address` are thread-safe. A forked child does not serve: there, the service is
    closed.

    Raises:
        InvalidArgumentError: the secret is too short, or a limit is not positive.
    """

    def __init__(
        self,
        secret: bytes,
        backend: TransferBackend,
        *,
        host: str = "0.0.0.0",
        port: int = 0,
        advertise_host: str | None = None,
        deadline_s: float = wire.DEFAULT_DEADLINE_S,
        handshake_deadline_s: float = wire.HANDSHAKE_DEADLINE_S,
        idle_deadline_s: float = wire.IDLE_DEADLINE_S,
        work_limit_s: float = wire.WORK_LIMIT_S,
        max_connections: int = wire.MAX_CONNECTIONS,
    ) -> None:
        limits = (deadline_s, handshake_deadline_s, idle_deadline_s, work_limit_s, max_connections)
        if min(limits) <= 0:
            raise InvalidArgumentError("deadlines and limits of a transfer service must be positive")
        self._secret = wire.check_secret(secret)
        self._backend = backend
        self._bind_to = (host, port)
        self._advertise_host = advertise_host
        self._deadline_s = deadline_s
        self._handshake_deadline_s = handshake_deadline_s
        self._idle_deadline_s = idle_deadline_s
        self._work_limit_s = work_limit_s
        self._max_connections = max_connections
        self._log = _SparingLog()
        self._listener: socket.socket | None = None
        self._address: Address | None = None
        self._acceptor: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._connections: set[_Connection] = set()

    def _become_closed(self) -> None:
        # In a forked child: threads do not exist there, locks may be held, and sockets are closed by `track`.
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._closed.set()
        self._connections = set()
        self._listener = self._acceptor = None

    def __enter__(self) -> TransferService:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def address(self) -> Address:
        """Host and port for peers to connect to.

        Raises:
            ReplicationError: the service has not been started.
        """
        if self._address is None:
            raise ReplicationError("the transfer service has not been started")
        return self._address

    def start(self) -> None:
        """Listen. Does nothing if the service was started before.

        Raises:
            ReplicationError: the address cannot be listened on, or the service was closed.
        """
        with self._lock:
            if self._closed.is_set():
                raise ReplicationError("the transfer service was closed")
            if self._listener is not None:
                return
            host, port = self._bind_to
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            try:
                listener = socket.create_server((host, port), family=family, backlog=wire.ACCEPT_BACKLOG)
            except OSError as exc:
                raise ReplicationError(f"cannot listen on {host} port {port}: {exc.strerror or exc}") from exc
            acceptor = threading.Thread(
                target=self._accept, args=(listener,), name="flashpoint-transfer-accept", daemon=True
            )
            try:
                acceptor.start()
            except RuntimeError as exc:
                listener.close()
                raise ReplicationError(f"cannot serve peers: {exc}") from exc
            track(listener)
            self._listener, self._acceptor = listener, acceptor
            self._address = (self._advertise_host or _reachable_host(host), listener.getsockname()[1])
            _live_services.add(self)

    def close(self) -> None:
        """Stop listening, break transfers under way off, and wait for their threads for at most about 2 s.

        Idempotent. A thread that hangs in the backend is left behind; it cannot keep the process alive.
        """
        with self._lock:
            self._closed.set()
            listener, acceptor = self._listener, self._acceptor
            connections = list(self._connections)
            for connection in connections:
                connection.interrupt()  # under the lock, so that none is closed and its descriptor reused
        _live_services.discard(self)
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread; close() alone would not
        until = time.monotonic() + _JOIN_S
        for thread in (acceptor, *(connection.thread for connection in connections)):
            if thread is not None and thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))
        if listener is not None:
            listener.close()

    # --- Connections ----------------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        reception = Reception(
            listener,
            self._secret,
            deadline_s=self._handshake_deadline_s,
            admit=self._admit,
            report=self._report_dropped,
        )
        reception.run(
            self._closed, lambda exc: self._log.warning("transfer service cannot accept a connection: %s", exc)
        )

    def _report_dropped(self, peer: str, error: FlashpointError | OSError) -> None:
        if isinstance(error, ConnectionLostError):
            _logger.debug("transfer connection ended: %s", error)
        elif not self._closed.is_set():
            self._log.warning("transfer connection from %s dropped: %s", peer, error)

    def _admit(self, sock: socket.socket, peer: str, keys: wire.SessionKeys) -> None:
        connection = _Connection(sock)
        thread = threading.Thread(
            target=self._run, args=(connection, peer, keys), name=f"flashpoint-transfer {peer}", daemon=True
        )
        connection.thread = thread
        with self._lock:
            if self._closed.is_set():
                sock.close()
                return
            connection.refused = len(self._connections) >= self._max_connections
            try:
                thread.start()  # under the lock, so that close() only ever joins threads that were started
            except RuntimeError as exc:
                self._log.warning("transfer service cannot serve %s: %s", peer, exc)
                sock.close()
                return
            self._connections.add(connection)

    def _drop(self, connection: _Connection) -> None:
        with self._lock:
            self._connections.discard(connection)
        connection.sock.close()

    def _run(self, connection: _Connection, peer: str, keys: wire.SessionKeys) -> None:
        try:
            channel = Channel(connection.sock, deadline_s=self._deadline_s, peer=peer)
            channel.take_keys_as_server(keys)
            if connection.refused:
                channel.receive()
                self._refuse(channel, ReplicationError("serving as many connections as allowed, try again later"))
                return
            while True:
                try:
                    request = channel.receive(idle_s=self._idle_deadline_s)
                except DeadlineError as exc:
                    _logger.debug("idle transfer connection closed: %s", exc)
                    return
                self._serve(channel, request)
        except (FlashpointError, OSError) as exc:
            self._report_dropped(peer, exc)
        except Exception as exc:
            self._log.warning("transfer connection from %s failed", peer, exc_info=exc)
        finally:
            self._drop(connection)

    # --- Requests -------------------------------------------------------------------------------------------
    # A handler refuses what it can while both sides agree on what comes next. What it raises leaves them out
    # of step, so that the connection is dropped.

    def _serve(self, channel: Channel, request: Frame) -> None:
        if request.kind is FrameKind.PING:
            channel.send(Frame(FrameKind.PONG))
        elif request.kind is FrameKind.GET_MANIFEST:
            self._give_manifest(channel, request)
        elif request.kind is FrameKind.GET:
            self._give_bytes(channel, request)
        elif request.kind is FrameKind.PUSH:
            self._take_part(channel, request)
        else:
            raise ProtocolError(f"{request.kind.name} is not a request")

    def _refuse(self, channel: Channel, exc: Exception) -> None:
        if isinstance(exc, FlashpointError):
            _logger.debug("transfer request refused: %s", exc)
        else:
            self._log.warning("transfer backend failed", exc_info=exc)
        channel.send(wire.error_frame(exc))

    def _give_manifest(self, channel: Channel, request: Frame) -> None:
        try:
            version = _checked_version(request.text("version"))
            save_id = validate_segment(request.text("attempt"))
            body = self._backend.read_manifest(version, request.integer("rank"), save_id)
        except Exception as exc:
            self._refuse(channel, exc)
            return
        channel.send(Frame(FrameKind.MANIFEST, body=body))

    def _give_bytes(self, channel: Channel, request: Frame) -> None:
        with contextlib.ExitStack() as opened:
            try:
                version = _checked_version(request.text("version"))
                name = validate_segment(request.text("name"))
                begin = request.integer("offset")
                end = begin + request.integer("length")
                view = opened.enter_context(self._backend.open_object(version, name))
                if end > len(view):
                    raise ProtocolError(f"bytes {begin} to {end} of {version}/{name}, which has {len(view)}")
                piece = opened.enter_context(view[begin:end])
            except Exception as exc:
                self._refuse(channel, exc)
                return
            channel.send(Frame(FrameKind.DATA, payload_bytes=len(piece)))
            channel.send_payload(piece)

    def _take_part(self, channel: Channel, request: Frame) -> None:
        try:
            every_s = min(_LONGEST_KEEPALIVE_S, max(_SHORTEST_KEEPALIVE_S, request.integer("patience_ms") / 4000))
            manifest = manifests.decode(request.body)
            with channel.working(every_s=every_s, limit_s=self._work_limit_s):
                part = self._backend.begin_receive(manifest)
        except Exception as exc:
            self._refuse(channel, exc)
            return
        if part is not None:
            with error_context(step=manifest.step, rank=manifest.rank, node=manifest.node):
                try:
                    self._fill_part(channel, manifest, part, every_s)
                except BaseException as exc:
                    self._abort(part)
                    if isinstance(exc, Exception) and not isinstance(exc, ConnectionLostError):
                        # The peer may still be sending; it looks for this when its own send fails.
                        with contextlib.suppress(FlashpointError):
                            channel.send(wire.error_frame(exc))
                    raise
        channel.send(Frame(FrameKind.ACK))

    def _fill_part(self, channel: Channel, manifest: Manifest, part: IncomingPart, every_s: float) -> None:
        with contextlib.ExitStack() as held:
            targets = [
                held.enter_context(BlockTarget(record, buffer, f"{manifest.version}/{record.name}"))
                for record, buffer in zip(manifest.objects, part.buffers, strict=True)
            ]
            verifier = held.enter_context(BlockVerifier())
            channel.send(Frame(FrameKind.READY))
            announced = channel.receive()
            if announced.kind is not FrameKind.DATA or announced.payload_bytes != manifest.total_size:
                raise ProtocolError("a push must go on with exactly the bytes that its manifest names")
            for target in targets:
                for missing in target.missing():
                    for _ in receive_blocks(channel, target, missing, verifier):
                        if verifier.failed:
                            verifier.finish(self._deadline_s)
            with channel.working(every_s=every_s, limit_s=self._work_limit_s):
                verifier.finish(self._deadline_s)
                held.close()  # the backend may unmap or exchange the buffers when it commits
                part.commit()

    def _abort(self, part: IncomingPart) -> None:
        try:
            part.abort()
        except Exception as exc:
            self._log.warning("transfer backend could not abort a part", exc_info=exc)


class _SparingLog:
    """Warnings that unauthenticated clients or a failing backend can cause at will: each text once in 10 s.

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
        _logger.warning(text + more, *args, exc_info=exc_info)


def _checked_version(name: str) -> str:
    if CheckpointContainerId.parse_version_container(validate_segment(name)) is None:
        raise InvalidNameError(f"not the name of a version: {name!a}")
    return name


def _reachable_host(host: str) -> str:
    """The address under which other nodes most likely reach a service that listens on ``host``."""
    if host not in ("", "0.0.0.0", "::"):
        return host
    family, elsewhere = (socket.AF_INET6, "2001:db8::1") if ":" in host else (socket.AF_INET, "192.0.2.1")
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        # Sends nothing: connecting a datagram socket only chooses the route, and so the local address.
        probe.connect((elsewhere, 9))
        return str(probe.getsockname()[0])
    return "::1" if ":" in host else "127.0.0.1"


_live_services: weakref.WeakSet[TransferService] = weakref.WeakSet()


def _close_live_services() -> None:
    # Before the interpreter is torn down: a daemon thread that logs just then can bring it down hard.
    for service in list(_live_services):
        service.close()


def _disown_services() -> None:
    for service in list(_live_services):
        service._become_closed()
    _live_services.clear()


atexit.register(_close_live_services)
os.register_at_fork(after_in_child=_disown_services)
