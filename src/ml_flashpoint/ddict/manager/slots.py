"""The manager's side of large values: which slot a value gets, and when a slot may hold another one.

Owns allocation and the rule of reuse. A value is needed for as long as anything in this process refers to it: the
shard, a checkpoint that is kept, whoever reads it for others. What is in a slot, and the clients' side, is
`shared_memory`'s, and what becomes of values that were sealed is up to whoever sealed them.

Whoever reads a value, or writes one, holds a shared lock (flock) on the slot's file, for as long as it has a view of
it, and the kernel takes the lock away when that process dies. So no slot is given out again that anybody looks at; see
`store`. The allocation writes its *token* where the header will be::

    length of the header (8): 0     the value id, and a zero byte

A writer that was stopped for so long that its slot was given to another finds another token, or a header.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import re
import struct
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from ml_flashpoint.ddict.errors import StaleValueError
from ml_flashpoint.ddict.manager.shard import StoredValue
from ml_flashpoint.ddict.manager.store import PartStore
from ml_flashpoint.format.errors import DamagedError, InvalidArgumentError, ObjectFormatError
from ml_flashpoint.format.object_format import Layout, ParsedHeader, encode_header, header_length, parse_header
from ml_flashpoint.memory.slot import Slot

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from ml_flashpoint.ddict.manager.store import PartRef

_NO_LENGTH: Final = bytes(8)
_PIECE_BYTES: Final = 1 << 30  # of large values in messages, whose blobs are of at most 2 GiB
_MAX_KEPT: Final = 16 << 10
_MAX_INT_BITS: Final = 4096
_FLOAT: Final = struct.Struct(">d")
_INCARNATION: Final = re.compile(r"[0-9a-f]{16}")
_TOKEN_AT: Final = 8


@lru_cache(maxsize=128)
def _parse_again(header: bytes, file_size: int) -> ParsedHeader:
    # The same values are read again and again.
    return parse_header(header, file_size)


def check_header(buffer: Buffer, value_id: str, file_size: int | None = None) -> tuple[Layout, str]:
    """Return where everything of this value lies, and its kind, by the header. ``buffer``: the file, or the part of
    it that is in use. ``file_size``: bytes of the file, if `buffer` is only the part in use. Raises `StaleValueError`:
    it holds another value, or none; `ObjectFormatError`: it is damaged."""
    with memoryview(buffer) as view:
        if view.nbytes < 8 or view[:8] == _NO_LENGTH:
            raise StaleValueError(f"there is no value here, {value_id} was expected")
        if file_size is None:
            file_size = view.nbytes
        length = header_length(view, file_size)
        header = bytes(view[:length])
        parsed = (_parse_again if length <= _MAX_KEPT else parse_header)(header, file_size)
        found = parsed.metadata.get("value")
        if found != value_id:
            raise StaleValueError(f"value {found} is here, {value_id} was expected")
        if parsed.layout.size > view.nbytes:
            raise ObjectFormatError("the object is truncated")
    return parsed.layout, parsed.metadata.get("kind", "")


def value_id_of(buffer: Buffer, file_size: int) -> str:
    """Return the id of the value in an object. ``buffer``: the object, up to its used size. ``file_size``: bytes of its
    whole file. Raises `ObjectFormatError`: it holds no value."""
    with memoryview(buffer) as view:
        found = parse_header(view, file_size).metadata.get("value")
    if found is None:
        raise ObjectFormatError("the object holds no value")
    return found


def header_anew(buffer: Buffer, was: str, value_id: str, file_size: int) -> bytes:
    """The header of an object that was taken out of its file, for another file and under another value id. ``buffer``:
    the object, whole and without the unused rest of its file. ``was``: id of the value so far. ``file_size``: bytes of
    the other file. Raises `ObjectFormatError`: it is not the object of that value."""
    with memoryview(buffer) as view:
        parsed = parse_header(view, None)
        if parsed.layout.size != view.nbytes or parsed.metadata.get("value") != was:
            raise ObjectFormatError(f"not the object of value {was}")
    return encode_header(parsed.layout, file_size, {**parsed.metadata, "value": value_id})


def encode_number(value: float) -> bytes | None:
    """The inline form of an integer or a float; None for an integer that is huge."""
    if isinstance(value, int):
        return b"i%d" % value if value.bit_length() <= _MAX_INT_BITS else None
    return b"f" + _FLOAT.pack(value)


def number_to_inline(value: float) -> bytes:
    """The inline form of any integer or float."""
    return encode_number(value) or b"p" + pickle.dumps(value, 5)


def decode_number(data: bytes) -> int | float:
    """Return what `encode_number` encoded. Raises ValueError or struct.error."""
    if data[:1] == b"i":
        return int(data[1:])
    number: float = _FLOAT.unpack(data[1:])[0]
    return number


def inline_number(data: bytes) -> int | float | None:
    """The integer or float in a small value, None if it is something else. Raises `DamagedError`: it is marked as a
    number and is none."""
    if data[:1] not in (b"i", b"f"):
        return None
    try:
        return decode_number(data)
    except (ValueError, struct.error) as error:
        raise DamagedError(f"not an encoded number: {error}") from error


@dataclass(frozen=True, slots=True)
class Reservation:
    """Room for one value, for its writer alone."""

    value_id: str  # of the value to come
    path: str  # the slot's file
    size: int  # bytes of the file


class ValueSlots:
    """See the module. Thread-safe. ``store``: the manager's. ``incarnation``: 16 hex digits, different each time that
    the manager starts. ``limit_bytes``: most that slots may take, free ones included: before a new one is made, free
    ones that do not suit are removed. It is not enforced otherwise."""

    def __init__(self, store: PartStore, incarnation: str, *, limit_bytes: int | None = None) -> None:
        if not _INCARNATION.fullmatch(incarnation):
            raise InvalidArgumentError("must be 16 hex digits", argument="incarnation", value=incarnation)
        self._store = store
        self._incarnation = incarnation
        self._limit_bytes = limit_bytes
        self._numbers = itertools.count()
        self._promised: dict[str, Slot] = {}  # each change is one step
        self._values: weakref.WeakValueDictionary[str, StoredValue] = weakref.WeakValueDictionary()
        self._unused: deque[Slot] = deque()

    @property
    def promised_bytes(self) -> int:
        """Bytes of slots that values are yet to be written to."""
        return sum(slot.size for slot in list(self._promised.values()))

    def allocate(self, nbytes: int) -> Reservation:
        """Room for a value of so many bytes (`shared_memory.object_size`), until `adopt` or `abandon`. Raises
        `CapacityError`: there is none."""
        self.collect()
        slot = self._store.take(nbytes, limit_bytes=self._limit_bytes)
        value_id = f"v-{self._incarnation}-{next(self._numbers):012d}"
        self._promised[value_id] = slot
        write_token(slot, value_id)
        return Reservation(value_id, str(slot.path), slot.size)

    def fill(self, value_id: str, blobs: Sequence[Buffer]) -> None:
        """Write what a client on another node sent (`shared_memory.object_blobs`) into the slot promised to it. Raises
        `StaleValueError`: nothing is promised to this value; `InvalidArgumentError`: it is more than fits. The promise
        stays."""
        room = self.room(value_id)
        with contextlib.ExitStack() as held:
            views = [held.enter_context(held.enter_context(memoryview(blob)).cast("B")) for blob in blobs]
            total = sum(view.nbytes for view in views)
            if not views or total > room.nbytes or views[0].nbytes < _TOKEN_AT:
                raise InvalidArgumentError("not an object that fits here", argument="blobs", value=total)
            import numpy as np  # here, as most managers never need it; unlike a memoryview, it copies without the GIL

            target = np.frombuffer(room, np.uint8)
            at = views[0].nbytes
            for view in views[1:]:
                target[at : at + view.nbytes] = view
                at += view.nbytes
            target[_TOKEN_AT : views[0].nbytes] = views[0][_TOKEN_AT:]
            target[:_TOKEN_AT] = views[0][:_TOKEN_AT]

    def adopt(self, value_id: str) -> StoredValue:
        """The value that was written. Raises `StaleValueError`: nothing was promised to it, or it is not there;
        `ObjectFormatError`: what is there is damaged. A promise stays then."""
        layout, _ = check_header(self.room(value_id), value_id)
        slot = self._checked(value_id, self._promised.pop(value_id, None))
        return self.hold(StoredValue(value_id, slot, layout.size, self._unused))

    def room(self, value_id: str) -> memoryview:
        """Return the bytes of the slot that is promised to a value. Raises `StaleValueError`: none is."""
        return self._checked(value_id, self._promised.get(value_id)).buffer

    @staticmethod
    def _checked(value_id: str, slot: Slot | None) -> Slot:
        if slot is None:
            raise StaleValueError(f"there is no reservation for value {value_id}")
        return slot

    def hold(self, value: StoredValue) -> StoredValue:
        """The object that stands for this value: the given one, or another that does already."""
        return self._values.setdefault(value.value_id, value)

    def needed_parts(self) -> set[PartRef]:
        """Return the parts of the values that anything refers to. A value that nothing refers to stays so."""
        return {value.part for value in list(self._values.values()) if value.part is not None}

    def collect(self) -> None:
        """Free the slots of values that nothing refers to any more."""
        while self._unused:
            with contextlib.suppress(IndexError):  # another thread has taken the last one
                self._store.free(self._unused.popleft())

    def abandon(self, value_ids: Iterable[str]) -> None:
        """The writers of these are gone, or gave up. What was adopted meanwhile, or is not known, is left alone."""
        for value_id in value_ids:
            slot = self._promised.pop(value_id, None)
            if slot is not None:
                self._store.free(slot)


def in_pieces(data: memoryview) -> list[memoryview]:
    """Cut the bytes of a large value into pieces that messages can take."""
    return [data[at : at + _PIECE_BYTES] for at in range(0, len(data), _PIECE_BYTES)]


def write_token(slot: Slot, value_id: str) -> None:
    """Mark a slot as kept for this value."""
    token = value_id.encode() + b"\0"
    slot.buffer[:_TOKEN_AT] = bytes(_TOKEN_AT)
    slot.buffer[_TOKEN_AT : _TOKEN_AT + len(token)] = token


def has_token(slot: Slot, value_id: str) -> bool:
    """Return True if a slot is kept for this value and nothing was written yet."""
    token = bytes(_TOKEN_AT) + value_id.encode() + b"\0"
    return bytes(slot.buffer[: len(token)]) == token
