"""The protocol by which parts travel between peers, and the server of a node's parts. A client asks for

* ``ping``: an answer;
* ``manifest``: that of a part, as a blob;
* ``fetch``: a range of a part's object, as the payload of the reply;
* ``push``: to take a part, whose manifest is a blob, with a rider (JSON for the backend). Unless the reply is that the
  part is ``held`` already, ``data`` follows, with all bytes of the object as payload, and is answered once they are
  checked and committed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias

from ml_flashpoint.format import errors
from ml_flashpoint.format.manifest import Manifest, decode, object_name
from ml_flashpoint.format.save_id import SaveId
from ml_flashpoint.net.blocks import BlockChecker
from ml_flashpoint.net.channel import STALL_S, Channel
from ml_flashpoint.net.messages import Dialect, Fields, errors_of, integer
from ml_flashpoint.net.server import Peer, RequestServer

if TYPE_CHECKING:
    from typing_extensions import Buffer

Address: TypeAlias = tuple[str, int]
"""Host and port."""

TRANSFERS: Final = Dialect(
    purpose=b"ml_flashpoint.replication transfers",
    errors=errors_of(errors),
    failure=errors.ReplicationError,
)


class PartName(NamedTuple):
    """Name of a part: its save and its rank."""

    save: SaveId
    rank: int

    @staticmethod
    def of(manifest: Manifest) -> PartName:
        """Return the name of a part. Raise a `ManifestError` unless it has one object that is named after it."""
        save, rank = SaveId.of(manifest), manifest.rank
        names = [record.name for record in manifest.objects]
        if save is None or names != [object_name(rank, save.text)]:
            message = f"no part of a save: it is of {manifest.save_id!a} and has the objects {names}"
            raise errors.ManifestError(message, step=manifest.step, rank=rank)
        return PartName(save, rank)

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
        ...

    def read_manifest(self, part: PartName) -> bytes:
        """Return the encoded manifest of a part."""
        ...

    def receive(self, manifest: Manifest, rider: Fields) -> AbstractContextManager[memoryview | None]:
        """Make room for a part; entering returns where its bytes go, or None if the part is held already.

        The part is committed when the context is left: all bytes are there and have the manifest's digests. If the
        context is left by an error, they have not, and the room is free.
        """
        ...


@contextlib.contextmanager
def error_context(part: PartName | None, node: str | None = None) -> Iterator[None]:
    """Have the errors that are raised inside name the step, rank and node, unless they name some already."""
    try:
        yield
    except errors.FlashpointError as error:
        if part is not None:
            error.step = part.save.step if error.step is None else error.step
            error.rank = part.rank if error.rank is None else error.rank
        error.node = node if error.node is None else error.node
        raise


_LIMITS = {"idle_s": 300.0, "max_connections": 256}


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
            raise errors.ReplicationError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error
        except RuntimeError as error:
            raise errors.ReplicationError(f"cannot serve peers: {error}") from error
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
        raise errors.ProtocolError(f"there is no request {op!a} of {len(blobs)} blobs")

    def _give_bytes(self, channel: Channel, fields: Fields) -> None:
        part, begin = PartName.from_fields(fields), integer(fields, "offset")
        end = begin + integer(fields, "length")
        with self._backend.open_part(part) as view:
            if end > len(view):
                raise errors.ProtocolError(f"bytes {begin} to {end} of {part}, which has {len(view)}")
            with view[begin:end] as piece:
                channel.send(None, {}, payload_bytes=len(piece))
                channel.send_payload(piece)

    def _take_part(self, channel: Channel, fields: Fields, encoded: bytes) -> tuple[Fields, Sequence[Buffer]]:
        rider, manifest = fields.get("rider"), decode(encoded)
        if not isinstance(rider, dict):
            raise errors.ProtocolError("a push must have a rider")
        part, record = PartName.of(manifest), manifest.objects[0]
        with error_context(part), contextlib.ExitStack() as receiving:
            buffer = receiving.enter_context(self._backend.receive(manifest, rider))
            if buffer is None:
                return {"held": True}, ()
            blocks = receiving.enter_context(BlockChecker(record, buffer, str(part)))
            channel.send(None, {"held": False})
            announced = channel.receive(request=True)
            if announced.subject != "data" or announced.payload_bytes != record.size:
                raise errors.ProtocolError("a push must go on with exactly the bytes that its manifest names")
            # What is wrong is told while the peer may still be sending; it looks for this when its own send fails.
            for block in range(len(record.digests)):
                blocks.receive(channel, block)
                if blocks.failed:
                    break
            blocks.finish(self._deadline_s)
            receiving.close()  # ends the checking, then commits
        return {}, ()
