"""The process that something belongs to. Owns the rule for its forked children."""

from __future__ import annotations

import os

from ml_flashpoint.format.errors import JobInUseError


class OwningProcess:
    """Whoever makes this. A forked child of it, as a loader's worker is, inherits what belongs to it: none of its
    threads, the same memory to save into, the same connections, and locks as they happened to be. It must not use any
    of it, and has nothing to end.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def forked(self) -> bool:
        """Whether this is a child of it."""
        return os.getpid() != self._pid

    def check(self, rank: int | None = None) -> None:
        """Raise a `JobInUseError` in a child of it."""
        if self.forked:
            raise JobInUseError(
                f"this belongs to process {self._pid}, which process {os.getpid()} was forked from",
                rank=rank,
                hint="save, load and wait in the process that it was constructed in",
            )
