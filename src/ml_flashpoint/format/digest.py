"""Block digests of an object's bytes: xxh3, 64 bits, by blocks of 16 MiB. They find accidents, not forgery.

Background threads, which the whole process shares, compute them while other bytes are still being copied or received.
"""

from __future__ import annotations

import functools
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import xxhash

from ml_flashpoint.format.errors import DigestMismatchError

if TYPE_CHECKING:
    from typing_extensions import Buffer

BLOCK_SIZE = 16 * 2**20
"""Bytes of one block, unless a manifest says otherwise. The last block of an object may be shorter."""

_MAX_THREADS = 16  # memory bandwidth is used up well before
_DIGEST = re.compile(r"[0-9a-f]{16}")


def block_count(size: int, block_size: int = BLOCK_SIZE) -> int:
    """Return the number of blocks of ``size`` bytes; an empty object has none."""
    return -(-size // block_size)


def digest_block(buf: Buffer) -> str:
    """Return the digest of a contiguous buffer: 16 lower-case hexadecimal digits. Releases the GIL."""
    # An object rather than `xxhash.xxh3_64_hexdigest`, which holds the GIL in the releases before xxhash 4.
    return xxhash.xxh3_64(buf).hexdigest()


def is_digest(text: object) -> bool:
    """Return True for text of the form that `digest_block` gives."""
    return isinstance(text, str) and _DIGEST.fullmatch(text) is not None


class BlockDigester:
    """A computation of the block digests of a buffer in the background, while the buffer is being filled. Thread-safe.

    `finish` or `abort`, which leaving it as a context manager does, must be called in the end: until then the buffer
    stays exported (an `mmap` cannot be closed).

    Args:
        buffer: contiguous; held, not copied.
        size: bytes of ``buffer``, from its start, that are digested.
        block_size: bytes of a block.
    """

    def __init__(self, buffer: Buffer, size: int, *, block_size: int = BLOCK_SIZE) -> None:
        view = memoryview(buffer)
        self.size = size
        self._view = view.cast("B") if view.nbytes else view
        self._block_size = block_size
        self._missing = [min(block_size, size - begin) for begin in range(0, size, block_size)]  # bytes not yet final
        self._digests = [""] * len(self._missing)
        self._ready: deque[int] = deque()
        self._computing = 0
        self._workers = threading.Semaphore(max(1, min(8, len(os.sched_getaffinity(0)) - 1)))
        self._error: BaseException | None = None
        self._ended = False
        self._changed = threading.Condition()

    def __enter__(self) -> BlockDigester:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    def advance(self, begin: int, end: int) -> None:
        """Mark the bytes from ``begin`` up to ``end`` as final: they change no more. Each byte once, in any order."""
        size, count = self._block_size, 0
        with self._changed:
            for index in range(begin // size, block_count(end, size)) if begin < end and not self._ended else ():
                self._missing[index] -= min(end, (index + 1) * size) - max(begin, index * size)
                if not self._missing[index]:
                    self._ready.append(index)
                    count += 1
        self._start(count)

    def advance_soon(self, delay_s: float) -> None:
        """Mark all bytes as final after a delay: the caller is about to return to its loop, and needs a core."""

        def begin() -> None:
            time.sleep(delay_s)
            self.advance(0, self.size)

        run_on_pool(begin)

    def help(self) -> bool:
        """Digest a final block that no thread digests yet; return False if there is none."""
        with self._changed:
            if not self._ready:
                return False
            index = self._ready.popleft()
            self._computing += 1
        begin = index * self._block_size
        try:
            with self._view[begin : min(begin + self._block_size, self.size)] as block:
                self._digests[index] = digest_block(block)
        except BaseException as error:
            self._error = error
        with self._changed:
            self._computing -= 1
            self._changed.notify_all()
        return True

    def finish(self) -> tuple[str, ...]:
        """Mark all bytes as final, and return the digests of all blocks, in order. Releases the buffer.

        This thread takes part, so `finish` ends even if no thread can be started.
        """
        with self._changed:
            self._ended = True
            self._ready.extend(index for index, missing in enumerate(self._missing) if missing)
            count = len(self._ready)
        self._start(count - 1)
        while self.help():
            pass
        self._close()
        if self._error is not None:
            raise self._error
        return tuple(self._digests)

    def abort(self) -> None:
        """Wait for the blocks that are being digested just now, and release the buffer. Safe to repeat."""
        with self._changed:
            self._ended = True
            self._ready.clear()
        self._close()

    def _start(self, count: int) -> None:
        for _ in range(count):
            if not self._workers.acquire(blocking=False):
                return
            self._submit()

    def _submit(self) -> None:
        if run_on_pool(self._work) is None:
            self._workers.release()  # finish() will do it

    def _work(self) -> None:
        # One block a job, so that all who use the pool take turns.
        if self.help() and self._ready:
            self._submit()
        else:
            self._workers.release()

    def _close(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._computing)
            self._view.release()


def verify_blocks(
    buffer: Buffer,
    digests: Sequence[str],
    block_size: int = BLOCK_SIZE,
    *,
    first_block: int = 0,
    path: str | os.PathLike[str] | None = None,
) -> None:
    """Check that consecutive whole blocks of an object have the digests that were recorded for them.

    Args:
        buffer: the bytes of the blocks. Only the last block of an object may be shorter than ``block_size``.
        digests: the recorded digests of exactly these blocks.
        first_block, path: number of the first block within the object, and the object, for errors.

    Raises:
        DigestMismatchError: a digest differs, or there are more or fewer blocks than digests.
    """
    with memoryview(buffer) as view:
        size = view.nbytes
        found = BlockDigester(view, size, block_size=block_size).finish()
    wrong = [index for index, (one, other) in enumerate(zip(found, digests, strict=False)) if one != other]
    if wrong:
        first = first_block + wrong[0]
        begin = first * block_size
        end = first_block * block_size + min((wrong[0] + 1) * block_size, size)
        also = f" ({len(wrong)} of {len(found)} blocks differ)" if len(wrong) > 1 else ""
        raise DigestMismatchError(
            f"block {first}, bytes {begin} to {end}, has digest {found[wrong[0]]} and not"
            f" {digests[wrong[0]]} as recorded{also}",
            path=path,
        )
    if len(found) != len(digests):
        raise DigestMismatchError(
            f"{size} bytes from block {first_block} on are {len(found)} blocks of {block_size} bytes,"
            f" but {len(digests)} digests are recorded",
            path=path,
        )


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
