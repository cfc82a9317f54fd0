"""The account of what a handle has written: two integers, compared with where an epoch begins.

A commit is a *cut*: the state of all managers at one checkpoint. Cuts are numbered in the order in which the
coordinator asks for them. A write is part of the next cut at its checkpoint or above. It comes *late* for a cut that
its manager has prepared at that checkpoint or above, and the manager answers with the number of that cut.
"""

from __future__ import annotations

from typing import NamedTuple


class Written(NamedTuple):
    """The highest checkpoint that a handle has written at, and the highest cut that a write came late for; -1: none."""

    checkpoint: int = -1
    late: int = -1

    def and_also(self, other: Written) -> Written:
        """Return the account of both."""
        return Written(max(self.checkpoint, other.checkpoint), max(self.late, other.late))

    def back_to(self, checkpoint_id: int) -> Written:
        """Return what is left of it after a rollback to a checkpoint."""
        return Written(min(self.checkpoint, checkpoint_id), self.late)

    def is_above(self, checkpoint_id: int, cut: int) -> bool:
        """Return whether some of it is lost where this cut at a checkpoint is what is left."""
        return self.checkpoint > checkpoint_id or self.late >= cut


NOTHING = Written()
