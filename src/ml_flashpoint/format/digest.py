"""Block digests of an object's bytes: xxh3, 64 bits, by blocks of 16 MiB. They find accidents, not forgery."""

from __future__ import annotations

import functools
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from typing_extensions import Buffer

BLOCK_SIZE = 16 * 2**20
"""Bytes of one block, unless a manifest says otherwise. The last block of an object may be shorter."""

_MAX_THREADS = 16  # memory bandwidth is used up well before
_MOST_AT_ONCE = 9  # threads that digest one buffer


def block_count(size: int, block_size: int = BLOCK_SIZE) -> int:
    """Return the number of blocks of ``size`` bytes; an empty object has none."""
    return -(-size // block_size)


def digest_block(buf: Buffer) -> str:
    """Return the digest of a contiguous buffer: 16 lower-case hexadecimal digits. Releases the GIL."""
    # An object rather than `xxhash.xxh3_64_hexdigest`, which holds the GIL in the releases before xxhash 4.
    return xxhash.xxh3_64(buf).hexdigest()


def digest_blocks(buffer: Buffer, *, block_size: int = BLOCK_SIZE) -> tuple[str, ...]:
    """Return the digests of all blocks of a contiguous buffer, in order.

    Threads that the whole process shares help, if there are any: one block a job, so that all who use them take turns.
    """
    with memoryview(buffer) as whole, whole.cast("B") if whole.nbytes else memoryview(b"") as view:
        digests = [""] * block_count(view.nbytes, block_size)
        left, ended = deque(range(len(digests))), SimpleQueue[BaseException | None]()

        def digest_next() -> bool:
            try:
                index = left.popleft()
            except IndexError:
                return False
            error: BaseException | None = None
            try:
                with view[index * block_size : (index + 1) * block_size] as block:
                    digests[index] = digest_block(block)
            except BaseException as caught:
                error = caught
            ended.put(error)
            return True

        def help_out() -> None:
            if digest_next() and left:
                run_on_pool(help_out)

        for _ in range(min(len(digests), len(os.sched_getaffinity(0)), _MOST_AT_ONCE) - 1):
            run_on_pool(help_out)
        while digest_next():
            pass
        errors = [ended.get() for _ in digests]  # the buffer is let go of when no thread is at work
    for error in errors:
        if error is not None:
            raise error
    return tuple(digests)


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(_MAX_THREADS, len(os.sched_getaffinity(0))), "flashpoint-digest")


os.register_at_fork(after_in_child=_pool.cache_clear)


def run_on_pool(job: Callable[[], object]) -> Future[object] | None:
    """Have a thread of the pool call ``job``. Return None if no thread starts; it may be called all the same."""
    try:
        return _pool().submit(job)
    except RuntimeError:  # also while the interpreter exits
        return None
