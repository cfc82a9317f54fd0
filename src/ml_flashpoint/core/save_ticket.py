"""One save on one rank: the ticket, which is what is known of it while it is under way."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ml_flashpoint.checkpoint_object_manager.arena import Arena
from ml_flashpoint.core.commit_queue import PendingSave
from ml_flashpoint.core.object_writer import FilledObject, StagedObject
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId


@dataclass(slots=True, eq=False)
class SaveTicket:
    """One save of this rank. Travels by pickle; what belongs to this process stays behind.

    Attributes:
        attempt, sequence: identity of the save, the same on all ranks once it is adopted; see `core.attempts`.
        number, key: of this saver's saves on this rank alone, in the order in which they began.
        adopted: whether the identity is final.
        staged: copies made before the plan was known.
        error: why staging failed. The save then fails at its write, which is where all ranks notice.
        version: set by the write.
        filled: the object, set by the write.
        spare: an arena to fill where nothing was staged, so that a saving process need not make a new one.
        others: keys of tensors that the plan leaves to other ranks, so that they need not be staged the next
            time; None while unknown. Set by the door.
        worker: the thread that writes and seals the save, if the door says so. Once it is gone, so is the save.
        handed_off_at: when it was handed to another process, in seconds of the monotonic clock.
        abandoned: nobody can write the save any more, although it was staged and offered.
        deserted: the same of a save that was never staged: the call that made it has ended.
        given_back: its arenas are no longer its own, because it failed.
        asked: whether this run is known to know what earlier ones have left in the base container.
        taking: it is about to take an arena, or has and is filling it.
    """

    attempt: str
    sequence: int
    number: int = 0
    key: str = ""
    adopted: bool = False
    staged: StagedObject | None = None
    error: BaseException | None = None
    version: CheckpointContainerId | None = None
    filled: FilledObject | None = None
    others: frozenset[str] | None = None
    spare: Arena | None = None
    spare_path: Path | None = None
    pending: PendingSave | None = field(default=None, repr=False)
    worker: threading.Thread | None = field(default=None, repr=False)
    handed_off_at: float = 0.0
    abandoned: bool = False
    deserted: bool = False
    given_back: bool = False
    asked: bool = False
    taking: bool = False

    @property
    def arenas(self) -> set[Arena]:
        """The arenas that this save has taken from its process's store."""
        held = [part.arena for part in (self.filled, self.staged) if part is not None]
        return {arena for arena in (*held, self.spare) if arena is not None}

    @property
    def holds_arena(self) -> bool:
        """Whether an arena is in use for it."""
        pending = self.pending
        if pending is None:
            return False
        if pending.part is not None:
            return pending.store is not None and pending.store.find(pending.attempt, pending.part.rank) is not None
        return not pending.resolved.is_set() and (self.taking or bool(self.arenas))

    def __getstate__(self) -> tuple[Any, ...]:
        spare_path = self.spare.path if self.spare is not None else None
        identity = self.attempt, self.sequence, self.number, self.key, self.adopted, self.asked
        return identity, self.staged, self.error, spare_path

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        identity, self.staged, self.error, self.spare_path = state
        self.attempt, self.sequence, self.number, self.key, self.adopted, self.asked = identity
        self.spare = self.version = self.filled = self.others = self.pending = self.worker = None
        self.handed_off_at = 0.0
        self.abandoned = self.deserted = self.given_back = self.taking = False
