"""A staged state: how it is told which thread saves it, and when that is over.

DCP says neither. It stages on one thread, then saves what was staged on another one, or sends it with the writer
to another process, and reports to the caller alone.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ml_flashpoint.core.background import give_way
from ml_flashpoint.format.errors import SaveError
from ml_flashpoint.format.knobs import seal_deadline_s

if TYPE_CHECKING:
    from _collections_abc import dict_items

    from ml_flashpoint.core.save import Save

_POLL_S = 0.002
_TAKE_UP_S = 10.0
"""Seconds in which a thread that was there when the state was staged must have taken it on. DCP starts a new one."""


class StagedStateDict(dict[str, Any]):
    """A staged state. Whoever reads it, or pickles it for another process, is who saves it.

    Args:
        on_taken: called by the thread that takes it on.
    """

    def __init__(self, state: dict[str, Any], save: Save, on_taken: Callable[[Save], None]) -> None:
        super().__init__(state)
        self._save, self._on_taken = save, on_taken
        self._threads = weakref.WeakSet(threading.enumerate())
        save.may_be_claimed = partial(_may_be_taken_on, weakref.ref(self), time.monotonic() + _TAKE_UP_S)
        weakref.finalize(self, _desert, save).atexit = False

    def items(self) -> dict_items[str, Any]:
        """The items, for whoever plans the save, which takes it on."""
        self._take_on()
        return super().items()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        if threading.current_thread() not in self._threads:
            give_way()  # for pickling, its thread would keep the interpreter's lock
        self._take_on()
        return dict, (dict(self),)

    def _take_on(self) -> None:
        # Once it is claimed, whoever else looks at it does not save it; given up, it still keeps its thread busy.
        if self._save.offered or self._save.worker is None:
            self._save.worker = threading.current_thread()
        self._on_taken(self._save)
        self._await_copies()

    def _await_copies(self) -> None:
        """Planners may read what was staged, and another process does: nobody gets it before it is there."""
        staged = self._save.staged
        if staged is None or self._save.staging_error is not None:
            return
        try:
            staged.wait(seal_deadline_s())
        except SaveError as error:  # raised by the write, where DCP tells all ranks
            self._save.staging_error = error

    def may_be_taken_on(self) -> bool:
        """Whether a thread was started since that lives, and may be about to take it on."""
        started = set(threading.enumerate()).difference(self._threads)
        return any(not thread.name.startswith("flashpoint-") for thread in started)


def _may_be_taken_on(state: weakref.ref[StagedStateDict], until: float) -> bool:
    staged = state()
    return staged is not None and (time.monotonic() <= until or staged.may_be_taken_on())


def _desert(save: Save) -> None:
    # Only noted: this runs wherever the garbage is collected, under whatever locks.
    if save.offered:
        save.deserted = True


def wait_until_over(save: Save, state: weakref.ref[StagedStateDict], deadline_s: float) -> bool:
    """Wait until nobody saves a staged state any more: its thread has ended, or there is none, or the state is gone.
    The latter may take long after a failure, whose traceback keeps it.

    Returns:
        Whether that was within ``deadline_s`` seconds.
    """
    began = time.monotonic()
    while not _is_over(save, state):
        if time.monotonic() > began + deadline_s:
            return False
        if (worker := save.worker) is None:
            time.sleep(_POLL_S)
        else:
            worker.join(_POLL_S)
    return True


def _is_over(save: Save, state: weakref.ref[StagedStateDict]) -> bool:
    worker = save.worker
    if state() is None or worker is threading.current_thread():
        return True
    return not save.may_be_claimed() if worker is None else not worker.is_alive()
