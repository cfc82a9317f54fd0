"""A file in a store, read by ranges: nothing is handed out whose blocks were not compared with their digests.

Owns the comparison, and how little memory it takes: whole blocks are read to where they are wanted, and of those that
are wanted in part only the last two stay.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final

from ml_flashpoint.format.digest import verify_blocks
from ml_flashpoint.format.errors import DamagedError
from ml_flashpoint.format.manifest import ObjectRecord
from ml_flashpoint.persist.store import PIECE_BYTES, DurableStore

_CACHED_BLOCKS: Final = 2


class VerifiedFile:
    """See the module. Thread-safe. ``path`` is what the user would call it."""

    def __init__(self, store: DurableStore, name: str, record: ObjectRecord) -> None:
        self.path = store.path_of(name)
        self.record = record
        self._store = store
        self._name = name
        self._cached: OrderedDict[int, bytearray] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, begin: int, end: int) -> bytearray:
        """Returns bytes ``begin:end``.

        Raises:
            FlashpointError: see `read_into`.
        """
        if not 0 <= begin <= end <= self.record.size:
            raise DamagedError(f"the file has no bytes {begin} to {end}", path=self.path)
        content = bytearray(end - begin)
        self.read_into(begin, memoryview(content))
        return content

    def read_into(self, begin: int, into: memoryview) -> None:
        """Fills a view from byte ``begin`` on.

        Raises:
            ObjectNotFoundError: there is no such file any more.
            DamagedError: the bytes are not what was written; names the file.
            LoadError: the store cannot be read.
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
                self._verified(block, into[start - begin : start - begin + taken])
                block += -(-taken // size)

    def _block(self, block: int) -> bytearray:
        with self._lock:
            content = self._cached.get(block)
            if content is not None:
                self._cached.move_to_end(block)
                return content
            self._make_room()  # before there is one more
        start = block * self.record.block_size
        content = bytearray(min(self.record.block_size, self.record.size - start))
        self._verified(block, memoryview(content))
        with self._lock:
            self._make_room()
            self._cached[block] = content
        return content

    def _make_room(self) -> None:
        while len(self._cached) >= _CACHED_BLOCKS:
            self._cached.popitem(last=False)

    def _verified(self, block: int, into: memoryview) -> None:
        size = self.record.block_size
        self._store.read_into(self._name, block * size, into)
        digests = self.record.digests[block : block - (-len(into) // size)]
        verify_blocks(into, digests, size, first_block=block, path=self.path)
