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


def object_content(descriptor: int, record: ObjectRecord, path: Path) -> Iterator[memoryview]:
    """The bytes of an object, as many as its file has: those that count, then zeros where there is unused room.

    A piece is valid until the next one is asked for.

    Args:
        descriptor: of its file.
        record: what it should be.
        path: for errors.

    Raises:
        DigestMismatchError: it is not.
    """
    piece = max(_PIECE_BYTES // record.block_size, 1) * record.block_size
    buffer = memoryview(bytearray(min(piece, max(record.size, record.file_size - record.size))))
    for begin in range(0, record.size, piece):
        content = buffer[: min(piece, record.size - begin)]
        if not read_fully(descriptor, content, begin):
            raise DigestMismatchError("the object is too short", path=path)
        first = begin // record.block_size
        digests = record.digests[first : first - (-len(content) // record.block_size)]
        verify_blocks(content, digests, record.block_size, first_block=first, path=path)
        yield content
    buffer[:] = bytes(len(buffer))
    for begin in range(record.size, record.file_size, max(1, len(buffer))):
        yield buffer[: record.file_size - begin]


def read_fully(descriptor: int, into: memoryview, offset: int) -> bool:
    """Fill a buffer from a file; returns false if that ends before."""
    done = 0
    while done < len(into):
        count = os.preadv(descriptor, [into[done:]], offset + done)
        if not count:
            return False
        done += count
    return True
