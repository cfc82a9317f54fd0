"""`Checkpointer`: a base container that is open on all ranks of a job, with everything that serves it."""

from __future__ import annotations

import atexit
import contextlib
import enum
import logging
import os
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from ml_flashpoint import events
from ml_flashpoint.config import Config
from ml_flashpoint.engine.board import Board
from ml_flashpoint.engine.copying import Copies
from ml_flashpoint.engine.persist import Persister
from ml_flashpoint.engine.reader import VersionReader
from ml_flashpoint.engine.recovery import Found, KeptVersion, Recovery
from ml_flashpoint.engine.replicas import Replicas
from ml_flashpoint.engine.rounds import Member, Verdict
from ml_flashpoint.engine.save import Save, Saves
from ml_flashpoint.engine.signals import InFlight, answer_sigterm, hold_up_sigterm, let_go_of_sigterm
from ml_flashpoint.engine.store import open_store
from ml_flashpoint.format.arguments import checked_base, checked_bool, checked_integer
from ml_flashpoint.format.errors import (
    FlashpointError,
    InvalidArgumentError,
    JobInUseError,
    LoadError,
    SaveError,
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
from ml_flashpoint.format.names import CheckpointContainerId, SaveId
from ml_flashpoint.memory.container import BaseContainer, JobLock, Owner
from ml_flashpoint.memory.pool import Pool
from ml_flashpoint.ranks.rank_group import rank_group
from ml_flashpoint.ranks.strategies import NoReplicationStrategy, PairwiseReplicationStrategy
from ml_flashpoint.state.archive import warn_of_old_torch
from ml_flashpoint.status import Status, StatusFile

if TYPE_CHECKING:
    from typing_extensions import Self

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_LINGER_S = 1.0


class Phase(enum.Enum):
    """The state of a base container that was opened; the same on all ranks but for `FORKED`."""

    UNASKED = "there are versions that nobody has asked about: nothing is saved"
    RUNNING = "a run has begun"
    BETWEEN_RUNS = "a run has ended and the next one could not begin: nothing is saved until `latest` works again"
    CLOSED = "nothing"
    FORKED = "nothing: it belongs to the process that this one was forked from"


class Checkpointer:
    """A base container that is open on all ranks. Collective to construct; a context manager. Thread-safe for saves.

    Args:
        base: absolute path of a folder on a tmpfs of this node that belongs to this job alone.
        config: settings; the same on all ranks.
        discard_existing: first remove all existing versions, on all nodes.

    Attributes:
        holders: the ranks that hold copies of this rank's parts.
        container: the store of versions on this node.
        replicas: the division of replicated state among ranks.

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
        self.phase = Phase.UNASKED
        self._excluded: set[SaveId] = set()
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
        ranks.check_nodes(Path(self.base))
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
        self._copies = Copies(ranks, self.strategy, self.container, self._held)
        stack.callback(self._copies.close)
        self._store = open_store(ranks)
        stack.callback(self._store.close)
        self.replicas = Replicas(ranks.rank, ranks.world_size, self._store, self._emit)
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
        look = None if self._persister is None else self._persister.look
        self._saves = self._together(lambda: Saves(ranks, self.base, self._pool, look))
        stack.callback(self._saves.thread.close)
        if discard_existing or not self._recovery.any_versions():
            self.go_on_from(None)
        if self._persister is not None and self.config.sigterm_grace_s is not None:
            in_flight = InFlight(self._persister.hurry, self._finish, self.config.sigterm_grace_s)
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

        until = time.monotonic() + recovery_deadline_s()
        return self.ranks.together(lambda: retrying(typed, until, f"opening {path}"), LoadError, f"opening {path}")

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

    def id(self, step: int) -> CheckpointContainerId:
        """Return the path of the version of a step, whether there is one or not."""
        return CheckpointContainerId.create_child(self.base, CheckpointContainerId.format_version_container(step))

    def holds(self, path: object) -> bool:
        """Return True if a path is that of a version in the base container. Whole paths are compared."""
        version = CheckpointContainerId.of_version(path)
        return version is not None and version.parent == self.base

    # ---- saving --------------------------------------------------------------------------------------------

    def begin(self, step: int | None = None, *, explicit: bool = False, table: str = "") -> Save:
        """Begin a save, which goes on by the calls of `Save`.

        Args:
            step: above all that were saved in this run; None if it is not known before `Save.name`.
            explicit: without a slot, wait up to the deadline of the save; other saves are skipped at once.
            table: name of the ranks' agreement on who writes what (`engine.replicas`): a save is verified only if all
                ranks have written it by one table.

        Raises:
            InvalidArgumentError: the step is not above those saved before in this run.
            UnaskedVersionsError: there are versions that nobody has asked about.
            SaveError: the checkpointer is closed, or no run has begun since the last one ended.
            JobInUseError: this process is a forked child.
        """
        self.check_usable("latest()")
        return self._saves.begin(step, explicit=explicit, table=table)

    def _push(self, run: int, save: SaveId, verdict: Verdict) -> None:
        """Have the holders copy the part of a round of a run. On the board's thread."""
        if not self.holders:
            return
        began, has_failed = time.monotonic(), self.status.replication_error is not None
        try:
            size = self._copies.push(save, run, verdict, self._pool)
        except FlashpointError as error:
            if not has_failed:  # once, until copies are made again
                _log.error("replication fails; older versions are kept: %s", error)
            self._emit(events.ReplicationFailed, save.step, error=str(error))
            raise
        if has_failed:
            _log.warning("replication works again from step %d on", save.step)
        seconds = time.monotonic() - began
        self._emit(events.PartReplicated, save.step, bytes=size, holders=self.holders, seconds=seconds)

    def _heard(self, verdict: Verdict) -> None:
        """Take a verdict into use. On the board's thread."""
        if verdict.total and not self._recovery.is_marked:
            self._recovery.mark()
        if self._persister is not None:  # before anybody learns that the save is verified
            self._persister.heard(verdict)
        self._saves.heard(verdict)
        if verdict.total and self.status.verified != verdict.newest.step:  # no save of it is under way on this rank
            self._emit(events.VersionVerified, verdict.newest.step, seconds=0.0)
        if verdict.total:
            self._pool.remove_left(verdict.retained, () if verdict.recovered is None else (verdict.recovered,))

    def _emit(self, kind: type[events.Event], step: int | None, **fields: Any) -> None:
        events.emit(kind, self.ranks, self.base, step, **fields)

    def subscribe(self, on_event: events.Subscriber) -> None:
        """Have a function called with each event of this base container, until this is closed: `events.subscribe`."""
        self._subscriptions.enter_context(events.subscribe(on_event, self.base))

    def wait(self, deadline_s: float | None = None) -> bool:
        """Wait until all futures of all saves that were begun have ended. Return True if that was so in time."""
        self.check_usable()
        return self._saves.wait(seal_deadline_s() if deadline_s is None else deadline_s)

    def await_commits(self, deadline_s: float) -> bool:
        """Wait until this rank's parts of all saves are committed, or have failed. Return True if in time."""
        return self._saves.wait(deadline_s, verified=False)

    def _wait_for_copies(self, deadline_s: float) -> bool:
        """Wait for the saves in flight, and until the version that the run goes on from has its copies, too."""
        give_up = time.monotonic() + deadline_s
        done, saves = self._saves.wait(deadline_s), self._saves
        with saves.changed:
            return done & saves.changed.wait_for(
                lambda: saves.board is None or saves.board.verdict.recovered is None, max(give_up - time.monotonic(), 0)
            )

    # ---- loading -------------------------------------------------------------------------------------------

    @property
    def last_recovery(self) -> events.VersionRecovered | None:
        """The work of the last `newest` or `bring` on this rank; None if that has found nothing, and before."""
        return self._recovery.report

    def newest(self) -> CheckpointContainerId | None:
        """Return the newest version that every rank can load, after fetching and checking the parts that this node
        lacks. None if no version ever existed. Collective. Saves continue unchanged until `go_on_from`.

        Raises:
            NothingLoadableError: versions exist, and none can be loaded. On all ranks.
        """
        return self._find(None)

    def bring(self, step: int) -> CheckpointContainerId:
        """Do the same for the version of a step. Raise a `LoadError` on all ranks if it cannot be loaded."""
        found = self._find(checked_integer("step", step, 0))
        assert found is not None
        return found

    def _find(self, wanted: int | None) -> CheckpointContainerId | None:
        self.check_usable()
        retained = frozenset() if (board := self._saves.board) is None else board.retained
        found = self._recovery.find(wanted, excluded=self._excluded, retained=retained)
        return None if found is None else self.id(found.save.step)

    def go_on_from(self, version: CheckpointContainerId | None) -> None:
        """Begin a new run that continues from a version that `newest` or `bring` returned, or, with None, from no
        version. Collective. Versions outside the lineage of the run are ignored from then on.

        Raises:
            SaveError, CapacityError: the run cannot be recorded on some node. On all ranks.
        """
        self.check_usable()
        chosen = None if version is None else self._recovery.found
        if version is not None and (chosen is None or self.id(chosen.save.step) != version):
            raise InvalidArgumentError("is not the version that was found last", argument="version", value=version)
        self._end_run(seal_deadline_s())
        try:
            self._begin_run(chosen)
        except BaseException:
            self._end_run(0.0)
            raise

    def _begin_run(self, chosen: Found | None) -> None:
        persist, saves = self.config.persist, self._saves
        self._copies.end()
        run, verdict = self._recovery.record(chosen)
        self._pool.remove_left(verdict.retained, () if verdict.recovered is None else (verdict.recovered,))
        board = Board(
            Member(verdict, self.config.rule),
            rank=self.ranks.rank,
            ranks=self.ranks.world_size,
            connect=lambda: self._store.connect(f"run-{run}"),
            push=partial(self._push, run),
            heard=self._heard,
            also=self.replicas.answer if self.ranks.world_size > 1 else None,
            emit=self._emit,
            persist_every=0 if persist is None else persist.every,
            persister_is_busy=lambda: self._persister is not None and self._persister.is_busy,
        )
        self._emit(events.RunBegun, None if chosen is None else chosen.save.step, run=run)
        saves.run, saves.board = run, board
        if self._persister is not None:
            self._persister.heard(verdict)
        # Before a board pushes what was recovered.
        self._copies.serve(run, board.hear, lambda: board.verdict.retained)
        self.ranks.together(board.start, SaveError, "beginning the run")
        with saves.changed:  # it may have been closed meanwhile, by another thread or a signal handler
            self.check_usable()
            self.phase = Phase.RUNNING

    def _end_run(self, deadline_s: float, last: Callable[[], None] = lambda: None) -> None:
        """End the board, after a last call on its thread. Saves that are not verified yet never will be."""
        give_up, saves = time.monotonic() + deadline_s, self._saves
        saves.thread.drain(deadline_s)
        board, saves.board, saves.run = saves.board, None, 0
        with saves.changed:
            if self.phase is Phase.RUNNING:
                self.phase = Phase.BETWEEN_RUNS
        if board is not None:
            board.close(max(give_up - time.monotonic(), 0.0), last)
        for save in list(saves.under_way):
            if save.id is not None:  # others get the new run's
                saves.give_up(save, SupersededError, "the save was not verified before its run ended")

    def latest(self) -> CheckpointContainerId | None:
        """Return the newest version (`newest`), and begin a run from it (`go_on_from`). Collective."""
        self.reconsider()
        self.go_on_from(found := self.newest())
        return found

    def go_back(self, step: int) -> CheckpointContainerId:
        """Return the version of a step (`bring`), and begin a run from it (`go_on_from`). Collective."""
        self.reconsider()
        self.go_on_from(found := self.bring(step))
        return found

    def discard(self, version: CheckpointContainerId) -> None:
        """Exclude a version that could not be loaded, until `reconsider`. Call it on all ranks."""
        found = self._recovery.found
        if found is not None and self.id(found.save.step) == version:
            self._excluded.add(found.save)

    def reconsider(self) -> None:
        """Include discarded versions again."""
        self._excluded.clear()

    def versions(self) -> list[KeptVersion]:
        """Return the versions to which `go_back` can go, newest first. Collective."""
        self.check_usable()
        return self._recovery.versions()

    def open_version(self, version: CheckpointContainerId | str | os.PathLike[str]) -> VersionReader:
        """Return a reader of the version that was found last, or of one in memory here or at this job's holders."""
        return self._recovery.reader(version)

    def check_room(self, expected_bytes: int) -> None:
        """Check that each node has room for the versions that its ranks keep, if this rank saves so many bytes. Raise a
        `CapacityError` or an `UnreadableError` if not. Collective."""
        self._recovery.check_room(expected_bytes)

    # ---- life ----------------------------------------------------------------------------------------------

    @property
    def run(self) -> int:
        """Number of the run; 0 unless one has begun."""
        return self._saves.run

    @property
    def is_closed(self) -> bool:
        """True once it is closed, or where this process is a forked child."""
        return self.phase in (Phase.CLOSED, Phase.FORKED)

    def check_usable(self, ask: str | None = None, *, hint: str | None = None) -> None:
        """Raise a `SaveError` if it is closed, a `JobInUseError` in a forked child; and with ``ask`` an
        `UnaskedVersionsError`, on all ranks, if there are versions that nobody has asked about.

        Args:
            ask: what the user calls to ask. hint: of that error.
        """
        rank = self.ranks.rank
        if self.phase is Phase.FORKED:
            text = "this belongs to another process, which this one was forked from"
            raise JobInUseError(text, rank=rank, hint="save, load and wait in the process that it was constructed in")
        if self.phase is Phase.CLOSED:
            raise SaveError("the checkpointer is closed", rank=rank, path=self.base)
        if self.phase is Phase.UNASKED and ask is not None:
            # What to do is in the message: of what DCP passes on, users see no hints.
            raise UnaskedVersionsError(
                "an earlier run has left versions here, and saving would overwrite"
                f" them: call {ask} before the first save, or use another folder",
                rank=rank,
                node=self.ranks.node,
                path=self.base,
                hint=hint,
            )

    @property
    def status(self) -> Status:
        """Status of saving on this rank."""
        return self._status.status

    def finish(self, deadline_s: float) -> bool:
        """Have saves in flight committed and copied, and the newest version persisted. Return True if all was done in
        time; False, too, once this is closed. Not collective. Raises a `JobInUseError` in a forked child."""
        if self.phase is Phase.CLOSED:  # whoever ends a training calls this, and must not fail of it
            return False
        self.check_usable()
        return self._finish(deadline_s)

    def _finish(self, deadline_s: float) -> bool:
        """Do as `finish`, also while another thread closes this: SIGTERM waits for that."""
        give_up = time.monotonic() + deadline_s
        if self._persister is not None:
            self._persister.hurry()  # at once: a save that other ranks have not begun may take all the time there is
        if not (done := self._wait_for_copies(deadline_s)):
            _log.warning("the unfinished save was not verified within %.0f s", deadline_s)
        if self._persister is not None and not self._persister.finish(max(give_up - time.monotonic(), 0.0)):
            _log.warning("the newest version was not persisted within %.0f s", deadline_s)
            return False
        return done

    def remove_versions(self) -> None:
        """Remove every version from memory, on all nodes, at a planned end; a failure is logged. Collective."""
        try:
            self.check_usable()
            if not self.ranks.all_ok(self._finish(seal_deadline_s())):
                _log.error("versions stay in memory: a rank has not ended its saves, or not persisted the newest one")
                return
            self._end_run(seal_deadline_s())
            self.ranks.together(self._remove_all, SaveError, "removing versions")
            self.go_on_from(None)  # last: to record a run takes memory
        except FlashpointError as error:
            _log.error("versions stay in memory: %s", error)

    def _remove_all(self) -> None:
        for pool in (self._pool, *self._held.values()):
            pool.clear()
        self._pool.remove_left(())

    def close(self, persist_deadline_s: float | None = None) -> None:
        """End everything, saves in flight within ``FLASHPOINT_EXIT_DEADLINE_S``. Versions stay. Safe to call twice."""
        if self.phase is Phase.FORKED:
            return
        answer_sigterm()
        with self._saves.changed:
            if self.is_closed:
                return
            self.phase = Phase.CLOSED
        give_up = time.monotonic() + exit_deadline_s()
        self._saves.thread.drain(exit_deadline_s())
        for save in list(self._saves.under_way):
            if not save.committed.done():
                self._saves.give_up(save, SaveError, "the checkpointer was closed before the save was committed")
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


_live: weakref.WeakSet[Checkpointer] = weakref.WeakSet()


def _close_all() -> None:
    for checkpointer in list(_live):
        checkpointer.close()
    events.flush()  # the events of these


def _leave_to_parent() -> None:
    for checkpointer in list(_live):
        checkpointer.phase = Phase.FORKED
        checkpointer._saves.board = None
    _live.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
