"""Whether copying while training goes on is worth it, as measured: it takes memory bandwidth from the step.

Owns the comparison of what a save takes of the loop either way, from its beginning until the next update of an
optimizer may begin: the time that the loop is held, and by how much what it does meanwhile is slowed down, are both in
that.
"""

from __future__ import annotations

import logging
from collections import deque

_log = logging.getLogger(__name__)

_EVERY = 128
"""Saves after which both ways are tried again. All ranks count alike, so they try the same at the same time."""
_WARM, _TRIED = 3, 4
"""Saves of a job before the first trial, whose memory is new; and those of a trial, either way. What the first of these
takes is not counted: it waits for the save before, which went the other way."""
_MARGIN = 1.01


class StagingTrial:
    """Chooses, save by save. To be used by one thread.

    Attributes:
        overlapped_s, blocking_s: the shortest of the latest times from the beginning of a save to the next update, with
            the copy under way meanwhile, and with all of it before; 0.0 while not known.
    """

    def __init__(self) -> None:
        self._saves = -1
        self._took: dict[bool, deque[float]] = {True: deque(maxlen=_TRIED), False: deque(maxlen=_TRIED)}
        self._overlaps = True
        self._counts = False

    @property
    def overlapped_s(self) -> float:
        """See the class."""
        return min(self._took[True], default=0.0)

    @property
    def blocking_s(self) -> float:
        """See the class."""
        return min(self._took[False], default=0.0)

    def begin(self) -> bool:
        """Whether the save that begins now overlaps."""
        self._saves += 1
        nth = self._saves % _EVERY - _WARM
        tried = range(2 * _TRIED)
        if nth == len(tried):
            self._choose()
        self._counts = nth > len(tried) or (nth in tried and nth % _TRIED > 0)
        if nth == 0:
            for took in self._took.values():
                took.clear()
        return nth < _TRIED if nth in tried else self._overlaps

    def took(self, overlapped: bool, seconds: float) -> None:
        """Take note of what the save that was begun last took."""
        if self._counts:
            self._took[overlapped].append(seconds)
            self._counts = False

    def _choose(self) -> None:
        if not (self._took[True] and self._took[False]):
            return
        before, self._overlaps = self._overlaps, self.overlapped_s <= _MARGIN * self.blocking_s
        if before != self._overlaps:
            how = "while training goes on" if self._overlaps else "before a save returns"
            _log.info(
                "the state is copied %s from now on: a save and what follows until the next update take %.4f s with "
                "the copy under way, and %.4f s with the copy before",
                how,
                self.overlapped_s,
                self.blocking_s,
            )
