"""What becomes of older versions in a rank's store: which go once a newer one is verified, and which give way.

Owns the drops that follow from that, of own parts and of copies alike. Which versions are retained is `retained`'s; how
a part is dropped is `rank_store`'s.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path

from ml_flashpoint.checkpoint_object_manager.arena import Arena
from ml_flashpoint.checkpoint_object_manager.arena_pool import ArenaPool
from ml_flashpoint.checkpoint_object_manager.base_marks import PRIVATE_DIR, mark_complete
from ml_flashpoint.checkpoint_object_manager.held_part import HeldPart
from ml_flashpoint.checkpoint_object_manager.reserve import keep_reserve
from ml_flashpoint.checkpoint_object_manager.retained import Retained
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.errors import FlashpointError
from ml_flashpoint.format.lineage import Lineage, read_lineage
from ml_flashpoint.ranks.recovery import superseded
from ml_flashpoint.ranks.retention import VerifiedSave

_log = logging.getLogger(__name__)


class RetainingStore(ABC):
    """The part of `RankStore` that is about versions that may go. Thread-safe.

    Attributes:
        retained: which versions stay beside the newest verified one.
    """

    base: Path
    rank: int
    directory: Path
    arenas: ArenaPool

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._parts: dict[tuple[str, int], HeldPart] = {}
        self.retained = Retained()

    @abstractmethod
    def drop(self, part: HeldPart) -> None:
        """Forget a part: manifest, then links; its arenas are free once nobody reads them."""

    def held(self) -> list[HeldPart]:
        """Parts in this store, own and copies, oldest save id first."""
        with self._lock:
            return [self._parts[key] for key in sorted(self._parts)]

    def held_of(self, save_id: str) -> list[HeldPart]:
        """Parts of one save in this store, own and copies."""
        return [part for part in self.held() if part.save_id == save_id]

    def _read_lineage(self) -> None:
        """Go by what this node knows of the lineage until ranks have come together."""
        try:
            self.retained.lineage = read_lineage(self.base / PRIVATE_DIR)
        except (FlashpointError, OSError) as error:
            _log.error("this node does not know any more what the job has gone back from: %s", error)

    def advance(self, save_id: str, *, step: int | None = None, age: int = 0) -> None:
        """Drop every part older than ``save_id``, which is verified on every rank and copy, but for what is retained.

        Args:
            step: of its version; by default that of a part that is here.
            age: see `VerifiedSave`.
        """
        mark_complete(self.base)
        with self._lock:
            if step is None:
                steps = (CheckpointContainerId.parse_version_container(p.version) for p in self.held_of(save_id))
                step = next(steps, None) or 0
            if not self.retained.verify(VerifiedSave(save_id, step, age)):
                return
        self.prune(save_id)
        self._prepare_next()
        with self._lock:
            beside = len(self._arenas_kept_beside())
            used = sum(len(p.arenas) for p in self._parts.values()) - beside
            copies = self.arenas.budget.copies if self.arenas.budget is not None else 0
            self.arenas.trim(used, to_keep=max(0, self.retained.keep.beside_newest * (1 + copies) - beside))
        keep_reserve(self.directory)

    def prune(self, save_id: str) -> None:
        """Drop every part older than ``save_id`` that is not retained."""
        for part in self.held():
            if superseded(part.save_id, save_id) and not self.retained.keeps(part.save_id):
                self.drop(part)

    def bytes_to_use(self) -> int:
        """Bytes of all arenas that saves and copies use in turn."""
        with self._lock:
            return sum(self.arenas.resident_bytes())

    def counts(self, save_id: str, rank: int) -> bool:
        """Whether a part is here, and not one that is kept beside the newest verified version, as far as room goes, or
        that is dropped and only read yet."""
        with self._lock:
            part = self._parts.get((save_id, rank))
            return part is not None and not part.doomed and not self.retained.is_beside(save_id)

    def _arenas_kept_beside(self) -> set[Arena]:
        beside = [part for part in self._parts.values() if self.retained.is_beside(part.save_id)]
        return {arena for part in beside for arena in part.arenas}

    def give_up_kept(self) -> bool:
        """For want of room: drop the oldest version that is kept beside the newest verified one, own
        part and copies. Returns whether there was one."""
        with self._lock:
            gone = self.retained.give_up_oldest({save_id for save_id, _ in self._parts})
            for part in self.held():
                if part.save_id in gone:
                    self.drop(part)
            return bool(gone)

    def follow(self, given_up_to: int) -> None:
        """Drop what another rank has given up for want of room, so that nobody can load it any more."""
        with self._lock:
            if self.retained.follow(given_up_to) and self.retained.newest is not None:
                self.prune(self.retained.newest.save_id)

    def retain(self, line: Iterable[VerifiedSave], lineage: Lineage) -> None:
        """Go on from the newest of these saves; see `Retained.restore`. Nothing is dropped yet."""
        with self._lock:
            self.retained.restore(line, lineage)

    def _prepare_next(self) -> None:
        """Have an arena for the next save beside what is kept, so that it need not make one, or some of that go."""
        with self._lock:
            own = [part for part in self._parts.values() if part.rank == self.rank and part.manifest is not None]
            if not own or not any(self.retained.is_beside(part.save_id) for part in self._parts.values()):
                return
            manifest = max(own, key=lambda part: part.save_id).manifest
            assert manifest is not None
            size = sum(record.size for record in manifest.objects)
            while not self.arenas.has_free(size, beside=self._copies_missing()):
                if self.arenas.has_room_beside(size, self._copies_missing()) and self.arenas.prepare_spare(size):
                    return
                if not self.give_up_kept():
                    return

    def _copies_missing(self) -> int:
        """Arenas that copies will need and do not have yet."""
        budget = self.arenas.budget
        if budget is None:
            return 0
        copies = {arena for part in self._parts.values() if part.rank != self.rank for arena in part.arenas}
        return max(0, budget.for_copies - self.arenas.exact_beside_kept(copies))
