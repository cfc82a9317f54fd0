"""`LocalCheckpointManager`: saves a tensor-aware state in this node's memory, and finds and loads the newest one."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ml_flashpoint import events
from ml_flashpoint.config import Config
from ml_flashpoint.copy.collection import collection_paused
from ml_flashpoint.copy.overlap import Overlap, OverlappingDoor
from ml_flashpoint.engine.checkpointer import Checkpointer
from ml_flashpoint.engine.joint_load import JointLoad
from ml_flashpoint.engine.save import Save
from ml_flashpoint.format.arguments import checked_base, checked_integer
from ml_flashpoint.format.errors import (
    FlashpointError,
    InvalidArgumentError,
    InvalidNameError,
    NothingLoadableError,
    SaveError,
    without_frames,
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
from ml_flashpoint.local.structure import Meshes, encode, read_part, read_state
from ml_flashpoint.ranks.strategies import NoReplicationStrategy, ReplicationStrategy, checked_strategy
from ml_flashpoint.status import Status

_log = logging.getLogger(__name__)


class CheckpointId(NamedTuple):
    """Name of the part of a checkpoint that one rank saved."""

    iteration: int
    rank: int
    session_id: str


class LocalCheckpointManager(OverlappingDoor):
    """Saves and loads local checkpoints: one part for each rank, in the memory of its node, and copies on other nodes.

    Construct it on all ranks, after ``init_process_group`` if there is one. The constructor, `find_latest`, `load`,
    `save` and `close` are collective, and belong to the training thread. A failure of one rank is an error on all.

    Args:
        root_local_ckpt_dir: absolute path of a folder on a tmpfs of this node, with room for two parts of each of its
            ranks, and of each rank whose copies they hold.
        session_id: name of the job within that folder.
        repl_strategy: replication strategy, or its name; by default there are no copies.
        settings: ``safe_globals``, ``keep``, ``persist``, ``persist_every``, ``persist_keep``, ``persist_bytes_per_s``,
            ``handle_sigterm``, ``grace_s``: see `Config.of`. Steps are iterations, and the URL belongs to this session.

    Attributes:
        latest_iteration: the newest iteration found or saved, -1 if there is none or nobody has looked.
    """

    def __init__(
        self,
        root_local_ckpt_dir: str | os.PathLike[str],
        session_id: str = "",
        repl_strategy: ReplicationStrategy | str | None = None,
        **settings: Any,
    ) -> None:
        self._base = _base_container(root_local_ckpt_dir, session_id)
        strategy = checked_strategy(repl_strategy, "repl_strategy") or NoReplicationStrategy()
        config = Config.of(replication=strategy, **settings)
        self._meshes = Meshes()
        self.session_id = session_id
        self.latest_iteration = -1
        self._version: CheckpointContainerId | None = None  # found last
        self._lost: NothingLoadableError | None = None  # why none was, though there were parts
        self._looked = False  # since the last save
        self._last: Save | None = None  # of this run
        self._failed = False  # a save of this run, on some rank
        self._oldest_accepted = 0
        self._engine = Checkpointer(self._base.path, config)
        self._ranks = self._engine.ranks
        self._overlap = Overlap()
        if repl_strategy is not None and self.rank == 0 and not strategy.survivable_losses(self._ranks.topology):
            text = "%r protects no part, or not all, against the loss of a node: raise the replication_jump"
            _log.warning(text, strategy)

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self._ranks.rank

    @property
    def local_ckpt_dir(self) -> Path:
        """Folder with this node's parts."""
        return Path(self._base.path)

    @property
    def status(self) -> Status:
        """Status of saving and persisting on this rank."""
        return self._engine.status

    def _check_open(self) -> None:
        try:
            self._engine.check_usable()
        except SaveError as error:
            raise CallOrderError("the manager is closed", rank=self.rank, path=self._base) from error

    # ---- finding and loading ------------------------------------------------------------------------------

    def find_latest(self) -> int:
        """Return the newest iteration that all ranks can load, in memory or persisted. Return -1 if there is none, or
        if each checkpoint lacks the part of some rank on all nodes. The result is valid until the next save.

        Raises:
            NoReplicasAvailableError: checkpoints exist, and their parts are damaged or cannot be read.
            WorldSizeChangedError: another number of ranks saved it.
        """
        self._check_open()
        if self._looked:
            return self.latest_iteration
        self._engine.await_commits(seal_deadline_s())
        self._version = self._lost = None
        try:
            self._version = self._engine.newest()
        except NothingLoadableError as error:
            if not error.parts_lost:
                hint = "try again when the cause is mended; or give these up: remove the folder on every node"
                raise NoReplicasAvailableError(error.message, rank=self.rank, path=self._base, hint=hint) from error
            self._lost = error
            if self._ranks.is_node_leader:
                _log.error("find_latest() is -1, and saves replace what is left: %s", error.message)
        self._check_world_size(self._version)
        self._note_found(self._version)
        return self.latest_iteration

    def _check_world_size(self, version: CheckpointContainerId | None) -> None:
        """Raise if another number of ranks saved what was found last."""
        report, step = self._engine.last_recovery, None if version is None else version.step
        saved = None if report is None else report.world_size
        if step is not None and saved not in (None, self._ranks.world_size):
            text = f"the newest checkpoint was saved by {saved} ranks, and there are {self._ranks.world_size} now"
            hint = f"go on with {saved} ranks, or begin a new session_id from another checkpoint"
            raise WorldSizeChangedError(text, step=step, rank=self.rank, path=self._base, hint=hint)

    def _note_found(self, version: CheckpointContainerId | None) -> None:
        """Go on from what was found."""
        step = None if version is None else version.step
        self.latest_iteration = -1 if step is None else step
        self._oldest_accepted = max(0, self.latest_iteration)
        self._version, self._looked = version, True

    def load(self, iteration: int | None = None) -> tuple[TensorAwareStateDict, CheckpointId]:
        """Load the state of the newest iteration. Its tensors come back on the devices that they were on.

        If some rank cannot read it, all step back to an older one; the id that is returned says to which. Saving goes
        on from there.

        Args:
            iteration: load this one, which is kept in memory (``keep``), or raise: then nothing has changed. Newer ones
                are left behind once it is loaded.

        Raises:
            LoadError: there is no such iteration in memory. Nothing has changed.
            CallOrderError: there is nothing to load.
            UnsafeContentError: the state needs a type that is not allowed here.
            CheckpointingException: no iteration can be loaded by all ranks (`NoReplicasAvailableError`), or there were
                others (`WorldSizeChangedError`).
        """
        self._check_open()
        joint = JointLoad(self._engine)

        def find() -> CheckpointContainerId | None:
            if iteration is None:
                self.find_latest()
                return self._version
            if joint.failures:
                return None
            self._engine.await_commits(seal_deadline_s())
            version = self._engine.bring(checked_integer("iteration", iteration, 0, MAX_STEP))
            self._looked = False  # the engine has found another one than `find_latest`
            self._check_world_size(version)
            return version

        loaded = joint.newest(find, partial(self._load_part, joint))
        if loaded is None:
            if iteration is not None:
                self._engine.reconsider()  # nobody has stepped back
            raise self._nothing_loaded(joint)
        version, state = loaded
        self._engine.go_on_from(version)
        self._note_found(version)
        self._last, self._failed = None, False
        return state, CheckpointId(self.latest_iteration, self.rank, self.session_id)

    def _load_part(self, joint: JointLoad, version: CheckpointContainerId) -> TensorAwareStateDict:
        """Load this rank's part of a version. Collective."""
        self._looked = False  # if this one cannot be loaded, another is looked for
        with self._engine.open_version(version) as reader:
            part = joint.step(version, lambda: read_part(reader.open(self.rank)))
            self._meshes.prepare(part.meshes, self._ranks)
            allowed = self._engine.config.safe_globals
            state = joint.step(version, partial(read_state, part, allowed, self._meshes))
            joint.step(version, state.restore_tensor_device)
            return state

    def _nothing_loaded(self, joint: JointLoad) -> FlashpointError:
        """Return the error of a load that has found nothing, or nothing that all ranks can load."""
        misfit = next((each for each in joint.failures if each.is_misfit), None)
        if misfit is not None and misfit.rank == self.rank and isinstance(joint.cause, FlashpointError):
            return joint.cause  # of this rank's own part
        kind: type[FlashpointError] = NoReplicasAvailableError if misfit is None else CheckpointingException
        text = "; ".join(f"rank {each.rank} cannot load {each.version}: {each.text}" for each in joint.failures)
        if not joint.failures and self._lost is None:
            kind, text = CallOrderError, "there is no checkpoint to load: find_latest() is -1"
        return kind(text or "some rank's part is on no node any more", rank=self.rank, path=self._base)

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
            InvalidArgumentError, StaleIterationError, CallOrderError: an argument is unusable, or the state hollow.
            UnaskedVersionsError: there are checkpoints of an earlier run, and `find_latest` was not called.
            CheckpointingException: the save failed on some rank, and can be repeated. Finalizing raises it, if async.
        """
        self._check_open()
        began = time.perf_counter()
        self._go_on()
        try:
            self._check(state_dict, iteration)
            save = self._begin(state_dict, iteration, is_async)
        except FlashpointError as error:
            if not is_async:  # the other ranks wait to be told
                failed: Future[Manifest] = Future()
                failed.set_exception(error)
                with contextlib.suppress(CheckpointingException):
                    self._conclude(iteration, failed)
            raise
        request = None
        if is_async:  # which ends once the save has its copies, or is known to get none
            conclude = partial(self._conclude, iteration, save.committed)
            request = AsyncRequest(BackgroundSave(save.verified), (), [conclude])
        else:
            self._conclude(iteration, save.committed)
        seconds = time.perf_counter() - began
        events.emit(events.LoopHeld, self._ranks, self._base, iteration, seconds=seconds)
        return request

    def _go_on(self) -> None:
        """Begin a run if none has begun, or a save of this one has failed: a step is saved once a run. Collective."""
        if not self._engine.run or self._failed:
            if not self._looked:
                self._engine.check_usable("find_latest()")
                self.find_latest()
            self._engine.go_on_from(self._version)
            self._last, self._failed = None, False

    def _check(self, state_dict: TensorAwareStateDict, iteration: int) -> None:
        if type(iteration) is not int or not 0 <= iteration <= MAX_STEP:
            raise InvalidIterationError("must be an integer of at least 0", argument="iteration", value=iteration)
        if iteration < self._oldest_accepted:
            text = f"is older than iteration {self._oldest_accepted}, which was saved or found before"
            hint = "to go back on purpose, load() an iteration that is kept, or use another session_id"
            raise StaleIterationError(text, argument="iteration", value=iteration, hint=hint)
        text, kind = "must be a BasicTensorAwareStateDict or the like", type(state_dict)
        if not issubclass(kind, TensorAwareStateDict):
            raise InvalidArgumentError(text, argument="state_dict", value=kind)
        hollow: Any = state_dict.is_hollow
        if hollow() if callable(hollow) else hollow:  # some subclasses override the property by a method
            raise CallOrderError("the state is hollow: its tensors were taken out", hint="call insert_tensors first")

    def _begin(self, state_dict: TensorAwareStateDict, iteration: int, is_async: bool) -> Save:
        """Copy a state, and have it committed. The futures of the save tell every failure."""
        if self._last is not None and self._last.step == iteration:
            return self._last
        self._looked, self._oldest_accepted = False, iteration
        self._last = save = self._engine.begin(iteration, explicit=True)
        try:
            with collection_paused():
                tensors, byte_items = encode(state_dict, self._engine.config.safe_globals, self._meshes)
                late = self._overlap.begin(tensor for _, tensor in tensors) if is_async else None
                staged = save.stage(tensors, late=late)
                named = [(name, copied) for (name, _), copied in zip(tensors, staged, strict=True)]
                save.fill(named, byte_items)
                save.commit()
        except BaseException as error:
            save.fail(error)
            if not isinstance(error, Exception):
                raise
            without_frames(error)
        return save

    def _conclude(self, iteration: int, committed: Future[Manifest]) -> None:
        """Wait until a save has ended here, and raise if it failed on any rank. Collective."""
        error = committed.exception()
        if error is None:
            manifest = committed.result()
            path = self.local_ckpt_dir / manifest.save.version / manifest.object_name
            _log.info("rank %d saved iteration %s to %s", self.rank, iteration, path)
        had_failed, self._failed, self._looked = self._failed, True, False  # unless all ranks have it
        told = json.dumps([repr(iteration), "" if error is None else str(error)])
        try:
            reports = [json.loads(blob) for blob in self._ranks.gather(told.encode())]
            reasons = "; ".join(f"rank {rank}: {reason}" for rank, (_, reason) in enumerate(reports) if reason)
            if not reasons and len({saved for saved, _ in reports}) > 1:
                reasons = "ranks saved different iterations"
        except FlashpointError as lost:
            error = error or lost
            reasons = f"rank {self.rank}: {error}"
        if reasons:
            raise CheckpointingException(
                f"the save failed: {reasons}",
                step=iteration if isinstance(iteration, int) else None,
                rank=self.rank,
                hint="the newest complete checkpoint can be loaded, and the save can be repeated",
            ) from error
        self._failed = had_failed  # the failure of another save stays
        self.latest_iteration = max(self.latest_iteration, iteration)

    def close(self) -> None:
        """Let saves in flight end, and the newest be persisted, if any are. Checkpoints stay. Safe to call twice."""
        if not self._engine.is_closed:
            self.stop_watching()
            self._engine.close(seal_deadline_s())


def _base_container(root: str | os.PathLike[str], session_id: str) -> CheckpointContainerId:
    base = checked_base(root, "root_local_ckpt_dir")
    try:
        return CheckpointContainerId.create_child(base, validate_segment(session_id)) if session_id != "" else base
    except InvalidNameError as error:
        raise InvalidArgumentError(f"must be a name: {error}", argument="session_id", value=session_id) from error
