"""`Staged`: a save of DCP's in the process that trains, with the tensors that were copied for it.

The copies lie in the slot of the save, a file that another process can map, so that only places travel there. Before a
base container is known they are copies like any others.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ml_flashpoint.copy.cpu import cpu_clones
from ml_flashpoint.copy.late import LateCopy
from ml_flashpoint.engine.checkpointer import Checkpointer
from ml_flashpoint.engine.committing import BytesItem, TensorItem
from ml_flashpoint.engine.save import Save
from ml_flashpoint.format.errors import SaveError
from ml_flashpoint.format.knobs import seal_deadline_s

if TYPE_CHECKING:
    from _collections_abc import dict_items

GIVEN_S = 1e-3
"""Seconds in which a thread that DCP has just started lets the training thread return to its loop."""

_reading = threading.local()


class StagedStateDict(dict[str, Any]):
    """A state that consists of copies. DCP saves it on a thread of its own, or sends it to another process, and says
    neither; so the state notes which thread reads it. ``staged`` is a `Staged`, or an `ArrivedState` in another
    process."""

    def __init__(self, state: dict[str, Any], staged: Any) -> None:
        super().__init__(state)
        self.staged = staged

    def items(self) -> dict_items[str, Any]:
        """Return the items."""
        _reading.staged = self.staged
        return super().items()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        reduced: tuple[Any, ...] = self.staged.sent(dict(self))
        return reduced


def take_read() -> Any:
    """Return what was staged of the state that the calling thread has read since the last call; None if it was no
    staged one."""
    staged, _reading.staged = getattr(_reading, "staged", None), None
    return staged


class Staged:
    """A save of DCP's; one that was not staged has no copies.

    Args:
        checkpointer: None if no base container is known yet.
        send: returns what a state is pickled as that consists of the copies.

    Attributes:
        save: None before it is begun.
        error: why there is nothing to save; raised as DCP plans.
        others: names of this rank's tensors that other ranks write, once its final plan is known; see `staging`.
        held_s: time that staging held the training loop; 0 if nothing was staged.
        thread: saves it, or waits for the process that does. None before.
        state: refers to the state that consists of the copies, for as long as DCP keeps that.
        is_claimed: True once a save has read what was staged.
    """

    def __init__(
        self, checkpointer: Checkpointer | None, send: Callable[[Staged, dict[str, Any]], tuple[Any, ...]]
    ) -> None:
        self.save: Save | None = None
        self.error: BaseException | None = None
        self.others: frozenset[str] | None = None
        self.held_s = 0.0
        self.thread: threading.Thread | None = None
        self.state: Callable[[], object] = object
        self.is_claimed = False
        self._checkpointer, self._send = checkpointer, send
        self._late: LateCopy | None = None
        self._stager = threading.current_thread()
        self._threads = weakref.WeakSet(threading.enumerate())

    def copy(self, tensors: Sequence[TensorItem], late: LateCopy | None) -> Sequence[torch.Tensor]:
        """Begin the save, if a base container is known, and copy tensors away. Return the copies in order."""
        if self._checkpointer is None:
            return cpu_clones([tensor for _, tensor in tensors])
        self.save, self._late = self._checkpointer.begin(explicit=True), late
        return self._checkpointer.stage(self.save, tensors, late=late)

    @property
    def is_copied(self) -> bool:
        """True if nothing is copied any more: nothing was late, or it is over."""
        return self._late is None or self._late.over

    def await_copies(self) -> None:
        """Wait until all is copied: whoever reads the copies needs all of them."""
        if self._late is None or self.error is not None:
            return
        try:
            self._late.wait(seal_deadline_s())
        except SaveError as error:
            self.fail(error)

    def claim(self, checkpointer: Checkpointer, step: int) -> None:
        """Give the save its step, on the thread that saves it. Raises `FlashpointError`, also if staging failed."""
        self.thread = self.thread or threading.current_thread()
        self.await_copies()
        failure, self._checkpointer = self.error, checkpointer
        try:
            if self.save is None:
                self.save = checkpointer.begin(step, explicit=True)
            else:
                checkpointer.name(self.save, step)
            if failure is not None:
                raise failure
        except Exception as error:
            self.fail(error)
            if failure is not None:
                raise SaveError(f"staging failed: {failure}", step=step) from failure
            raise

    def fill(self, tensors: Sequence[TensorItem], byte_items: Sequence[BytesItem]) -> None:
        """Bring all items into one object."""
        checkpointer, save = self._begun
        checkpointer.fill(save, tensors, byte_items)

    def commit(self, *, extra: Sequence[BytesItem] = (), labels: Mapping[str, str]) -> None:
        """Commit the object; return when this rank's part is committed."""
        checkpointer, save = self._begun
        checkpointer.commit(save, extra=extra, labels=labels)
        save.committed.result()

    def fail(self, error: BaseException) -> None:
        """Give it up. Safe to repeat, and after it was committed."""
        self.error = self.error or error
        if self.save is not None and self._checkpointer is not None:
            self._checkpointer.fail(self.save, error)

    @property
    def has_ended(self) -> bool:
        """True once this rank's part is committed, or there will be none."""
        return self.error is not None or (self.save is not None and self.save.committed.done())

    @property
    def is_over(self) -> bool:
        """True if DCP does nothing with it any more: its thread has ended or begins another save, its state is dropped,
        or, on the thread that has staged it, no thread has been started for it."""
        current = threading.current_thread()
        if self.thread is not None:
            return self.thread is current or not self.thread.is_alive()
        if self.state() is None:
            return True
        # DCP starts a thread for each asynchronous save before that returns.
        started = set(threading.enumerate()).difference(self._threads)
        return current is self._stager and all(each.name.startswith("flashpoint-") for each in started)

    @property
    def _begun(self) -> tuple[Checkpointer, Save]:
        if self.save is None or self._checkpointer is None:
            raise SaveError("nothing was staged")
        return self._checkpointer, self.save

    # ---- for another process ----------------------------------------------------------------------------------

    def sent(self, state: dict[str, Any]) -> tuple[Any, ...]:
        """Return what the state is pickled as."""
        if (thread := threading.current_thread()) is not self._stager:
            time.sleep(GIVEN_S)  # for pickling, its thread would keep the interpreter's lock
            self.thread = thread
        self.await_copies()
        return self._send(self, state)

    def place_of(self, tensor: torch.Tensor) -> tuple[str, int] | None:
        """Return file and offset of one of the copies; None for any other tensor."""
        if self.save is None or self._checkpointer is None:
            return None
        return self._checkpointer.place_of(self.save, tensor)

    def tensor_at(self, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """Return the copy, or a part of it, that lies at an offset. Raises `SaveError` if there is none."""
        checkpointer, save = self._begun
        if self.error is not None:
            raise self.error
        return checkpointer.tensor_at(save, offset, dtype, shape)
