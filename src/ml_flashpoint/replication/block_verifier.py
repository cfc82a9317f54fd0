"""Checking blocks against their digests while the following ones are still arriving.

Owns which blocks of an object have arrived whole, and one background thread a transfer that finds out.
Receiving them, and what to do about a bad one, is for `transfer_service` and `transfer_client`.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

from ml_flashpoint.format.digest import block_count, digest_block
from ml_flashpoint.format.errors import DeadlineError, DigestMismatchError, InvalidArgumentError
from ml_flashpoint.format.manifest import ObjectRecord
from ml_flashpoint.replication.channel import Cancelled, Channel

_INLINE_BYTES = 256 << 10
"""Blocks up to this size are digested by the receiving thread: quicker than waking another one."""


class BlockTarget:
    """An object being received: where to, and which of its blocks are known to be right.

    Args:
        record: What the manifest says of the object.
        into: Writable and contiguous, `record.size` bytes. Held until `release`.
        path: How errors name the object.

    Raises:
        InvalidArgumentError: `into` is read-only or of another size.
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
        """First byte of `block` and the one after its last, or after that of a later block, `last`."""
        end = (block if last is None else last) * self.record.block_size + self.record.block_size
        return block * self.record.block_size, min(end, self.record.size)

    def check(self, block: int) -> None:
        """Digest `block` and note whether it is right.

        Raises:
            DigestMismatchError: It is not.
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
    """Checks blocks on one daemon thread of its own, started when first needed, while others are received.

    A context manager: leaving it drops the blocks not looked at yet and waits for the one under way (a few
    ms), so that nothing refers to the buffers afterwards. For one thread.
    """

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[tuple[BlockTarget, int] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._outstanding = 0
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._failure: BaseException | None = None

    def __enter__(self) -> BlockVerifier:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join()

    @property
    def failed(self) -> bool:
        """Whether a block was found wrong so far."""
        return self._failure is not None

    def submit(self, target: BlockTarget, block: int) -> None:
        """Have `block`, which has arrived whole, checked."""
        begin, end = target.span(block)
        if end - begin <= _INLINE_BYTES:
            self._check(target, block)
            return
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="flashpoint-transfer-verify", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no more threads to be had
                self._check(target, block)
                return
            self._thread = thread
        self._outstanding += 1
        self._tasks.put((target, block))

    def finish(self, deadline_s: float) -> None:
        """Wait until all submitted blocks are checked.

        Raises:
            DigestMismatchError: The first that was found wrong.
            DeadlineError: No block was finished for `deadline_s`.
        """
        while self._outstanding:
            try:
                self._results.get(timeout=deadline_s)
            except queue.Empty:
                raise DeadlineError(f"digests of received blocks made no progress for {deadline_s:g} s") from None
            self._outstanding -= 1
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None and not self._stopped:
            self._check(*task)
            self._results.put(None)

    def _check(self, target: BlockTarget, block: int) -> None:
        try:
            target.check(block)
        except BaseException as exc:
            if self._failure is None:
                self._failure = exc


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
