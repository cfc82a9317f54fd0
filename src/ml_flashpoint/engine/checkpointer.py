"""`Checkpointer`: a base container that is open on all ranks of a job, with everything that serves it.

One save passes three threads. The program's thread takes a slot, copies the state into it and names the copies. The
committing thread writes the header, completes the digests and commits the part. The board's thread has the holders copy
it, and learns which save is verified. `Save` has a future for each of the three.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from ml_flashpoint import events
from ml_flashpoint.config import Config
from ml_flashpoint.engine import save as saves
from ml_flashpoint.engine.board import Board
from ml_flashpoint.engine.committing import BytesItem, CommittingThread, Filled, PartWriter, Staged, TensorItem
from ml_flashpoint.engine.copying import Copies, HeldCopies
from ml_flashpoint.engine.persist import Persister, PersistHealth
from ml_flashpoint.engine.reader import VersionReader
from ml_flashpoint.engine.recovery import Found, KeptVersion, Recovery, RecoveryReport
from ml_flashpoint.engine.replicas import Replicas
from ml_flashpoint.engine.rounds import Fate, Member, Verdict
from ml_flashpoint.engine.save import Save, SaveStats, Terms
from ml_flashpoint.engine.signals import InFlight, answer_sigterm, hold_up_sigterm, let_go_of_sigterm
from ml_flashpoint.engine.store import open_store
from ml_flashpoint.format.arguments import checked_base, checked_bool, checked_integer
from ml_flashpoint.format.errors import (
    DeadlineError,
    FlashpointError,
    InvalidArgumentError,
    JobInUseError,
    LoadError,
    SaveError,
    SkippedError,
    SupersededError,
    UnaskedVersionsError,
    UnreadableError,
    is_shortage,
    retrying,
)
from ml_flashpoint.format.knobs import (
    copy_threads,
    exit_deadline_s,
    lock_deadline_s,
    recovery_deadline_s,
    seal_deadline_s,
)
from ml_flashpoint.format.manifest import Manifest
from ml_flashpoint.format.names import CheckpointContainerId, SaveId
from ml_flashpoint.memory.container import BaseContainer, Owner
from ml_flashpoint.memory.lock import JobLock
from ml_flashpoint.memory.pool import Pool, SlotRequest
from ml_flashpoint.memory.slot import Slot
from ml_flashpoint.ranks.rank_group import boot_id, rank_group
from ml_flashpoint.ranks.strategies import NoReplicationStrategy, PairwiseReplicationStrategy
from ml_flashpoint.state.archive import warn_of_old_torch
from ml_flashpoint.status import Status, StatusFile

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self

    from ml_flashpoint.copy.late import LateCopy

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

Items = Callable[[], tuple[Sequence[TensorItem], Sequence[BytesItem]]]
"""Returns the tensors and the byte items of an object, under their names."""

_TABLE = "table"
_POLL_S = 0.25
"""Seconds after which a waiting save looks for a slot."""
_LINGER_S = 1.0


class Checkpointer:
    """A base container that is open on all ranks. Collective to construct; a context manager. Thread-safe for saves.

    Args:
        base: absolute path of a folder on a tmpfs of this node that belongs to this job alone.
        config: settings; the same on all ranks.
        discard_existing: versions that are there do not count any more, and are removed, on all nodes.

    Attributes:
        base: base container. ranks: the ranks that use it together. strategy: who holds copies of whose parts.
        holders: the ranks that hold copies of this one's parts.
        container: the store of versions on this node.
        stats: counters of what became of the saves of this rank.
        replicas: who writes what of the state that several ranks have alike.

    Raises:
        InvalidArgumentError: an argument is unusable, or differs between ranks.
        JobInUseError: another job has the base container open.
        FlashpointError: this rank, or another one, cannot use it. Raised on all ranks.
    """

    def __init__(
        self, base: str | os.PathLike[str], config: Config | None = None, *, discard_existing: bool = False
    ) -> None:
        self.base = checked_base(base)
        self.config = config or Config()
        checked_bool("discard_existing", discard_existing)
        copy_threads()  # a value that is none is refused now, and not by each save
        warn_of_old_torch()
        self.ranks = rank_group()
        self.stats = SaveStats()
        self._pid = os.getpid()
        self._changed = threading.Condition()  # a slot may be free
        self._saves: set[Save] = set()
        self._run = 0
        self._board: Board | None = None
        self._found: Found | None = None
        self._excluded: set[SaveId] = set()
        self._writer = PartWriter()
        self._wanted: int | None = None  # size of slots to be made ahead
        self._is_skipping = self._closed = self._has_begun = False
        for other in list(_live):
            if os.path.realpath(other.base) == os.path.realpath(self.base) and not other.is_closed:
                _log.warning("%s is opened again in this process, so the earlier Checkpointer is closed", self.base)
                other.close(exit_deadline_s())
        with contextlib.ExitStack() as stack:
            self._subscriptions = stack.enter_context(contextlib.ExitStack())  # ends last: closing emits events
            self._open(stack, discard_existing=discard_existing)
            self._stack = stack.pop_all()
        if not _live:  # not at import: since Python 3.13, a child of multiprocessing forgets what its parent registered
            atexit.unregister(_close_all)
            atexit.register(_close_all)
        _live.add(self)

    # ---- opening -------------------------------------------------------------------------------------------

    def _open(self, stack: contextlib.ExitStack, *, discard_existing: bool) -> None:
        ranks, rule = self.ranks, self.config.rule
        self.container = self._together(partial(self._locked_container, stack))
        ranks.check_nodes(_place_of(Path(self.base)), "a base container")
        strategy = self.config.replication
        assert not isinstance(strategy, str)
        several = len(ranks.topology.node_order) > 1
        self.strategy = strategy or (PairwiseReplicationStrategy() if several else NoReplicationStrategy())
        self.holders = self.strategy.copies_of(ranks.rank, ranks.topology)
        ranks.agree_on(
            discard_existing=discard_existing,
            replication=repr(self.strategy),
            keep=repr(rule),
            persist=repr(self.config.persist),
            on_world_size_change=self.config.on_world_size_change,
        )
        self._together(partial(self._clean, discard_existing=discard_existing))
        self._status = StatusFile(self.container, self._job, ranks, self.strategy)
        stack.callback(self._status.close)
        self._held: dict[int, Pool] = {}
        self._pool = self._together(partial(self._pools, stack))
        self._held_copies = HeldCopies(self.container, self._held)
        self._copies = Copies(ranks, self.strategy, self._held_copies)
        stack.callback(self._copies.close)
        self._store = open_store(ranks)
        stack.callback(self._store.close)
        self.replicas = Replicas(ranks.rank, ranks.world_size, self._store)
        persist = self.config.persist
        self._recovery = Recovery(
            ranks,
            self.container,
            self._pool,
            self._copies,
            self.strategy,
            rule,
            held=self._held,
            durable=None if persist is None else persist.url,
        )
        self._persister: Persister | None = None
        if persist is not None:
            connect = partial(self._store.connect, "persist")
            self._persister = self._together(lambda: Persister(persist, ranks, self._pool, self.base, connect=connect))
            stack.callback(self._persister.close)
        self._executor = self._together(lambda: CommittingThread(self._idle))
        stack.callback(self._executor.close)
        if discard_existing or not self._recovery.any_versions():
            self.go_on_from(None)
        if self._persister is not None and self.config.sigterm_grace_s is not None:
            in_flight = InFlight(self._persister.hurry, self.finish, self.config.sigterm_grace_s)
            hold_up_sigterm(in_flight)
            stack.callback(let_go_of_sigterm, in_flight)

    def _together(self, action: Callable[[], _T]) -> _T:
        """Do something on all ranks, again where the system is short of something just now; or raise on all ranks."""
        rank, node, path = self.ranks.rank, self.ranks.node, self.base

        def typed() -> _T:
            try:
                return action()
            except FlashpointError:
                raise
            except Exception as error:
                kind = UnreadableError if is_shortage(error) else LoadError
                text = f"cannot use the base container: {type(error).__name__}: {error}"
                raise kind(text, rank=rank, node=node, path=path) from error

        text = "another rank cannot use its base container; its log says why"
        until = time.monotonic() + recovery_deadline_s()
        otherwise = LoadError(text, rank=rank, node=node, path=path)
        return self.ranks.together(lambda: retrying(typed, until, f"opening {self.base}"), otherwise)

    def _locked_container(self, stack: contextlib.ExitStack) -> BaseContainer:
        # A base container belongs to one job. A whole filesystem, such as /dev/shm, belongs to all of the machine.
        if os.path.ismount(self.base):
            raise InvalidArgumentError(
                "is the mount point of a filesystem",
                argument="base",
                value=os.fspath(self.base),
                hint=f"name a folder in it that belongs to this job alone, such as {self.base}/mlf-jobs/job-145",
            )
        self._job = JobLock(Path(self.base), self.ranks.job, lock_deadline_s())
        stack.callback(self._job.release)
        return BaseContainer(Path(self.base), self._job)

    def _clean(self, *, discard_existing: bool) -> None:
        if self.ranks.is_node_leader:
            self.container.clean()
            if discard_existing and (found := self.container.list_versions()):
                _log.warning("discarding %s, as asked", ", ".join(str(save) for save in sorted(found)))
                for save in found:
                    self.container.remove(save)

    def _pools(self, stack: contextlib.ExitStack) -> Pool:
        """Open the pools of the copies that this rank holds, and return that of its own parts."""
        size, topology, config = self.ranks.world_size, self.ranks.topology, self.config
        held = {rank: self.strategy.held_by(rank, topology) for rank in topology.ranks_of(self.ranks.node)}
        owners = [Owner(size, each) for rank in held for each in (rank, *held[rank])]

        def make(rank: int, extra: int) -> Pool:
            pool = Pool(self.container, Owner(size, rank), keep=config.rule.versions, owners=owners, extra=extra)
            stack.callback(pool.close)
            return pool

        for rank in held[self.ranks.rank]:
            self._held[rank] = make(rank, 0)
        return make(self.ranks.rank, 2 if config.persist is None else 3)

    # ---- names ---------------------------------------------------------------------------------------------

    def id(self, step: int) -> CheckpointContainerId:
        """Return the path of the version of a step, whether there is one or not."""
        return CheckpointContainerId.create_child(self.base, CheckpointContainerId.format_version_container(step))

    def holds(self, path: object) -> bool:
        """Return True if a path is that of a version in the base container. Whole paths are compared."""
        version = CheckpointContainerId.of_version(path)
        return version is not None and version.parent == self.base

    # ---- one save ------------------------------------------------------------------------------------------

    def begin(self, step: int | None = None, *, explicit: bool = False, table: str = "") -> Save:
        """Start a save. The order of its calls is begin, stage (optional), fill, commit; or fail.

        Args:
            step: above all that were saved in this run; None if it is not known before `name`.
            explicit: without a slot, wait up to the deadline of the save; other saves are skipped at once.
            table: name of the ranks' agreement on who writes what (`engine.replicas`): a save is verified only if all
                ranks have written it by one table.

        Raises:
            InvalidArgumentError: the step is not above those saved before in this run.
            UnaskedVersionsError: there are versions that nobody has asked about.
            SaveError: the checkpointer is closed, or this process is a forked child.
        """
        self.check_usable()
        now = time.monotonic()
        save = Save(Terms(self.base, explicit, table, now, now + seal_deadline_s()))
        if step is not None:
            save.id = self._call(step, save.terms)
        with self._changed:
            self._saves.add(save)
        return save

    def _call(self, step: int, terms: Terms) -> SaveId:
        found = SaveId(self._run, checked_integer("step", step, 0))
        self._asked_board.call(found, explicit=terms.explicit, table=terms.table)
        return found

    @property
    def _asked_board(self) -> Board:
        if (board := self._board) is None:
            self.check_asked("latest()")
            raise SaveError("no run has begun since the last one ended: call latest()", rank=self.ranks.rank)
        return board

    def name(self, save: Save, step: int) -> None:
        """Give a save that was begun without a step its step. Raises as `begin` does; the save has failed then.

        One that has failed before is called, too: other ranks may have a part of it, and learn that this one has none.
        """
        if save.committed.done() and save.id is None and (board := self._board) is not None:
            save.id = self._call(step, save.terms)
            board.fail(save.id)
        with self._working(save):
            if save.id is not None:
                raise SaveError("the save has a step already", step=save.step, rank=self.ranks.rank)
            save.id = self._call(step, save.terms)
            if save.slot is not None:
                self._pool.name(save.slot, save.id)

    def stage(
        self,
        save: Save,
        tensors: Sequence[TensorItem],
        byte_keys: Sequence[str] = (),
        *,
        kind: object = None,
        late: LateCopy | None = None,
    ) -> Sequence[torch.Tensor]:
        """Take a slot and copy tensors into it, to be named by `fill`.

        Args:
            tensors: names (which only size the header) and plain strided tensors on any device.
            byte_keys: names of byte items, if they are known and many.
            kind: the same object as before only if keys, dtypes and shapes are the same, in the same order; None: they
                are compared.
            late: is started for those of the tensors that it takes.

        Returns:
            The copies, in order.

        Raises:
            SkippedError: there is no free slot. `SaveError`, `CapacityError`: no room, or the save has ended.
        """
        with self._working(save):
            staged = self._writer.stage(partial(self._take, save), tensors, byte_keys, kind=kind, late=late)
            save.content = staged
        if staged.late is None:
            saves.end(save.staged, None)
        return staged.views

    def place_of(self, save: Save, tensor: torch.Tensor) -> tuple[str, int] | None:
        """Return where another process finds a staged tensor: the file of the slot, and the offset in it. None if the
        tensor is not one of the copies in the slot, or no contiguous view of one."""
        content = save.content
        if not isinstance(content, Staged) or not tensor.is_contiguous() or tensor.is_neg() or tensor.is_conj():
            return None
        offset = tensor.data_ptr() - content.slot.address
        inside = content.begin <= offset and offset + tensor.nbytes <= content.end
        return (os.fspath(content.slot.path), offset) if inside else None

    def tensor_at(self, save: Save, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """Return the staged bytes at an offset of the slot as a tensor, without a copy. Raise a `SaveError` if nothing
        was staged there."""
        content, nbytes = save.content, dtype.itemsize
        for size in shape:
            nbytes *= size
        if not isinstance(content, Staged) or not content.begin <= offset <= offset + nbytes <= content.end:
            raise SaveError(f"nothing is staged at bytes {offset} to {offset + nbytes}", rank=self.ranks.rank)
        return content.slot.view(offset, offset + nbytes, dtype, shape)

    def fill(
        self,
        save: Save,
        tensors: Sequence[TensorItem],
        byte_items: Sequence[BytesItem] = (),
    ) -> None:
        """Bring all items into one object. Tensors that were staged are not copied again. Raises as `stage` does."""
        with self._working(save):
            staged, take = save.content, partial(self._take, save)
            assert not isinstance(staged, Filled)
            filled = self._writer.fill(take, tensors, byte_items, staged=staged, deadline_s=save.terms.left_s)
            save.content = filled
        if filled.staged.late is None:
            saves.end(save.staged, None)

    def commit(
        self,
        save: Save,
        *,
        items: Items | None = None,
        extra: Sequence[BytesItem] = (),
        labels: Mapping[str, str] | None = None,
    ) -> None:
        """Have the committing executor seal and commit what was filled; `Save.committed` ends then. Does not wait.

        Args:
            items: in place of `fill`: called on the committing executor, returns the tensors and byte items.
            extra: further byte items, known only now.
            labels: short strings for the manifest.
        """
        with self._working(save):
            if (items is None and not isinstance(save.content, Filled)) or save.id is None:
                raise SaveError("a save must be filled and have a step before it is committed", rank=self.ranks.rank)
        self._executor.submit(partial(self._commit, save, items, tuple(extra), dict(labels or {})))

    def fail(self, save: Save, error: BaseException) -> None:
        """Give a save up that is not committed: its futures end with the error, its slot is free. Safe to repeat."""
        if not saves.fail(save.committed, error):
            return
        saves.fail(save.staged, error)
        saves.fail(save.verified, error)
        is_skipped = isinstance(error, SkippedError)
        with self._changed:
            self.stats.skipped += is_skipped
            self.stats.failed += not is_skipped
            is_first, self._is_skipping = is_skipped and not self._is_skipping, is_skipped
        if (board := self._board) is not None and save.id is not None:
            board.fail(save.id, late=int(is_skipped))
        if is_first:
            _log.warning("%s; until one is not skipped, nothing more is said", error)
        if is_skipped:
            self._emit(events.SaveSkipped, save.step)
        else:
            self._emit(events.SaveFailed, save.step, error=str(error))
        self._free(save)

    def _give_up(self, save: Save, error: BaseException) -> None:
        """Do as `fail`, also with a save that is committed and not verified."""
        self.fail(save, error)
        saves.fail(save.verified, error)

    def _free(self, save: Save) -> None:
        """Free the slot of a save that has failed, unless a thread is at work in it, which comes here afterwards."""
        if save.lock.acquire(blocking=False):
            try:
                slot, content, save.slot, save.content = save.slot, save.content, None, None
                if content is not None:
                    (content.staged if isinstance(content, Filled) else content).discard()
                if slot is not None:
                    self._pool.free(slot)
            finally:
                save.lock.release()
            with self._changed:
                self._changed.notify_all()

    @contextlib.contextmanager
    def _working(self, save: Save) -> Iterator[None]:
        """Work on a save that has not ended. If that raises, the save fails."""
        try:
            with save.lock:
                if save.committed.done():
                    raise save.committed.exception() or SaveError("the save is committed", rank=self.ranks.rank)
                yield
        except BaseException as error:
            self.fail(save, error)
            raise
        finally:
            if save.committed.done() and save.committed.exception() is not None:
                self._free(save)

    # ---- slots ---------------------------------------------------------------------------------------------

    def _take(self, save: Save, size: int, old: Slot | None = None, *, exact: bool = False) -> Slot:
        """Return a slot for a save (`committing.Take`). Without one, an explicit save waits, and another is skipped."""
        if old is not None:
            (self._pool.remove if exact else self._pool.free)(old)
            save.slot = None
        self._check_process()
        before, explicit = self._pool.saves, save.terms.explicit

        def request() -> SlotRequest:
            return self._asked_board.request(save.id, explicit=explicit)

        while (slot := self._pool.take(size, request, exact=exact)) is None:
            if (shortage := self._pool.shortage(size, self._asked_board.retained)) is not None:
                raise shortage
            if save.committed.done():
                raise save.committed.exception() or SaveError("the save has ended")
            text = "no slot is free: earlier saves are still being copied, or their versions read"
            hint = "save less often, or raise the limit of memory, so that there is room for two more slots"
            if not explicit or self._executor.is_current:  # nothing becomes free while that one waits
                raise SkippedError(f"the save is skipped: {text}", step=save.step, rank=self.ranks.rank, hint=hint)
            if not save.terms.left_s:
                raise DeadlineError(text, step=save.step, rank=self.ranks.rank, hint=hint)
            with self._changed:
                self._changed.wait(min(_POLL_S, save.terms.left_s))
        save.slot = slot
        for lost in before - self._pool.saves:  # no round can be about these any more
            self._asked_board.fail(lost)
        return slot

    # ---- the committing thread -------------------------------------------------------------------------------

    def _commit(self, save: Save, items: Items | None, extra: Sequence[BytesItem], labels: dict[str, str]) -> None:
        try:
            with self._working(save):
                manifest = self._sealed(save, items, extra, labels)
        except FlashpointError:  # which is that of the futures
            return
        assert save.id is not None
        board, size, seconds = self._board, manifest.record.size, time.monotonic() - save.terms.began
        with self._changed:
            self.stats.committed += 1
            self.stats.last_committed = save.id.step
            self.stats.bytes, self.stats.committed_s = size, seconds
            self._is_skipping = False
        self._wanted = size
        self._emit(events.PartCommitted, save.id.step, bytes=size, seconds=seconds)
        if board is not None:
            board.commit(save.id)
        saves.end(save.committed, manifest)
        if board is not None:
            self._judge(save, board.verdict)

    def _sealed(self, save: Save, items: Items | None, extra: Sequence[BytesItem], labels: dict[str, str]) -> Manifest:
        """Complete the object of a save, and commit it. Return its manifest."""
        if items is not None:
            self.fill(save, *items())
        assert isinstance(save.content, Filled)
        assert save.id is not None
        save.content.staged.wait(save.terms.left_s)
        saves.end(save.staged, None)
        rank, take = self.ranks.rank, partial(self._take, save)
        slot, record = self._writer.seal(take, save.content, extra, deadline_s=save.terms.left_s)
        if save.terms.table:
            labels[_TABLE] = save.terms.table
        manifest = Manifest(save.id, rank, self.ranks.world_size, self.ranks.node, record, labels)
        save.slot = save.content = None
        self._pool.commit(slot, manifest)
        return manifest

    def _idle(self) -> bool:
        """Have saves fail whose deadlines have passed, and make slots ahead. Return True if there may be more to do."""
        if self._persister is not None:
            self._persister.look()
        with self._changed:
            self._saves = {save for save in self._saves if not (save.committed.done() and save.verified.done())}
            late = [save for save in self._saves if not save.terms.left_s]
        for save in late:
            text = "was not verified" if save.committed.done() else "was not committed"
            seconds = save.terms.until - save.terms.began
            text = f"the save {text} within {seconds:.0f} s"
            self._give_up(save, DeadlineError(text, step=save.step, rank=self.ranks.rank))
        if self._wanted is None or (board := self._board) is None:
            return False
        if self._pool.prepare(self._wanted, board.request(None)):
            return True
        self._wanted = None
        return False

    # ---- the board's thread ----------------------------------------------------------------------------------

    def _push(self, save: SaveId, verdict: Verdict) -> None:
        if not self.holders:
            return
        began = time.monotonic()
        try:
            size = self._copies.push(save, verdict, self._pool)
        except FlashpointError as error:
            if self.stats.copy_error is None:  # once, until copies are made again
                _log.error("replication fails, older versions stay: %s", error)
            self.stats.copy_error = str(error)
            self._emit(events.ReplicationFailed, save.step, error=str(error))
            raise
        if self.stats.copy_error is not None:
            _log.warning("replication works again from step %d on", save.step)
        self.stats.copy_error, seconds = None, time.monotonic() - began
        self._emit(events.PartReplicated, save.step, bytes=size, holders=self.holders, seconds=seconds)

    def _heard(self, verdict: Verdict) -> None:
        """Resolve the saves that a verdict decides about."""
        self._recovery.heard(verdict)
        if self._persister is not None:  # before anybody learns that the save is verified
            self._persister.heard(verdict)
        with self._changed:
            mine = [save for save in self._saves if save.id is not None and save.id.run == self._run]
        for save in sorted(mine, key=lambda save: save.id or SaveId(0, 0)):
            self._judge(save, verdict)
        with self._changed:
            self._changed.notify_all()
        if verdict.total:
            self._pool.remove_left(verdict.retained, () if verdict.recovered is None else (verdict.recovered,))

    def _judge(self, save: Save, verdict: Verdict) -> None:
        """End `Save.verified` if a verdict decides about the save."""
        assert save.id is not None
        step, fate = save.id.step, verdict.fate(save.id, explicit=save.terms.explicit)
        if fate is Fate.VERIFIED:
            if saves.end(save.verified, None):
                self.stats.last_verified = step
                self._emit(events.VersionVerified, step, seconds=time.monotonic() - save.terms.began)
        elif fate is Fate.SUPERSEDED:
            why = "the ranks go on with a later one"
            if save.id in verdict.lost:
                why = "some rank has no part of it, or no room for a copy"
            elif save.id < verdict.newest:
                why = f"step {verdict.newest.step} is verified instead"
            error = SupersededError(f"the save is not verified: {why}", step=step, rank=self.ranks.rank)
            saves.fail(save.verified, error)

    def _emit(self, kind: type[events.Event], step: int | None, **fields: Any) -> None:
        events.emit(kind, self.ranks, self.base, step, **fields)

    def subscribe(self, on_event: events.Subscriber) -> None:
        """Have a function called with each event of this base container, until this is closed: `events.subscribe`."""
        self._subscriptions.enter_context(events.subscribe(on_event, self.base))

    def wait(self, deadline_s: float | None = None) -> bool:
        """Wait until all futures of all saves that were begun have ended. Return True if that was so in time."""
        self.check_usable()
        return self._wait(seal_deadline_s() if deadline_s is None else deadline_s)

    def _wait(self, deadline_s: float) -> bool:
        with self._changed:
            futures: list[Future[Any]] = [each for save in self._saves for each in (save.committed, save.verified)]
        return not concurrent.futures.wait(futures, deadline_s).not_done

    def await_commits(self, deadline_s: float) -> bool:
        """Wait until this rank's parts of all saves are committed, or have failed. Return True if in time."""
        with self._changed:
            futures = [save.committed for save in self._saves]
        return not concurrent.futures.wait(futures, deadline_s).not_done

    def _wait_for_copies(self, deadline_s: float) -> bool:
        """Wait for the saves in flight, and until the version that the run goes on from has its copies, too."""
        give_up = time.monotonic() + deadline_s
        done = self._wait(deadline_s)
        with self._changed:
            return done & self._changed.wait_for(
                lambda: self._board is None or self._board.verdict.recovered is None, max(give_up - time.monotonic(), 0)
            )

    # ---- loading -------------------------------------------------------------------------------------------

    @property
    def last_recovery(self) -> RecoveryReport | None:
        """Report of the last `newest`, `bring` or `latest`; None before."""
        return self._recovery.report

    def newest(self) -> CheckpointContainerId | None:
        """Find the newest version that every rank can load, and bring here what this node lacks of it, checked. None if
        there never was one. Collective. Saves go on as before until `go_on_from`.

        Raises:
            NothingLoadableError: there are versions, and none can be loaded. On all ranks.
        """
        return self._find(None)

    def bring(self, step: int) -> CheckpointContainerId:
        """Do the same with the version of a step. Collective.

        Raises:
            LoadError: there is no such version, or it cannot be loaded. On all ranks.
        """
        found = self._find(checked_integer("step", step, 0))
        assert found is not None
        return found

    def _find(self, wanted: int | None) -> CheckpointContainerId | None:
        self.check_usable()
        retained = frozenset() if self._board is None else self._board.retained
        self._found = self._recovery.find(wanted, excluded=self._excluded, retained=retained)
        return None if self._found is None else self.id(self._found.save.step)

    def go_on_from(self, version: CheckpointContainerId | None) -> None:
        """Begin a new run, which goes on from a version that `newest` or `bring` has returned, or from none of those
        there are. Collective. Versions outside the run's lineage do not exist any more.

        Raises:
            SaveError, CapacityError: the run cannot be recorded on some node. On all ranks.
        """
        self.check_usable()
        chosen = None if version is None else self._found
        if version is not None and (chosen is None or self.id(chosen.save.step) != version):
            raise InvalidArgumentError("is not the version that was found last", argument="version", value=version)
        self._end_run(seal_deadline_s())
        try:
            self._begin_run(chosen)
        except BaseException:
            self._end_run(0.0)
            raise

    def _begin_run(self, chosen: Found | None) -> None:
        persist = self.config.persist
        self._held_copies.end()
        run, verdict = self._recovery.record(chosen)
        self._run = run
        self._pool.remove_left(verdict.retained, () if verdict.recovered is None else (verdict.recovered,))
        self._board = board = Board(
            Member(verdict, self.config.rule),
            rank=self.ranks.rank,
            ranks=self.ranks.world_size,
            connect=lambda: self._store.connect(f"run-{run}"),
            push=self._push,
            heard=self._heard,
            also=self.replicas.answer,
            emit=self._emit,
            persist_every=0 if persist is None else persist.every,
            persister_is_busy=lambda: self._persister is not None and self._persister.is_busy,
        )
        self.stats.last_committed = self.stats.last_verified = None
        if self._persister is not None:
            self._persister.heard(verdict)
        # Before a board pushes what was recovered.
        self._held_copies.serve(run, board.hear, lambda: board.retained)
        self.ranks.together(board.start, SaveError("another rank cannot begin the run; its log says why"))
        self._has_begun = True

    def _end_run(self, deadline_s: float, last: Callable[[], None] = lambda: None) -> None:
        """End the board, after a last call on its thread. Saves that are not verified yet never will be."""
        give_up = time.monotonic() + deadline_s
        self._executor.drain(deadline_s)
        board, self._board, self._run = self._board, None, 0
        if board is not None:
            board.close(max(give_up - time.monotonic(), 0.0), last)
        with self._changed:
            mine = [save for save in self._saves if save.id is not None]  # others get the new run's
        for save in mine:
            text = "the save was not verified before its run ended"
            self._give_up(save, SupersededError(text, step=save.step, rank=self.ranks.rank))

    def latest(self) -> CheckpointContainerId | None:
        """Find and bring the newest version (`newest`) and go on from it (`go_on_from`). Collective."""
        self.reconsider()
        found = self.newest()
        self.go_on_from(found)
        return found

    def go_back(self, step: int) -> CheckpointContainerId:
        """Bring the version of a step (`bring`) and go on from it (`go_on_from`). Collective."""
        self.reconsider()
        found = self.bring(step)
        self.go_on_from(found)
        return found

    def discard(self, version: CheckpointContainerId) -> None:
        """Do not find a version again until `reconsider`: it could not be loaded. The same on all ranks."""
        if self._found is not None and self.id(self._found.save.step) == version:
            self._excluded.add(self._found.save)

    def reconsider(self) -> None:
        """Forget what was discarded."""
        self._excluded.clear()

    def versions(self) -> list[KeptVersion]:
        """Return what can be gone back to, newest first. Collective."""
        self.check_usable()
        return self._recovery.versions()

    def open_version(self, version: CheckpointContainerId | str | os.PathLike[str]) -> VersionReader:
        """Return a reader of the version that was found last, or of one in memory here or at this job's holders."""
        return self._recovery.reader(version)

    def check_room(self, expected_bytes: int) -> None:
        """Check that each node has room for the versions that its ranks keep. Collective.

        Args:
            expected_bytes: bytes that this rank saves.

        Raises:
            CapacityError: a node lacks room, or another node cannot tell how much it has. On all ranks.
            UnreadableError: this node cannot tell.
        """
        self._recovery.check_room(expected_bytes)

    # ---- life ----------------------------------------------------------------------------------------------

    @property
    def run(self) -> int:
        """Number of the run; 0 while versions are there that nobody has asked about."""
        return self._run

    @property
    def is_between_runs(self) -> bool:
        """True while a run of this process has ended and the next one could not begin, on all ranks. Nothing is saved
        until `latest` works again."""
        return self._has_begun and not self._run

    @property
    def board_error(self) -> str | None:
        """The reason why nothing new can be verified now; None while the board works."""
        board = self._board
        return None if board is None else board.error

    def check_asked(self, call: str, *, hint: str | None = None) -> None:
        """Raise, on all ranks, if there are versions that nobody has asked about.

        Args:
            call: what the user calls to ask.

        Raises:
            UnaskedVersionsError: there are.
        """
        if self._run or self._has_begun:
            return
        # What to do is in the message: of what DCP passes on, users see no hints.
        raise UnaskedVersionsError(
            "there are checkpoints of an earlier run here that nobody has asked about, and saving would overwrite them:"
            f" call {call} before the first save, to go on from them or to give them up, or use another folder",
            rank=self.ranks.rank,
            node=self.ranks.node,
            path=self.base,
            hint=hint,
        )

    @property
    def is_closed(self) -> bool:
        """True once it is closed, or where this process is a forked child."""
        return self._closed or os.getpid() != self._pid

    def check_usable(self) -> None:
        """Raise a `JobInUseError` in a forked child, a `SaveError` if this is closed."""
        self._check_process()
        if self._closed:
            raise SaveError("the checkpointer is closed", rank=self.ranks.rank, path=self.base)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise JobInUseError(
                f"this belongs to process {self._pid}, which process {os.getpid()} was forked from",
                rank=self.ranks.rank,
                hint="save, load and wait in the process that it was constructed in",
            )

    @property
    def status(self) -> Status:
        """Status of saving on this rank."""
        return self._status.status

    def finish(self, deadline_s: float) -> bool:
        """Have saves in flight committed and copied, and the newest version persisted. Not collective.

        Returns:
            True if all was done in time.
        """
        give_up = time.monotonic() + deadline_s
        if self._persister is not None:
            self._persister.hurry()  # at once: a save that other ranks have not begun may take all the time there is
        if not (done := self._wait_for_copies(deadline_s)):
            _log.warning("the save in flight was not verified within %.0f s", deadline_s)
        if self._persister is not None and not self._persister.finish(max(give_up - time.monotonic(), 0.0)):
            _log.warning("the newest version was not persisted within %.0f s", deadline_s)
            return False
        return done

    @property
    def persist_health(self) -> PersistHealth:
        """State of persisting on this rank; all None where nothing is to be persisted."""
        return PersistHealth(None, None, None, 0) if self._persister is None else self._persister.health

    def remove_versions(self) -> None:
        """Remove every version from memory, on all nodes, at a planned end; a failure is logged. Collective."""
        try:
            if not self.ranks.all_ok(self.finish(seal_deadline_s())):
                _log.error("versions stay in memory: a rank has not ended its saves, or not persisted the newest one")
                return
            self._end_run(seal_deadline_s())
            self.ranks.together(self._remove_all, SaveError("another rank cannot remove its versions"))
            self.go_on_from(None)  # last: to record a run takes memory
        except FlashpointError as error:
            _log.error("versions stay in memory: %s", error)

    def _remove_all(self) -> None:
        for pool in (self._pool, *self._held.values()):
            pool.clear()
        self._pool.remove_left(())

    def close(self, persist_deadline_s: float | None = None) -> None:
        """End everything, saves in flight within ``FLASHPOINT_EXIT_DEADLINE_S``. Versions stay. Safe to call twice."""
        if os.getpid() != self._pid:
            return
        answer_sigterm()
        with self._changed:
            if self._closed:
                return
            self._closed = True
        give_up = time.monotonic() + exit_deadline_s()
        self._executor.drain(exit_deadline_s())
        with self._changed:
            left = [save for save in self._saves if not save.committed.done()]
        for save in left:
            self.fail(save, SaveError("the checkpointer was closed before the save was committed"))
        if not self._wait_for_copies(max(give_up - time.monotonic(), 0.0)):
            _log.info("closed before the last saves were verified; they are committed on this node")
        if self._persister is not None:
            self._persister.finish(seal_deadline_s() if persist_deadline_s is None else persist_deadline_s)
        self._end_run(max(give_up - time.monotonic(), 2 * _LINGER_S), self._leave_store)
        self._stack.close()

    def _leave_store(self) -> None:
        """Have rank 0, which hosts the store, stay for a moment: other ranks read the last verdict."""
        give_up = time.monotonic() + _LINGER_S
        with contextlib.suppress(RuntimeError):
            store = self._store.connect("open")
            left = store.plain.add("closed", 1)
            while self.ranks.rank == 0 and left < self.ranks.world_size and time.monotonic() < give_up:
                time.sleep(_LINGER_S / 100)
                left = store.plain.add("closed", 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error the peers may be dead. They are not waited for as long.
        self.close(None if error is None else exit_deadline_s())


def _place_of(base: Path) -> str:
    with contextlib.suppress(OSError):
        found = os.stat(base)
        return f"{boot_id()}-{found.st_dev:x}-{found.st_ino:x}"
    return ""


_live: weakref.WeakSet[Checkpointer] = weakref.WeakSet()


def _close_all() -> None:
    for checkpointer in list(_live):
        checkpointer.close()
    events.flush()  # the events of these


os.register_at_fork(after_in_child=_live.clear)
