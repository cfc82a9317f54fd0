"""Arenas that a manager fills itself: with objects that come from durable storage.

Owns giving such an object the value id that it has here. Allocation is `value_arenas`', reading `persisted_parts`'.
"""

from __future__ import annotations

from pathlib import Path

from ml_flashpoint.checkpoint_object_manager.rank_store import RankStore
from ml_flashpoint.ddict.entries import StoredValue
from ml_flashpoint.ddict.value_arenas import ValueArenas


class Room:
    """An arena of this manager that it fills itself, with an object that was written elsewhere.

    Args:
        nbytes: of the object.

    Raises:
        CapacityError: no room.
    """

    def __init__(self, arenas: ValueArenas, store: RankStore, nbytes: int) -> None:
        self._arenas = arenas
        self._allocation = arenas.allocate(nbytes)
        self.buffer = store.arena_by_path(Path(self._allocation.path)).buffer[:nbytes]
        """Where the object is to be put, whole."""

    def keep(self, value_id: str) -> StoredValue:
        """The value, now that the object is there; ``value_id`` is the one it was written under.

        Raises:
            DamagedError: it is none.
        """
        own = self._allocation.value_id
        if value_id != own:
            # Ids have one length, so the header stays as long as it is.
            end = 8 + int.from_bytes(self.buffer[:8], "little")
            header = bytes(self.buffer[:end]).replace(value_id.encode(), own.encode())
            if len(header) == end:
                self.buffer[:end] = header
        return self._arenas.adopt(own)

    def give_up(self) -> None:
        """Let go of the arena."""
        self._arenas.abandon([self._allocation.value_id])
