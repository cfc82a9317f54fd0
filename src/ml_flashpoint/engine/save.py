"""One save of one rank: its three futures, and what it has on its way to a committed part."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import TypeVar

from ml_flashpoint.engine.committing import Filled, Staged
from ml_flashpoint.format.manifest import Manifest
from ml_flashpoint.format.names import CheckpointContainerId, SaveId
from ml_flashpoint.memory.slot import Slot

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of a save, known when it begins.

    Attributes:
        base: base container. explicit, table: see `Checkpointer.begin`.
        began, until: when the save began, and its deadline (`time.monotonic`).
    """

    base: CheckpointContainerId
    explicit: bool
    table: str
    began: float
    until: float

    @property
    def left_s(self) -> float:
        """Seconds to the deadline."""
        return max(self.until - time.monotonic(), 0.0)


def _future() -> Future[_T]:
    future: Future[_T] = Future()
    future.set_running_or_notify_cancel()  # nobody can cancel it
    return future


@dataclass(slots=True, eq=False)
class Save:
    """One rank's part of a version on its way: staged, committed, verified. Made by `Checkpointer.begin`.

    Attributes:
        terms: what is known since it began.
        id: run and step; None while a save that was staged before its step was known has no name.
        staged: done once the program may change the tensors.
        committed: the manifest, once this rank's part is committed.
        verified: done once all ranks have committed their parts and have all copies of them. Fails with
            `SupersededError` when a newer save is verified instead, or the ranks pass over this one.
        slot, content: the slot that the save writes, and what is in it. lock: of the thread that does. The engine's.

    All three futures end by the deadline of the save (``FLASHPOINT_SEAL_DEADLINE_S``).
    """

    terms: Terms
    id: SaveId | None = None
    staged: Future[None] = field(default_factory=_future)
    committed: Future[Manifest] = field(default_factory=_future)
    verified: Future[None] = field(default_factory=_future)
    slot: Slot | None = None
    content: Staged | Filled | None = None
    lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    @property
    def step(self) -> int | None:
        """The step; None as long as `id` is."""
        return None if self.id is None else self.id.step

    @property
    def version(self) -> CheckpointContainerId | None:
        """Path of the version; None as long as `id` is."""
        return None if self.id is None else CheckpointContainerId.create_child(self.terms.base, self.id.version)


@dataclass(slots=True)
class SaveStats:
    """Counters of the saves of one rank. Steps are None before the first.

    Attributes:
        committed, skipped, failed: number of saves that were. One that is skipped has not failed.
        last_committed, last_verified: the newest steps that were.
        copy_error: reason why copies are missing now; None while copying works.
        bytes, committed_s: of the newest part that was committed: its size, and the seconds from the save's begin.
        blocked_s, blocked_total_s: seconds that the newest save, and all of them, kept the training loop.
    """

    committed: int = 0
    skipped: int = 0
    failed: int = 0
    last_committed: int | None = None
    last_verified: int | None = None
    copy_error: str | None = None
    bytes: int = 0
    committed_s: float = 0.0
    blocked_s: float = 0.0
    blocked_total_s: float = 0.0


def end(future: Future[_T], result: _T) -> bool:
    """Give a future its result. Return False if it has ended before."""
    try:
        future.set_result(result)
    except InvalidStateError:
        return False
    return True


def fail(future: Future[_T], error: BaseException) -> bool:
    """Have a future fail. Return False if it has ended before."""
    try:
        future.set_exception(error)
    except InvalidStateError:
        return False
    return True
