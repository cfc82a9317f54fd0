"""Saves that another process of this machine writes: DCP's saving process, or one that a queue of requests has started.

Owns both ends. The other process is a client of the trainer, over a Unix socket. What is pickled in place of the
trainer's saver is a ticket for one save. Tensors that were staged come back as places in their arena, all others, which
a planner made, as bytes; the trainer writes and commits as if one of its threads had saved. So nothing of the other
process is left when it dies: the save fails once its connection is gone, or at its deadline.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ml_flashpoint.checkpoint_object_manager.arena_tensor import SharedArena
from ml_flashpoint.copy.dtypes import dtype_name, octets_of, torch_dtype
from ml_flashpoint.core.object_stages import BytesItem, TensorItem
from ml_flashpoint.core.save import Save
from ml_flashpoint.core.save_identity import SaveIdentity
from ml_flashpoint.core.saver import MLFlashpointCheckpointSaver
from ml_flashpoint.format import errors
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.errors import FlashpointError, ProtocolError, SaveError
from ml_flashpoint.format.knobs import collective_deadline_s, seal_deadline_s
from ml_flashpoint.format.manifest import Manifest, decode, encode
from ml_flashpoint.net.client import Connection, Reply
from ml_flashpoint.net.messages import Dialect, Fields, errors_of, integer, list_of, text
from ml_flashpoint.net.server import Peer, RequestServer

if TYPE_CHECKING:
    from typing_extensions import Buffer

_WIRE = Dialect(b"ml-flashpoint saving process 1", errors_of(errors), SaveError, json_bytes=64 << 20)
_ALIGNMENT = 16
_PIECE_BYTES = 64 << 20
_PIECE_BLOBS = 1024


@dataclass(frozen=True, slots=True)
class Ticket:
    """Leads another process to one save. Picklable.

    Attributes:
        address: path of the trainer's socket.
        secret: proves to the trainer that the other process got a ticket from it.
        key: of the save.
    """

    address: str
    secret: bytes = field(repr=False)
    key: str

    def connect(self) -> Connection:
        """Connect to the trainer.

        Raises:
            FlashpointError: the trainer is gone, or does not answer.
        """
        return Connection(("unix", self.address), self.secret, _WIRE, connect_timeout_s=collective_deadline_s())

    def await_end(self) -> None:
        """Wait until the save has ended, well or not, or the trainer has."""
        with contextlib.suppress(FlashpointError), self.connect() as connection:
            connection.request("await end", {"key": self.key}, timeout_s=seal_deadline_s() + collective_deadline_s())


# ---- the trainer's end --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Session:
    """One connection, and what was received of the tensors and items to come."""

    save: Save | None = None
    received: bytearray = field(default_factory=bytearray)
    filled: int = 0


class SaveServer:
    """Has other processes write saves of a trainer. Thread-safe. It listens from the first ticket until it is closed.

    Args:
        saver: the trainer's, which the saves are of.
    """

    def __init__(self, saver: MLFlashpointCheckpointSaver) -> None:
        self._saver = saver
        self._lock = threading.Lock()
        self._saves: weakref.WeakValueDictionary[str, Save] = weakref.WeakValueDictionary()
        self._server: RequestServer | None = None
        self._secret = secrets.token_bytes(32)
        self._address = ""
        self._socket = -1

    def ticket(self, save: Save) -> Ticket:
        """Return what leads another process to a save.

        Raises:
            SaveError: the socket or its thread cannot be made.
        """
        with self._lock:
            if self._server is None:
                try:
                    self._listen()
                except (OSError, RuntimeError) as error:
                    raise SaveError(f"no other process can save: {error}", rank=self._saver.rank) from error
            self._saves[save.key] = save
            return Ticket(self._address, self._secret, save.key)

    def _listen(self) -> None:
        # The socket is reached by the trainer's descriptor of it, and loses its name at once: so the path is short, and
        # nothing is left of it, however the trainer ends.
        with tempfile.TemporaryDirectory(prefix="flashpoint-") as private:
            folder = os.open(private, os.O_PATH | os.O_CLOEXEC)
            try:
                path = f"/proc/self/fd/{folder}/socket"
                server = RequestServer(self._secret, self, _WIRE, unix_path=path, idle_s=seal_deadline_s())
                self._socket = os.open(path, os.O_PATH | os.O_CLOEXEC)
            finally:
                os.close(folder)
        self._address = f"/proc/{os.getpid()}/fd/{self._socket}"
        self._server = server

    def close(self) -> None:
        """Break off what other processes are writing. Idempotent."""
        with self._lock:
            server, self._server = self._server, None
        if server is not None:
            server.close()
            os.close(self._socket)

    def open(self, peer: Peer) -> _Session:
        """See `RequestHandler`."""
        return _Session()

    def closed(self, session: _Session) -> None:
        """Give up what the other process had not committed; see `RequestHandler`."""
        save = session.save
        if save is not None and not save.decided.is_set():
            lost = f"the save {save.save_id} was lost: its process is gone"
            self._saver.fail(save, SaveError(lost, rank=self._saver.rank, hint="the next save is not affected"))

    def handle(
        self, session: _Session, op: str, fields: Fields, blobs: list[bytes]
    ) -> tuple[Fields, Sequence[Buffer]] | None:
        """Carry out one call of a `RemoteSaver`, or of `Ticket.await_end`; see `RequestHandler`."""
        if op == "await end":
            ended = self._saves.get(text(fields, "key"))
            if ended is not None:
                ended.finished.wait(seal_deadline_s() + collective_deadline_s())
            return {}, ()
        if op == "take":
            session.save = self._taken(text(fields, "key"))
            return {}, ()
        save = session.save
        if save is None:
            raise ProtocolError(f"{op} comes before a save was taken")
        if "others" in fields:
            save.others = frozenset(list_of(fields, "others"))
        return self._carry_out(session, save, op, fields, blobs)

    def _taken(self, key: str) -> Save:
        with self._lock:
            save = self._saves.pop(key, None)
        if save is None or save.decided.is_set():
            why = "" if save is None else f": {save.error}"
            raise SaveError(f"the save {key} was given up before this process began{why}", rank=self._saver.rank)
        return save

    def _carry_out(
        self, session: _Session, save: Save, op: str, fields: Fields, blobs: list[bytes]
    ) -> tuple[Fields, Sequence[Buffer]]:
        saver = self._saver
        if op == "propose":
            version = CheckpointContainerId(fields["version"]) if "version" in fields else None
            return _described(saver.propose(version, save)), ()
        if op == "adopt":
            saver.adopt(save, _identity(fields))
            save.complete = False  # until the coordinator says so
        elif op == "complete":
            saver.note_complete(save)
        elif op == "fail":
            saver.fail(save, _WIRE.rebuild(fields))
        elif op == "receive":
            self._receive(session, integer(fields, "total"), blobs)
        elif op == "write":
            version = CheckpointContainerId(fields["version"])
            saver.write(save, version, *self._items(session, save, fields), metadata=fields.get("metadata"))
            session.received, session.filled = bytearray(), 0
        elif op == "commit":
            extra = list(zip(map(str, list_of(fields, "extra")), blobs, strict=True))
            return {}, [encode(saver.commit(save, extra=extra, labels=fields["labels"]))]
        else:
            raise ProtocolError(f"no such operation: {op}")
        return {}, ()

    def _receive(self, session: _Session, total: int, blobs: list[bytes]) -> None:
        if not session.received:
            session.received = bytearray(total)
        for blob in blobs:
            end = session.filled + len(blob)
            if end > len(session.received):
                raise ProtocolError("more was sent than was announced")
            session.received[session.filled : end] = blob
            session.filled = end

    def _items(self, session: _Session, save: Save, fields: Fields) -> tuple[list[TensorItem], list[BytesItem]]:
        """The tensors and items of a write: in the arena where they were staged, or received."""
        received, at, staged = session.received, 0, save.copies
        if save.error is not None:  # and so what was staged is another save's
            raise SaveError(f"the save was given up: {save.error}", rank=self._saver.rank)
        if session.filled != len(received):
            raise ProtocolError("less was sent than was announced")
        tensors: list[TensorItem] = []
        copies: dict[int, torch.Tensor] = {copy.place[1]: copy for copy in staged if copy.numel()}
        for key, name, shape, place in list_of(fields, "tensors"):
            dtype, size = torch_dtype(name), torch.Size(shape)
            nbytes = size.numel() * dtype.itemsize
            if place is not None:
                copy = copies.get(place)
                if copy is None or copy.dtype is not dtype or copy.shape != size:  # a shard of one, say
                    copy = staged[0].place[0].view(place, place + nbytes, dtype, size)
                tensors.append((str(key), copy))
                continue
            if at + nbytes > len(received):
                raise ProtocolError("less was sent than was announced")
            if not nbytes:
                tensors.append((str(key), torch.empty(size, dtype=dtype, device="cpu")))
                continue
            data = torch.frombuffer(received, dtype=torch.uint8, count=nbytes, offset=at)
            tensors.append((str(key), data.view(dtype).view(size)))
            at += _padded(nbytes)
        byte_items: list[BytesItem] = []
        for key, nbytes in list_of(fields, "byte_items"):
            if not 0 <= nbytes <= len(received) - at:
                raise ProtocolError("less was sent than was announced")
            byte_items.append((str(key), bytes(received[at : at + nbytes])))
            at += _padded(nbytes)
        return tensors, byte_items


# ---- the other process's end --------------------------------------------------------------------------------------


class RemoteSaver(MLFlashpointCheckpointSaver):
    """A saver in another process, for the one save that its ticket leads to: it has the trainer do what it is told.

    Args:
        ticket: of the save.
        rank, world_size, node: of the trainer.
        identity: see `Save`.
        staging_error: why nothing was staged, if so.
        arena: where the save was staged, if anywhere.
    """

    def __init__(
        self,
        ticket: Ticket,
        rank: int,
        world_size: int,
        node: str,
        identity: SaveIdentity,
        staging_error: BaseException | None,
        arena: SharedArena | None,
    ) -> None:
        self.rank, self.world_size, self.node = rank, world_size, node
        self._ticket, self._identity, self._staging_error = ticket, identity, staging_error
        self._arena = arena
        self._connection: Connection | None = None
        self._begun = False

    def __reduce__(self) -> tuple[Any, ...]:
        where = self.rank, self.world_size, self.node
        return RemoteSaver, (self._ticket, *where, self._identity, self._staging_error, self._arena)

    def begin(self, *, exchanged: bool = False) -> Save:
        """Start the save; see the base class."""
        if self._begun:
            raise SaveError("this process was handed one save and has done it", rank=self.rank)
        self._begun = True
        save = Save(self._identity, exchanged=exchanged)
        save.staging_error = self._staging_error
        return save

    def propose(self, version: CheckpointContainerId | None, save: Save | None = None) -> SaveIdentity:
        """See the base class."""
        return _identity(self._request("propose", {} if version is None else {"version": str(version)}).fields)

    def adopt(self, save: Save, identity: SaveIdentity) -> None:
        """See the base class."""
        super().adopt(save, identity)
        self._request("adopt", _described(identity))

    def note_complete(self, save: Save) -> None:
        """See the base class. The end of the save."""
        super().note_complete(save)
        with contextlib.suppress(FlashpointError):  # the trainer is gone, or does not wait for it
            self._request("complete")
        self._close()

    def fail(self, save: Save, error: BaseException) -> None:
        """Give the save up; see the base class."""
        with contextlib.suppress(FlashpointError):  # the trainer is gone, or has given it up before
            self._request("fail", {**_WIRE.describe(error), **_others(save)})
        self._close()

    def write(
        self,
        save: Save,
        version: CheckpointContainerId,
        tensors: Sequence[TensorItem],
        byte_items: Sequence[BytesItem] = (),
        *,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """See the base class."""
        arena = None if self._arena is None or self._arena.changed else self._arena
        places = [None if arena is None else arena.place_of(tensor) for _, tensor in tensors]
        sent: list[memoryview] = []
        for (_, tensor), place in zip(tensors, places, strict=True):
            if place is None and tensor.numel():
                sent.append(octets_of(tensor.cpu().contiguous()).data)
        sent.extend(memoryview(data) for _, data in byte_items)
        total = sum(_padded(data.nbytes) for data in sent)
        for blobs in _pieces(sent):
            self._request("receive", {"total": total}, blobs)
        described = [
            (key, dtype_name(tensor.dtype), tuple(tensor.shape), place)
            for (key, tensor), place in zip(tensors, places, strict=True)
        ]
        items = [(key, len(data)) for key, data in byte_items]
        fields = {"version": str(version), "tensors": described, "byte_items": items, **_others(save)}
        self._request("write", fields if metadata is None else {**fields, "metadata": dict(metadata)})

    def commit(
        self, save: Save, *, extra: Sequence[BytesItem] = (), labels: Mapping[str, str] | None = None
    ) -> Manifest:
        """See the base class."""
        fields = {"labels": dict(labels or {}), "extra": [key for key, _ in extra]}
        manifest = decode(self._request("commit", fields, [data for _, data in extra]).blobs[0])
        if save.complete is None:  # nobody will tell whether it is complete
            self._close()
        return manifest

    def _request(self, op: str, fields: Fields | None = None, blobs: Sequence[Buffer] = ()) -> Reply:
        # Not when this arrives: what cannot be unpickled would end torch's saving process, and all later saves with it.
        if self._connection is None:
            connection = self._ticket.connect()
            connection.request("take", {"key": self._ticket.key}, timeout_s=seal_deadline_s())
            self._connection = connection
        return self._connection.request(op, fields or {}, blobs, timeout_s=seal_deadline_s())

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _pieces(sent: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Everything, each followed by what pads it, in messages of a bounded size."""
    blobs, size = list[memoryview](), 0
    for data in sent:
        for begin in range(0, data.nbytes, _PIECE_BYTES):
            blobs.append(data[begin : begin + _PIECE_BYTES])
            size += blobs[-1].nbytes
            if size >= _PIECE_BYTES or len(blobs) >= _PIECE_BLOBS:
                yield blobs
                blobs, size = [], 0
        blobs.append(memoryview(bytes(_padded(data.nbytes) - data.nbytes)))
    if blobs:
        yield blobs


def _others(save: Save) -> Fields:
    return {} if save.others is None else {"others": sorted(save.others)}


def _described(identity: SaveIdentity) -> Fields:
    return {name: getattr(identity, name) for name in SaveIdentity.__slots__}


def _identity(fields: Fields) -> SaveIdentity:
    numbers = (integer(fields, name, -1) for name in ("sequence", "step", "newest_ms"))
    return SaveIdentity(text(fields, "run_id"), *numbers)
