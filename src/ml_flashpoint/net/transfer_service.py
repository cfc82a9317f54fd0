"""The server of parts: serves those of this node to peers, and takes copies of others' parts in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ml_flashpoint.format.errors import ProtocolError, ReplicationError
from ml_flashpoint.format.manifest import decode
from ml_flashpoint.net.blocks import BlockChecker
from ml_flashpoint.net.channel import Channel
from ml_flashpoint.net.messages import Fields, integer
from ml_flashpoint.net.server import HangUp, Peer, RequestServer
from ml_flashpoint.net.transfers import DEADLINE_S, TRANSFERS, Address, PartName, TransferBackend, error_context

if TYPE_CHECKING:
    from typing_extensions import Buffer

_LIMITS = {"idle_s": 300.0, "max_connections": 256}


class TransferService:
    """A server for the peers that know the job's secret. Listens from construction until `close`.

    In a forked child it is closed. The backend sees only authenticated requests, with names that cannot leave a
    directory.

    Args:
        secret: of the job, 16 bytes or more.
        backend: where parts come from and go to.
        host: address to listen on, which peers reach.
        port: port to listen on; 0 takes a free one.
        deadline_s: a transfer without progress for so long is given up.
        limits: others of `RequestServer`.

    Attributes:
        address: host and port for peers to connect to.

    Raises:
        InvalidArgumentError: the secret is too short.
        ReplicationError: the address cannot be listened on, or there is no thread to be had.
    """

    def __init__(
        self,
        secret: bytes,
        backend: TransferBackend,
        *,
        host: str,
        port: int = 0,
        deadline_s: float = DEADLINE_S,
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

    # ---- requests: see `RequestHandler`; a session is the channel ---------------------------------------------------

    def open(self, peer: Peer) -> Channel:
        """Return the session of a connection."""
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
            with _out_of_step(), view[begin:end] as piece:
                channel.send(None, {}, payload_bytes=len(piece))
                channel.send_payload(piece)

    def _take_part(self, channel: Channel, fields: Fields, encoded: bytes) -> tuple[Fields, Sequence[Buffer]]:
        rider, manifest = fields.get("rider"), decode(encoded)
        if not isinstance(rider, dict):
            raise ProtocolError("a push must have a rider")
        part, record = PartName.of(manifest), manifest.objects[0]
        with error_context(part), contextlib.ExitStack() as receiving:
            buffer = receiving.enter_context(self._backend.receive(manifest, rider))
            if buffer is None:
                return {"held": True}, ()
            # What is wrong is told while the peer may still be sending; it looks for this when its own send fails.
            with _out_of_step():
                blocks = receiving.enter_context(BlockChecker(record, buffer, str(part)))
                channel.send(None, {"held": False})
                announced = channel.receive(request=True)
                if announced.subject != "data" or announced.payload_bytes != record.size:
                    raise ProtocolError("a push must go on with exactly the bytes that its manifest names")
                for block in range(len(record.digests)):
                    blocks.receive(channel, block)
                    if blocks.failed:
                        break
                blocks.finish(self._deadline_s)
                receiving.close()  # ends the checking, then commits
        return {}, ()


@contextlib.contextmanager
def _out_of_step() -> Iterator[None]:
    """From here on the two sides no longer agree on what comes next, if anything goes wrong."""
    try:
        yield
    except Exception as error:
        raise HangUp from error
