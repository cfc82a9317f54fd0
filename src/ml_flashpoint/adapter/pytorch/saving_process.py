"""Saves that DCP's saving process writes: both ends of the connection.

The saving process is a client of the trainer, over a Unix socket. Pickled are the address of that socket, its secret,
and a ticket for what was staged. Tensors that lie in the staged slot come back as offsets in it, what a planner made of
others as bytes; the trainer names and commits the save, as if one of its threads had saved. Nothing of the saving
process is left when it dies: its save fails as its connection ends.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ml_flashpoint.adapter.pytorch.staged_state import StagedStateDict
from ml_flashpoint.copy.dtypes import dtype_name, octets_of, torch_dtype
from ml_flashpoint.engine.committing import BytesItem, TensorItem
from ml_flashpoint.format import errors
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.errors import FlashpointError, ProtocolError, SaveError
from ml_flashpoint.format.knobs import collective_deadline_s, seal_deadline_s
from ml_flashpoint.net.client import Connection
from ml_flashpoint.net.messages import Dialect, Fields, errors_of, list_of, text
from ml_flashpoint.net.server import Peer, RequestServer

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from ml_flashpoint.adapter.pytorch.saves import LocalSaves, Staged

_log = logging.getLogger(__name__)

WIRE = Dialect(b"ml-flashpoint saving process 2", errors_of(errors), SaveError)
_ALIGNMENT = 16
_PIECE_BYTES = 64 << 20
_PIECE_BLOBS = 1024


class MappedFile:
    """Tensors that lie in the mapping of a file, each with a storage of its own.

    Torch takes a view of a larger storage for all of that when it pickles it.
    """

    def __init__(self, mapping: mmap.mmap) -> None:
        self._mapping = mapping
        self._begin = torch.frombuffer(mapping, dtype=torch.uint8, count=1).data_ptr()
        self._end = self._begin + len(mapping)

    def tensor_at(self, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """Return the tensor at an offset. Raises `SaveError` if the file ends before."""
        count = torch.Size(shape).numel() * dtype.itemsize
        if not 0 <= offset <= offset + count <= len(self._mapping):
            raise SaveError(f"nothing was staged at bytes {offset} to {offset + count}")
        with torch.inference_mode(False):
            if not count:
                return torch.empty(tuple(shape), dtype=dtype, device="cpu")
            data = torch.frombuffer(self._mapping, dtype=torch.uint8, count=count, offset=offset)
            return data.view(dtype).view(tuple(shape))

    def place_of(self, tensor: torch.Tensor) -> int | None:
        """Return where the memory of a tensor begins in the file; None if it is elsewhere, or not all of its memory."""
        offset = tensor.data_ptr() - self._begin
        plain = tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()
        return offset if plain and offset >= 0 and tensor.data_ptr() + tensor.nbytes <= self._end else None

    @property
    def changed(self) -> bool:
        """True if this process may have written to the mapping, if that is private."""
        inside, pages = False, 0
        try:
            with open("/proc/self/smaps") as maps:
                for line in maps:
                    name, _, rest = line.partition(" ")
                    if not name.endswith(":"):
                        begin, _, end = name.partition("-")
                        inside = int(begin, 16) < self._end and int(end, 16) > self._begin
                    elif inside and name == "Anonymous:":
                        pages += int(rest.split()[0])
        except OSError:
            return True
        return pages > 0


# ---- the trainer's end --------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Session:
    """One connection: its save, and what was received of the tensors and items to come."""

    save: Staged | None = None
    received: bytearray = field(default_factory=bytearray)


class SaveServer:
    """Has saving processes write saves of a trainer. Thread-safe. Listens from the first use until it is closed."""

    def __init__(self, saves: LocalSaves) -> None:
        self._saves = saves
        self._lock = threading.Lock()
        self._staged: weakref.WeakValueDictionary[str, Staged] = weakref.WeakValueDictionary()
        self._server: RequestServer | None = None
        self._secret = secrets.token_bytes(32)
        self._address = f"\0flashpoint-{secrets.token_hex(16)}"  # an abstract name: there is no file

    def reached_by(self) -> tuple[str, bytes]:
        """Return address and secret.

        Raises:
            SaveError: the socket or its thread cannot be made.
        """
        with self._lock:
            if self._server is None:
                try:
                    self._server = RequestServer(
                        self._secret, self, WIRE, unix_path=self._address, idle_s=seal_deadline_s()
                    )
                except (OSError, RuntimeError) as error:
                    raise SaveError(f"no other process can save: {error}", rank=self._saves.rank) from error
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
            session.save.fail(SaveError("its process is gone", rank=self._saves.rank, hint=hint))

    def handle(
        self, session: _Session, op: str, fields: Fields, blobs: list[bytes]
    ) -> tuple[Fields, Sequence[Buffer]] | None:
        """Carry out one call of `RemoteSave`; see `RequestHandler`."""
        if session.save is not None and "others" in fields:
            session.save.others = frozenset(list_of(fields, "others"))
        if op == "begin":
            session.save = self._begin(CheckpointContainerId(text(fields, "version")), fields.get("key"))
        elif session.save is None:
            raise ProtocolError(f"{op} comes before a save was begun")
        elif op == "receive":
            for blob in blobs:
                session.received += blob
        elif op == "fill":
            session.save.fill(*_items(session.save, session.received, fields))
            session.received = bytearray()
        elif op == "commit":
            extra = list(zip(list_of(fields, "extra"), blobs, strict=True))
            session.save.commit(extra=extra, labels=fields["labels"])
        elif op == "fail":
            session.save.fail(WIRE.rebuild(fields["error"]))
        else:
            raise ProtocolError(f"there is no call {op}")
        return {}, ()

    def _begin(self, version: CheckpointContainerId, key: object) -> Staged:
        with self._lock:
            staged = self._staged.pop(key, None) if isinstance(key, str) else None
        if staged is None and key is not None:
            raise SaveError("the save was given up before this process began", rank=self._saves.rank)
        return self._saves.begin(version, staged)


def _items(save: Staged, received: bytearray, fields: Fields) -> tuple[list[TensorItem], list[BytesItem]]:
    """Return the items of a call, of what was received and of what was staged."""
    at = 0

    def take(count: int) -> int:
        nonlocal at
        if not 0 <= count <= len(received) - at:
            raise ProtocolError("less was sent than was announced")
        begin, at = at, at + _padded(count)
        return begin

    tensors: list[TensorItem] = []
    for key, name, shape, offset in list_of(fields, "tensors"):
        dtype, size = torch_dtype(name), torch.Size(shape)
        if offset is not None:
            tensors.append((str(key), save.tensor_at(offset, dtype, size)))
            continue
        count = size.numel() * dtype.itemsize
        begin = take(count)
        if not count:
            tensors.append((str(key), torch.empty(size, dtype=dtype, device="cpu")))
            continue
        data = torch.frombuffer(received, dtype=torch.uint8, count=count, offset=begin)
        tensors.append((str(key), data.view(dtype).view(size)))
    byte_items: list[BytesItem] = []
    for key, count in list_of(fields, "byte_items"):
        begin = take(count)
        byte_items.append((str(key), bytes(received[begin : begin + count])))
    return tensors, byte_items


class _Pickler(pickle.Pickler):
    """Pickles a staged state, with places in a file for the tensors that lie in it."""

    def __init__(self, stream: io.BytesIO, place_of: Callable[[torch.Tensor], tuple[str, int] | None]) -> None:
        super().__init__(stream, pickle.HIGHEST_PROTOCOL)
        self.path: str | None = None
        self._place_of = place_of

    def persistent_id(self, value: Any) -> tuple[int, torch.dtype, tuple[int, ...]] | None:
        if type(value) is not torch.Tensor or (place := self._place_of(value)) is None:
            return None
        self.path, offset = place
        return offset, value.dtype, tuple(value.shape)


# ---- the saving process's end --------------------------------------------------------------------------------------


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, file: MappedFile | None) -> None:
        super().__init__(io.BytesIO(data))
        self._file = file

    def persistent_load(self, place: Any) -> torch.Tensor:
        offset, dtype, shape = place
        if self._file is None:
            return torch.empty(shape, dtype=dtype, device="meta")
        return self._file.tensor_at(offset, dtype, shape)


@dataclass(frozen=True, eq=False, slots=True)
class ArrivedState:
    """A staged state, in the process that it was sent to.

    Attributes:
        key: ticket for the save.
        file: what the staged tensors lie in. The mapping is private: what this process writes to them stays here.
    """

    key: str
    file: MappedFile | None


def _arrived(key: str, path: str | None, data: bytes) -> StagedStateDict:
    file = None
    if path is not None:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                protection = mmap.PROT_READ | mmap.PROT_WRITE
                file = MappedFile(mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE, prot=protection))
            finally:
                os.close(descriptor)
        except (OSError, ValueError) as error:
            # DCP's saving process would end with it, for good. So only this save fails: its tensors have no data.
            _log.error("the staged state cannot be read: %s", error)
    return StagedStateDict(_Unpickler(data, file).load(), ArrivedState(key, file))


class RemoteSaves:
    """The saves of a trainer, in a process that writes one of them. Picklable.

    Args:
        address, secret: of the trainer's socket.
        rank, world_size: of the trainer.
    """

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
    """A save of a trainer: see `saves.Staged`. It fails as its connection ends."""

    def __init__(self, connection: Connection, file: MappedFile | None) -> None:
        self.others: frozenset[str] | None = None
        self._connection, self._file = connection, file

    def fill(self, tensors: Sequence[TensorItem], byte_items: Sequence[BytesItem]) -> None:
        """Have all items brought into one object."""
        file = None if self._file is None or self._file.changed else self._file
        places = [None if file is None else file.place_of(tensor) for _, tensor in tensors]
        sent: list[memoryview] = []
        for (_, tensor), place in zip(tensors, places, strict=True):
            if place is None and tensor.numel():
                sent.append(octets_of(tensor.cpu().contiguous()).data)
        sent.extend(memoryview(data) for _, data in byte_items)
        for blobs in _pieces(sent):
            self.request("receive", {}, blobs)
        described = [
            (key, dtype_name(tensor.dtype), tuple(tensor.shape), place)
            for (key, tensor), place in zip(tensors, places, strict=True)
        ]
        self.request("fill", {"tensors": described, "byte_items": [(key, len(data)) for key, data in byte_items]})

    def commit(self, *, extra: Sequence[BytesItem] = (), labels: Mapping[str, str]) -> None:
        """Have the object committed; return when the trainer's part is."""
        fields = {"labels": dict(labels), "extra": [key for key, _ in extra]}
        self.request("commit", fields, [data for _, data in extra])
        self._connection.close()

    def fail(self, error: BaseException) -> None:
        """Give it up."""
        with contextlib.suppress(FlashpointError):  # the trainer is gone, or has given it up before
            self.request("fail", {"error": WIRE.describe(error)})
        self._connection.close()

    def request(self, op: str, fields: Fields, blobs: Sequence[Buffer] = ()) -> None:
        """Have the trainer do something for this save. Raises `FlashpointError` as it does."""
        if self.others is not None:
            fields = {**fields, "others": sorted(self.others)}
        self._connection.request(op, fields, blobs, timeout_s=seal_deadline_s())


def _padded(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT


def _pieces(sent: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Yield everything, each followed by what pads it, in messages of a bounded size."""
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
