"""Serves this node's objects to peers and takes copies in from them.

Owns what the requests of `transfer_protocol` mean, and their order. Connections, and who may have one, are
`net.server`'s; where objects live, and whether a copy is wanted, is for the `TransferBackend`, which sees only
authenticated requests with names that cannot leave a directory.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ml_flashpoint.format import manifest as manifests
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId, validate_segment
from ml_flashpoint.format.errors import (
    InvalidArgumentError,
    InvalidNameError,
    ProtocolError,
    ReplicationError,
)
from ml_flashpoint.format.manifest import Manifest
from ml_flashpoint.net import transfer_protocol as protocol
from ml_flashpoint.net.block_verifier import BlockTarget, BlockVerifier, receive_blocks
from ml_flashpoint.net.channel import Channel
from ml_flashpoint.net.handshake import check_secret
from ml_flashpoint.net.messages import Fields, integer, text
from ml_flashpoint.net.server import HANDSHAKE_DEADLINE_S, HangUp, Peer, RequestServer
from ml_flashpoint.net.transfer_backend import IncomingPart, TransferBackend
from ml_flashpoint.net.transfer_protocol import Address, error_context

if TYPE_CHECKING:
    from typing_extensions import Buffer

_log = logging.getLogger(__name__)

_SHORTEST_KEEPALIVE_S, _LONGEST_KEEPALIVE_S = 0.02, 5.0


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
        deadline_s: float = protocol.DEFAULT_DEADLINE_S,
        handshake_deadline_s: float = HANDSHAKE_DEADLINE_S,
        idle_deadline_s: float = protocol.IDLE_DEADLINE_S,
        work_limit_s: float = protocol.WORK_LIMIT_S,
        max_connections: int = protocol.MAX_CONNECTIONS,
    ) -> None:
        limits = (deadline_s, handshake_deadline_s, idle_deadline_s, work_limit_s, max_connections)
        if min(limits) <= 0:
            raise InvalidArgumentError("deadlines and limits of a transfer service must be positive")
        self._secret = check_secret(secret)
        self._handler = _Requests(backend, deadline_s, work_limit_s)
        self._bind_to = (host, port)
        self._advertise_host = advertise_host
        self._limits = {
            "stall_s": deadline_s,
            "handshake_deadline_s": handshake_deadline_s,
            "idle_s": idle_deadline_s,
            "max_connections": max_connections,
        }
        self._server: RequestServer | None = None
        self._address: Address | None = None
        self._lock = threading.Lock()
        self._closed = False
        _services.add(self)

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
            if self._closed:
                raise ReplicationError("the transfer service was closed")
            if self._server is not None:
                return
            host, port = self._bind_to
            try:
                self._server = RequestServer(
                    self._secret,
                    self._handler,
                    protocol.TRANSFERS,
                    tcp_host=host,
                    tcp_port=port,
                    **self._limits,  # type: ignore[arg-type]
                )
            except OSError as exc:
                raise ReplicationError(f"cannot listen on {host} port {port}: {exc.strerror or exc}") from exc
            except RuntimeError as exc:
                raise ReplicationError(f"cannot serve peers: {exc}") from exc
            self._address = (self._advertise_host or _reachable_host(host), int(self._server.addresses[0][2]))  # type: ignore[misc]

    def close(self) -> None:
        """Stop listening, break transfers under way off, and wait for their threads for at most about 2 s. Idempotent.
        A thread that hangs in the backend is left behind; it cannot keep the process alive.
        """
        with self._lock:
            self._closed = True
            server, self._server = self._server, None
        if server is not None:
            server.close()

    def _become_closed(self) -> None:
        self._lock, self._closed, self._server = threading.Lock(), True, None


@contextlib.contextmanager
def _out_of_step() -> Iterator[None]:
    """From here on the two sides no longer agree on what comes next, if anything goes wrong."""
    try:
        yield
    except Exception as error:
        raise HangUp from error


class _Requests:
    """What requests mean: see `net.server.RequestHandler`. A session is the channel."""

    def __init__(self, backend: TransferBackend, deadline_s: float, work_limit_s: float) -> None:
        self._backend = backend
        self._deadline_s = deadline_s
        self._work_limit_s = work_limit_s

    def open(self, peer: Peer) -> Channel:
        assert peer.channel is not None
        return peer.channel

    def closed(self, session: Channel) -> None:
        pass

    def handle(
        self, session: Channel, op: str, fields: Fields, blobs: list[bytes]
    ) -> tuple[Fields, Sequence[Buffer]] | None:
        if op == "ping":
            return {}, ()
        if op == "manifest":
            version, save_id = _checked_version(text(fields, "version")), validate_segment(text(fields, "save"))
            return {}, (self._backend.read_manifest(version, integer(fields, "rank"), save_id),)
        if op == "fetch":
            self._give_bytes(session, fields)
            return None
        if op == "push" and len(blobs) == 1:
            return self._take_part(session, fields, blobs[0])
        raise ProtocolError(f"there is no request {op!a} of {len(blobs)} blobs")

    def _give_bytes(self, channel: Channel, fields: Fields) -> None:
        with contextlib.ExitStack() as opened:
            version, name = _checked_version(text(fields, "version")), validate_segment(text(fields, "name"))
            begin = integer(fields, "offset")
            end = begin + integer(fields, "length")
            view = opened.enter_context(self._backend.open_object(version, name))
            if end > len(view):
                raise ProtocolError(f"bytes {begin} to {end} of {version}/{name}, which has {len(view)}")
            piece = opened.enter_context(view[begin:end])
            with _out_of_step():
                channel.send(None, {}, payload_bytes=len(piece))
                channel.send_payload(piece)

    def _take_part(self, channel: Channel, fields: Fields, encoded: bytes) -> tuple[Fields, Sequence[Buffer]]:
        every_s = min(_LONGEST_KEEPALIVE_S, max(_SHORTEST_KEEPALIVE_S, integer(fields, "patience_ms") / 4000))
        manifest = manifests.decode(encoded)
        with channel.working(every_s=every_s, limit_s=self._work_limit_s):
            part = self._backend.begin_receive(manifest)
        if part is None:
            return {"held": True}, ()
        # What is wrong is told while the peer may still be sending; it looks for this when its own send fails.
        with _out_of_step(), error_context(step=manifest.step, rank=manifest.rank):
            try:
                self._fill_part(channel, manifest, part, every_s)
            except BaseException:
                self._abort(part)
                raise
        return {}, ()

    def _fill_part(self, channel: Channel, manifest: Manifest, part: IncomingPart, every_s: float) -> None:
        with contextlib.ExitStack() as held:
            targets = [
                held.enter_context(BlockTarget(record, buffer, f"{manifest.version}/{record.name}"))
                for record, buffer in zip(manifest.objects, part.buffers, strict=True)
            ]
            verifier = held.enter_context(BlockVerifier())
            channel.send(None, {"held": False})
            announced = channel.receive(request=True)
            if announced.subject != "data" or announced.payload_bytes != manifest.total_size:
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
        except Exception:
            _log.exception("a part could not be aborted")


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


_services: weakref.WeakSet[TransferService] = weakref.WeakSet()


def _disown_services() -> None:
    for service in list(_services):
        service._become_closed()
    _services.clear()


os.register_at_fork(after_in_child=_disown_services)
