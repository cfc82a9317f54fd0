"""The trainer's saver: it stages, commits, and has what it committed replicated.

Owns which saves of this rank are under way, their save ids and arenas, what happens when one fails, and the rule
for which arena may be taken when all are in use. The order of the calls is `saver`'s; copying and layout are
`object_writer`'s; what follows the commit (copies, agreement, pruning) is `commit_queue`'s.

A save may be staged in one place and committed in another: later, on another thread, or for another process, which has
a `RemoteSaver` by pickle.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ml_flashpoint.checkpoint_object_manager.arena import Arena
from ml_flashpoint.checkpoint_object_manager.base_marks import holds_parts
from ml_flashpoint.checkpoint_object_manager.budget import MOST_OWN_VERSIONS
from ml_flashpoint.checkpoint_object_manager.capacity import OWN_VERSIONS
from ml_flashpoint.checkpoint_object_manager.checkpoint_object_manager import CheckpointObjectManager
from ml_flashpoint.checkpoint_object_manager.held_part import HeldPart
from ml_flashpoint.checkpoint_object_manager.rank_store import RankStore
from ml_flashpoint.core.commit_queue import CommitQueue, CommitStats
from ml_flashpoint.core.object_stages import BytesItem, FilledObject, TensorItem
from ml_flashpoint.core.object_writer import ObjectWriter
from ml_flashpoint.core.owning_process import OwningProcess
from ml_flashpoint.core.persisting import Persisting
from ml_flashpoint.core.room import prepare_room
from ml_flashpoint.core.save import Save
from ml_flashpoint.core.save_identity import Numbering, SaveIdentity, later_than, missing_ranks
from ml_flashpoint.core.saver import MLFlashpointCheckpointSaver, unasked_versions
from ml_flashpoint.core.saving_process import RemoteSaver, SaveServer, Ticket
from ml_flashpoint.engine.signals import answer_sigterm
from ml_flashpoint.format.arguments import checked_integer, ignored
from ml_flashpoint.format.at_exit import at_exit
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.errors import CapacityError, FlashpointError, InvalidArgumentError, JobInUseError, SaveError
from ml_flashpoint.format.knobs import exit_deadline_s, seal_deadline_s
from ml_flashpoint.format.manifest import Manifest, object_name
from ml_flashpoint.ranks.rank_group import Agreement, rank_group
from ml_flashpoint.replication.replication_manager import ReplicationManager

_log = logging.getLogger(__name__)

# What a new arena costs in page faults, in bytes a second: to wait that long for a used one is no dearer.
_FAULT_RATE = 1 << 30
_DESERTED_POLL_S = 0.1
__all__ = ["DefaultMLFlashpointCheckpointSaver", "MLFlashpointCheckpointSaver"]


class DefaultMLFlashpointCheckpointSaver(MLFlashpointCheckpointSaver):
    """Saves into tmpfs arenas and has them replicated in the background. Thread-safe.

    Construct it on all ranks, to agree on a run id. Pickled, it is a `RemoteSaver`; see :meth:`hand_off`.

    Args:
        global_rank_getter: this process's rank; by default from torch.distributed.
        local_rank_getter, global_barrier_func, use_optimized_save: accepted for callers that pass them, and ignored.
        ckpt_obj_manager: where bytes live; one of its own by default.
        replication_manager, persisting: who makes copies, and who durable ones of what is verified; none by default.
        initial_buffer_size_bytes: accepted for callers that pass it: arenas are as large as what is saved.
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
        initial_buffer_size_bytes: int = 16 << 30,
        *,
        use_optimized_save: bool | None = None,
        cache_staged_state_dict: bool = True,
        persisting: Persisting | None = None,
    ) -> None:
        unused = {"local_rank_getter": local_rank_getter, "global_barrier_func": global_barrier_func}
        ignored("DefaultMLFlashpointCheckpointSaver", **unused, use_optimized_save=use_optimized_save)
        checked_integer("initial_buffer_size_bytes", initial_buffer_size_bytes, 1)
        self._cache = cache_staged_state_dict
        self._objects = ckpt_obj_manager or CheckpointObjectManager()
        self._replication = replication_manager
        self._group = rank_group()
        self.rank = global_rank_getter() if global_rank_getter is not None else self._group.rank
        self.world_size = self._group.world_size
        self.node = self._group.node
        self._writer = ObjectWriter(cache=cache_staged_state_dict)
        self._numbering = Numbering(self._group, self._group.new_number())
        self._commits = CommitQueue(
            self._group,
            Agreement(self._group),
            self._numbering,
            replication_manager,
            seal_deadline_s=seal_deadline_s,
            watch=self._watch,
            base=lambda: self._objects.store and self._objects.store.base,
            persisting=persisting,
        )
        self._lock = threading.RLock()
        self._begun = 0
        self.owner = OwningProcess()
        self._saves: list[Save] = []  # under way or held, oldest first
        self._taking: set[Save] = set()  # about to take an arena
        self._elsewhere: weakref.WeakSet[Save] = weakref.WeakSet()  # handed to other processes
        self._server = SaveServer(self)
        self._largest = 0
        self._closed = False
        _live_savers.add(self)

    # ---- the calls of one save ----------------------------------------------------------------------------

    def begin(self, *, exchanged: bool = False, here: bool = False) -> Save:
        """Start a save; see the base class. One ``here`` is given up when this thread begins another one, or waits,
        until it has another worker: an interrupt may have kept the thread from even learning of it."""
        answer_sigterm()
        self.owner.check(self.rank)
        with self._lock:
            if self._closed:
                raise SaveError("the saver is closed", rank=self.rank)
            mine = self._numbering.begin()
            self._begun += 1
            save = Save(mine, number=self._begun, exchanged=exchanged and self._group.distributed)
            if here:
                self._desert_own()
                save.worker = threading.current_thread()
            self._saves = [*(s for s in self._saves if not s.finished.is_set() or self._holds_arena(s)), save]
            self._commits.submit(save)
        return save

    def propose(self, version: CheckpointContainerId | None, save: Save | None = None) -> SaveIdentity:
        """See the base class."""
        if version is not None and not self.is_asked(version.parent):
            raise unasked_versions(self.rank, self.node, str(version.parent))
        if version is not None:
            self._save_in(self._store(version.parent))
        return self._numbering.propose(version, None if save is None else save.sequence)

    def _save_in(self, store: RankStore) -> None:
        """Take note that saves go to a store, once somebody has asked about it. Raise a `JobInUseError` where a later
        saver of this process has saved: what this one saves would count as older, and be lost."""
        store.asked = True
        if any(part.rank == self.rank and self._numbering.is_newer(part.save_id) for part in store.held()):
            raise JobInUseError(
                "another engine of this process has saved here since this one was opened, and counts as the newer one",
                rank=self.rank,
                path=store.base,
                hint="use one for each base container, and close it before the next one is opened",
            )

    def is_asked(self, base: CheckpointContainerId) -> bool:
        """Return True if there was nothing in a base container here before this opening, or somebody has looked."""
        store = self._objects.opened(base, self.rank)
        if store is not None and store.asked:
            return True
        return not holds_parts(self._objects.resolved(base), but_of=self._numbering.is_own)

    def adopt(self, save: Save, identity: SaveIdentity) -> None:
        """See the base class."""
        self._numbering.adopt(identity)
        super().adopt(save, identity)

    def agree(self, save: Save, version: CheckpointContainerId | None) -> None:
        """Collective, in the foreground: let ranks come to the identity of a save that all of them have begun, for
        doors that exchange nothing else. A rank that cannot save takes part without a version.

        Raises:
            DivergedError: ranks save different steps; on all ranks.
            UnaskedVersionsError: a rank has found what nobody has asked about; on all ranks.
            FlashpointError: a rank is gone.
        """
        asked, proposal = True, self._numbering.propose(None, save.sequence)
        try:
            asked = version is None or self.is_asked(version.parent)
            if version is not None and asked:
                self._save_in(self._store(version.parent))
            proposal = self._numbering.propose(version, save.sequence)
        except (FlashpointError, OSError) as error:  # told by the write: the others wait in the agreement
            save.staging_error = error
        identity = self._numbering.agree(proposal, asked=asked, late=missing_ranks(self, version))
        if identity is None:
            base = None if version is None else str(version.parent)
            raise unasked_versions(self.rank, None if asked else self.node, base)
        self.adopt(save, identity)

    def stage(
        self,
        save: Save,
        tensors: Sequence[TensorItem],
        *,
        base: CheckpointContainerId | None = None,
        byte_keys: Sequence[str] = (),
        **how: Any,
    ) -> Sequence[Any] | None:
        """Copy tensors away now, to be named by the write.

        Args:
            tensors: names (only to size the header) and plain strided tensors on any device.
            base: base container of the save, where it is known this early; else the one used last.
            byte_keys: names of the byte items, where they are known this early.
            how: see `ObjectWriter.stage`.

        Returns:
            The copies, in order; None if there is no base container yet to copy them into.

        Raises:
            CapacityError, SaveError: no room; or the save was given up.
        """
        store = self._objects.store if base is None else self._store(base)
        if store is None:
            return None
        with self._at_work(save):
            staged = self._writer.stage(
                lambda size: self._acquire(save, store, size),
                lambda arena: self._release(save, store, arena),
                tensors,
                byte_keys,
                **how,
            )
            save.stage(staged)
        return staged.views

    def offer(self, save: Save) -> None:
        """Leave a staged save to whoever claims it: another thread, or the process it is handed off to."""
        save.offered = True

    def claim(self, save: Save) -> Save:
        """Take on a save that was offered.

        Raises:
            SaveError: it was claimed before, or given up; what was staged for it may be gone.
        """
        with self._lock:
            if not save.offered:
                raise SaveError("what was staged was saved or given up before, and is not kept", rank=self.rank)
            save.offered, save.worker = False, threading.current_thread()
            return save

    def write(
        self,
        save: Save,
        version: CheckpointContainerId,
        tensors: Sequence[TensorItem],
        byte_items: Sequence[BytesItem] = (),
        *,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """See the base class."""
        if (failure := save.staging_error) is not None:
            raise SaveError(f"staging failed: {failure}", step=version.step, rank=self.rank) from failure
        if version.step is None:
            raise InvalidArgumentError(
                "must end in step-<n>_ckpt",
                argument="version",
                value=str(version),
                hint="CheckpointContainerId.create_child(base, CheckpointContainerId.format_version_container(step))",
            )
        save.version = version
        if not save.adopted:
            self._number_alone(save, version)
        with self._at_work(save):
            self._fill(save, version.parent, tensors, byte_items, metadata)

    def _fill(
        self,
        save: Save,
        base: CheckpointContainerId,
        tensors: Sequence[TensorItem],
        byte_items: Sequence[BytesItem],
        metadata: Mapping[str, str] | None,
    ) -> None:
        store = self._store(base)
        staged = save.staged
        if staged is not None:
            staged.wait(seal_deadline_s())
        arena = staged.arena if staged is not None else None
        if staged is not None and arena is not None and not arena.path.is_relative_to(store.base):
            # Staged for another base container: its bytes are as good as any other tensor.
            staged = arena = None
        taken: list[Arena] = []

        def acquire(size: int) -> Arena:
            taken.append(self._acquire(save, store, size))
            return taken[-1]

        try:
            save.fill(self._writer.fill(acquire, tensors, byte_items, staged=staged, arena=arena, metadata=metadata))
        except BaseException:
            for each in taken:
                self._release(save, store, each)
            raise

    @contextmanager
    def _at_work(self, save: Save) -> Iterator[None]:
        # Whoever gives the save up meanwhile, for its deadline, say, leaves the arenas to this thread.
        save.enter()
        try:
            yield
        finally:
            self._leave(save)

    def _leave(self, save: Save) -> None:
        if save.leave() and save.error is not None:
            self.fail(save, save.error)

    def _number_alone(self, save: Save, version: CheckpointContainerId) -> None:
        mine = self.propose(version, save)
        # With other ranks, what one finds must not change its own names alone: see `CommitQueue`.
        self.adopt(save, later_than(mine, mine.newest_ms if self.world_size == 1 else -1))

    def commit(
        self,
        save: Save,
        *,
        extra: Sequence[BytesItem] = (),
        labels: Mapping[str, str] | None = None,
    ) -> Manifest:
        """See the base class."""
        if save.filled is None or save.version is None:
            raise SaveError("nothing was written to commit", rank=self.rank)
        with self._at_work(save):
            manifest = self._commit(save, save.filled, save.version, extra, labels or {})
        save.filled = None  # to let go of thousands of entries takes its time: here, and not where a later save begins
        return manifest

    def _commit(
        self,
        save: Save,
        filled: FilledObject,
        version: CheckpointContainerId,
        extra: Sequence[BytesItem],
        labels: Mapping[str, str],
    ) -> Manifest:
        written = self._writer.finish(filled, extra)
        manifest = Manifest(
            version=version.name,
            rank=self.rank,
            world_size=self.world_size,
            save_id=save.save_id,
            node=self.node,
            objects=(written.record(object_name(self.rank, save.save_id)),),
            labels=dict(labels),
        )
        self._commit_part(save, manifest, written.arena)
        return manifest

    def hand_off(self, save: Save | None = None) -> RemoteSaver:
        """What to pickle in place of this saver, for a process that is to write a save: the one offered as ``save``,
        or a new one.

        Raises:
            SaveError: see :meth:`claim`; or there can be no socket.
        """
        if save is not None:
            self.claim(save)
        else:
            save = self.begin(exchanged=True)
            save.worker = threading.current_thread()
        self._elsewhere.add(save)
        arena = save.copies[0].place[0] if save.copies else None
        try:
            ticket = self.ticket(save)
        except SaveError as error:
            self.fail(save, error)
            raise
        where = self.rank, self.world_size, self.node
        return RemoteSaver(ticket, *where, save.identity, save.staging_error, arena)

    def ticket(self, save: Save) -> Ticket:
        """Lead another process to a save, to write it or to wait for its end.

        Raises:
            SaveError: there can be no socket.
        """
        return self._server.ticket(save)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.hand_off().__reduce__()

    def fail(self, save: Save, error: BaseException) -> None:
        """Give a save up; see the base class."""
        store = self._objects.store
        with self._lock:
            if save.part is not None:
                return
            save.fail(error)
            save.offered = False
            # Whoever writes to its arenas keeps them, and comes here afterwards.
            arenas = save.release_unless_written()
        self._commits.go_on()
        if save.staged is not None:
            save.staged.settle()
        if arenas is None:
            return
        for object_ in (save.staged, save.filled):
            if object_ is not None:
                object_.interior.discard()
        if store is None or store.closed:
            return
        for arena in arenas:
            store.release(arena)

    def _commit_part(self, save: Save, manifest: Manifest, arena: Arena) -> None:
        assert save.version is not None
        store = self._store(save.version.parent)
        if save.decided.is_set():
            raise SaveError(f"the save was given up: {save.error}", step=manifest.step, rank=self.rank)
        if not self._pass_on(save, store.commit(manifest, [arena]), store):
            raise SaveError("committed too late: the save was given up", step=manifest.step, rank=self.rank)

    def _pass_on(self, save: Save, part: HeldPart, store: RankStore) -> bool:
        """Hand a committed part over to the queue. Returns whether in time; the part is gone if not."""
        with self._lock:  # as `fail`, which must not release an arena that is free already
            for left in save.release() - set(part.arenas):
                store.release(left)  # what was staged and then had to be copied once more; a spare that was too small
            if not save.commit(part, store):
                store.drop(part)
                return False
        self._commits.go_on()
        if save.staged is not None and part.manifest is not None:
            self._writer.learn(save.staged, part.manifest.objects[0].size)
        if not self._group.distributed and not self._commits.is_queue_thread():
            # Nothing to wait for but the queue's thread: with its verdict, the next save finds a free arena.
            save.finished.wait(1.0)
        if len(self._saves_with_arenas()) < 2 and part.manifest is not None:
            # For the object, not its arena: else each spare would be larger than the last, without end.
            store.arenas.prepare_spare(part.manifest.objects[0].size)
        return True

    # ---- arenas -------------------------------------------------------------------------------------------

    def _store(self, base: CheckpointContainerId) -> RankStore:
        return self._objects.open(base, self.rank)

    def _release(self, save: Save, store: RankStore, arena: Arena) -> None:
        for released in save.release(arena):
            store.release(released)

    def _holds_arena(self, save: Save) -> bool:
        if save.part is not None:
            return save.store is not None and save.store.counts(save.save_id, save.part.rank)
        return not save.decided.is_set() and (save in self._taking or bool(save.arenas))

    def _saves_with_arenas(self) -> list[Save]:
        with self._lock:
            return [save for save in self._saves if self._holds_arena(save)]

    def _inherited(self, store: RankStore) -> list[HeldPart]:
        """Versions of this rank that no save of this saver has made: those of an earlier process, say."""
        with self._lock:
            mine = {save.save_id for save in self._saves}
        own = [part for part in store.held() if part.rank == self.rank and store.counts(part.save_id, part.rank)]
        return [part for part in own if part.save_id not in mine]

    def _missing_for_copies(self, store: RankStore) -> int:
        own = [arena for part in store.held() if part.rank == self.rank for arena in part.arenas]
        with self._lock:
            under_way = [arena for save in self._saves for arena in save.arenas]
        return store.missing_for_copies({*own, *under_way})

    def _acquire(self, save: Save, store: RankStore, size: int) -> Arena:
        """An arena for a save: a free one if there is, else a new one while few are in use and there is room, else
        one taken from an older save that is not verified. What copies of peers need is left to them."""
        store.check_job()
        self._preflight(store, size)
        store.drop_useless()
        held = len(self._saves_with_arenas()) + len(self._inherited(store))
        if OWN_VERSIONS <= held < MOST_OWN_VERSIONS:
            self._commits.wait_for_change(
                lambda: store.arenas.has_free(size, beside=self._missing_for_copies(store)), 0.05 + size / _FAULT_RATE
            )
        give_up = time.monotonic() + seal_deadline_s() if save.room_until is None else save.room_until
        error: FlashpointError = SaveError(
            f"{MOST_OWN_VERSIONS} earlier saves are still under way",
            rank=self.rank,
            node=self.node,
            hint="save less often, or wait for a save before the next one",
        )
        while True:
            preceded = self._is_preceded(save)
            with self._lock:  # saves of several threads must not all take the last one
                # There is always one for the oldest under way: later ones that hold all the others wait for it.
                others = sum(held is not save for held in self._saves_with_arenas()) + len(self._inherited(store))
                may_take = others < MOST_OWN_VERSIONS + (not preceded)
                if may_take:
                    self._taking.add(save)
            full = False
            if may_take:
                try:
                    due = others < OWN_VERSIONS or others >= MOST_OWN_VERSIONS  # the latter: the oldest under way
                    if due or store.ensure_free(1 + self._missing_for_copies(store), size):
                        return save.take(store.acquire(size))
                    error = CapacityError("no room for a further version beside the copies", path=store.base)
                except CapacityError as caught:
                    error, full = caught, True
                finally:
                    self._taking.discard(save)
            if self._evict_one(save, full=full, inherited=len(self._inherited(store))) or self._fail_deserted():
                continue
            if not preceded and not full:
                # Nothing is under way that could free something, and what is left is what a crash goes back to: one
                # beyond what is due is better than no version any more. A copy that then lacks room makes way itself.
                try:
                    return save.take(store.acquire(size))
                except CapacityError as caught:
                    error = caught
                if self._evict_one(save, full=True, inherited=len(self._inherited(store))):
                    continue
            # Nothing to take back now; an earlier save that is under way may free something when it ends, or when
            # it turns out that nobody goes on with it.
            finished = self._commits.finished_count
            left = give_up - time.monotonic()
            if left <= 0 or not preceded:
                raise error
            self._commits.wait_for_change(
                lambda seen=finished: self._commits.finished_count > seen,  # type: ignore[misc]
                min(left, _DESERTED_POLL_S),
            )

    def _is_preceded(self, save: Save) -> bool:
        """Whether an earlier save than this one is under way. Saves finish in order, so later ones do not count."""
        with self._lock:
            return any(each.number < save.number and not each.finished.is_set() for each in self._saves)

    def _evict_one(self, save: Save | None, *, full: bool, inherited: int = 0) -> bool:
        """Evict the oldest save (before this one) that is committed, but neither verified nor being copied, if a newer
        one is complete; without room on the filesystem, if any other is committed."""
        held = [each for each in self._saves_with_arenas() if each.part is not None]
        if len(held) + inherited < 2:
            return False
        # What a newer one replaces only if other ranks have come as far is what a crash would go back to.
        newest = max((i for i, each in enumerate(held) if each.complete is not False), default=-1)
        older, newer = held[: max(newest, 0)], held[newest + 1 :]
        given_up = older + (newer + held[newest : newest + 1] if full else [])
        return any(self._commits.evict(each) for each in given_up if save is None or each.number < save.number)

    def _preflight(self, store: RankStore, size: int) -> None:
        if size <= self._largest:
            return
        replication = self._replication
        copies = len(replication.held_by(self.rank)) if replication is not None and replication.initialized else 0
        prepare_room(store, self._group, size, copies)
        store.evict = lambda: self._evict_one(None, full=False)
        self._largest = size

    # ---- saves that nobody goes on with ---------------------------------------------------------------------

    def _is_worked_on(self, save: Save) -> bool:
        """Whether its worker may still go on with it: it lives, and has not begun a later save. One that nobody has
        come for, and nobody is about to, may be kept by the traceback of a failure: it holds up no later save."""
        worker = save.worker
        with self._lock:
            later = [each for each in self._saves if each.number > save.number]
            # Only looking at a staged state, as any thread may do, is not beginning to save it.
            begun = not save.offered
            moved_on = begun and any(each.worker is worker for each in later)
        if worker is None:
            return begun or not later or save.may_be_claimed()
        return worker.is_alive() and not moved_on

    def _watch(self, save: Save) -> float:
        """Called by the commit queue while it waits for a save, and once when it gives it up."""
        if save.error is not None:
            self.fail(save, save.error)  # at its deadline
        else:
            self._fail_if_deserted(save)
        return _DESERTED_POLL_S

    def _fail_if_deserted(self, save: Save) -> bool:
        """Give up a save that nobody goes on with, because its plan or its write failed on another rank."""
        if self._is_worked_on(save) and not save.deserted:
            return False
        # Asked last: it may have been handed to another process meanwhile, and its thread have gone on to another one.
        if save in self._elsewhere and save.worker is not None and save.worker.is_alive():
            return False
        self.fail(save, SaveError("given up: the checkpoint failed on another rank", rank=self.rank))
        return True

    def _fail_deserted(self) -> bool:
        """The same for all saves of this process, without waiting for the queue. Returns whether there were any."""
        return any(self._fail_if_deserted(save) for save in self._saves if not save.decided.is_set())

    def _desert_own(self) -> None:
        """Take note that the calling thread goes on with no save. A ``dcp.save`` that failed on another rank leaves the
        coordinator's save uncommitted, and does not say so."""
        with self._lock:
            for save in self._saves:
                if save.worker is threading.current_thread():
                    save.deserted = True

    # ---- reading and ending -------------------------------------------------------------------------------

    @property
    def stats(self) -> CommitStats:
        """Counters of what became of the saves."""
        return self._commits.stats

    def wait(self, deadline_s: float | None = None, *, held_up: threading.Thread | None = None) -> bool:
        """Wait until every save begun so far is finished: verified everywhere, or lost; but for what a thread that is
        held up meanwhile has not committed. Returns whether in time."""
        self.owner.check(self.rank)
        self._desert_own()
        return self._commits.wait_for_change(lambda: self._commits.is_idle(held_up), deadline_s or seal_deadline_s())

    def close(self, deadline_s: float | None = None) -> None:
        """Let saves under way finish, within a deadline, and stop the background work. Idempotent."""
        if self.owner.forked:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._desert_own()
        finished = self._commits.close(exit_deadline_s() if deadline_s is None else deadline_s)
        if not finished:
            _log.info("closed before the last saves were verified; they are committed on this node")
        self._server.close()


_live_savers: weakref.WeakSet[DefaultMLFlashpointCheckpointSaver] = weakref.WeakSet()


def _close_savers() -> None:
    for saver in list(_live_savers):
        saver.close()


at_exit(_close_savers)
