"""The parts and large values that a manager has on its node, and the slots that they lie in.

A part is a snapshot or a large value of this manager, or a copy of that of another one. Its name is a `SaveId`: the
step is the checkpoint that it was sealed in, and in place of a run it has a number of its own. Slots have many sizes,
and are taken by whatever fits, unlike those of a `memory.pool.Pool`. The managers of a node share a base container;
each has its own folder of slots.

A value is needed for as long as anything in this process refers to it: the shard, a checkpoint that is kept, whoever
reads it for others. Whoever reads or writes a slot in another process has a shared lock (flock) on the file, for as
long as it has a view of it, and the kernel takes the lock away when that process dies. A free slot is taken again only
after an exclusive lock on it was had. Under that lock its first bytes are cleared: a late reader finds no value there.
The allocation writes a *token* there, a header without a value::

    bytes that are in use, this included (8, little-endian), or 0     the value id, padded with zeros (56)     the value

A writer that was stopped for so long that its slot was given to another finds another token, or a header.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import itertools
import logging
import os
import pickle
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ml_flashpoint.ddict.errors import StaleValueError
from ml_flashpoint.ddict.manager.shard import StoredValue
from ml_flashpoint.ddict.options import check_checkpoint_id
from ml_flashpoint.format.arguments import checked_integer
from ml_flashpoint.format.errors import (
    CapacityError,
    DamagedError,
    FlashpointError,
    InvalidArgumentError,
    JobInUseError,
    ManifestError,
    ObjectFormatError,
    ObjectNotFoundError,
    SaveError,
    is_shortage,
)
from ml_flashpoint.format.manifest import Manifest, ObjectRecord
from ml_flashpoint.format.names import MAX_RUN, SaveId, parse_object_name
from ml_flashpoint.memory.capacity import available_bytes
from ml_flashpoint.memory.container import BaseContainer, JobLock, Owner
from ml_flashpoint.memory.pool import slot_size
from ml_flashpoint.memory.slot import PAGE, Slot, round_up

if TYPE_CHECKING:
    from typing_extensions import Buffer


def part_id(run: Any, step: object) -> SaveId:
    """The name of a part that somebody else gave. Raises `InvalidArgumentError`: it is none."""
    return SaveId(checked_integer("run", run, 0, MAX_RUN), check_checkpoint_id(step, "step"))


_log = logging.getLogger(__name__)

_ROOM: Final = 256 << 10  # bytes to leave for manifests and folders
_MOST_TIMES, _MOST_MORE = 4, 256 << 10  # a free slot that is larger than this allows is left for something of its size
_CLEARED: Final = bytes(64)
_PAUSE_S: Final = 0.05


@dataclass(frozen=True, eq=False, slots=True)
class HeldPart:
    """A committed part in a slot of this process."""

    save: SaveId
    manifest: Manifest
    slot: Slot

    @property
    def record(self) -> ObjectRecord:
        """The record of its object."""
        return self.manifest.record

    @property
    def data(self) -> memoryview:
        """The bytes of its object that count."""
        return self.slot.buffer[: self.record.size]


class PartStore:
    """The parts and the slots of one manager. Thread-safe. What an earlier process of it left is taken over; one that
    is ending is waited for. ``base``: base container of the node's managers; made if it is missing.

    Raises:
        JobInUseError: another process has the slots of this manager, or a training job the base container.
        UnsafePathError: others could have planted the folder, or may write to it."""

    def __init__(self, base: Path, number: int, managers: int, *, lock_deadline_s: float = 30.0) -> None:
        self._job = JobLock(base, str(base), lock_deadline_s)
        self.container = BaseContainer(base, self._job)
        self.number = number
        self.folder = self.container.slot_folder(Owner(managers, number))
        self._lock = threading.Lock()
        self._parts: dict[tuple[SaveId, int], HeldPart] = {}
        self._free: list[Slot] = []  # free for longest first
        self._in_use: set[Slot] = set()
        self._descriptor = -1
        try:
            self._descriptor = _locked(self.folder, number, lock_deadline_s)
            self._numbers = itertools.count(self._inherit())
        except BaseException:
            self.close()
            raise

    def _inherit(self) -> int:
        """Take over what is left. Other managers of the node may be at work beside. Return the next slot's number."""
        slots: dict[int, Slot] = {}
        for path in list(self.folder.iterdir()):
            try:
                if not path.name.isdecimal():
                    raise DamagedError("a slot was not made whole", path=path)
                slot = Slot.open(path)
            except (FlashpointError, OSError) as error:
                if is_shortage(error):
                    raise
                _log.warning("removing a slot that cannot be used: %s", error)
                path.unlink(missing_ok=True)
                continue
            self._in_use.add(slot)
            slots[slot.inode] = slot
        for found in glob.glob("step-*_ckpt/*.safetensors", root_dir=self.container.base):
            with contextlib.suppress(FileNotFoundError):  # another manager removes its own
                self._inherit_part(Path(found), slots.get(os.stat(self.container.base / found).st_ino))
        for slot in self._in_use - {part.slot for part in self._parts.values()}:
            self._release(slot)
        return 1 + max((int(slot.path.name) for slot in slots.values()), default=-1)

    def _inherit_part(self, found: Path, slot: Slot | None) -> None:
        owner = parse_object_name(found.name)
        save = None if owner is None else SaveId.parse(found.parent.name, owner[1])
        if slot is None or owner is None or save is None:
            return
        try:
            manifest = self.container.read_manifest(save, owner[0])
            if manifest.record.file_size != slot.size:
                raise ManifestError("the manifest is of another object", path=self.container.base / found)
            self._parts[save, owner[0]] = HeldPart(save, manifest, slot)
        except (ObjectNotFoundError, ManifestError) as error:  # cut short, or damaged
            _log.warning("removing a part that is not whole: %s", error)
            self.container.remove_part(save, owner[0])

    # ---- slots ---------------------------------------------------------------------------------------------

    def take(self, size: int, *, exact: bool = False, limit_bytes: int | None = None) -> Slot:
        """Return a slot for the caller alone, until it is committed or freed. It holds what it held last. ``exact``: it
        has just this size, for a copy. ``limit_bytes``: of all slots; free ones are removed before a new one would
        exceed it. Raises `CapacityError` or `SaveError`: there is no room, even so; the system refuses."""
        slot = self._reused(size, size if exact else _MOST_TIMES * size + _MOST_MORE)
        if slot is None:
            if limit_bytes is not None:
                self.remove_free(limit_bytes - self.resident_bytes()[0] - size)
            wanted = round_up(size, PAGE) if exact else slot_size(size)
            try:
                slot = self._make(wanted)
            except CapacityError:
                if not self.remove_free(0):
                    raise
                slot = self._make(wanted)
            with self._lock:
                self._in_use.add(slot)
        return slot

    def _reused(self, size: int, most: int) -> Slot | None:
        """Take the smallest free slot that fits and is not larger than ``most``."""
        with self._lock:
            for slot in sorted(self._free, key=lambda each: each.size):
                if size <= slot.size <= most and not slot.readers and slot.lock():
                    slot.buffer[: len(_CLEARED)] = _CLEARED
                    slot.unlock()
                    self._free.remove(slot)
                    self._in_use.add(slot)
                    return slot
        return None

    def _make(self, size: int) -> Slot:
        path = self.folder / str(next(self._numbers))
        return Slot.make(path, size, go_on=lambda left: available_bytes(self.folder) - _ROOM >= left, prepare=False)

    def free(self, slot: Slot) -> None:
        """Return a slot that was taken and not committed. Nothing happens if it was returned before."""
        with self._lock:
            self._release(slot)

    def _release(self, slot: Slot) -> None:
        if slot in self._in_use:
            self._in_use.remove(slot)
            self._free.append(slot)

    def remove_free(self, keep_bytes: int) -> int:
        """Remove free slots, those free for longest first, until they have ``keep_bytes`` together. Return the bytes
        that were removed."""
        gone = []
        with self._lock:
            left = sum(slot.size for slot in self._free)
            for slot in [each for each in self._free if not each.readers]:
                if left > keep_bytes:
                    left -= slot.size
                    self._free.remove(slot)
                    gone.append(slot)
        for slot in gone:
            if slot.lock():
                slot.remove()
            else:  # its memory goes with whoever reads it
                slot.path.unlink(missing_ok=True)
                slot.close()
        return sum(slot.size for slot in gone)

    def resident_bytes(self) -> tuple[int, int]:
        """Return the bytes of the slots in use, and of the free ones."""
        with self._lock:
            return sum(slot.size for slot in self._in_use), sum(slot.size for slot in self._free)

    # ---- parts ---------------------------------------------------------------------------------------------

    def commit(self, slot: Slot, manifest: Manifest) -> HeldPart:
        """Make what lies in a slot a part, in place of one of the same name. The slot is the part's from then on."""
        save, rank = manifest.save, manifest.rank
        with self._lock:
            if slot not in self._in_use:
                raise SaveError("the store was closed", rank=rank, path=slot.path)
            replaced = self._parts.pop((save, rank), None)
            if replaced is not None and replaced.slot is not slot:
                self._release(replaced.slot)
            self.container.commit(slot, manifest)
            part = self._parts[save, rank] = HeldPart(save, manifest, slot)
        return part

    @contextlib.contextmanager
    def receiving(self, manifest: Manifest) -> Iterator[memoryview]:
        """Yield a buffer for a part from elsewhere, which is committed if the block is left without an error."""
        slot = self.take(manifest.record.file_size, exact=True)
        try:
            with slot.buffer[: manifest.record.size] as buffer:
                yield buffer
            self.commit(slot, manifest)
        except BaseException:
            self.free(slot)
            raise

    def find(self, save: SaveId, rank: int) -> HeldPart | None:
        """Return a part; None if it is not here."""
        with self._lock:
            return self._parts.get((save, rank))

    def parts_of(self, rank: int) -> list[HeldPart]:
        """Return the parts of a manager, its own or copies."""
        with self._lock:
            return [part for (_, owner), part in self._parts.items() if owner == rank]

    @contextlib.contextmanager
    def reading(self, save: SaveId, rank: int) -> Iterator[HeldPart]:
        """Yield a part, whose slot is not used again before the block is left."""
        with self._lock:
            part = self._parts.get((save, rank))
            if part is None:
                raise ObjectNotFoundError("a part is not here any more", step=save.step, rank=rank, path=save.text)
            part.slot.readers += 1
        try:
            yield part
        finally:
            with self._lock:
                part.slot.readers -= 1

    def drop(self, parts: Collection[HeldPart]) -> None:
        """Remove parts. Their slots are free; of free slots, no more bytes are kept than are in use."""
        with self._lock:
            for part in parts:
                key = part.save, part.manifest.rank
                if self._parts.get(key) is part:
                    del self._parts[key]
                    self.container.remove_part(*key)
                    self._release(part.slot)
        self.remove_free(self.resident_bytes()[0])

    def close(self) -> None:
        """Unmap all slots, and let another process have them. The files stay. Safe to call twice."""
        with self._lock:
            for slot in (*self._in_use, *self._free):
                slot.close()
            self._parts.clear()
            self._in_use.clear()
            self._free.clear()
            self._job.release()
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1


def _locked(folder: Path, number: int, deadline_s: float) -> int:
    give_up = time.monotonic() + deadline_s
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() > give_up:
                os.close(descriptor)
                text = f"another process has the slots of manager {number}"
                raise JobInUseError(text, path=folder, hint="end that process") from None
            time.sleep(_PAUSE_S)


_PIECE_BYTES: Final = 1 << 30  # of large values in messages, whose blobs are of at most 2 GiB
_MAX_INT_BITS: Final = 4096
_FLOAT: Final = struct.Struct(">d")
_HEADER: Final = struct.Struct("<Q56s")
_ZERO: Final = b"\0"
VALUE_AT: Final = _HEADER.size
"""The bytes of the header of a slot, after which its value lies."""


def slot_header(value_id: str, size: int) -> bytes:
    """Return what a slot begins with that has a value of so many bytes, this included; 0: that is kept for one."""
    return _HEADER.pack(size, value_id.encode())


def check_value(buffer: Buffer, value_id: str) -> int:
    """Return the bytes of a value, with its header. Raises `StaleValueError`: another one is here, or none;
    `ObjectFormatError`: it is cut off."""
    with memoryview(buffer) as view:
        size, found = _HEADER.unpack_from(view) if view.nbytes >= VALUE_AT else (0, b"")
        if not size:
            raise StaleValueError(f"there is no value here, {value_id} was expected")
        if found != _HEADER.unpack(slot_header(value_id, size))[1]:
            raise StaleValueError(f"value {found.rstrip(_ZERO)!a} is here, {value_id} was expected")
        if not VALUE_AT < size <= view.nbytes:
            raise ObjectFormatError("the value is cut off")
    return int(size)


def value_id_of(buffer: Buffer) -> str:
    """Return the id of the value here. Raises `ObjectFormatError`: there is none."""
    with memoryview(buffer) as view:
        if view.nbytes < VALUE_AT:
            raise ObjectFormatError("there is no value here")
        return _HEADER.unpack_from(view)[1].rstrip(_ZERO).decode("ascii", "replace")  # type: ignore[no-any-return]


def number_to_inline(value: float) -> bytes:
    """The inline form of an integer or a float: pickled, if it is an integer that is huge."""
    if not isinstance(value, int):
        return b"f" + _FLOAT.pack(value)
    return b"i%d" % value if value.bit_length() <= _MAX_INT_BITS else b"p" + pickle.dumps(value, 5)


def inline_number(data: bytes) -> int | float | None:
    """The integer or float in a small value, None if it is something else. Raises `DamagedError`."""
    try:
        if data[:1] == b"i":
            return int(data[1:])
        return float(_FLOAT.unpack(data[1:])[0]) if data[:1] == b"f" else None
    except (ValueError, struct.error) as error:
        raise DamagedError(f"not an encoded number: {error}") from error


class Reservation(NamedTuple):
    """Room for one value, for its writer alone."""

    value_id: str  # of the value to come
    path: str  # the slot's file
    size: int  # bytes of the file


class ValueSlots:
    """See the module. Thread-safe. ``store``: the manager's. ``incarnation``: 16 hex digits, different each time that
    the manager starts. ``limit_bytes``: most that slots may take, free ones included: before a new one is made, free
    ones that do not suit are removed. It is not enforced otherwise."""

    def __init__(self, store: PartStore, incarnation: str, *, limit_bytes: int | None = None) -> None:
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
        """Room for a value of so many bytes (`values.object_size`), until `adopt` or `abandon`."""
        self.collect()
        slot = self._store.take(nbytes, limit_bytes=self._limit_bytes)
        value_id = f"v-{self._incarnation}-{next(self._numbers):012d}"
        self._promised[value_id] = slot
        slot.buffer[:VALUE_AT] = slot_header(value_id, 0)
        return Reservation(value_id, str(slot.path), slot.size)

    def fill(self, value_id: str, blobs: Sequence[Buffer]) -> None:
        """Write what a client on another node sent (`values.object_blobs`) into the slot promised to it."""
        room = self.room(value_id)
        with contextlib.ExitStack() as held:
            views = [held.enter_context(held.enter_context(memoryview(blob)).cast("B")) for blob in blobs]
            total = sum(view.nbytes for view in views)
            if not views or total > room.nbytes or views[0].nbytes < VALUE_AT:
                raise InvalidArgumentError("not an object that fits here", argument="blobs", value=total)
            import numpy as np  # here, as most managers never need it; unlike a memoryview, it copies without the GIL

            target = np.frombuffer(room, np.uint8)
            at = views[0].nbytes
            for view in views[1:]:
                target[at : at + view.nbytes] = view
                at += view.nbytes
            target[8 : views[0].nbytes] = views[0][8:]
            target[:8] = views[0][:8]

    def adopt(self, value_id: str) -> StoredValue:
        """The value that was written. Where this raises, the promise stays."""
        size = check_value(self.room(value_id), value_id)
        return self.hold(StoredValue(value_id, self._promised.pop(value_id), size, self._unused))

    def room(self, value_id: str) -> memoryview:
        """Return the bytes of the slot that is promised to a value. Raises `StaleValueError`: none is."""
        slot = self._promised.get(value_id)
        if slot is None:
            raise StaleValueError(f"there is no reservation for value {value_id}")
        return slot.buffer

    def hold(self, value: StoredValue) -> StoredValue:
        """The object that stands for this value: the given one, or another that does already."""
        return self._values.setdefault(value.value_id, value)

    def needed_parts(self) -> set[SaveId]:
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
            if (slot := self._promised.pop(value_id, None)) is not None:
                self._store.free(slot)


def in_pieces(data: memoryview) -> list[memoryview]:
    """Cut the bytes of a large value into pieces that messages can take."""
    return [data[at : at + _PIECE_BYTES] for at in range(0, len(data), _PIECE_BYTES)]


def has_token(slot: Slot, value_id: str) -> bool:
    """Return True if a slot is kept for this value and nothing was written yet."""
    return bytes(slot.buffer[:VALUE_AT]) == slot_header(value_id, 0)
