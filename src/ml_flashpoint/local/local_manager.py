"""`LocalCheckpointManager`: saves a tensor-aware state in this node's memory, and finds and loads the newest one."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ml_flashpoint import events
from ml_flashpoint.config import Config, Persist
from ml_flashpoint.copy.collection import collection_paused
from ml_flashpoint.copy.overlap import Overlap, OverlappingDoor
from ml_flashpoint.engine.checkpointer import Checkpointer
from ml_flashpoint.engine.joint_load import FailedStepError, JointLoad, LoadFailure
from ml_flashpoint.engine.save import Save
from ml_flashpoint.format.arguments import checked_base, checked_globals, checked_grace, checked_integer
from ml_flashpoint.format.errors import (
    FlashpointError,
    InvalidArgumentError,
    InvalidNameError,
    NothingLoadableError,
    SaveError,
)
from ml_flashpoint.format.knobs import seal_deadline_s
from ml_flashpoint.format.manifest import Manifest
from ml_flashpoint.format.names import MAX_STEP, CheckpointContainerId, validate_segment
from ml_flashpoint.local.async_queue import AsyncRequest, BackgroundSave
from ml_flashpoint.local.basic_state_dict import TensorAwareStateDict
from ml_flashpoint.local.errors import (
    CallOrderError,
    CheckpointingException,
    InvalidIterationError,
    NoReplicasAvailableError,
    StaleIterationError,
    WorldSizeChangedError,
)
from ml_flashpoint.local.structure import Meshes, encode, read_header, read_state
from ml_flashpoint.ranks.rank_group import rank_group
from ml_flashpoint.ranks.retention import Keep
from ml_flashpoint.ranks.strategies import NoReplicationStrategy, ReplicationStrategy, checked_strategy
from ml_flashpoint.state.archive import SafeGlobal

if TYPE_CHECKING:
    from ml_flashpoint.engine.persist import PersistHealth

_log = logging.getLogger(__name__)


class CheckpointId(NamedTuple):
    """Name of the part of a checkpoint that one rank saved."""

    iteration: int
    rank: int
    session_id: str


class LocalCheckpointManager(OverlappingDoor):
    """Local checkpoints of a job: one part a rank, in the memory of its node, and copies as a strategy says.

    Construct it on all ranks, after ``init_process_group`` if there is one. Constructing it and calling
    `find_latest`, `load`, `save` and `close` is collective, in the training thread. A failure of one rank is an error
    on all of them, within ``FLASHPOINT_COLLECTIVE_DEADLINE_S`` if a rank does not answer at all. A second manager for
    the same folder takes over from the first, which is closed.

    Args:
        root_local_ckpt_dir: absolute path of a folder on a tmpfs of this node, with room for two parts of each of its
            ranks and of each rank whose copies they hold.
        session_id: name of a job within that folder.
        repl_strategy: who holds copies of whose parts; by default nobody. Copies that exist are used for loading
            either way.
        safe_globals: further types that a state may be made of, as for ``torch.serialization.safe_globals``.
        keep: number of the newest iterations that stay in memory, or a `Keep`: what `load` falls back to.
        persist, persist_every, persist_keep, persist_bytes_per_s, handle_sigterm, grace_s: see
            `ml_flashpoint.Flashpoint`; steps are iterations, and the URL belongs to this session alone.

    Attributes:
        session_id: as given.
        latest_iteration: the newest iteration found or saved, -1 if there is none or nobody has looked.

    Raises:
        InvalidArgumentError: an argument is unusable.
        FlashpointError: the folder cannot be used, or ranks cannot agree.
    """

    def __init__(
        self,
        root_local_ckpt_dir: str | os.PathLike[str],
        session_id: str = "",
        repl_strategy: ReplicationStrategy | str | None = None,
        *,
        safe_globals: Sequence[SafeGlobal] = (),
        keep: int | Keep = 1,
        persist: str | None = None,
        persist_every: int = 50,
        persist_keep: int = 3,
        persist_bytes_per_s: float | None = None,
        handle_sigterm: bool = True,
        grace_s: float = 20.0,
    ) -> None:
        self._base = _base_container(root_local_ckpt_dir, session_id)
        strategy = checked_strategy(repl_strategy, "repl_strategy") or NoReplicationStrategy()
        durable = Persist.of(persist, persist_every, persist_keep, persist_bytes_per_s)
        config = Config(strategy, keep, durable, checked_grace(handle_sigterm, grace_s))
        self._allowed = checked_globals(safe_globals)
        self._meshes = Meshes()
        self.session_id = session_id
        self.latest_iteration = -1
        self._version: CheckpointContainerId | None = None  # found last
        self._looked = False  # since the last save
        self._parts_lost = False
        self._last: Save | None = None  # of this run
        self._failed = False  # a save of this run, on some rank
        self._oldest_accepted = 0
        self._ranks = rank_group()
        self._engine = Checkpointer(self._base.path, config)
        self._overlap = Overlap()
        if repl_strategy is not None and self.rank == 0 and not strategy.survivable_losses(self._ranks.topology):
            _log.warning(
                "%r protects no part, or not all, against the loss of a node: ranks of a clique share nodes, "
                "the replication_jump should be at least the number of ranks of a node",
                strategy,
            )

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self._ranks.rank

    @property
    def local_ckpt_dir(self) -> Path:
        """Folder with this node's parts."""
        return Path(self._base.path)

    @property
    def persist_health(self) -> PersistHealth:
        """Progress of persisting on this rank; all None where nothing is to be persisted."""
        return self._engine.persist_health

    def _check_open(self) -> None:
        try:
            self._engine.check_usable()
        except SaveError as error:
            raise CallOrderError("the manager is closed", rank=self.rank, path=self._base) from error

    # ---- finding and loading ------------------------------------------------------------------------------

    def find_latest(self) -> int:
        """Find the newest iteration that all ranks can load, in memory or persisted. Parts that this node lacks are
        brought here. The answer stays until the next save.

        Returns:
            The iteration; -1 if there is none, or only those of which some rank's part is on no node any more.

        Raises:
            NoReplicasAvailableError: there are checkpoints whose parts are damaged or cannot be read.
            WorldSizeChangedError: another number of ranks saved it.
            FlashpointError: ranks cannot agree.
        """
        self._check_open()
        if self._looked:
            return self.latest_iteration
        self._engine.await_commits(seal_deadline_s())
        self._version, self._parts_lost = None, False
        try:
            self._version = self._engine.newest()
        except NothingLoadableError as error:
            if not error.parts_lost:
                raise NoReplicasAvailableError(
                    error.message,
                    rank=self.rank,
                    node=self._ranks.node,
                    path=self._base,
                    hint="try again when the cause is mended; with a repl_strategy, the loss of a node is survived; to"
                    " give these checkpoints up, remove the folder on every node, or begin a new session_id",
                ) from error
            self._parts_lost = True
            if self._ranks.is_node_leader:
                _log.error("find_latest() is -1, and saves replace what is left: %s", error.message)
        self._check_world_size(self._version)
        step = None if self._version is None else self._version.step
        self.latest_iteration = -1 if step is None else step
        self._oldest_accepted = max(0, self.latest_iteration)
        self._looked = True
        return self.latest_iteration

    def _check_world_size(self, version: CheckpointContainerId | None) -> None:
        report = self._engine.last_recovery
        saved = None if report is None else report.world_size
        if version is not None and saved is not None and saved != self._ranks.world_size:
            raise WorldSizeChangedError(
                f"the newest checkpoint was saved by {saved} ranks, and there are {self._ranks.world_size} now",
                step=version.step,
                rank=self.rank,
                path=self._base,
                hint=f"go on with {saved} ranks, or begin a new session_id from another checkpoint",
            )

    def load(self, iteration: int | None = None) -> tuple[TensorAwareStateDict, CheckpointId]:
        """Load the state of the newest iteration. Its tensors come back on the devices that they were on.

        If some rank cannot read it, all step back to an older one; the id that is returned says to which. Saving goes
        on from there.

        Args:
            iteration: load this one, which is kept in memory (``keep``), or raise. Newer ones are left behind then.

        Returns:
            The state, and its id.

        Raises:
            LoadError: there is no such iteration in memory. Nothing has changed.
            NoReplicasAvailableError: there are parts, but of no iteration those of all ranks can be read.
            CallOrderError: there is nothing to load.
            UnsafeContentError: the state needs a type that is not allowed here.
            WorldSizeChangedError: another number of ranks saved it.
            CheckpointingException: another rank could not load it.
        """
        self._check_open()
        joint = JointLoad(self._engine)
        if iteration is None:
            loaded = joint.newest(self._find, partial(self._load_part, joint))
            if loaded is None:
                raise self._nothing_loaded(joint)
            version, state = loaded
        else:
            checked_integer("iteration", iteration, 0, MAX_STEP)
            self._engine.await_commits(seal_deadline_s())
            version = self._engine.bring(iteration)
            self._check_world_size(version)
            try:
                state = self._load_part(joint, version)
            except FailedStepError as failed:
                raise self._unloadable(failed.failure) from failed.__cause__
        self._engine.go_on_from(version)
        assert version.step is not None
        self._version, self._looked, self._last, self._failed = version, True, None, False
        self.latest_iteration = self._oldest_accepted = version.step
        return state, CheckpointId(version.step, self.rank, self.session_id)

    def _find(self) -> CheckpointContainerId | None:
        self.find_latest()
        return self._version

    def _load_part(self, joint: JointLoad, version: CheckpointContainerId) -> TensorAwareStateDict:
        """Load this rank's part of a version. Collective; a `FailedStepError` says which rank cannot load its own."""
        self._looked = False  # if this one cannot be loaded, another is looked for
        with self._engine.open_version(version) as reader:
            part = joint.step(version, partial(reader.open, self.rank))
            header = joint.step(version, partial(read_header, part))
            self._meshes.prepare(header.meshes, self._ranks)
            state = joint.step(version, partial(read_state, part, header, self._allowed, self._meshes))
            joint.step(version, state.restore_tensor_device)
            return state

    def _nothing_loaded(self, joint: JointLoad) -> FlashpointError:
        """Return the error of a load that has found nothing, or nothing that all ranks can load."""
        if not joint.failures and not self._parts_lost:
            return CallOrderError(
                "there is no checkpoint to load", rank=self.rank, path=self._base, hint="find_latest() returned -1"
            )
        misfit = next((each for each in joint.failures if each.is_misfit), None)
        if misfit is not None and misfit.rank == self.rank and isinstance(joint.cause, FlashpointError):
            return joint.cause  # of this rank's own part
        if misfit is not None:
            return self._unloadable(misfit)
        why = "; ".join(f"{each.version}, rank {each.rank}: {each.text}" for each in joint.failures)
        return NoReplicasAvailableError(
            f"there are checkpoints, and none has sound parts of all ranks{why and f' ({why})'}",
            rank=self.rank,
            path=self._base,
            hint="with a repl_strategy, the loss of a node is survived",
        )

    def _unloadable(self, failure: LoadFailure) -> CheckpointingException:
        text = f"rank {failure.rank} cannot load {failure.version}: {failure.text}"
        return CheckpointingException(text, rank=self.rank, path=self._base)

    # ---- saving -------------------------------------------------------------------------------------------

    def save(self, state_dict: TensorAwareStateDict, iteration: int, is_async: bool = False) -> AsyncRequest | None:
        """Save a state as an iteration. The state is only looked at, never changed.

        Synchronously, the parts of all ranks are committed when this returns, and copies follow. Asynchronously, the
        state is copied when this returns; an `AsyncCallsQueue` or ``execute_sync()`` ends the request that is returned,
        not before the save has its copies, or a newer save has.

        Args:
            state_dict: not hollow.
            iteration: above that of the newest checkpoint. The one that was saved last is not saved again.

        Raises:
            InvalidIterationError, StaleIterationError, InvalidArgumentError: an argument is unusable.
            CallOrderError: the state is hollow, or the manager closed.
            UnaskedVersionsError: there are checkpoints of an earlier run, and `find_latest` was not called.
            CheckpointingException: the save failed on some rank, and can be repeated. Asynchronously, finalizing the
                request raises this.
        """
        self._check_open()
        began = time.perf_counter()
        self._go_on()
        try:
            self._check_iteration(iteration)
            _check_state(state_dict)
        except FlashpointError as error:
            if not is_async:  # the other ranks wait to be told
                with contextlib.suppress(CheckpointingException):
                    self._conclude(iteration, _failed(error))
            raise
        committed, verified = self._begin(state_dict, iteration, is_async)
        if not is_async:
            self._conclude(iteration, committed)
        seconds = time.perf_counter() - began
        events.emit(events.LoopHeld, self._ranks, self._base, iteration, seconds=seconds)
        if not is_async:
            return None
        # Once it has its copies, or is known to get none.
        return AsyncRequest(BackgroundSave(verified), (), [partial(self._conclude, iteration, committed)])

    def _go_on(self) -> None:
        """Begin a run if none has begun, or a save of this one has failed: a step is saved once a run. Collective."""
        if self._engine.run and not self._failed:
            return
        if not self._looked:
            self._engine.check_asked("find_latest()")
            self.find_latest()
        self._engine.go_on_from(self._version)
        self._last, self._failed = None, False

    def _check_iteration(self, iteration: int) -> None:
        if type(iteration) is not int or not 0 <= iteration <= MAX_STEP:
            raise InvalidIterationError("must be an integer of at least 0", argument="iteration", value=iteration)
        if iteration < self._oldest_accepted:
            raise StaleIterationError(
                f"is older than iteration {self._oldest_accepted}, which was saved or found before",
                argument="iteration",
                value=iteration,
                rank=self.rank,
                hint="to go back on purpose, load() an iteration that is kept, or use another session_id",
            )

    def _begin(
        self, state_dict: TensorAwareStateDict, iteration: int, is_async: bool
    ) -> tuple[Future[Manifest], Future[Any]]:
        """Copy a state, and have it committed. The futures, of the commit and of all copies, tell every failure."""
        save = self._last
        if save is None or save.id is None or save.id.step != iteration:
            self._looked, self._oldest_accepted = False, iteration
            try:
                self._last = save = self._engine.begin(iteration, explicit=True)
            except FlashpointError as error:
                return _failed(error), _failed(error)
            try:
                self._fill(save, state_dict, is_async)
            except BaseException as error:
                self._engine.fail(save, error)
                if not isinstance(error, Exception):
                    raise
        return save.committed, save.verified

    def _fill(self, save: Save, state_dict: TensorAwareStateDict, is_async: bool) -> None:
        with collection_paused():
            tensors, byte_items = encode(state_dict, self._allowed, self._meshes)
            late = self._overlap.begin(tensor for _, tensor in tensors) if is_async else None
            staged = self._engine.stage(save, tensors, late=late)
            named = [(name, copied) for (name, _), copied in zip(tensors, staged, strict=True)]
            self._engine.fill(save, named, byte_items)
            self._engine.commit(save)

    def _conclude(self, iteration: int, committed: Future[Manifest]) -> None:
        """Wait until a save has ended here, and raise if it failed on any rank. Collective."""
        began = time.perf_counter()
        error = committed.exception()
        if error is None:
            manifest = committed.result()
            path = self.local_ckpt_dir / manifest.save.version / manifest.object_name
            _log.info("rank %d saved iteration %s to %s", self.rank, iteration, path)
        told = json.dumps([repr(iteration), "" if error is None else str(error)])
        try:
            reports = dict(enumerate(json.loads(blob) for blob in self._ranks.gather(told.encode())))
        except FlashpointError as lost:
            error = error or lost
            reports = {self.rank: [repr(iteration), str(error)]}
        _log.debug("finalize_fn took %.4fs", time.perf_counter() - began)
        reasons = "; ".join(f"rank {rank}: {reason}" for rank, (_, reason) in reports.items() if reason)
        if not reasons and len({saved for saved, _ in reports.values()}) == 1:
            self.latest_iteration = max(self.latest_iteration, iteration)
            return
        self._failed, self._looked = True, False
        raise CheckpointingException(
            f"the save failed: {reasons or 'ranks saved different iterations'}",
            step=iteration if isinstance(iteration, int) else None,
            rank=self.rank,
            hint="the newest complete checkpoint can be loaded, and the save can be repeated",
        ) from error

    def close(self) -> None:
        """Let saves in flight end, have the newest one persisted, if any are to be, and close the folder. Checkpoints
        stay. Safe to call twice."""
        if not self._engine.is_closed:
            self.stop_watching()
            self._engine.close(seal_deadline_s())


def _failed(error: BaseException) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


def _base_container(root: str | os.PathLike[str], session_id: str) -> CheckpointContainerId:
    base = checked_base(root, "root_local_ckpt_dir")
    try:
        return CheckpointContainerId.create_child(base, validate_segment(session_id)) if session_id != "" else base
    except InvalidNameError as error:
        raise InvalidArgumentError(f"must be a name: {error}", argument="session_id", value=session_id) from error


def _check_state(state_dict: TensorAwareStateDict) -> None:
    if not isinstance(state_dict, TensorAwareStateDict):
        raise InvalidArgumentError(
            "must be a TensorAwareStateDict",
            argument="state_dict",
            value=type(state_dict),
            hint="wrap it: BasicTensorAwareStateDict(state_dict)",
        )
    with contextlib.suppress(NotImplementedError):
        hollow: Any = state_dict.is_hollow
        if hollow() if callable(hollow) else hollow:  # some subclasses override the property by a method
            raise CallOrderError("the state is hollow: its tensors were taken out", hint="call insert_tensors first")
