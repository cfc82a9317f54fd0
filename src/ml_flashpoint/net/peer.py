"""The client of a peer's `TransferService`: pushes parts to it and fetches from it."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from ml_flashpoint.format.errors import (
    FlashpointError,
    InvalidArgumentError,
    ManifestError,
    ProtocolError,
    ReplicationError,
)
from ml_flashpoint.format.manifest import Manifest, decode, encode
from ml_flashpoint.net.blocks import BlockChecker
from ml_flashpoint.net.channel import STALL_S, Cancelled, Channel, ConnectionLostError
from ml_flashpoint.net.client import Connection
from ml_flashpoint.net.handshake import check_secret
from ml_flashpoint.net.messages import Fields, Message
from ml_flashpoint.net.transfers import TRANSFERS, Address, PartName, error_context

_log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10.0
"""Default time for connecting and authenticating."""
_WORK_BYTES_S = 64 << 20
"""Rate at which the slowest peer makes room for a part, and checks and commits it."""


class PeerConnection:
    """A connection to a peer's transfer service. Thread-safe: one request at a time. A context manager.

    Connects with the first request, and again with the next one after a failure. If the connection breaks while it is
    idle, the next request is sent once more, over a new connection. Raises what `connect` and `Channel` do, and what
    the peer refuses with. Errors name the peer's ``node``, and the step and rank. ``deadline_s`` is the longest time
    without progress; a push of many bytes may keep the peer at work for longer.

    Attributes:
        connections: number of connections made so far. There may be another process behind each.
    """

    def __init__(
        self,
        address: Address,
        secret: bytes,
        *,
        node: str | None = None,
        deadline_s: float = STALL_S,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> None:
        if min(deadline_s, connect_timeout_s) <= 0:
            raise InvalidArgumentError("deadlines of a peer connection must be positive")
        options = {"connect_timeout_s": connect_timeout_s, "stall_s": deadline_s}
        self._connect = partial(Connection, ("tcp", *address), check_secret(secret), TRANSFERS, **options)
        self._node, self._deadline_s = node, deadline_s
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._closed = False
        self.connections = 0

    def __enter__(self) -> PeerConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection for good; a request under way in another thread fails. Safe to call twice."""
        self._closed = True
        if self._connection is not None:
            self._connection.close()

    def ping(self, *, cancelled: Cancelled | None = None) -> None:
        """Return once the peer has answered."""
        with self._asked("ping", {}, cancelled=cancelled):
            pass

    def read_manifest(self, part: PartName) -> Manifest:
        """Return the manifest of a part. Raise a `ManifestError` if the peer gives something else."""
        with self._asked("manifest", part.to_fields(), part=part) as (_, reply):
            if len(reply.blobs) != 1:
                raise ProtocolError("the peer answered out of turn")
            manifest = decode(reply.blobs[0])
        with error_context(part, self._node):
            if (given := PartName.of(manifest)) != part:
                raise ManifestError(f"asked for {part}, got {given}")
        return manifest

    def fetch(self, part: PartName, blocks: BlockChecker, *, cancelled: Cancelled | None = None) -> None:
        """Fetch the missing blocks of a part's object, and check them. Those that are right stay, also after an error.

        Raise a `DigestMismatchError` if a block is not what the manifest says.
        """
        with error_context(part, self._node):
            try:
                for run in blocks.missing():
                    begin, end = blocks.span(run)
                    fields = {**part.to_fields(), "offset": begin, "length": end - begin}
                    with self._asked("fetch", fields, payload_bytes=end - begin, cancelled=cancelled) as (channel, _):
                        for block in run:
                            blocks.receive(channel, block, cancelled)
            finally:
                blocks.finish(self._deadline_s)

    def push(
        self, manifest: Manifest, buffer: memoryview, rider: Fields | None = None, *, cancelled: Cancelled | None = None
    ) -> bool:
        """Give the peer a copy of a part, with a rider for its backend. Return once the copy is checked and committed
        there.

        Return False if the peer has the part already, else True. Raise a `DigestMismatchError` if the bytes that
        arrived are not those of the manifest.
        """
        part = PartName.of(manifest)
        if buffer.nbytes != manifest.total_size:
            raise InvalidArgumentError("the buffer must have the size of the manifest's object")
        work_s = self._deadline_s + buffer.nbytes / _WORK_BYTES_S
        fields, encoded = {"rider": rider or {}}, encode(manifest)
        with self._asked("push", fields, encoded, part=part, work_s=work_s, cancelled=cancelled) as (channel, reply):
            if reply.fields.get("held"):
                return False
            try:
                channel.send("data", {}, payload_bytes=buffer.nbytes)
                if buffer.nbytes:
                    with buffer.cast("B") as view:
                        channel.send_payload(view, cancelled=cancelled)
            except ConnectionLostError:
                # A peer that finds the part damaged says so and hangs up; what it said may be there.
                with contextlib.suppress(ConnectionLostError):
                    _check(channel.receive(request=False))
                raise
            _check(channel.receive(request=False, stall_s=work_s, cancelled=cancelled))
        return True

    @contextlib.contextmanager
    def _asked(
        self, op: str, fields: Fields, *blobs: bytes, part: PartName | None = None, **options: Any
    ) -> Iterator[tuple[Channel, Message]]:
        """Send a request and yield the channel with the answer, see `Connection.exchange`."""
        with error_context(part, self._node):
            while True:
                connection, is_new = self._opened()
                has_answered = False
                try:
                    with connection.exchange(op, fields, blobs, **options) as exchanged:
                        has_answered = True
                        yield exchanged
                    return
                except ConnectionLostError:
                    if has_answered or is_new:
                        raise

    def _opened(self) -> tuple[Connection, bool]:
        """Return an open connection, and True if it is new."""
        with self._lock:
            is_new = self._connection is None or self._connection.closed
            if is_new and not self._closed:
                self._connection = self._connect()
                self.connections += 1
            if self._connection is None or self._closed:
                self.close()  # which looked for a connection before this one was there
                raise ConnectionLostError("this connection was closed")
            return self._connection, is_new


def _check(reply: Message) -> None:
    if isinstance(reply.subject, dict):
        raise TRANSFERS.rebuild(reply.subject)


def push_to_all(targets: Sequence[int], push: Callable[[int], object]) -> None:
    """Call ``push(target)`` for each rank or manager, all at once. Once all have ended, raise the failure of one, if
    any."""
    failures: list[FlashpointError] = []

    def guarded(target: int) -> None:
        try:
            push(target)
        except FlashpointError as error:
            failures.append(error)
        except Exception as error:  # lost with its thread, it would pass for an acknowledgement
            _log.exception("pushing a copy to rank %d failed", target)
            failures.append(ReplicationError(f"{type(error).__name__}: {error}", rank=target))

    threads = []
    for target in targets[1:]:
        thread = threading.Thread(target=guarded, args=(target,), daemon=True, name=f"flashpoint-push-{target}")
        try:
            thread.start()
            threads.append(thread)
        except RuntimeError:  # no more threads to be had
            guarded(target)
    for target in targets[:1]:
        guarded(target)
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
