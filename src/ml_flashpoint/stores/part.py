"""An object in stores, read by ranges: nothing is handed out whose blocks were not compared with their digests.

Owns the comparison, how little memory it takes (whole blocks are read to where they are wanted; of blocks wanted in
part, the last two stay), and which store is asked: the first, and for a block that it cannot give, the next.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Final

from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.digest import verify_blocks
from ml_flashpoint.format.errors import (
    DamagedError,
    DigestMismatchError,
    FlashpointError,
    ObjectNotFoundError,
    PrunedError,
    UnreadableError,
)
from ml_flashpoint.format.failure_kinds import is_damage
from ml_flashpoint.format.manifest import Manifest, ObjectRecord, manifest_name
from ml_flashpoint.format.object_format import Entry, Layout, header_length, parse_header
from ml_flashpoint.stores.files import PIECE_BYTES

if TYPE_CHECKING:
    from ml_flashpoint.stores.version_store import VersionStore

_log = logging.getLogger(__name__)

_CACHED_BLOCKS: Final = 2
_ZEROS: Final = bytes(1 << 20)
Read = Callable[[int, memoryview], None]
"""``(begin, view)``: fill a view of bytes from byte ``begin`` of an object on."""


class StoredObject:
    """An object that is read by ranges. Thread-safe.

    Args:
        record: of the object.
        read: fills views with whole blocks, compared with their digests.
        path: for errors.
    """

    def __init__(self, record: ObjectRecord, read: Read, path: str) -> None:
        self.record, self.path = record, path
        self._verified = read
        self._block = lru_cache(maxsize=_CACHED_BLOCKS)(partial(_read_block, record, read))
        self._layout: Layout | None = None

    @property
    def layout(self) -> Layout:
        """The items of the object.

        Raises:
            ObjectFormatError: the header is not valid, although its digest is right.
        """
        if self._layout is None:
            size, file_size = self.record.size, self.record.file_size
            length = header_length(self.read(0, min(8, size)), file_size, self.path)
            self._layout = parse_header(self.read(0, length), file_size, self.path).layout
        return self._layout

    def entry(self, key: str) -> Entry:
        """Return the place of an item. Raise an `ObjectNotFoundError` if there is none."""
        found = self.layout.by_key.get(key)
        if found is None:
            raise ObjectNotFoundError(f"the object has no item {str(key)[:80]!a}", path=self.path)
        return found

    def bytes_of(self, key: str) -> memoryview:
        """Return an item, in memory of its own."""
        entry = self.entry(key)
        return memoryview(self.read(entry.begin, entry.end))

    def read(self, begin: int, end: int) -> bytearray:
        """Return bytes ``begin:end``. Raises what `read_into` raises."""
        if not 0 <= begin <= end <= self.record.size:
            raise DamagedError(f"the file has no bytes {begin} to {end}", path=self.path)
        content = bytearray(end - begin)
        self.read_into(begin, memoryview(content))
        return content

    def read_into(self, begin: int, into: memoryview) -> None:
        """Fill a view from byte ``begin`` on.

        Raises:
            ObjectNotFoundError: the object is gone.
            DamagedError: the bytes are not what was written; names the file.
            PrunedError: a running job has removed the part.
            LoadError, UnreadableError: the store cannot be read just now.
        """
        if not len(into):
            return
        end, size = begin + len(into), self.record.block_size
        piece = max(PIECE_BYTES // size, 1) * size
        block = begin // size
        while (start := block * size) < end:
            whole = (end if end == self.record.size else end - end % size) - start
            if start < begin or whole <= 0:
                content = self._block(block)
                low, high = max(begin, start), min(end, start + len(content))
                into[low - begin : high - begin] = memoryview(content)[low - start : high - start]
                block += 1
            else:
                taken = min(whole, piece)
                self._verified(start, into[start - begin : start - begin + taken])
                block += -(-taken // size)

    def pieces(self) -> Iterator[memoryview]:
        """Yield the whole file: bytes that count, then zeros for unused room. A piece is valid until the next one."""
        record = self.record
        piece = max(PIECE_BYTES // record.block_size, 1) * record.block_size
        view = memoryview(bytearray(min(piece, record.size)))
        for begin in range(0, record.size, piece):
            content = view[: min(piece, record.size - begin)]
            self._verified(begin, content)
            yield content
        for begin in range(record.size, record.file_size, len(_ZEROS)):
            yield memoryview(_ZEROS)[: record.file_size - begin]

    def check(self) -> None:
        """Read all of it. Raises what `read_into` raises."""
        for _ in self.pieces():
            pass


def _read_block(record: ObjectRecord, read: Read, block: int) -> bytearray:
    begin = block * record.block_size
    content = bytearray(min(record.block_size, record.size - begin))
    read(begin, memoryview(content))
    return content


def check_blocks(record: ObjectRecord, begin: int, into: memoryview, path: str) -> None:
    """Compare whole blocks of an object, from byte ``begin`` on, with their digests.

    Raises:
        DigestMismatchError: they differ.
    """
    size, first = record.block_size, begin // record.block_size
    digests = record.digests[first : first - (-len(into) // size)]
    verify_blocks(into, digests, size, first_block=first, path=path)


def stored_object(
    manifest: Manifest, stores: Sequence[VersionStore], record: ObjectRecord | None = None
) -> StoredObject:
    """Return an object of a part that one or several stores hold.

    Args:
        manifest: of the part.
        stores: that hold it. A block that one cannot give is read from the next.
        record: of the object; by default the first one.
    """
    of = manifest.objects[0] if record is None else record

    def read(begin: int, into: memoryview) -> None:
        failures: list[FlashpointError] = []
        for store in stores:
            path = store.path_of(manifest, of)
            try:
                store.read_into(manifest, of, begin, into)
                check_blocks(of, begin, into, path)
                return
            except (DamagedError, ObjectNotFoundError, PrunedError, UnreadableError) as error:
                known = (manifest.version, manifest.rank, manifest.save_id)
                gone = isinstance(error, (DigestMismatchError, ObjectNotFoundError)) and not store.has(*known)
                failures.append(pruned(*known, store.path) if gone else error)
            if len(failures) < len(stores):
                _log.warning("rank %d: taking another copy: %s", manifest.rank, failures[-1])
        # What cannot be read just now may be sound: no reason for an older version.
        raise next((error for error in failures if not is_damage(error)), failures[0])

    return StoredObject(of, read, stores[0].path_of(manifest, of))


def pruned(version: str, rank: int, save_id: str, path: str) -> PrunedError:
    """Return the error of a reader whose part went."""
    return PrunedError(
        "the version was pruned while it was read",
        step=CheckpointContainerId.parse_version_container(version),
        rank=rank,
        path=os.path.join(path, version, manifest_name(rank, save_id)),
        hint="read the newest version",
    )
