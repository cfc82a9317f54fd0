"""One save of this rank, from its begin until all ranks know what became of it.

Owns the states of a save, and which of them may follow which. Every state is entered by one method here, with one
caller: the saver up to the commit, the commit queue from there on. Whoever comes too late changes nothing::

    BEGUN ── STAGED ── FILLED ── COMMITTED ── REPLICATED ── VERIFIED
      └────────┴─────────┤           └─────────────┤
                       FAILED             EVICTED

A save need not be staged. A save that other ranks could not commit stays what it is here.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Sequence

from ml_flashpoint.checkpoint_object_manager.arena import Arena
from ml_flashpoint.checkpoint_object_manager.arena_tensor import ArenaTensor
from ml_flashpoint.checkpoint_object_manager.held_part import HeldPart
from ml_flashpoint.checkpoint_object_manager.rank_store import RankStore
from ml_flashpoint.core.object_stages import FilledObject, StagedObject
from ml_flashpoint.core.save_identity import SaveIdentity
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.errors import SaveError


class SaveState(enum.Enum):
    """How far a save has come on this rank."""

    BEGUN = "begun"
    STAGED = "staged"
    """Its tensors are copied, and may change again."""
    FILLED = "filled"
    """Its items have names and places in an object."""
    COMMITTED = "committed"
    """Its part is on this node, whole."""
    REPLICATED = "replicated"
    """All copies that the strategy asks for are acknowledged."""
    VERIFIED = "verified"
    """All ranks have replicated theirs: older versions may go."""
    FAILED = "failed"
    """Nothing of it is visible."""
    EVICTED = "evicted"
    """Its part was given up, unverified: a newer save needed its memory, or a recovery has found a newer version."""


_S = SaveState
_NEXT: dict[SaveState, frozenset[SaveState]] = {
    _S.BEGUN: frozenset({_S.STAGED, _S.FILLED, _S.COMMITTED, _S.FAILED}),
    _S.STAGED: frozenset({_S.FILLED, _S.COMMITTED, _S.FAILED}),
    _S.FILLED: frozenset({_S.COMMITTED, _S.FAILED}),
    _S.COMMITTED: frozenset({_S.REPLICATED, _S.EVICTED}),
    _S.REPLICATED: frozenset({_S.VERIFIED, _S.EVICTED}),
    _S.VERIFIED: frozenset(),
    _S.FAILED: frozenset(),
    _S.EVICTED: frozenset(),
}


class Save:
    """See the module. Thread-safe.

    Args:
        identity: the name of the save, as long as ranks have not come to another one; see `core.save_identity`.
        number: of this saver's saves on this rank, in the order in which they began.
        exchanged: whether ranks will come to its identity together, so that until then it is known to this one only.

    Attributes:
        key: of this save on this rank alone, whatever ranks come to call it.
        adopted: whether the identity is final.
        began: when, by the monotonic clock.
        staged: copies made before the plan was known.
        copies: the tensors of them, as another process gets them; empty once it is committed, or has failed.
        staging_error: why there are none. The save then fails at its write, which is where all ranks notice.
        filled: the object, once it is written.
        version: set by the write, or before, by a door that knows it.
        others: keys of tensors that the plan leaves to other ranks, so that they need not be staged the next
            time; None while unknown. Set by the door.
        worker: the thread that writes and commits the save, if the door says so. Once it is gone, so is the save.
        offered: whether what was staged is there for any thread to claim.
        may_be_claimed: whether anybody may still come for what was staged, as far as its door knows.
        room_until: when, by the monotonic clock, to stop waiting for room; None: after ``FLASHPOINT_SEAL_DEADLINE_S``.
        held_s: seconds that it held its loop, if its door knows them before it is committed, and nobody else tells.
        deserted: nobody will write it any more. Only a note: it is set wherever garbage is collected.
        part, store: what was committed, and where.
        error: why it failed.
        complete: whether all ranks have committed it, as far as this one knows; None if its door does not find out
            before it is verified.
        uncertain: other ranks may know that it is verified, and have pruned what is older.
        decided: set once it is committed here, or has failed.
        finished: set once nothing more will be done for it, whatever its state.
    """

    def __init__(self, identity: SaveIdentity, *, number: int = 0, exchanged: bool = False) -> None:
        self.identity = identity
        self.number = number
        self.key = identity.save_id
        self.adopted = False
        self.staged: StagedObject | None = None
        self.copies: Sequence[ArenaTensor] = ()
        self.staging_error: BaseException | None = None
        self._exchanged = exchanged
        self.began = time.monotonic()
        self.state = SaveState.BEGUN
        self.filled: FilledObject | None = None
        self.version: CheckpointContainerId | None = None
        self.complete: bool | None = None
        self.others: frozenset[str] | None = None
        self.worker: threading.Thread | None = None
        self.held_s: float | None = None
        self.room_until: float | None = None
        self.offered = self.deserted = self.uncertain = False
        self.may_be_claimed: Callable[[], bool] = lambda: True
        self.part: HeldPart | None = None
        self.store: RankStore | None = None
        self.error: BaseException | None = None
        self.decided, self.finished = threading.Event(), threading.Event()
        self._arenas: set[Arena] = set()
        self._at_work = 0
        self._lock = threading.Lock()

    # ---- what it is ---------------------------------------------------------------------------------------

    @property
    def save_id(self) -> str:
        """The string by which its parts are named."""
        return self.identity.save_id

    @property
    def sequence(self) -> int:
        """The number that all ranks have for it, once it is adopted."""
        return self.identity.sequence

    @property
    def step(self) -> int | None:
        """The step that is saved; None before the write."""
        return None if self.version is None else self.version.step

    @property
    def known(self) -> bool:
        """Whether name and number are those that the other ranks have for it."""
        return self.adopted or not self._exchanged

    @property
    def arenas(self) -> set[Arena]:
        """The arenas that it has taken from its process's store, and that belong neither to its part nor to others."""
        with self._lock:
            return set(self._arenas)

    def adopt(self, identity: SaveIdentity) -> None:
        """Take over what ranks have come to call it. Idempotent."""
        self.identity, self.adopted = identity, True

    def take(self, arena: Arena) -> Arena:
        """Hold an arena until it is released, or of the part."""
        with self._lock:
            self._arenas.add(arena)
        return arena

    def release(self, *arenas: Arena) -> set[Arena]:
        """Let go of these arenas, or of all. Returns those that it held: they are the caller's now."""
        with self._lock:
            released = self._arenas & set(arenas) if arenas else set(self._arenas)
            self._arenas -= released
            return released

    def enter(self) -> None:
        """The calling thread is about to write to its arenas. They stay its own until that thread has left.

        Raises:
            SaveError: it was given up, and they may be another save's.
        """
        with self._lock:
            if self.state is SaveState.FAILED:
                raise SaveError(f"the save was given up: {self.error}", step=self.step)
            self._at_work += 1

    def leave(self) -> bool:
        """The calling thread does not write to its arenas any more. Returns whether it was given up meanwhile."""
        with self._lock:
            self._at_work -= 1
            return self.state is SaveState.FAILED

    def release_unless_written(self) -> set[Arena] | None:
        """As :meth:`release` of all arenas, but None while a thread writes to them."""
        with self._lock:
            if self._at_work:
                return None
            released, self._arenas = self._arenas, set()
            return released

    # ---- its states ---------------------------------------------------------------------------------------

    def stage(self, staged: StagedObject) -> None:
        """Its tensors were copied."""
        self.staged = staged
        self._enter(SaveState.STAGED)

    def fill(self, filled: FilledObject) -> None:
        """Its items are in their places."""
        self.filled = filled
        self._enter(SaveState.FILLED)

    def commit(self, part: HeldPart, store: RankStore) -> bool:
        """Its part was committed. Returns false if it has failed before: the part is the caller's to drop."""
        with self._lock:
            if SaveState.COMMITTED not in _NEXT[self.state]:
                return False
            self.state, self.part, self.store, self.copies = SaveState.COMMITTED, part, store, ()
            self.decided.set()
            return True

    def fail(self, error: BaseException) -> bool:
        """It is given up before its commit. Returns false if that, or the commit, was before."""
        with self._lock:
            if SaveState.FAILED not in _NEXT[self.state]:
                return False
            self.state, self.error, self.copies = SaveState.FAILED, error, ()
            self.decided.set()
            return True

    def replicate(self) -> None:
        """All copies of its part are acknowledged."""
        self._enter(SaveState.REPLICATED)

    def verify(self) -> None:
        """All ranks have replicated theirs."""
        self._enter(SaveState.VERIFIED)

    def evict(self) -> bool:
        """Its part goes, for a newer save or version. Returns false where it must not."""
        return not self.uncertain and self._enter(SaveState.EVICTED)

    def _enter(self, state: SaveState) -> bool:
        with self._lock:
            if state not in _NEXT[self.state]:
                return False
            self.state = state
            return True
