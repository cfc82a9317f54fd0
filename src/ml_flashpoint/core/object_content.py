"""The bytes of an object of this node on their way out, compared with their digests as they are read.

Owns reading them from an open file, which keeps its pages whatever happens to its name. What it means that they differ
is up to who reads.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ml_flashpoint.format.digest import verify_blocks
from ml_flashpoint.format.errors import DigestMismatchError
from ml_flashpoint.format.manifest import ObjectRecord

_PIECE_BYTES: Final = 16 << 20
_ZEROS: Final = bytes(1 << 20)


class PieceBuffer:
    """Memory to read pieces into, kept from one object to the next: to fault in the pages of new memory takes as long
    as to read some pieces, and to give them back keeps the GIL. To be used for one object at a time."""

    def __init__(self) -> None:
        self._memory = bytearray()

    def of(self, size: int) -> memoryview:
        """So many bytes of it."""
        if len(self._memory) < size:
            self._memory = bytearray(size)
        return memoryview(self._memory)[:size]


def object_content(
    descriptor: int, record: ObjectRecord, path: Path, buffer: PieceBuffer | None = None
) -> Iterator[memoryview]:
    """The bytes of an object, as many as its file has: those that count, then zeros where there is unused room.

    A piece is valid until the next one is asked for.

    Args:
        descriptor: of its file.
        record: what it should be.
        path: for errors.
        buffer: what to read into, of who reads often.

    Raises:
        DigestMismatchError: it is not.
    """
    piece = max(_PIECE_BYTES // record.block_size, 1) * record.block_size
    view = (buffer or PieceBuffer()).of(min(piece, record.size))
    for begin in range(0, record.size, piece):
        content = view[: min(piece, record.size - begin)]
        if not read_fully(descriptor, content, begin):
            raise DigestMismatchError("the object is too short", path=path)
        first = begin // record.block_size
        digests = record.digests[first : first - (-len(content) // record.block_size)]
        verify_blocks(content, digests, record.block_size, first_block=first, path=path)
        yield content
    for begin in range(record.size, record.file_size, len(_ZEROS)):
        yield memoryview(_ZEROS)[: record.file_size - begin]


def read_fully(descriptor: int, into: memoryview, offset: int) -> bool:
    """Fill a buffer from a file; returns false if that ends before."""
    done = 0
    while done < len(into):
        count = os.preadv(descriptor, [into[done:]], offset + done)
        if not count:
            return False
        done += count
    return True
