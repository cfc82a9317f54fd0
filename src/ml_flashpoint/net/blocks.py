"""Checking the blocks of an object against their digests while the following ones are still arriving."""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial

from ml_flashpoint.format.digest import block_count, digest_block, run_on_pool
from ml_flashpoint.format.errors import DeadlineError, DigestMismatchError, InvalidArgumentError
from ml_flashpoint.format.manifest import ObjectRecord
from ml_flashpoint.net.channel import Cancelled, Channel

_INLINE_BYTES = 256 << 10
"""Blocks up to this size are digested by the receiving thread: quicker than waking another one."""


class BlockChecker:
    """The blocks of an object that is being received into a buffer, and which of them are right.

    Blocks are digested on the threads of `format.digest`. One thread receives. A context manager: nothing refers to the
    buffer after it is left. The buffer has as many bytes as whole blocks from ``first`` on have; ``path`` is for
    errors.
    """

    def __init__(self, record: ObjectRecord, into: memoryview, path: str, first: int = 0) -> None:
        end = first * record.block_size + into.nbytes
        is_whole = end == record.size or (end < record.size and end % record.block_size == 0)
        if into.readonly or not into.c_contiguous or not is_whole:
            raise InvalidArgumentError(f"the buffer for {path} must be writable, contiguous and of whole blocks")
        self._record = record
        self._path = path
        self._first = first
        self._view = into.cast("B") if into.nbytes else memoryview(bytearray())
        self._right = bytearray(block_count(into.nbytes, record.block_size))
        self._checks: list[Future[object]] = []
        self._failure: BaseException | None = None

    def __enter__(self) -> BlockChecker:
        return self

    def __exit__(self, *_: object) -> None:
        wait([check for check in self._checks if not check.cancel()])
        self._view.release()

    @property
    def failed(self) -> bool:
        """True if a block was found wrong since the last `finish`."""
        return self._failure is not None

    def missing(self) -> list[range]:
        """Return the runs of consecutive blocks that are not right, in order."""
        runs: list[range] = []
        at = self._right.find(0)
        while at >= 0:
            end = self._right.find(1, at)
            end = end if end >= 0 else len(self._right)
            runs.append(range(self._first + at, self._first + end))
            at = self._right.find(0, end)
        return runs

    def span(self, blocks: range) -> tuple[int, int]:
        """Return the first byte of consecutive blocks in the object, and the one after their last."""
        size = self._record.block_size
        return blocks[0] * size, min((blocks[-1] + 1) * size, self._record.size)

    def _place(self, block: int) -> memoryview:
        begin, end = self.span(range(block, block + 1))
        before = self._first * self._record.block_size
        return self._view[begin - before : end - before]

    def receive(self, channel: Channel, block: int, cancelled: Cancelled | None = None) -> None:
        """Receive one block into its place, and have it checked. Raises what `Channel.receive_payload` does."""
        with self._place(block) as piece:
            channel.receive_payload(piece, cancelled=cancelled)
        self.submit(block)

    def submit(self, block: int) -> None:
        """Have a block checked that is in its place."""
        is_small = self._record.block_size <= _INLINE_BYTES
        check = None if is_small else run_on_pool(partial(self._check, block))
        if check is None:
            self._check(block)
        else:
            self._checks.append(check)

    def finish(self, deadline_s: float) -> None:
        """Wait until all blocks that have arrived are checked. Raise a `DigestMismatchError` for the first one that was
        found wrong since the last call, and a `DeadlineError` if none was checked for so many seconds."""
        left = set(self._checks)
        while left:
            done, left = wait(left, deadline_s, FIRST_COMPLETED)
            if not done:
                raise DeadlineError(f"digests of received blocks made no progress for {deadline_s:g} s")
        self._checks.clear()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _check(self, block: int) -> None:
        try:
            with self._place(block) as piece:
                found = digest_block(piece)
            if found != (recorded := self._record.digests[block]):
                begin, end = self.span(range(block, block + 1))
                raise DigestMismatchError(
                    f"block {block}, bytes {begin} to {end}, arrived with digest {found} and not {recorded} as"
                    " recorded",
                    path=self._path,
                )
            self._right[block - self._first] = 1
        except BaseException as error:
            self._failure = self._failure or error
