"""A staged state: how it is told which thread saves it, and when that is over.

DCP says neither. It stages on one thread, then saves what was staged on another one, or sends it with the writer
to another process, and reports to the caller alone.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _collections_abc import dict_items

    from ml_flashpoint.core.save import Save

_POLL_S = 0.002


class StagedStateDict(dict[str, Any]):
    """A staged state. Whoever reads it, or pickles it for another process, is who saves it.

    Args:
        on_taken: called by the thread that takes it on.
    """

    def __init__(self, state: dict[str, Any], save: Save, on_taken: Callable[[Save], None]) -> None:
        super().__init__(state)
        self._save, self._on_taken = save, on_taken
        weakref.finalize(self, _desert, save).atexit = False

    def items(self) -> dict_items[str, Any]:
        """The items, for whoever plans the save, which takes it on."""
        self._take_on()
        return super().items()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        self._take_on()
        return dict, (dict(self),)

    def _take_on(self) -> None:
        if self._save.offered:  # once it is claimed, whoever else looks at it does not save it
            self._save.worker = threading.current_thread()
        self._on_taken(self._save)


def _desert(save: Save) -> None:
    # Only noted: this runs wherever the garbage is collected, under whatever locks.
    if save.offered:
        save.deserted = True


def wait_until_over(save: Save, state: weakref.ref[StagedStateDict], deadline_s: float) -> bool:
    """Wait until nobody saves a staged state any more: its thread has ended, or the state is gone.

    Returns:
        Whether that was within ``deadline_s`` seconds.
    """
    give_up = time.monotonic() + deadline_s
    while state() is not None:
        worker = save.worker
        if worker is threading.current_thread() or (worker is not None and not worker.is_alive()):
            break
        if time.monotonic() > give_up:
            return False
        if worker is None:
            time.sleep(_POLL_S)
        else:
            worker.join(_POLL_S)
    return True
