"""Block digests: the fingerprint of an object's bytes, kept by blocks of 16 MiB.

Owns the digest algorithm (xxh3, 64 bits: it finds accidents, it is no defence against forgery), the block
size, and the background threads that compute digests while other bytes are still being copied or received.
Where digests are recorded (`format.manifest`) and what to do about damage is up to others.

The threads are daemons shared by the whole process. They start when first needed, do not survive into a
forked child (which starts its own), and are stopped before the interpreter is torn down.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import xxhash

from ml_flashpoint.format.at_exit import at_exit
from ml_flashpoint.format.errors import DigestMismatchError, FlashpointError, InvalidArgumentError

if TYPE_CHECKING:
    from typing_extensions import Buffer

BLOCK_SIZE = 16 * 2**20
"""Bytes of one block, unless a manifest says otherwise. The last block of an object may be shorter."""

MAX_THREADS = 16
"""Threads that compute digests in one process, at most: memory bandwidth is used up well before."""

_DIGEST = re.compile(r"[0-9a-f]{16}")
_EXIT_TIMEOUT_S = 2.0


def digest_workers() -> int:
    """Threads that digest beside the one that copies."""
    return max(1, min(8, len(os.sched_getaffinity(0)) - 1))


def block_count(size: int, block_size: int = BLOCK_SIZE) -> int:
    """Return the number of blocks of ``size`` bytes; an empty object has none."""
    return -(-size // block_size)


def digest_block(buf: Buffer) -> str:
    """Return the digest of a contiguous buffer: 16 lower-case hexadecimal digits.

    The GIL is released meanwhile unless the buffer is small.
    """
    # An object rather than `xxhash.xxh3_64_hexdigest`, which holds the GIL in the releases before xxhash 4.
    return xxhash.xxh3_64(buf).hexdigest()


def is_digest(text: str) -> bool:
    """Whether ``text`` has the form that `digest_block` gives."""
    return _DIGEST.fullmatch(text) is not None


class BlockDigester:
    """Computes the block digests of a buffer in the background, while it is being filled.

    `advance` says which bytes will not change any more; a block is digested once all of it is final. `finish`
    or `abort` must be called in the end: until then the buffer stays exported (an `mmap` cannot be closed).
    As a context manager, leaving the block aborts whatever was not finished.

    Thread-safe: ranges may be marked by several threads. Useless in a forked child.

    Args:
        buffer: contiguous; held, not copied.
        size: bytes of ``buffer``, from its start, that are digested.
        workers: threads of the shared pool that this digester may keep busy at once, at least 1. The thread
            that calls `finish` helps in addition.
        block_size: bytes of a block.

    Raises:
        InvalidArgumentError: an argument is out of range, or ``buffer`` is smaller than ``size``.
    """

    def __init__(self, buffer: Buffer, size: int, workers: int = 1, *, block_size: int = BLOCK_SIZE) -> None:
        for argument, value, lowest in (
            ("size", size, 0),
            ("workers", workers, 1),
            ("block_size", block_size, 1),
        ):
            if value < lowest:
                raise InvalidArgumentError(f"{argument} must be at least {lowest}", argument=argument, value=value)
        view = memoryview(buffer)
        if not view.c_contiguous:
            view.release()
            raise InvalidArgumentError("the buffer must be contiguous", argument="buffer")
        if view.nbytes < size:
            available = view.nbytes
            view.release()
            raise InvalidArgumentError(f"the buffer has only {available} bytes", argument="size", value=size)
        self._view = view.cast("B") if view.nbytes else memoryview(b"")
        self._size = size
        self._workers = workers
        self._block_size = block_size
        self._pid = os.getpid()
        count = block_count(size, block_size)
        self._missing = [block_size] * count  # bytes of each block that are not final yet
        if count:
            self._missing[-1] = size - (count - 1) * block_size
        self._digests: list[str | None] = [None] * count
        self._ready: deque[int] = deque()
        self._in_pool = 0  # jobs in the pool's queue or running there
        self._computing = 0
        self._error: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()

    def __enter__(self) -> BlockDigester:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    @property
    def size(self) -> int:
        """Bytes of the buffer that are digested."""
        return self._size

    def advance(self, begin: int, end: int) -> None:
        """Mark the bytes from ``begin`` up to ``end`` as final. Ranges may come in any order, each byte once.

        Raises:
            InvalidArgumentError: the range is not within the size, or holds bytes that were marked before
                (which is noticed when a block would have more final bytes than bytes).
            FlashpointError: the digester is finished or aborted.
        """
        if not 0 <= begin <= end <= self._size:
            raise InvalidArgumentError(
                f"a range must lie within 0 to {self._size}", argument="range", value=(begin, end)
            )
        if begin == end:
            return
        self._check_process()
        with self._changed:
            self._check_open()
            queued = len(self._ready)
            for index in range(begin // self._block_size, block_count(end, self._block_size)):
                start = index * self._block_size
                amount = min(end, start + self._block_size) - max(begin, start)
                if amount > self._missing[index]:
                    raise InvalidArgumentError(
                        f"bytes of block {index} were marked as final twice",
                        argument="range",
                        value=(begin, end),
                    )
                self._missing[index] -= amount
                if not self._missing[index]:
                    self._ready.append(index)
            jobs = min(len(self._ready) - queued, self._workers - self._in_pool)
            self._in_pool += max(jobs, 0)
        for _ in range(jobs):
            self._submit()

    def advance_soon(self, delay_s: float) -> None:
        """Mark all bytes as final, and begin in a moment: whoever calls this is about to hand the loop its thread back,
        and needs a core for that. :meth:`finish` need not wait so long."""

        def begin() -> None:
            time.sleep(delay_s)
            with self._changed:
                missing = any(self._missing) and not self._closed
            with contextlib.suppress(FlashpointError):  # finished or aborted this very moment
                if missing:
                    self.advance(0, self._size)

        run_on_pool(begin)

    def help(self) -> None:
        """Digest a block that is final, if there is one that nobody digests yet: whoever has just filled it has it in
        its core's cache."""
        self._digest_next()

    def finish(self) -> tuple[str, ...]:
        """Mark all bytes that are not final yet as final and waits for the digests of all blocks, in order.

        Takes part in the computing itself, so it ends even if no thread could be started. Lets go of the
        buffer.

        Raises:
            FlashpointError: the digester is finished or aborted, or belongs to a parent process.
            Exception: what went wrong with the buffer (it was released, for example).
        """
        self._check_process()
        with self._changed:
            self._check_open()
            self._ready.extend(index for index, missing in enumerate(self._missing) if missing)
            self._missing = [0] * len(self._missing)
            jobs = min(len(self._ready) - 1, self._workers - self._in_pool)
            self._in_pool += max(jobs, 0)
        for _ in range(jobs):
            self._submit()
        while self._digest_next():
            pass
        self._close()
        if self._error is not None:
            raise self._error
        return tuple(digest for digest in self._digests if digest is not None)

    def abort(self) -> None:
        """Give up: waits for the blocks being digested just now, a few ms, and lets go of the buffer.

        Does nothing if the digester is finished or aborted already.
        """
        if os.getpid() == self._pid:
            with self._changed:
                self._ready.clear()
            self._close()

    def _check_process(self) -> None:
        # Before the lock is taken: in a forked child it may be held for good.
        if os.getpid() != self._pid:
            raise FlashpointError("a digester cannot be used in a forked child of its process")

    def _check_open(self) -> None:
        if self._closed:
            raise FlashpointError("the digester is finished or aborted")

    def _submit(self) -> None:
        if not run_on_pool(self._pool_job):
            with self._changed:
                self._in_pool -= 1  # finish() will do it

    def _pool_job(self) -> None:
        # One block a job, so that the digesters of a process take turns.
        self._digest_next()
        with self._changed:
            more = bool(self._ready)
            if not more:
                self._in_pool -= 1
        if more:
            self._submit()

    def _digest_next(self) -> bool:
        with self._changed:
            if not self._ready:
                return False
            index = self._ready.popleft()
            self._computing += 1
        start = index * self._block_size
        try:
            with self._view[start : min(start + self._block_size, self._size)] as block:
                self._digests[index] = digest_block(block)
        except BaseException as error:
            with self._changed:
                self._error = error
                self._ready.clear()
        finally:
            with self._changed:
                self._computing -= 1
                self._changed.notify_all()
        return True

    def _close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._computing)
            self._view.release()


def verify_blocks(
    buffer: Buffer,
    digests: Sequence[str],
    block_size: int = BLOCK_SIZE,
    *,
    first_block: int = 0,
    path: str | os.PathLike[str] | None = None,
    workers: int = 1,
) -> None:
    """Check that consecutive whole blocks of an object have the digests that were recorded for them.

    Args:
        buffer: the bytes of the blocks. Only the last block of an object may be shorter than ``block_size``.
        digests: the recorded digests of exactly these blocks.
        block_size: bytes of a block.
        first_block: number, within the object, of the first block in ``buffer``; only used in what is raised.
        path: object or peer that the bytes are from; only used in what is raised.
        workers: threads of the shared pool to use besides the calling one, at least 1.

    Raises:
        DigestMismatchError: A digest differs, or there are more or fewer blocks than digests. Names the path,
            the first such block and its byte range.
    """
    with memoryview(buffer) as view:
        size = view.nbytes
        found = BlockDigester(view, size, workers, block_size=block_size).finish()
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


class _Pool:
    """Daemon threads that run callables which do not raise."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._stopped = False
        self._limit = min(MAX_THREADS, len(os.sched_getaffinity(0)))

    def submit(self, job: Callable[[], object]) -> bool:
        """Queue a job; returns whether a thread will run it."""
        with self._lock:
            if not self._stopped and len(self._threads) < self._limit:
                name = f"flashpoint-digest-{len(self._threads)}"
                thread = threading.Thread(target=self._run, name=name, daemon=True)
                try:
                    thread.start()
                    self._threads.append(thread)
                except RuntimeError:
                    pass  # no more to be had just now, or the interpreter is about to exit
            if self._stopped or not self._threads:
                return False
            self._jobs.put(job)
            return True

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # or a waiting thread would keep the last buffer alive

    def stop(self) -> None:
        """Let the running jobs end and drops the waiting ones."""
        with self._lock:
            self._stopped = True
        try:
            while True:
                self._jobs.get_nowait()
        except queue.Empty:
            pass
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(_EXIT_TIMEOUT_S)


_pool: _Pool | None = None
_pool_lock = threading.Lock()


def _shared_pool() -> _Pool:
    global _pool
    with _pool_lock:
        if _pool is None:
            _pool = _Pool()
        return _pool


def run_on_pool(job: Callable[[], object]) -> bool:
    """Have a thread of this process's pool call ``job``, which does not raise. Returns whether one will."""
    return _shared_pool().submit(job)


def _forget_pool() -> None:
    # In a forked child: the threads do not exist there, and either lock may be held by one of them.
    global _pool, _pool_lock
    _pool = None
    _pool_lock = threading.Lock()


def _stop_pool() -> None:
    if _pool is not None:
        _pool.stop()


os.register_at_fork(after_in_child=_forget_pool)
at_exit(_stop_pool)
