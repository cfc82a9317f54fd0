"""Checking blocks against their digests while the following ones are still arriving.

Owns which blocks of an object have arrived whole. The threads that find out are `format.digest`'s.
Receiving them, and what to do about a bad one, is for `transfer_service` and `transfer_client`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator

from ml_flashpoint.format.digest import block_count, digest_block, run_on_pool
from ml_flashpoint.format.errors import DeadlineError, DigestMismatchError, InvalidArgumentError
from ml_flashpoint.format.manifest import ObjectRecord
from ml_flashpoint.net.channel import Cancelled, Channel

_INLINE_BYTES = 256 << 10
"""Blocks up to this size are digested by the receiving thread: quicker than waking another one."""


class BlockTarget:
    """An object being received: where to, and which of its blocks are known to be right.

    Args:
        record: what the manifest says of the object.
        into: writable and contiguous, `record.size` bytes. Held until `release`.
        path: how errors name the object.

    Raises:
        InvalidArgumentError: ``into`` is read-only or of another size.
    """

    def __init__(self, record: ObjectRecord, into: memoryview, path: str) -> None:
        if into.readonly or not into.c_contiguous or into.nbytes != record.size:
            raise InvalidArgumentError(
                f"the buffer for {path} must be writable, contiguous and of {record.size:,} bytes"
                f" (it has {into.nbytes:,})"
            )
        self.record = record
        self.path = path
        self.view = into.cast("B") if into.nbytes else memoryview(bytearray())
        self._right = bytearray(block_count(record.size, record.block_size))

    def __enter__(self) -> BlockTarget:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Let go of the buffer, so that what it is a view of can be closed."""
        self.view.release()

    def span(self, block: int, last: int | None = None) -> tuple[int, int]:
        """First byte of ``block`` and the one after its last, or after that of a later block, ``last``."""
        end = (block if last is None else last) * self.record.block_size + self.record.block_size
        return block * self.record.block_size, min(end, self.record.size)

    def check(self, block: int) -> None:
        """Digest ``block`` and note whether it is right.

        Raises:
            DigestMismatchError: it is not.
        """
        begin, end = self.span(block)
        with self.view[begin:end] as piece:
            found = digest_block(piece)
        if found != self.record.digests[block]:
            raise DigestMismatchError(
                f"block {block}, bytes {begin} to {end}, arrived with digest {found}"
                f" and not {self.record.digests[block]} as recorded",
                path=self.path,
            )
        self._right[block] = 1

    @property
    def right_blocks(self) -> int:
        """How many blocks have arrived and been found right."""
        return self._right.count(1)

    def missing(self) -> list[range]:
        """The runs of consecutive blocks that have not, in order."""
        runs: list[range] = []
        block = self._right.find(0)
        while block >= 0:
            end = self._right.find(1, block)
            runs.append(range(block, end if end >= 0 else len(self._right)))
            block = self._right.find(0, end) if end >= 0 else -1
        return runs


class BlockVerifier:
    """Checks blocks on the threads that compute digests, while others are received.

    A context manager: leaving it drops the blocks not looked at yet and waits for those under way (a few ms), so that
    nothing refers to the buffers afterwards.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[BlockTarget, int]] = deque()
        self._under_way = 0
        self._changed = threading.Condition()
        self._failure: BaseException | None = None

    def __enter__(self) -> BlockVerifier:
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._waiting.clear()
            self._changed.wait_for(lambda: not self._under_way)

    @property
    def failed(self) -> bool:
        """Whether a block was found wrong so far."""
        return self._failure is not None

    def submit(self, target: BlockTarget, block: int) -> None:
        """Have ``block``, which has arrived whole, checked."""
        begin, end = target.span(block)
        with self._changed:
            self._waiting.append((target, block))
        if end - begin <= _INLINE_BYTES or not run_on_pool(self._check_next):
            self._check_next()

    def finish(self, deadline_s: float) -> None:
        """Wait until all submitted blocks are checked; takes part in it.

        Args:
            deadline_s: seconds in which one of them is to be finished.

        Raises:
            DigestMismatchError: the first that was found wrong.
            DeadlineError: none was finished for so long.
        """
        while self._check_next():
            pass
        with self._changed:
            while self._under_way:
                if not self._changed.wait(deadline_s):
                    raise DeadlineError(f"digests of received blocks made no progress for {deadline_s:g} s")
        if self._failure is not None:
            raise self._failure

    def _check_next(self) -> bool:
        with self._changed:
            if not self._waiting:
                return False
            target, block = self._waiting.popleft()
            self._under_way += 1
        try:
            target.check(block)
        except BaseException as error:
            self._failure = self._failure or error
        finally:
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()
        return True


def receive_blocks(
    channel: Channel,
    target: BlockTarget,
    blocks: range,
    verifier: BlockVerifier,
    *,
    cancelled: Cancelled | None = None,
) -> Iterator[int]:
    """Receive consecutive blocks into their places and have them verified, yielding the bytes of each.

    Raises what `Channel.receive_payload` does.
    """
    for block in blocks:
        begin, end = target.span(block)
        with target.view[begin:end] as piece:
            channel.receive_payload(piece, cancelled=cancelled)
        verifier.submit(target, block)
        yield end - begin
