"""The entries of a manager's checkpoints, as they were when each was prepared.

Owns which are kept, and that their values stay until they are let go of. Which are needed is the coordinator's to say.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from ml_flashpoint.ddict.checkpoints.snapshots import Snapshots
from ml_flashpoint.ddict.errors import DDictPersistError
from ml_flashpoint.ddict.manager.shard import Entry


class KeptCheckpoints:
    """See the module. Thread-safe. Values are let go of under ``lock``, the manager's."""

    def __init__(self, lock: AbstractContextManager[object], snapshots: Snapshots) -> None:
        self._lock = lock
        self._snapshots = snapshots
        self._kept: dict[int, tuple[list[Entry], contextlib.ExitStack]] = {}

    def keep(self, checkpoint_id: int, entries: list[Entry]) -> None:
        """Keep these, in place of what was kept of this checkpoint."""
        with self._lock:
            before = self._kept.pop(checkpoint_id, None)
            self._kept[checkpoint_id] = (entries, self._snapshots.pin(entries))
        if before is not None:
            before[1].close()

    def __contains__(self, checkpoint_id: int) -> bool:
        return checkpoint_id in self._kept

    def entries(self, checkpoint_id: int) -> list[Entry]:
        """Of a checkpoint that is kept."""
        return self._kept[checkpoint_id][0]

    @contextlib.contextmanager
    def using(self, checkpoint_id: int) -> Iterator[list[Entry]]:
        """The entries, which stay as they are meanwhile, whoever lets go of them.

        Raises:
            DDictPersistError: there are none.
        """
        with self._lock:
            if checkpoint_id not in self._kept:
                raise DDictPersistError("this checkpoint was not prepared here", checkpoint_id=checkpoint_id)
            entries = self.entries(checkpoint_id)
            pin = self._snapshots.pin(entries)
        with pin:
            yield entries

    def retain(self, is_wanted: Callable[[int], bool]) -> None:
        """Let go of checkpoints of which ``is_wanted(checkpoint_id)`` is false."""
        with self._lock:
            gone = [self._kept.pop(each) for each in list(self._kept) if not is_wanted(each)]
        for _, pin in gone:
            pin.close()
