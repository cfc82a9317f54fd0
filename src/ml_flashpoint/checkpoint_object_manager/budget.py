"""How many arenas a rank is meant to have on its node, and when it may have more.

Owns the numbers that docs/operations.md states. The ranks of a node share a filesystem and cannot take memory from one
another, so none may take more than is its due before the others have what is theirs.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from ml_flashpoint.checkpoint_object_manager.capacity import OWN_VERSIONS
from ml_flashpoint.memory.capacity import available_bytes

_log = logging.getLogger(__name__)

MOST_OWN_VERSIONS = 4
"""The newest verified version and the one being written; while replication lags behind the saves also the one being
replicated, and the newest committed one, or a crash in the middle of the next save would lose more than that."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What one rank may take.

    Attributes:
        directory: of this rank's arenas; those of the other ranks are beside it.
        neighbours: directories of the other ranks that run on this node.
        copies: peers whose parts this rank holds.
    """

    directory: Path
    neighbours: Collection[Path] = ()
    copies: int = 0

    @property
    def due(self) -> int:
        """Arenas that this rank needs: it may always have so many."""
        return OWN_VERSIONS * (1 + self.copies)

    @property
    def most(self) -> int:
        """Arenas that it may have where there is room."""
        return self.due + MOST_OWN_VERSIONS - OWN_VERSIONS

    @property
    def for_copies(self) -> int:
        """Arenas that are due to copies."""
        return OWN_VERSIONS * self.copies

    def has_room(self, count: int, size: int, *, given_back: int = 0) -> bool:
        """Whether a rank that has ``count`` arenas may have one of ``size`` bytes more, beside what the others need.

        Versions that are kept beside the newest verified one are not counted.

        Args:
            given_back: bytes of the arena that it grows from.
        """
        if count < self.due:
            return True
        if count >= self.most:
            return False
        return size - given_back <= self.left(size)

    def left(self, size: int = 0) -> int:
        """Bytes of the filesystem that the other ranks do not need, whose arenas have ``size`` bytes, or more."""
        owed = sum(max(0, self.due * max(size, *sizes) - sum(sizes)) for sizes in map(_sizes, self.neighbours))
        return available_bytes(self.directory) - owed


def _sizes(directory: Path) -> list[int]:
    """Sizes of the arenas in a rank's directory, and a 0."""
    sizes = [0]
    try:
        for entry in os.scandir(directory):
            if entry.name.startswith("arena-"):
                sizes.append(entry.stat(follow_symlinks=False).st_size)
    except OSError as error:  # not there yet, or going
        _log.debug("cannot look at %s: %s", directory, error)
    return sizes
