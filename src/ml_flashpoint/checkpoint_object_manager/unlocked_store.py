"""Arenas for a process that saves on behalf of the one that holds a rank's store.

Owns making them, and the lock that shows a later trainer that such a process is at work. Everything else about them is
`rank_store`'s.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import BinaryIO

from ml_flashpoint.checkpoint_object_manager.arena import Arena
from ml_flashpoint.checkpoint_object_manager.arena_pool import lent_name, with_headroom
from ml_flashpoint.checkpoint_object_manager.base_marks import PRIVATE_DIR
from ml_flashpoint.checkpoint_object_manager.rank_lock import AT_WORK
from ml_flashpoint.format.private_folders import make_tree, open_own


class UnlockedStore:
    """Arenas for a process that saves on behalf of the one that holds the store: always new, never reused.

    Args:
        trainer: pid of the process that it saves for.
    """

    def __init__(self, base: Path, rank: int, trainer: int) -> None:
        self.base = base
        self._trainer = trainer
        self._directory = base / PRIVATE_DIR / f"rank-{rank:05d}"

    def hold(self) -> BinaryIO:
        """Keep a new trainer from reusing arenas that are written to here, until what is returned is closed."""
        make_tree(self.base, self._directory)
        file = open(open_own(self._directory / AT_WORK, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab")  # noqa: SIM115
        fcntl.flock(file, fcntl.LOCK_SH)
        return file

    def acquire(self, size: int, *, exact: bool = False) -> Arena:
        """A new arena. It is the trainer's from the moment that the save is committed.

        Raises:
            CapacityError: no room for one.
        """
        make_tree(self.base, self._directory)
        # A name that no pool makes, and by which the trainer that opens its store just now knows whose it is.
        path = self._directory / lent_name(self._trainer, time.time_ns())
        return Arena.create(path, size if exact else with_headroom(size))

    def release(self, arena: Arena) -> None:
        """Delete an arena that nothing was committed in."""
        arena.unlink()
        arena.close()
