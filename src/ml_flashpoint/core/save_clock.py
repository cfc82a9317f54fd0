"""What saves cost a loop, for doors that hold it while a call of theirs lasts.

Owns the times that a `SaveInterval` is told: how long a turn of the loop takes, and how long a save holds it, from the
question whether one is due. What is chosen from them is the interval's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ml_flashpoint.core.save_interval import SaveInterval


class SaveClock:
    """See the module. For the training thread alone.

    Args:
        interval: is told what is measured.
        under_way: whether a save is, now.
    """

    def __init__(self, interval: SaveInterval, under_way: Callable[[], bool]) -> None:
        self.interval = interval
        self._under_way = under_way
        self._was_saving = False
        self._asked_at: float | None = None
        self._held_s: float | None = None

    def is_due(self, step: int, before: int | None = None) -> bool:
        """Whether to save at this step, which is done now. Asked after each, and just before the save.

        Args:
            before: the step before, if that is not the number before.
        """
        now = time.perf_counter()
        self.interval.passed(now, saving=self._was_saving, steps=1 if before is None else step - before)
        self._was_saving = self._under_way()
        due = self.interval.is_due(step, before)
        self._asked_at = now if due else None
        if due and self._held_s is not None:
            self.interval.saved(self._held_s)
            self._held_s = None
        return due

    def begun(self) -> None:
        """The loop goes on after a save, which may be under way. Nothing is measured where nobody asked before."""
        if self._asked_at is None:
            return
        self._held_s, self._asked_at = time.perf_counter() - self._asked_at, None
        self._was_saving = True

    @contextmanager
    def ending(self) -> Iterator[None]:
        """The loop waits in here for the end of the latest save. If that is while it makes another one, it is counted
        for that one."""
        began = time.perf_counter()
        try:
            yield
        finally:
            if self._asked_at is None and self._held_s is not None:
                self._held_s += time.perf_counter() - began
