"""The protocol by which parts travel between peers: the server of a node's parts, and its client. A client asks for

* ``ping``: an answer;
* ``manifest``: that of a part, as a blob;
* ``fetch``: a range of a part's object, as the payload of the reply;
* ``push``: to take a part, whose manifest is a blob, with a rider (JSON for the backend). Unless the reply is that the
  part is ``held`` already, ``data`` follows, with all bytes of the object as payload, and is answered once they are
  checked and committed.

Blocks are checked against their digests while the following ones are still arriving.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias

from ml_flashpoint.format import errors
from ml_flashpoint.format.digest import block_count, digest_block, run_on_pool
from ml_flashpoint.format.errors import (
    DeadlineError,
    DigestMismatchError,
    FlashpointError,
    ManifestError,
    ProtocolError,
    ReplicationError,
)
from ml_flashpoint.format.manifest import Manifest, ObjectRecord, decode, encode
from ml_flashpoint.format.names import SaveId
from ml_flashpoint.net.channel import STALL_S, Cancelled, Channel, ConnectionLostError
from ml_flashpoint.net.client import Connection
from ml_flashpoint.net.handshake import check_secret
from ml_flashpoint.net.messages import Dialect, Fields, Message, errors_of, integer
from ml_flashpoint.net.server import Peer, RequestServer

if TYPE_CHECKING:
    from typing_extensions import Buffer

_log = logging.getLogger(__name__)

Address: TypeAlias = tuple[str, int]
"""Host and port."""

TRANSFERS: Final = Dialect(
    purpose=b"ml_flashpoint.replication transfers", errors=errors_of(errors), failure=ReplicationError
)

_LIMITS = {"idle_s": 300.0, "max_connections": 256}
CONNECT_TIMEOUT_S = 10.0
"""Default time for connecting and authenticating."""
_WORK_BYTES_S = 64 << 20
"""Rate at which the slowest peer makes room for a part, and checks and commits it."""
_INLINE_BYTES = 256 << 10
"""Blocks up to this size are digested by the receiving thread: quicker than waking another one."""


class PartName(NamedTuple):
    """Name of a part: its save and its rank."""

    save: SaveId
    rank: int

    @staticmethod
    def of(manifest: Manifest) -> PartName:
        """Return the name of a part."""
        return PartName(manifest.save, manifest.rank)

    def to_fields(self) -> Fields:
        """Return the name as fields of a request."""
        return {"run": self.save.run, "step": self.save.step, "rank": self.rank}

    @staticmethod
    def from_fields(fields: Fields) -> PartName:
        """Return the name in the fields of a request: numbers, by which no file elsewhere can be named."""
        return PartName(SaveId(integer(fields, "run"), integer(fields, "step")), integer(fields, "rank"))

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.save.version} (run {self.save.run})"


class TransferBackend(Protocol):
    """The parts that a `TransferService` serves from and stores to. Called by many threads at once. Its errors reach
    the peer."""

    def open_part(self, part: PartName) -> AbstractContextManager[memoryview]:
        """Return the bytes of a committed object, which stay as they are until the context is left."""

    def read_manifest(self, part: PartName) -> bytes:
        """Return the encoded manifest of a part."""

    def receive(self, manifest: Manifest, rider: Fields) -> AbstractContextManager[memoryview | None]:
        """Make room for a part; entering returns where its bytes go, or None if the part is held already.

        The part is committed when the context is left: all bytes are there and have the manifest's digests. If the
        context is left by an error, they have not, and the room is free.
        """


@contextlib.contextmanager
def error_context(part: PartName | None, node: str | None = None) -> Iterator[None]:
    """Have the errors that are raised inside name the step, rank and node, unless they name some already."""
    try:
        yield
    except FlashpointError as error:
        if part is not None:
            error.step = part.save.step if error.step is None else error.step
            error.rank = part.rank if error.rank is None else error.rank
        error.node = node if error.node is None else error.node
        raise


class BlockChecker:
    """The blocks of an object that is being received into a buffer, and which of them are right.

    Blocks are digested on the threads of `format.digest`. One thread receives. A context manager: nothing refers to the
    buffer after it is left. The buffer has as many bytes as whole blocks from ``first`` on have; ``path`` is for
    errors.
    """

    def __init__(self, record: ObjectRecord, into: memoryview, path: str, first: int = 0) -> None:
        self._record = record
        self._path = path
        self._first = first
        self._view = into.cast("B") if into.nbytes else memoryview(bytearray())
        self._right = bytearray(block_count(into.nbytes, record.block_size))
        self._checks: list[Future[object]] = []
        self._failure: BaseException | None = None

    def __enter__(self) -> BlockChecker:
        return self

    def __exit__(self, *_: object) -> None:
        wait([check for check in self._checks if not check.cancel()])
        self._view.release()

    @property
    def failed(self) -> bool:
        """True if a block was found wrong since the last `finish`."""
        return self._failure is not None

    def missing(self) -> list[range]:
        """Return the runs of consecutive blocks that are not right, in order."""
        runs: list[range] = []
        at = self._right.find(0)
        while at >= 0:
            end = self._right.find(1, at)
            end = end if end >= 0 else len(self._right)
            runs.append(range(self._first + at, self._first + end))
            at = self._right.find(0, end)
        return runs

    def span(self, blocks: range) -> tuple[int, int]:
        """Return the first byte of consecutive blocks in the object, and the one after their last."""
        size = self._record.block_size
        return blocks[0] * size, min((blocks[-1] + 1) * size, self._record.size)

    def _place(self, block: int) -> memoryview:
        begin, end = self.span(range(block, block + 1))
        before = self._first * self._record.block_size
        return self._view[begin - before : end - before]

    def receive(self, channel: Channel, block: int, cancelled: Cancelled | None = None) -> None:
        """Receive one block into its place, and have it checked. Raises what `Channel.receive_payload` does."""
        with self._place(block) as piece:
            channel.receive_payload(piece, cancelled=cancelled)
        self.submit(block)

    def submit(self, block: int) -> None:
        """Have a block checked that is in its place."""
        is_small = self._record.block_size <= _INLINE_BYTES
        check = None if is_small else run_on_pool(partial(self._check, block))
        if check is None:
            self._check(block)
        else:
            self._checks.append(check)

    def finish(self, deadline_s: float) -> None:
        """Wait until all blocks that have arrived are checked. Raise a `DigestMismatchError` for the first one that was
        found wrong since the last call, and a `DeadlineError` if none was checked for so many seconds."""
        left = set(self._checks)
        while left:
            done, left = wait(left, deadline_s, FIRST_COMPLETED)
            if not done:
                raise DeadlineError(f"digests of received blocks made no progress for {deadline_s:g} s")
        self._checks.clear()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _check(self, block: int) -> None:
        try:
            with self._place(block) as piece:
                found = digest_block(piece)
            if found != (recorded := self._record.digests[block]):
                begin, end = self.span(range(block, block + 1))
                raise DigestMismatchError(
                    f"block {block}, bytes {begin} to {end}, arrived with digest {found} and not {recorded} as"
                    " recorded",
                    path=self._path,
                )
            self._right[block - self._first] = 1
        except BaseException as error:
            self._failure = self._failure or error


class TransferService:
    """The server of a node's parts, for peers that know the job's secret. Listens from construction until `close`.

    The backend sees only authenticated requests, with names that cannot leave a directory. A transfer without progress
    for ``deadline_s`` is given up. ``limits`` are others of `RequestServer`. Raises a `ReplicationError` if it cannot
    listen.

    Attributes:
        address: host and port for peers to connect to.
    """

    def __init__(
        self,
        secret: bytes,
        backend: TransferBackend,
        *,
        host: str,
        port: int = 0,
        deadline_s: float = STALL_S,
        **limits: Any,
    ) -> None:
        self._backend = backend
        self._deadline_s = deadline_s
        options = {"tcp_host": host, "tcp_port": port, "stall_s": deadline_s, **_LIMITS, **limits}
        try:
            self._server = RequestServer(secret, self, TRANSFERS, **options)
        except OSError as error:
            raise ReplicationError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error
        except RuntimeError as error:
            raise ReplicationError(f"cannot serve peers: {error}") from error
        self.address: Address = (host, int(self._server.addresses[0][-1]))

    def __enter__(self) -> TransferService:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening, break off transfers, and wait for their threads for at most about 2 s. Safe to call twice."""
        self._server.close()

    def open(self, peer: Peer) -> Channel:
        """See `RequestHandler`, as for the next two: a session is the channel."""
        assert peer.channel is not None
        return peer.channel

    def closed(self, session: Channel) -> None:
        """Do nothing."""

    def handle(
        self, session: Channel, op: str, fields: Fields, blobs: list[bytes]
    ) -> tuple[Fields, Sequence[Buffer]] | None:
        """Carry out a request."""
        if op == "ping":
            return {}, ()
        if op == "manifest":
            return {}, (self._backend.read_manifest(PartName.from_fields(fields)),)
        if op == "fetch":
            self._give_bytes(session, fields)
            return None
        if op == "push" and len(blobs) == 1:
            return self._take_part(session, fields, blobs[0])
        raise ProtocolError(f"there is no request {op!a} of {len(blobs)} blobs")

    def _give_bytes(self, channel: Channel, fields: Fields) -> None:
        part, begin = PartName.from_fields(fields), integer(fields, "offset")
        end = begin + integer(fields, "length")
        with self._backend.open_part(part) as view:
            if end > len(view):
                raise ProtocolError(f"bytes {begin} to {end} of {part}, which has {len(view)}")
            with view[begin:end] as piece:
                channel.send(None, {}, payload_bytes=len(piece))
                channel.send_payload(piece)

    def _take_part(self, channel: Channel, fields: Fields, encoded: bytes) -> tuple[Fields, Sequence[Buffer]]:
        rider, manifest = fields.get("rider"), decode(encoded)
        if not isinstance(rider, dict):
            raise ProtocolError("a push must have a rider")
        part, record = PartName.of(manifest), manifest.record
        with error_context(part), contextlib.ExitStack() as receiving:
            buffer = receiving.enter_context(self._backend.receive(manifest, rider))
            if buffer is None:
                return {"held": True}, ()
            blocks = receiving.enter_context(BlockChecker(record, buffer, str(part)))
            channel.send(None, {"held": False})
            announced = channel.receive(request=True)
            if announced.subject != "data" or announced.payload_bytes != record.size:
                raise ProtocolError("a push must go on with exactly the bytes that its manifest names")
            # What is wrong is told while the peer may still be sending; it looks for this when its own send fails.
            for block in range(len(record.digests)):
                blocks.receive(channel, block)
                if blocks.failed:
                    break
            blocks.finish(self._deadline_s)
            receiving.close()  # ends the checking, then commits
        return {}, ()


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
