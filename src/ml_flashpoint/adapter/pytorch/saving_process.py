"""A save of a trainer's that another process writes: that process's end of it.

The process is a client of the trainer, over a Unix socket: see `saves.LocalSaves`. Pickled are the address of that
socket, its secret, and a ticket for what was staged. Tensors that lie in the staged slot go back as offsets in it, what
a planner made of others as bytes; the trainer names and commits the save, which fails as the connection ends.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import mmap
import os
import pickle
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from ml_flashpoint.adapter.pytorch.staging import LeftOut, StagedStateDict
from ml_flashpoint.copy.dtypes import dtype_name, octets_of
from ml_flashpoint.engine.committing import BytesItem, TensorItem
from ml_flashpoint.format import errors
from ml_flashpoint.format.errors import FlashpointError, SaveError
from ml_flashpoint.format.knobs import collective_deadline_s, seal_deadline_s
from ml_flashpoint.format.names import CheckpointContainerId
from ml_flashpoint.net.client import Connection
from ml_flashpoint.net.messages import Dialect, Fields, errors_of

if TYPE_CHECKING:
    from typing_extensions import Buffer

_log = logging.getLogger(__name__)

WIRE = Dialect(b"ml-flashpoint saving process 4", errors_of(errors), SaveError)
_BLOB_BYTES = 1 << 30
_ITEMS = 4096
"""Most items in one message: of fields and blobs, a message takes only so many."""
_RANGES = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) .*?^Anonymous: +(\d+)", re.M | re.S)
"""The ranges in ``smaps``, and the KiB of each that are the process's own."""


# ---- the staged state ---------------------------------------------------------------------------------------------


def pickled(
    key: str, state: dict[str, Any], place_of: Callable[[torch.Tensor], tuple[str, int] | None]
) -> tuple[Any, ...]:
    """Return what a staged state is pickled as: its ticket, and the state with places for the tensors in the slot.

    Args:
        place_of: returns file and offset of a tensor that lies in the slot; None for any other.
    """
    stream = io.BytesIO()
    pickler = _Pickler(stream, place_of)
    pickler.dump(state)
    return _arrived, (key, pickler.path, stream.getvalue())


class _Pickler(pickle.Pickler):
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
        self._begin = torch.frombuffer(self._mapping, dtype=torch.uint8, count=1).data_ptr()
        self._end = self._begin + len(self._mapping)

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
        offset = tensor.data_ptr() - self._begin
        plain = tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()
        return offset if plain and offset >= 0 and tensor.data_ptr() + tensor.nbytes <= self._end else None

    @property
    def changed(self) -> bool:
        """True if this process, where a planner transforms in place, may have written to the mapping."""
        with open("/proc/self/smaps") as maps:
            own = [(begin, end) for begin, end, kib in _RANGES.findall(maps.read()) if int(kib)]
        return any(int(begin, 16) < self._end and int(end, 16) > self._begin for begin, end in own)


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


# ---- the save -----------------------------------------------------------------------------------------------------


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
    """A save of a trainer: see `saves.Staged`. It fails as its connection ends."""

    def __init__(self, connection: Connection, file: _PrivateFile | None) -> None:
        self.others: frozenset[str] | None = None
        self._connection, self._file = connection, file
        self._items: list[tuple[Any, ...]] = []
        self._blobs: list[list[memoryview]] = []  # of each item

    def fill(self, tensors: Sequence[TensorItem], byte_items: Sequence[BytesItem]) -> None:
        """Take what the trainer does not have of the items."""
        file = None if self._file is None or self._file.changed else self._file
        for key, tensor in tensors:
            place = None if file is None else file.place_of(tensor)
            is_sent = place is None and tensor.numel() > 0
            data = octets_of(tensor.cpu().contiguous()).data if is_sent else memoryview(b"")
            self._add(key, data, dtype_name(tensor.dtype), tuple(tensor.shape), place)
        for key, content in byte_items:
            self._add(key, memoryview(content))

    def _add(self, key: str, data: memoryview, *described: Any) -> None:
        blobs = [data[begin : begin + _BLOB_BYTES] for begin in range(0, data.nbytes, _BLOB_BYTES)]
        self._items.append((key, len(blobs), *described))
        self._blobs.append(blobs)

    def commit(self, extra: Sequence[BytesItem] = ()) -> None:
        """Have the object made and committed; return when the trainer's part is."""
        self.fill((), extra)
        for begin in range(0, len(self._items), _ITEMS):
            some = slice(begin, begin + _ITEMS)
            self.request("fill", {"items": self._items[some]}, list(chain.from_iterable(self._blobs[some])))
        others = None if self.others is None else sorted(self.others)
        self.request("commit", {}, [json.dumps(others).encode()])
        self._connection.close()

    def fail(self, error: BaseException) -> None:
        """Give it up."""
        with contextlib.suppress(FlashpointError):  # the trainer is gone, or has given it up before
            self.request("fail", {"error": WIRE.describe(error)})
        self._connection.close()

    def request(self, op: str, fields: Fields, blobs: Sequence[Buffer] = ()) -> None:
        """Have the trainer do something for this save. Raises `FlashpointError` as it does."""
        self._connection.request(op, fields, blobs, timeout_s=seal_deadline_s())
