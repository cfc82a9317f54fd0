"""Which blocks of an object do not have their digests. Owns reading several at a time; where from is the caller's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ml_flashpoint.format.digest import digest_block
from ml_flashpoint.format.manifest import ObjectRecord


def wrong_blocks(record: ObjectRecord, read: Callable[[int, memoryview], bool], threads: int) -> str | None:
    """What is wrong with the bytes of an object, in words; None if nothing is. Raises what ``read`` raises.

    Args:
        record: what they should be.
        read: fills a buffer from an offset on, on several threads; returns whether there was enough.
        threads: blocks that are read at the same time.
    """
    buffers = threading.local()

    def is_good(index: int) -> bool:
        begin = index * record.block_size
        if not hasattr(buffers, "block"):
            buffers.block = bytearray(min(record.block_size, record.size))
        with memoryview(buffers.block)[: record.size - begin] as block:
            return read(begin, block) and digest_block(block) == record.digests[index]

    count = len(record.digests)
    with ThreadPoolExecutor(max(1, min(threads, count))) as pool:
        try:
            bad = [index for index, good in enumerate(pool.map(is_good, range(count))) if not good]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    if not bad:
        return None
    begin = bad[0] * record.block_size
    return (
        f"{len(bad)} of {count} blocks do not have the digests that were recorded, the first is block {bad[0]} (bytes"
        f" {begin} to {min(begin + record.block_size, record.size)})"
    )
