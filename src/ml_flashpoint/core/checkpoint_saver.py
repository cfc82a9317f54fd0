"""The trainer's saver: it stages, seals, and has what it sealed replicated.

Owns which saves of this rank are under way, their attempts and arenas, what happens when one fails, and the rule
for which arena may be taken when all are in use. Copying and layout are `object_writer`'s; what follows the seal
(copies, agreement, pruning) is `commit_queue`'s.

A save may be staged in one place and sealed in another: later, on another thread, or in another process, to
which saver and ticket travel by pickle and where the saver is a :class:`HandedOffSaver`.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from ml_flashpoint.checkpoint_object_manager.arena import Arena
from ml_flashpoint.checkpoint_object_manager.budget import MOST_OWN_VERSIONS, Budget
from ml_flashpoint.checkpoint_object_manager.capacity import OWN_VERSIONS, preflight
from ml_flashpoint.checkpoint_object_manager.checkpoint_object_manager import CheckpointObjectManager
from ml_flashpoint.checkpoint_object_manager.rank_store import HeldPart, RankStore
from ml_flashpoint.core.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.core.commit_queue import CommitQueue, CommitStats, PendingSave
from ml_flashpoint.core.errors import CapacityError, FlashpointError, InvalidArgumentError, SaveError
from ml_flashpoint.core.knobs import exit_deadline_s, seal_deadline_s
from ml_flashpoint.core.manifest import Manifest, manifest_name, read_manifest
from ml_flashpoint.core.object_writer import ObjectWriter, StagedObject, TensorItem
from ml_flashpoint.core.rank_group import rank_group
from ml_flashpoint.core.save_ticket import Notice, NoticeBoard, SaveTicket, lost
from ml_flashpoint.core.saver import ArenaSource, MLFlashpointCheckpointSaver
from ml_flashpoint.core.saving_process import HandedOffSaver, HandOff
from ml_flashpoint.replication.replication_manager import ReplicationManager

_log = logging.getLogger(__name__)

DEFAULT_BUFFER_BYTES = 16 << 30
_SAVES_OF_A_SAVER = 10**9
# What a new arena costs in page faults, in bytes a second: to wait that long for a used one is no dearer.
_FAULT_RATE = 1 << 30
_NOTICE_POLL_S = 0.002
_ABANDONED_POLL_S = 0.1
_TAKE_UP_S = 30.0
"""Seconds that a process may need from the hand-off of a save until it signs for it: it may be started for that, and
import much."""

__all__ = [
    "DEFAULT_BUFFER_BYTES",
    "DefaultMLFlashpointCheckpointSaver",
    "HandedOffSaver",
    "MLFlashpointCheckpointSaver",
]


class DefaultMLFlashpointCheckpointSaver(MLFlashpointCheckpointSaver):
    """Saves into tmpfs arenas and has them replicated in the background. Thread-safe.

    Construct it on all ranks (it agrees on a run id). Pickled, it becomes a :class:`HandedOffSaver` that carries
    a new save; see also :meth:`hand_off`.

    Args:
        global_rank_getter: this process's rank; by default from torch.distributed.
        local_rank_getter: accepted for callers that pass it, not used: nodes are found by asking who shares one.
        global_barrier_func: accepted for callers that pass it, never called: saves need no barrier.
        ckpt_obj_manager: where bytes live; one of its own by default.
        replication_manager: who makes copies; none by default.
        initial_buffer_size_bytes: expected bytes a rank; costs nothing until used, and larger states work.
        cache_staged_state_dict: keep layout and views between saves. The arenas stay in memory either way.

    Raises:
        InvalidArgumentError: ``initial_buffer_size_bytes`` is not positive.
    """

    def __init__(
        self,
        global_rank_getter: Callable[[], int] | None = None,
        local_rank_getter: Callable[[], int] | None = None,
        global_barrier_func: Callable[[], object] | None = None,
        ckpt_obj_manager: CheckpointObjectManager | None = None,
        replication_manager: ReplicationManager | None = None,
        initial_buffer_size_bytes: int = DEFAULT_BUFFER_BYTES,
        *,
        cache_staged_state_dict: bool = True,
    ) -> None:
        if not isinstance(initial_buffer_size_bytes, int) or initial_buffer_size_bytes <= 0:
            raise InvalidArgumentError(
                "must be a positive number of bytes",
                argument="initial_buffer_size_bytes",
                value=initial_buffer_size_bytes,
            )
        self._expected_bytes = initial_buffer_size_bytes
        self._cache = cache_staged_state_dict
        self._objects = ckpt_obj_manager or CheckpointObjectManager()
        self._replication = replication_manager
        self._group = rank_group()
        self.rank = global_rank_getter() if global_rank_getter is not None else self._group.rank
        self.world_size = self._group.world_size
        self.node = self._group.node
        self._writer = ObjectWriter(cache=cache_staged_state_dict)
        self._commits = CommitQueue(
            self._group, replication_manager, seal_deadline_s=seal_deadline_s, watch=self._watch
        )
        self._lock = threading.RLock()
        # Numbers of a later saver are higher. Ranks compare them at each save, so they learn if one has made a saver
        # that others have not.
        self._sequence = next(self._group.savers) * _SAVES_OF_A_SAVER
        self._staged: list[SaveTicket] = []  # staged, not yet claimed by a write
        self._saves: list[SaveTicket] = []  # under way or held, oldest first
        self._handed_off: dict[str, SaveTicket] = {}
        self._notices: NoticeBoard | None = None
        self._largest = 0
        self._closed = False
        _live_savers.add(self)

    # ---- the calls of one save ----------------------------------------------------------------------------

    def begin(self) -> SaveTicket:
        """Start a save; see the base class."""
        with self._lock:
            if self._closed:
                raise SaveError("the saver is closed", rank=self.rank)
            self._sequence += 1
            attempt = f"{self._group.run_id}-{self._sequence:012d}"
            ticket = SaveTicket(attempt, self._sequence, pending=PendingSave(attempt, self._sequence))
            self._saves = [
                t for t in self._saves if t.pending and (not t.pending.settled.is_set() or _holds_arena(t))
            ] + [ticket]
            assert ticket.pending is not None
            self._commits.submit(ticket.pending)
        return ticket

    def stage(
        self,
        ticket: SaveTicket,
        tensors: Sequence[TensorItem],
        *,
        base: CheckpointContainerId | None = None,
        byte_keys: Sequence[str] = (),
    ) -> list[Any] | None:
        """Copy tensors away now, to be named by the write.

        Args:
            tensors: names (only to size the header) and plain strided tensors on any device.
            base: base container of the save, where it is known this early; else the one used last.
            byte_keys: names of the byte items, where they are known this early.

        Returns:
            The copies, in order; None if there is no base container yet to copy them into.

        Raises:
            CapacityError: no room.
        """
        store = self._objects.store if base is None else self._store(base)
        if store is None:
            return None
        staged = self._writer.stage(lambda size: self._acquire(ticket, store, size), store.release, tensors, byte_keys)
        ticket.staged = staged
        return staged.views

    def offer(self, ticket: SaveTicket) -> None:
        """Leave a staged save to whoever claims it: another thread, or the process it is handed off to."""
        with self._lock:
            self._staged.append(ticket)

    def claim(self, ticket: SaveTicket) -> SaveTicket:
        """Take on a save that was offered.

        Raises:
            SaveError: it was claimed before, or given up; what was staged for it may be gone.
        """
        with self._lock:
            if ticket not in self._staged:
                raise SaveError("what was staged was saved or given up before, and is not kept", rank=self.rank)
            self._staged.remove(ticket)
            return ticket

    def fail(self, ticket: SaveTicket, error: BaseException) -> None:
        """Give a save up; see the base class."""
        pending = ticket.pending
        store = self._objects.store
        with self._lock:
            # One that was given up at its deadline keeps its arenas until who filled them says that it is over.
            if pending is None or ticket.given_back or pending.part is not None:
                return
            pending.resolve(None, store, error)
            ticket.given_back = True
            if ticket in self._staged:
                self._staged.remove(ticket)
        for object_ in (ticket.staged, ticket.filled):
            if object_ is not None:
                object_.discard()
        if store is None or store.closed:
            return
        for arena in ticket.arenas:
            arena.refresh()  # a saving process may have made it larger
            store.release(arena)

    def _commit(self, ticket: SaveTicket, manifest: Manifest, arena: Arena) -> None:
        assert ticket.pending is not None
        assert ticket.version is not None
        store = self._store(ticket.version.parent)
        if ticket.pending.resolved.is_set():
            raise SaveError(f"the save was given up: {ticket.pending.error}", step=manifest.step, rank=self.rank)
        part = store.commit(manifest, [arena])
        # What was staged and then had to be copied once more.
        for left in ticket.arenas - {arena}:
            store.release(left)
        if not self._resolve(ticket, part, store):
            raise SaveError("sealed too late: the save was given up", step=manifest.step, rank=self.rank)

    def _resolve(self, ticket: SaveTicket, part: HeldPart, store: RankStore) -> bool:
        """Hand a committed part over to the queue. Returns whether in time; the part is gone if not."""
        assert ticket.pending is not None
        with self._lock:  # as `fail`, which must not give back an arena that is free already
            if not ticket.pending.resolve(part, store):
                store.drop(part)
                ticket.given_back = True
                return False
        if ticket.staged is not None and part.manifest is not None:
            self._writer.learn(ticket.staged, part.manifest.objects[0].size)
        if not self._group.distributed and not self._commits.is_queue_thread():
            # Nothing to wait for but the queue's thread: with its verdict, the next save finds a free arena.
            ticket.pending.settled.wait(1.0)
        if len(self._own_arenas()) < 2 and part.manifest is not None:
            # For the object, not its arena: else each spare would be larger than the last, without end.
            store.prepare_spare(part.manifest.objects[0].size)
        return True

    # ---- arenas -------------------------------------------------------------------------------------------

    def _store(self, base: CheckpointContainerId) -> RankStore:
        return self._objects.open(base, self.rank)

    def _arena_of(self, staged: StagedObject) -> Arena:
        assert staged.arena is not None
        return staged.arena

    def _own_arenas(self) -> list[SaveTicket]:
        with self._lock:
            return [t for t in self._saves if _holds_arena(t)]

    def _adopted(self, store: RankStore) -> list[HeldPart]:
        """Versions of this rank that no save of this saver has made: what was recovered, say."""
        with self._lock:
            mine = {t.attempt for t in self._saves}
        return [part for part in store.held() if part.rank == self.rank and part.attempt not in mine]

    def _missing_for_copies(self, store: RankStore) -> int:
        own = [arena for part in store.held() if part.rank == self.rank for arena in part.arenas]
        with self._lock:
            under_way = [arena for t in self._saves if not t.given_back for arena in t.arenas]
        return store.missing_for_copies({*own, *under_way})

    def _acquire(self, ticket: SaveTicket, store: ArenaSource, size: int) -> Arena:
        """An arena for a save: a free one if there is, else a new one while few are in use and there is room, else
        one taken from an older save that is not verified. What copies of peers need is left to them."""
        assert isinstance(store, RankStore)
        self._preflight(store, size)
        held = len(self._own_arenas()) + len(self._adopted(store))
        if OWN_VERSIONS <= held < MOST_OWN_VERSIONS:
            self._commits.wait_for_change(
                lambda: store.has_free(size, beside=self._missing_for_copies(store)), 0.05 + size / _FAULT_RATE
            )
        give_up = time.monotonic() + seal_deadline_s()
        error: FlashpointError = SaveError(
            f"{MOST_OWN_VERSIONS} earlier saves are still under way",
            rank=self.rank,
            node=self.node,
            hint="save less often, or wait for a save before the next one",
        )
        while True:
            preceded = self._is_preceded(ticket)
            with self._lock:  # saves of several threads must not all take the last one
                # There is always one for the oldest under way: later ones that hold all the others wait for it.
                others = sum(held is not ticket for held in self._own_arenas()) + len(self._adopted(store))
                ticket.taking = others < MOST_OWN_VERSIONS + (not preceded)
            if ticket.taking:
                try:
                    due = others < OWN_VERSIONS or others >= MOST_OWN_VERSIONS  # the latter: the oldest under way
                    if due or store.ensure_free(1 + self._missing_for_copies(store), size):
                        return store.acquire(size)
                    error = CapacityError("no room for a further version beside the copies", path=store.base)
                except CapacityError as full:
                    error = full
                ticket.taking = False
            full_up = isinstance(error, CapacityError)
            if self._drop_one(ticket, full=full_up, adopted=len(self._adopted(store))) or self._fail_abandoned():
                continue
            # Nothing to take back now; an earlier save that is under way may free something when it settles, or when
            # it turns out that nobody goes on with it.
            settled = self._commits.settled_count
            left = give_up - time.monotonic()
            if left <= 0 or not preceded:
                raise error
            self._commits.wait_for_change(
                lambda seen=settled: self._commits.settled_count > seen,  # type: ignore[misc]
                min(left, _ABANDONED_POLL_S),
            )

    def _is_preceded(self, ticket: SaveTicket) -> bool:
        """Whether an earlier save than this one is under way. Saves settle in order, so later ones do not count."""
        with self._lock:
            earlier = [t.pending for t in self._saves if t.sequence < ticket.sequence]
        return any(pending is not None and not pending.settled.is_set() for pending in earlier)

    def _drop_one(self, ticket: SaveTicket | None, *, full: bool, adopted: int = 0) -> bool:
        """Give up the oldest save (before this one) that is sealed, but neither verified nor being copied, if a newer
        one is sealed; without room on the filesystem, if any other is."""
        held = [t for t in self._own_arenas() if t.pending is not None and t.pending.part is not None]
        if len(held) + adopted < 2:
            return False
        earlier = [t for t in held[: None if full else -1] if ticket is None or t.sequence < ticket.sequence]
        return any(t.pending is not None and self._commits.drop(t.pending) for t in earlier)

    def _preflight(self, store: RankStore, size: int) -> None:
        if size <= self._largest:
            return
        if size > self._expected_bytes:
            _log.info("the state of rank %d has %d bytes, more than expected", self.rank, size)
        copies = len(self._replication.held_by(self.rank)) if self._replicates() and self._replication else 0
        in_use, free = store.resident_bytes()
        preflight(store.base, size, copies=copies, held_bytes=in_use + free)
        here = self._group.topology.ranks_of(self._group.node)
        neighbours = tuple(store.directory_of(rank) for rank in here if rank != self.rank)
        store.keep_to(Budget(store.directory, neighbours, copies))
        store.evict = lambda: self._drop_one(None, full=False)
        self._largest = size

    def _replicates(self) -> bool:
        return self._replication is not None and self._replication.initialized

    # ---- saves in another process -------------------------------------------------------------------------

    def hand_off(self, ticket: SaveTicket | None = None) -> HandOff:
        """What to pickle in place of this saver, for a process that is to write a save: the one offered as
        ``ticket``, or a new one.

        Raises:
            SaveError: see :meth:`claim`.
        """
        ticket = self.claim(ticket) if ticket is not None else self.begin()
        ticket.worker = threading.current_thread()
        store = self._objects.store
        if ticket.staged is None and store is not None and self._largest:
            try:
                # Not under the lock: it may wait for an earlier save, which cannot settle without that.
                ticket.spare = self._acquire(ticket, store, self._largest)
            except FlashpointError as error:
                ticket.error = error
        with self._lock:
            if self._notices is None:
                self._notices = NoticeBoard()
            ticket.handed_off_at = time.monotonic()
            self._handed_off[ticket.attempt] = ticket
            return HandOff(self.rank, self.world_size, self.node, ticket, self._notices)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.hand_off().__reduce__()

    def _watch(self, pending: PendingSave) -> float | None:
        """Called by the commit queue while it waits for ``pending``: look for the other process's notice."""
        for late in [t for t in list(self._handed_off.values()) if t.pending and t.pending.resolved.is_set()]:
            self._look_for_notice(late)  # given up at its deadline; until now its process may have been writing
        ticket = self._handed_off.get(pending.attempt)
        if ticket is None:
            self._fail_if_abandoned(pending)
            return _ABANDONED_POLL_S
        return self._look_for_notice(ticket)

    def _look_for_notice(self, ticket: SaveTicket) -> float:
        assert self._notices is not None
        answered = not self._is_worked_on(ticket)
        pid = self._notices.process_of(ticket.attempt)
        may_begin = time.monotonic() < ticket.handed_off_at + _TAKE_UP_S
        alive = may_begin if pid is None else _is_alive(pid)
        # Asked last: a notice posted just before the answer or the end is not missed.
        notice = self._notices.take(ticket.attempt)
        if notice is None and alive and not answered:
            return _NOTICE_POLL_S
        if notice is None and pid is None and not self._notices.revoke(ticket.attempt):
            return _NOTICE_POLL_S  # it has signed just now
        self._handed_off.pop(ticket.attempt, None)
        if notice is None:
            if self._objects.store is not None:
                self._objects.store.withdraw(ticket.attempt, sweep=not alive and not self._handed_off)
            why = "it failed before this rank's part was sealed" if alive else "its process is gone"
            self.fail(ticket, lost(ticket, why, self.rank))
        else:
            self._take(ticket, notice)
        return 0.0

    def _is_worked_on(self, ticket: SaveTicket) -> bool:
        """Whether its worker may still go on with it: it lives, and has not begun a later save."""
        worker = ticket.worker
        with self._lock:
            # Only looking at a staged state, as any thread may do, is not beginning to save it.
            begun = ticket not in self._staged
            moved_on = begun and any(t.worker is worker and t.sequence > ticket.sequence for t in self._saves)
        return worker is None or (worker.is_alive() and not moved_on)

    def _fail_if_abandoned(self, pending: PendingSave) -> bool:
        """Give up a save that nobody goes on with, because its plan or its write failed on another rank."""
        with self._lock:
            ticket = next((t for t in self._saves if t.pending is pending), None)
            offered = ticket in self._staged
        if ticket is None or not ((offered and ticket.abandoned) or not self._is_worked_on(ticket)):
            return False
        self.fail(ticket, SaveError("given up: the checkpoint failed on another rank", rank=self.rank))
        return True

    def _fail_abandoned(self) -> bool:
        """The same for all saves of this process, without waiting for the queue to come to them. Returns whether
        there were any."""
        with self._lock:
            unresolved = [
                t.pending
                for t in self._saves
                if t.pending and not t.pending.resolved.is_set() and t.attempt not in self._handed_off
            ]
        return any(self._fail_if_abandoned(pending) for pending in unresolved)

    def _take(self, ticket: SaveTicket, notice: Notice) -> None:
        step = CheckpointContainerId.parse_version_container(notice.version)
        ticket.others = None if notice.others is None else frozenset(notice.others)
        if ticket.pending is not None:
            ticket.pending.step = step
        try:
            store = self._objects.open(notice.base, self.rank)
            if notice.error is not None:
                raise SaveError(notice.error, step=step, rank=self.rank)
            manifest = read_manifest(store.base / notice.version / manifest_name(self.rank, ticket.attempt))
            part = store.register(manifest, [store.arena_by_path(Path(p)) for p in notice.arenas])
        except (FlashpointError, OSError) as error:
            self.fail(ticket, error)
            return
        for arena in ticket.arenas - set(part.arenas):
            store.release(arena)
        self._resolve(ticket, part, store)

    # ---- reading and ending -------------------------------------------------------------------------------

    @property
    def stats(self) -> CommitStats:
        """Counters of what became of the saves."""
        return self._commits.stats

    def wait(self, deadline_s: float | None = None) -> bool:
        """Wait until every save begun so far is settled: verified everywhere, or lost. Returns whether in time."""
        return self._commits.wait_for_change(lambda: self._commits.idle, deadline_s or seal_deadline_s())

    def close(self, deadline_s: float | None = None) -> None:
        """Let saves under way finish, within a deadline, and stop the background work. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        finished = self._commits.close(exit_deadline_s() if deadline_s is None else deadline_s)
        if not finished:
            _log.info("closed before the last saves were verified; they are sealed on this node")
        if self._notices is not None:
            self._notices.remove()


def _holds_arena(ticket: SaveTicket) -> bool:
    pending = ticket.pending
    if pending is None:
        return False
    if pending.part is not None:
        return pending.store is not None and pending.store.find(pending.attempt, pending.part.rank) is not None
    return not pending.resolved.is_set() and (ticket.taking or bool(ticket.arenas))


def _is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


_live_savers: weakref.WeakSet[DefaultMLFlashpointCheckpointSaver] = weakref.WeakSet()


def _close_savers() -> None:
    for saver in list(_live_savers):
        saver.close()


atexit.register(_close_savers)
os.register_at_fork(after_in_child=_live_savers.clear)  # a child has none of their threads, and they are its parent's
