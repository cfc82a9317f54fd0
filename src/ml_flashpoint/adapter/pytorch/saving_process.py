"""Saves that DCP's saving process writes: both ends of the connection.

The saving process is a client of the trainer, over a Unix socket. Pickled are the address of that socket, its secret,
and a ticket for what was staged. Tensors that lie in the staged slot come back as offsets in it, what a planner made of
others as bytes; the trainer names and commits the save. As the connection ends, a save that is not committed fails.
"""

from __future__ import annotations

import contextlib
import io
import logging
import mmap
import os
import pickle
import secrets
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from ml_flashpoint.adapter.pytorch.staging import LeftOut, Staged, StagedStateDict
from ml_flashpoint.copy.dtypes import dtype_name, octets_of, torch_dtype
from ml_flashpoint.engine.committing import BytesItem, TensorItem
from ml_flashpoint.format import errors
from ml_flashpoint.format.errors import FlashpointError, ProtocolError, SaveError
from ml_flashpoint.format.knobs import collective_deadline_s, seal_deadline_s
from ml_flashpoint.format.names import CheckpointContainerId
from ml_flashpoint.net.client import Connection
from ml_flashpoint.net.messages import Dialect, Fields, errors_of, list_of, text
from ml_flashpoint.net.server import Peer, RequestServer

if TYPE_CHECKING:
    from typing_extensions import Buffer

_log = logging.getLogger(__name__)

WIRE = Dialect(b"ml-flashpoint saving process 2", errors_of(errors), SaveError)
_PIECE_BYTES = 64 << 20
_PIECES = 1024
"""Bytes of one blob, and blobs of one message."""


# ---- the trainer's end --------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Session:
    """One connection: its save, and what was received of the tensors and items to come."""

    save: Staged | None = None
    received: list[bytes] = field(default_factory=list)


class SaveServer:
    """Has saving processes write saves of a trainer, which ``begin`` starts. Listens from the first use until it is
    closed. Thread-safe."""

    def __init__(self, begin: Callable[[CheckpointContainerId, Staged | None], Staged], rank: int) -> None:
        self._begin, self._rank = begin, rank
        self._lock = threading.Lock()
        self._staged: weakref.WeakValueDictionary[str, Staged] = weakref.WeakValueDictionary()
        self._server: RequestServer | None = None
        self._secret = secrets.token_bytes(32)
        self._address = f"\0flashpoint-{secrets.token_hex(16)}"  # an abstract name: there is no file

    def reached_by(self) -> tuple[str, bytes]:
        """Return address and secret. Raises `SaveError` if the socket or its thread cannot be made."""
        with self._lock:
            if self._server is None:
                try:
                    self._server = RequestServer(
                        self._secret, self, WIRE, unix_path=self._address, idle_s=seal_deadline_s()
                    )
                except (OSError, RuntimeError) as error:
                    raise SaveError(f"no other process can save: {error}", rank=self._rank) from error
            return self._address, self._secret

    def send(self, staged: Staged, state: dict[str, Any]) -> tuple[Any, ...]:
        """Return what a staged state is pickled as: a ticket for the save, and the state without its staged tensors."""
        key = secrets.token_hex(16)
        with self._lock:
            self._staged[key] = staged
        stream = io.BytesIO()
        pickler = _Pickler(stream, staged.place_of)
        pickler.dump(state)
        return _arrived, (key, pickler.path, stream.getvalue())

    def close(self) -> None:
        """Break off what saving processes are writing. Safe to call twice."""
        with self._lock:
            server, self._server = self._server, None
        if server is not None:
            server.close()

    def open(self, peer: Peer) -> _Session:
        """See `RequestHandler`."""
        return _Session()

    def closed(self, session: _Session) -> None:
        """Give up what the saving process had not committed; see `RequestHandler`."""
        if session.save is not None:
            hint = "the next save is not affected"
            session.save.fail(SaveError("its process is gone", rank=self._rank, hint=hint))

    def handle(
        self, session: _Session, op: str, fields: Fields, blobs: list[bytes]
    ) -> tuple[Fields, Sequence[Buffer]] | None:
        """Carry out one call of `RemoteSave`; see `RequestHandler`."""
        save = session.save
        if op == "begin":
            version, key = CheckpointContainerId(text(fields, "version")), fields.get("key")
            with self._lock:
                staged = self._staged.pop(key, None) if isinstance(key, str) else None
            if staged is None and key is not None:
                raise SaveError("the save was given up before this process began", rank=self._rank)
            session.save = self._begin(version, staged)
        elif save is None:
            raise ProtocolError(f"{op} comes before a save was begun")
        elif op == "receive":
            session.received += blobs
        elif op == "commit":
            others = fields.get("others")
            save.others = None if others is None else frozenset(others)
            save.fill(*_items(save, session.received, fields))
            save.commit(list(zip(list_of(fields, "extra"), blobs, strict=True)))
        elif op == "fail":
            save.fail(WIRE.rebuild(fields["error"]))
        else:
            raise ProtocolError(f"there is no call {op}")
        return {}, ()


def _items(save: Staged, received: list[bytes], fields: Fields) -> tuple[list[TensorItem], list[BytesItem]]:
    """Return the items of a call, of what was received and of what was staged."""

    pieces = iter(received)

    def take(count: int) -> bytearray:
        found = list(islice(pieces, count))
        if len(found) != count:
            raise ProtocolError("less was sent than was announced")
        return bytearray().join(found)

    tensors: list[TensorItem] = []
    for key, name, shape, offset, count in list_of(fields, "tensors"):
        dtype = torch_dtype(name)
        if offset is not None:
            tensors.append((str(key), save.tensor_at(offset, dtype, shape)))
            continue
        data = take(count)
        if len(data) != torch.Size(shape).numel() * dtype.itemsize:
            raise ProtocolError(f"{key!r} was not sent as it was announced")
        octets = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8, device="cpu")
        tensors.append((str(key), octets.view(dtype).view(tuple(shape))))
    return tensors, [(str(key), bytes(take(count))) for key, count in list_of(fields, "byte_items")]


class _Pickler(pickle.Pickler):
    """Pickles a staged state, with places in a file for the tensors that lie in it."""

    def __init__(self, stream: io.BytesIO, place_of: Callable[[torch.Tensor], tuple[str, int] | None]) -> None:
        super().__init__(stream, pickle.HIGHEST_PROTOCOL)
        self.path: str | None = None
        self._place_of = place_of

    def persistent_id(self, value: Any) -> tuple[int | None, torch.dtype, tuple[int, ...]] | None:
        offset = None
        if type(value) is torch.Tensor and (place := self._place_of(value)) is not None:
            self.path, offset = place
        elif type(value) is not LeftOut:
            return None
        return offset, value.dtype, tuple(value.shape)


# ---- the saving process's end --------------------------------------------------------------------------------------


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, file: _PrivateFile | None) -> None:
        super().__init__(io.BytesIO(data))
        self._file = file

    def persistent_load(self, place: Any) -> torch.Tensor:
        offset, dtype, shape = place
        if self._file is None or offset is None:
            return LeftOut.of(torch.empty(shape, dtype=dtype, device="meta"))
        return self._file.tensor_at(offset, dtype, shape)


class _PrivateFile:
    """The file that staged tensors lie in. What this process writes to the mapping stays here."""

    def __init__(self, path: str) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            protection = mmap.PROT_READ | mmap.PROT_WRITE
            self._mapping = mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE, prot=protection)
        finally:
            os.close(descriptor)
        self.begin = torch.frombuffer(self._mapping, dtype=torch.uint8, count=1).data_ptr()
        self.end = self.begin + len(self._mapping)

    def tensor_at(self, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """Return the tensor at an offset, with a storage of its own: torch pickles all of a storage with a view."""
        count = torch.Size(shape).numel() * dtype.itemsize
        if not count:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        with torch.inference_mode(False):
            data = torch.frombuffer(self._mapping, dtype=torch.uint8, count=count, offset=offset)
            return data.view(dtype).view(tuple(shape))

    def place_of(self, tensor: torch.Tensor) -> int | None:
        """Return where the memory of a tensor begins in the file; None if it is elsewhere, or not all of its memory."""
        offset = tensor.data_ptr() - self.begin
        plain = tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()
        return offset if plain and offset >= 0 and tensor.data_ptr() + tensor.nbytes <= self.end else None

    @property
    def changed(self) -> bool:
        """True if this process may have written to the mapping."""
        inside, pages = False, 0
        try:
            with open("/proc/self/smaps") as maps:
                for line in maps:
                    name, _, rest = line.partition(" ")
                    if not name.endswith(":"):
                        begin, _, end = name.partition("-")
                        inside = int(begin, 16) < self.end and int(end, 16) > self.begin
                    elif inside and name == "Anonymous:":
                        pages += int(rest.split()[0])
        except OSError:
            return True
        return pages > 0


@dataclass(frozen=True, eq=False, slots=True)
class ArrivedState:
    """A staged state, in the process that it was sent to: the ticket for its save, and the file that it lies in."""

    key: str
    file: _PrivateFile | None


def _arrived(key: str, path: str | None, data: bytes) -> StagedStateDict:
    file = None
    if path is not None:
        try:
            file = _PrivateFile(path)
        except (OSError, ValueError) as error:
            # DCP's saving process would end with it, for good. So only this save fails: its tensors have no data.
            _log.error("the staged state cannot be read: %s", error)
    return StagedStateDict(_Unpickler(data, file).load(), ArrivedState(key, file))


class RemoteSaves:
    """The saves of a trainer, in a process that writes one of them. Picklable."""

    def __init__(self, address: str, secret: bytes, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._address, self._secret = address, secret

    def begin(self, version: CheckpointContainerId, staged: ArrivedState | None) -> RemoteSave:
        """See `saves.LocalSaves.begin`."""
        # Not when this arrives: what cannot be unpickled would end DCP's saving process, and all later saves with it.
        address = ("unix", self._address)
        connection = Connection(address, self._secret, WIRE, connect_timeout_s=collective_deadline_s())
        save = RemoteSave(connection, None if staged is None else staged.file)
        save.request("begin", {"version": str(version), "key": None if staged is None else staged.key})
        return save


class RemoteSave:
    """A save of a trainer: see `Staged`. It fails as its connection ends."""

    def __init__(self, connection: Connection, file: _PrivateFile | None) -> None:
        self.others: frozenset[str] | None = None
        self._connection, self._file = connection, file
        self._described: Fields = {}

    def fill(self, tensors: Sequence[TensorItem], byte_items: Sequence[BytesItem]) -> None:
        """Send what the trainer does not have of the items."""
        file = None if self._file is None or self._file.changed else self._file
        described: list[tuple[Any, ...]] = []
        sent: list[memoryview] = []
        for key, tensor in tensors:
            place = None if file is None else file.place_of(tensor)
            is_sent = place is None and tensor.numel() > 0
            pieces = _pieces(octets_of(tensor.cpu().contiguous()).data) if is_sent else []
            described.append((key, dtype_name(tensor.dtype), tuple(tensor.shape), place, len(pieces)))
            sent += pieces
        counts = []
        for key, data in byte_items:
            pieces = _pieces(memoryview(data))
            counts.append((key, len(pieces)))
            sent += pieces
        blobs, size = list[memoryview](), 0
        for piece in sent:
            if blobs and (size + piece.nbytes > _PIECE_BYTES or len(blobs) == _PIECES):
                self.request("receive", {}, blobs)
                blobs, size = [], 0
            blobs.append(piece)
            size += piece.nbytes
        self.request("receive", {}, blobs)
        self._described = {"tensors": described, "byte_items": counts}

    def commit(self, extra: Sequence[BytesItem] = ()) -> None:
        """Have the object made and committed; return when the trainer's part is."""
        others = None if self.others is None else sorted(self.others)
        fields = {**self._described, "others": others, "extra": [key for key, _ in extra]}
        self.request("commit", fields, [data for _, data in extra])
        self._connection.close()

    def fail(self, error: BaseException) -> None:
        """Give it up."""
        with contextlib.suppress(FlashpointError):  # the trainer is gone, or has given it up before
            self.request("fail", {"error": WIRE.describe(error)})
        self._connection.close()

    def request(self, op: str, fields: Fields, blobs: Sequence[Buffer] = ()) -> None:
        """Have the trainer do something for this save. Raises `FlashpointError` as it does."""
        self._connection.request(op, fields, blobs, timeout_s=seal_deadline_s())


def _pieces(data: memoryview) -> list[memoryview]:
    return [data[begin : begin + _PIECE_BYTES] for begin in range(0, data.nbytes, _PIECE_BYTES)]
