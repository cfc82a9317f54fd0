"""Pushes copies to peers and fetches objects from them.

Owns one authenticated connection to a peer's `TransferService`, and fetching an object from whichever of
several holders can give it. Which parts go where, and when, is for the replication manager and the loader to
decide.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType

from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.errors import (
    DeadlineError,
    DigestMismatchError,
    FlashpointError,
    InvalidArgumentError,
    ObjectNotFoundError,
    ProtocolError,
    ReplicationError,
)
from ml_flashpoint.format.manifest import Manifest, ObjectRecord
from ml_flashpoint.net.block_verifier import BlockTarget, BlockVerifier, receive_blocks
from ml_flashpoint.net.channel import Cancelled, Channel, ConnectionLostError, TransferCancelledError
from ml_flashpoint.net.client import connect
from ml_flashpoint.net.handshake import check_secret
from ml_flashpoint.net.messages import Fields, Message
from ml_flashpoint.net.transfer_protocol import (
    CONNECT_TIMEOUT_S,
    DEFAULT_DEADLINE_S,
    TRANSFERS,
    Address,
    error_context,
)


class PeerConnection:
    """One connection to a peer's transfer service, for one request at a time.

    Connects when entered as a context manager, or with the first request. After an error that is not a
    refusal by the peer, the connection is closed, and requests on it raise; make a new one.

    Every method raises `ReplicationError` (also as `AuthenticationError` or `ProtocolError`; as
    `ConnectionLostError` where a new connection may work), `DeadlineError` when the peer makes no
    progress, or what the peer refused with: `ObjectNotFoundError`, `CapacityError`, `ManifestError`,
    `JobInUseError`... All are `FlashpointError`s and name the peer's node, and the step and rank if those are
    known.

    Args:
        address: host and port of the peer's service. A numeric host is best: resolving a name has no
            deadline.
        secret: the job's secret, 16 bytes or more.
        node: id of the peer's node, for errors.
        deadline_s: longest time without any progress.
        connect_timeout_s: longest time for connecting and authenticating.

    For one thread at a time, but `interrupt` may be called by any.

    Raises:
        InvalidArgumentError: the secret is too short, or a limit is not positive.
    """

    def __init__(
        self,
        address: Address,
        secret: bytes,
        *,
        node: str | None = None,
        deadline_s: float = DEFAULT_DEADLINE_S,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> None:
        if min(deadline_s, connect_timeout_s) <= 0:
            raise InvalidArgumentError("deadlines of a peer connection must be positive")
        self._address = address
        self._secret = check_secret(secret)
        self._node = node
        self._deadline_s = deadline_s
        self._connect_timeout_s = connect_timeout_s
        self._channel: Channel | None = None
        self._closed = False

    def __enter__(self) -> PeerConnection:
        self.connect()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def connect(self) -> None:
        """Connect and authenticate, unless that was done before."""
        with error_context(step=None, node=self._node):
            self._open_channel()

    def close(self) -> None:
        """Close the connection for good. Idempotent."""
        self._closed = True
        if self._channel is not None:
            self._channel.close()

    def interrupt(self) -> None:
        """Make a request that is under way in another thread fail soon. Thread-safe."""
        self._closed = True
        if self._channel is not None:
            self._channel.interrupt()

    def ping(self, *, cancelled: Cancelled | None = None) -> None:
        """Return once the peer has answered. ``cancelled``: see `push`."""
        with error_context(step=None, node=self._node):
            self._ask("ping", {}, cancelled=cancelled)

    def read_manifest(self, version: str, rank: int, save_id: str) -> bytes:
        """The encoded manifest of the part of ``rank`` saved in ``save_id``, not checked in any way yet."""
        with self._error_context(version, rank):
            blobs = self._ask("manifest", {"version": version, "rank": rank, "save": save_id})[1].blobs
            if len(blobs) != 1:
                self.close()
                raise ProtocolError("the peer answered out of turn")
            return blobs[0]

    def push(
        self,
        manifest: Manifest,
        manifest_bytes: bytes,
        buffers: Sequence[memoryview],
        *,
        cancelled: Cancelled | None = None,
    ) -> bool:
        """Give the peer a copy of a part, and return once it is verified and committed there.

        Returns whether anything was sent: nothing is if the peer holds the part already.

        Args:
            manifest: what is pushed.
            manifest_bytes: ``manifest``, encoded: the peer stores these very bytes.
            buffers: the bytes of each object, in the manifest's order, each of its `size`. They must stay as
                they are until the return.
            cancelled: asked every 16 MiB and about every second; once true, the push is broken off.

        Raises:
            DigestMismatchError: the bytes that arrived are not those of the manifest.
            TransferCancelledError: ``cancelled`` returned true.
            FlashpointError: see the class.
        """
        if [buffer.nbytes for buffer in buffers] != [record.size for record in manifest.objects]:
            raise InvalidArgumentError("buffers must have the sizes of the manifest's objects, in its order")
        with error_context(step=manifest.step, rank=manifest.rank, node=self._node):
            fields = {"patience_ms": int(self._deadline_s * 1000)}
            channel, reply = self._ask("push", fields, manifest_bytes, cancelled=cancelled)
            if reply.fields.get("held"):
                return False
            with self._closing_on_error():
                try:
                    channel.send("data", {}, payload_bytes=manifest.total_size)
                    for buffer in buffers:
                        if buffer.nbytes:
                            with buffer.cast("B") as view:
                                channel.send_payload(view, cancelled=cancelled)
                except ConnectionLostError:
                    # A peer that finds the part damaged reports it and hangs up; its report may be there.
                    with contextlib.suppress(ConnectionLostError):
                        _check(channel.receive_reply())
                    raise
                _check(channel.receive_reply(cancelled=cancelled))
        return True

    def fetch(
        self, version: str, name: str, offset: int, into: memoryview, *, cancelled: Cancelled | None = None
    ) -> None:
        """Fill ``into`` with bytes of an object from ``offset`` on. They are not checked against any digest.

        Raises:
            FlashpointError: see the class; `ProtocolError` if the object has no such bytes.
        """
        if into.readonly or not into.c_contiguous:
            raise InvalidArgumentError("the buffer to fetch into must be writable and contiguous")
        with self._error_context(version, None):
            channel = self._ask_for_bytes(version, name, offset, into.nbytes, cancelled)
            if into.nbytes:
                with self._closing_on_error(), into.cast("B") as view:
                    channel.receive_payload(view, cancelled=cancelled)

    def fetch_object(
        self,
        version: str,
        record: ObjectRecord,
        into: memoryview,
        *,
        rank: int | None = None,
        cancelled: Cancelled | None = None,
    ) -> None:
        """Fill ``into`` with a whole object and check it against the digests of ``record``, block by block.

        Args:
            version: name of the version.
            record: what the manifest says of the object.
            into: writable, `record.size` bytes. Its content is undefined after an error.
            rank: whose part the object is of, for errors.
            cancelled: see `push`.

        Raises:
            DigestMismatchError: A block is not what the manifest says.
            FlashpointError: see the class.
        """
        with (
            self._error_context(version, rank),
            BlockTarget(record, into, f"{version}/{record.name}") as target,
            BlockVerifier() as verifier,
        ):
            for _ in self.fetch_missing(version, target, verifier, cancelled=cancelled):
                pass
            verifier.finish(self._deadline_s)

    def fetch_missing(
        self,
        version: str,
        target: BlockTarget,
        verifier: BlockVerifier,
        *,
        cancelled: Cancelled | None = None,
    ) -> Iterator[int]:
        """Receive the blocks that ``target`` is missing and hand them to ``verifier``, yielding their sizes.

        For callers that keep what arrived before a failure; the others use `fetch_object`.
        """
        for blocks in target.missing():
            begin, end = target.span(blocks[0], blocks[-1])
            channel = self._ask_for_bytes(version, target.record.name, begin, end - begin, cancelled)
            with self._closing_on_error():
                yield from receive_blocks(channel, target, blocks, verifier, cancelled=cancelled)

    def _ask_for_bytes(self, version: str, name: str, offset: int, length: int, cancelled: Cancelled | None) -> Channel:
        fields = {"version": version, "name": name, "offset": offset, "length": length}
        channel, _ = self._ask("fetch", fields, payload_bytes=length, cancelled=cancelled)
        return channel

    def _ask(
        self,
        op: str,
        fields: Fields,
        *blobs: bytes,
        payload_bytes: int = 0,
        cancelled: Cancelled | None = None,
    ) -> tuple[Channel, Message]:
        channel = self._open_channel()
        with self._closing_on_error():
            channel.send(op, fields, blobs)
            reply = channel.receive_reply(cancelled=cancelled)
            if reply.subject is None and reply.payload_bytes != payload_bytes:
                raise ProtocolError(f"the peer sends {reply.payload_bytes:,} bytes instead of {payload_bytes:,}")
        _check(reply)  # a refusal leaves the connection in step, and so of use for the next request
        return channel, reply

    @contextlib.contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _error_context(self, version: str, rank: int | None) -> AbstractContextManager[None]:
        step = CheckpointContainerId.parse_version_container(version)
        return error_context(step=step, rank=rank, node=self._node)

    def _open_channel(self) -> Channel:
        if self._closed:
            raise ConnectionLostError("this connection was closed")
        if self._channel is None:
            with self._closing_on_error():
                self._channel = connect(
                    ("tcp", *self._address),
                    self._secret,
                    TRANSFERS,
                    within_s=self._connect_timeout_s,
                    stall_s=self._deadline_s,
                )
        return self._channel


def _check(reply: Message) -> None:
    if isinstance(reply.subject, dict):
        error = TRANSFERS.rebuild(reply.subject)
        error.message = f"the peer refused: {error.message}"
        raise error


@dataclass(frozen=True, slots=True)
class Holder:
    """A node that should have an object, and where its transfer service listens."""

    node: str
    address: Address


@dataclass(frozen=True, slots=True)
class FetchReport:
    """How an object was fetched.

    Attributes:
        received_bytes: bytes that arrived from each node, in blocks that arrived whole.
        failures: each failed attempt, in order: the node, and why. A `DigestMismatchError` among them means
            that this node's copy (or its memory, or the way to it) is damaged.
    """

    received_bytes: Mapping[str, int]
    failures: tuple[tuple[str, FlashpointError], ...]


def fetch_object_from_holders(
    holders: Sequence[Holder],
    secret: bytes,
    version: str,
    record: ObjectRecord,
    into: memoryview,
    *,
    rank: int | None = None,
    attempts: int = 3,
    deadline_s: float = DEFAULT_DEADLINE_S,
    cancelled: Cancelled | None = None,
    failures: list[tuple[str, FlashpointError]] | None = None,
) -> FetchReport:
    """Fetch and verify a whole object from whichever holders can give it, keeping each block that is right.

    Holders are asked in turn. After a failure the next one is asked for the blocks still missing, over a new
    connection. A holder whose connection broke is asked again, after the others, for as long as it delivers
    something, and otherwise up to ``attempts`` times; one that refused, has damaged blocks, does not
    authenticate, or does not answer, is not.

    Args:
        holders: in order of preference, at least one.
        secret: the job's secret.
        version, record, into, rank, cancelled: see `PeerConnection.fetch_object`.
        attempts: attempts in a row without any progress that each holder gets while its connection breaks.
        deadline_s: see `PeerConnection`; for each attempt.
        failures: what failed is appended here, as in the report, also when this raises.

    Raises:
        TransferCancelledError: ``cancelled`` returned true.
        FlashpointError: no holder could give it: `DigestMismatchError`, `ObjectNotFoundError` or
            `DeadlineError` if that is what happened with every one, else `ReplicationError`. Tells what
            happened with each.
        InvalidArgumentError: there are no holders, or ``into`` does not fit.
    """
    if not holders or attempts < 1:
        raise InvalidArgumentError("fetching needs at least one holder and one attempt")
    path = f"{version}/{record.name}"
    received = {holder.node: 0 for holder in holders}
    failures = [] if failures is None else failures
    already = len(failures)
    waiting = deque((holder, attempts) for holder in holders)
    step = CheckpointContainerId.parse_version_container(version)
    with error_context(step=step, rank=rank), BlockTarget(record, into, path) as target:
        while waiting and target.missing():
            holder, attempts_left = waiting.popleft()
            right_before = target.right_blocks
            peer = PeerConnection(holder.address, secret, node=holder.node, deadline_s=deadline_s)
            count, failure = _fetch_from(peer, version, target, deadline_s, cancelled)
            received[holder.node] += count
            if failure is None:
                continue
            failures.append((holder.node, failure))
            attempts_left = attempts if target.right_blocks > right_before else attempts_left - 1
            if isinstance(failure, ConnectionLostError) and attempts_left:
                waiting.append((holder, attempts_left))
        if target.missing():
            raise _overall_failure(path, failures[already:])
    return FetchReport(received, tuple(failures[already:]))


def _fetch_from(
    peer: PeerConnection, version: str, target: BlockTarget, deadline_s: float, cancelled: Cancelled | None
) -> tuple[int, FlashpointError | None]:
    """Fetch what is missing of an object from one holder. Returns the bytes that came, and what ended it early."""
    received, failure = 0, None
    with BlockVerifier() as verifier:
        try:
            for count in peer.fetch_missing(version, target, verifier, cancelled=cancelled):
                received += count
        except TransferCancelledError:
            raise
        except FlashpointError as error:
            failure = error
        finally:
            peer.close()
        try:
            verifier.finish(deadline_s)  # what arrived before a failure counts as well
        except (DigestMismatchError, DeadlineError) as error:
            failure = error
    return received, failure


def _overall_failure(path: str, failures: Sequence[tuple[str, FlashpointError]]) -> FlashpointError:
    causes = "; ".join(dict.fromkeys(f"{node}: {error.message}" for node, error in failures))
    error_type: type[FlashpointError] = ReplicationError
    for candidate in (DigestMismatchError, ObjectNotFoundError, DeadlineError):
        if all(isinstance(error, candidate) for _, error in failures):
            error_type = candidate
    return error_type(f"no holder could give {path} ({causes})")
