"""`LocalCheckpointManager`: saves a tensor-aware state in this node's memory, and finds and loads the newest one.

Owns what its calls mean: iterations and their order, when a save counts as done, and how one rank's failure becomes
everybody's. Bytes, copies, recovery and pruning are the engine's; what a state is made of is `structure`'s.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ml_flashpoint import events
from ml_flashpoint.copy.collection import collection_paused
from ml_flashpoint.copy.overlap import Overlap, OverlappingDoor
from ml_flashpoint.core.background import give_way
from ml_flashpoint.core.engine import CheckpointEngine
from ml_flashpoint.core.joint_load import FailedStepError, JointLoad
from ml_flashpoint.core.object_stages import BytesItem, TensorItem
from ml_flashpoint.core.part_reader import ObjectReader
from ml_flashpoint.core.persist_options import PersistHealth, persist_options
from ml_flashpoint.core.save import Save, SaveState
from ml_flashpoint.format.arguments import checked_globals, checked_grace, checked_integer
from ml_flashpoint.format.checkpoint_id_types import MAX_STEP, CheckpointContainerId
from ml_flashpoint.format.errors import (
    FlashpointError,
    InvalidArgumentError,
    NothingLoadableError,
    ReplicationError,
    TopologyError,
)
from ml_flashpoint.format.knobs import collective_deadline_s, seal_deadline_s
from ml_flashpoint.format.manifest import Manifest
from ml_flashpoint.local.arguments import base_container, check_state
from ml_flashpoint.local.async_request import AsyncRequest, BackgroundSave
from ml_flashpoint.local.base_state_dict import TensorAwareStateDict
from ml_flashpoint.local.dtensors import Meshes
from ml_flashpoint.local.errors import (
    CallOrderError,
    CheckpointingException,
    InvalidIterationError,
    NoReplicasAvailableError,
    StaleIterationError,
)
from ml_flashpoint.local.failures import check_world_size, nothing_to_load, save_failed
from ml_flashpoint.local.structure import Header, encode, read_header, read_state
from ml_flashpoint.ranks.rank_group import rank_group
from ml_flashpoint.ranks.retention import Keep, checked_keep
from ml_flashpoint.ranks.strategies import NoReplicationStrategy, ReplicationStrategy, checked_strategy
from ml_flashpoint.state.archive import SafeGlobal

_log = logging.getLogger(__name__)

_LAST_WORDS_S = 2.0


class CheckpointId(NamedTuple):
    """Names the part of a checkpoint that one rank saved."""

    iteration: int
    rank: int
    session_id: str


class LocalCheckpointManager(OverlappingDoor):
    """Local checkpoints of a job: one part a rank, in the memory of its node, and copies as a strategy says.

    Construct it on all ranks, after ``init_process_group`` if there is one. Constructing it and calling
    `find_latest`, `load`, `save` and `close` is collective, in the training thread. What fails on one rank is an error
    on all of them, within ``FLASHPOINT_COLLECTIVE_DEADLINE_S`` if a rank does not answer at all.

    The newest complete iteration is kept until a newer one is complete, with all its copies, on all ranks. A second
    manager for the same folder takes over from the first, which is closed.

    Args:
        root_local_ckpt_dir: absolute path of a folder on a tmpfs of this node, with room for two parts of each of its
            ranks and of each rank whose copies they hold.
        session_id: name of a job within that folder.
        repl_strategy: who holds copies of whose parts; by default nobody. Copies that exist are used for loading
            either way.
        safe_globals: further types that a state may be made of, as for ``torch.serialization.safe_globals``.
        keep: how many of the newest iterations stay in memory, or a `Keep`: what `load` falls
            back to.
        persist, persist_every, persist_keep, persist_bytes_per_s: see `ml_flashpoint.Flashpoint`; steps are iterations,
            and the URL belongs to this session alone.
        handle_sigterm, grace_s: see `ml_flashpoint.Engine`.

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
        self._base = base_container(root_local_ckpt_dir, session_id)
        strategy = checked_strategy(repl_strategy, "repl_strategy") or NoReplicationStrategy()
        rule = checked_keep(keep)
        options = persist_options(persist, persist_every, persist_keep, persist_bytes_per_s)
        grace = checked_grace(handle_sigterm, grace_s)
        self._allowed = checked_globals(safe_globals)
        self._meshes = Meshes()
        self.session_id = session_id
        self.latest_iteration = -1
        self._version: CheckpointContainerId | None = None
        self._looked = False
        self._oldest_accepted = 0
        self._under_way: list[Save] = []
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._ranks = rank_group()
        self._key = os.path.realpath(self._base.path)
        if (earlier := _managers.pop(self._key, None)) is not None:
            earlier.close()
        try:
            self._engine = CheckpointEngine(
                self._base, replication=strategy, keep=rule, persist=options, sigterm_grace_s=grace
            )
        except (InvalidArgumentError, TopologyError, ReplicationError):
            raise
        except FlashpointError as error:
            raise CheckpointingException(
                f"the folder cannot be used: {error}", rank=self.rank, node=self._ranks.node, path=self._base
            ) from error
        self._saver = self._engine.saver
        self._overlap = Overlap()
        _managers[self._key] = self
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
        """The folder with this node's parts."""
        return Path(self._base.path)

    @property
    def persist_health(self) -> PersistHealth:
        """How persisting goes, on this rank, now; all None where nothing is to be persisted."""
        return self._engine.persist_health

    def _check_open(self) -> None:
        if self._closed:
            raise CallOrderError("the manager is closed", rank=self.rank, path=self._base)
        self._saver.owner.check(self.rank)

    # ---- finding and loading ------------------------------------------------------------------------------

    def find_latest(self) -> int:
        """The newest iteration that all ranks can load, in memory or persisted, -1 if there is none. Parts that this
        node lacks are brought here from copies in memory. The answer is kept until the next save.

        Also -1 where checkpoints are left of which some rank's part is on no node any more; the log says which. What
        is saved then replaces them.

        Raises:
            NoReplicasAvailableError: there are checkpoints whose parts are damaged or cannot be read, and none can be
                loaded. To save as if there were none would overwrite them.
            WorldSizeChangedError: it was saved by another number of ranks.
            FlashpointError: ranks cannot agree.
        """
        self._check_open()
        if not self._looked:
            self._saver.wait()  # else a version might be pruned while it is looked at
            self._engine.unasked = False
            try:
                self._version = self._engine.loader.get_latest_complete_checkpoint(self._base)
            except NothingLoadableError as error:
                if not error.parts_lost:
                    raise NoReplicasAvailableError(
                        error.message,
                        rank=self.rank,
                        node=self._ranks.node,
                        path=self._base,
                        hint="try again when the cause is mended; with a repl_strategy, the loss of a node is "
                        "survived; to give these checkpoints up, remove the folder on every node, or begin "
                        "a new session_id",
                    ) from error
                self._version = None
                if self._ranks.is_node_leader:
                    _log.error("find_latest() is -1, and saves replace what is left: %s", error.message)
            if self._version is not None:
                check_world_size(self._engine.loader.last_recovery, self._version, self._ranks, self._base)
            step = self._version.step if self._version is not None else None
            self.latest_iteration = -1 if step is None else step
            if step is not None:
                self._engine.go_on_from(step)
            self._oldest_accepted = max(0, self.latest_iteration)
            self._looked = True
        return self.latest_iteration

    def load(self, iteration: int | None = None) -> tuple[TensorAwareStateDict, CheckpointId]:
        """The state of the newest iteration, with its tensors on the devices that they were on, and its id.

        Looks for it first, if `find_latest` was not called. An iteration that turns out unreadable on some rank is
        passed over for an older one by all, so the iteration is the one that the id says.

        Args:
            iteration: load this one, which is kept in memory (``keep``), or raise. What is newer is left behind then,
                and goes with the next save.

        Raises:
            LoadError: there is no such iteration in memory; names those that there are. Nothing has changed.
            NoReplicasAvailableError: there are parts, but of no iteration those of all ranks can be read.
            CallOrderError: there is nothing to load.
            UnsafeContentError: the state needs a type that is not allowed here.
            WorldSizeChangedError: see `find_latest`.
            CheckpointingException: another rank could not load it.
        """
        joint = JointLoad(self._engine.loader, self._ranks)
        if iteration is not None:
            return self._load_kept(checked_integer("iteration", iteration, 0, MAX_STEP), joint)

        def find() -> CheckpointContainerId | None:
            self.find_latest()
            return self._version

        def load_part(version: CheckpointContainerId) -> TensorAwareStateDict:
            self._looked = False  # if this one cannot be loaded, another is looked for
            state = self._load_part(version, joint)
            self._looked = True
            return state

        loaded = joint.newest(find, load_part)
        if loaded is not None:
            return loaded[1], CheckpointId(self.latest_iteration, self.rank, self.session_id)
        failure = next((each for each in joint.failures if each.is_misfit), None)
        if failure is None:
            raise nothing_to_load(joint.failures, self._ranks, self._base)
        if isinstance(joint.cause, FlashpointError) and failure.rank == self.rank:  # then it was the last, too
            raise joint.cause
        raise CheckpointingException(
            f"rank {failure.rank} cannot load the checkpoint: {failure.text}",
            step=self.latest_iteration,
            rank=self.rank,
        ) from joint.cause

    def _load_part(self, version: CheckpointContainerId, joint: JointLoad) -> TensorAwareStateDict:
        """Load this rank's part of a version. Collective; a `FailedStepError` says which rank cannot load its own."""
        loader = self._engine.loader

        def open_part() -> tuple[ObjectReader, Header]:
            manifest = loader.read_manifest(version, self.rank)
            reader = loader.open_object(version, manifest, manifest.objects[0])
            return reader, read_header(reader)

        def read_part() -> TensorAwareStateDict:
            state = read_state(reader, header, self._allowed, self._meshes)
            state.restore_tensor_device()
            reader.check_kept()
            return state

        reader, header = joint.step(version, open_part)
        self._meshes.prepare(header.meshes, self._ranks)
        return joint.step(version, read_part)

    def _load_kept(self, iteration: int, joint: JointLoad) -> tuple[TensorAwareStateDict, CheckpointId]:
        self._check_open()
        version = self._engine.bring(iteration)
        try:
            check_world_size(self._engine.loader.last_recovery, version, self._ranks, self._base)
            state = self._load_part(version, joint)
        except FailedStepError as failed:
            raise CheckpointingException(
                f"rank {failed.failure.rank} cannot load iteration {iteration}: {failed.failure.text}",
                step=iteration,
                rank=self.rank,
            ) from failed.__cause__
        finally:
            self._engine.loader.release()
        self._engine.leave_newer()
        self._engine.go_on_from(iteration)
        self._version, self._looked = version, True
        self.latest_iteration = self._oldest_accepted = iteration
        return state, CheckpointId(iteration, self.rank, self.session_id)

    # ---- saving -------------------------------------------------------------------------------------------

    def save(self, state_dict: TensorAwareStateDict, iteration: int, is_async: bool = False) -> AsyncRequest | None:
        """Save a state as an iteration. The state is only looked at, never changed.

        Synchronously, all parts and all copies are complete when this returns. Asynchronously, the state is copied
        before this returns, and the rest happens in background threads; the request that is returned ends the save
        when it is finalized, by an `AsyncCallsQueue` or by ``execute_sync()``.

        Args:
            state_dict: what to save; not hollow.
            iteration: at least that of the newest checkpoint. The same one again replaces it.

        Raises:
            InvalidIterationError, StaleIterationError, InvalidArgumentError: an argument is unusable.
            CallOrderError: the state is hollow, or the manager closed.
            UnaskedVersionsError: there are checkpoints of an earlier run, and `find_latest` was not called.
            CheckpointingException: the save failed on some rank; the newest complete iteration before is as it was.
                Asynchronously, finalizing the request raises this instead.
        """
        self._check_open()
        self._engine.check_asked("find_latest()")
        began = time.perf_counter()
        # An asynchronous save waits for no other rank here: it is numbered by each rank alone.
        save = self._saver.begin(exchanged=not is_async)
        self._under_way = [*(each for each in self._under_way if not each.finished.is_set()), save]
        self._looked = False
        error: Exception | None = None
        try:
            version = self._checked_version(iteration)
            check_state(state_dict)
        except Exception as caught:
            self._fail_together(save, iteration, caught, is_async)
            raise
        self._oldest_accepted = iteration
        try:
            with collection_paused():
                if not is_async:
                    self._saver.agree(save, version)
                encoded = encode(state_dict, self._allowed, self._meshes)
                if is_async:
                    late = self._overlap.begin(tensor for _, tensor in encoded.tensors)
                    staged = self._saver.stage(save, encoded.tensors, late=late)
                    assert staged is not None
                    names = [name for name, _ in encoded.tensors]
                    tensors = list(zip(names, staged, strict=True))
                    save.held_s = time.perf_counter() - began
                    return self._go_on(save, version, tensors, encoded.byte_items)
                self._saver.write(save, version, encoded.tensors, encoded.byte_items)
                self._log_saved(iteration, self._saver.commit(save))
        except Exception as caught:
            error = caught
            self._saver.fail(save, caught)
        except BaseException as interrupt:
            self._saver.fail(save, interrupt)
            raise
        if is_async:
            return self._request(save, iteration, error)
        self._conclude(save, iteration, error)
        seconds = time.perf_counter() - began
        events.emit(events.LoopHeld, self._ranks, self._base, iteration, seconds=seconds)
        return None

    def _fail_together(self, save: Save, iteration: int, error: Exception, is_async: bool) -> None:
        """Give up a save that was misused here. The other ranks may be saving: they learn by a save that fails."""
        if not is_async:
            with contextlib.suppress(FlashpointError):
                self._saver.agree(save, None)
        self._saver.fail(save, error)
        if not is_async:
            self._conclude(save, iteration, error, misused=True)

    def _checked_version(self, iteration: int) -> CheckpointContainerId:
        if isinstance(iteration, bool) or not isinstance(iteration, int) or not 0 <= iteration <= MAX_STEP:
            raise InvalidIterationError("must be an integer of at least 0", argument="iteration", value=iteration)
        if iteration < self._oldest_accepted:
            raise StaleIterationError(
                f"is older than iteration {self._oldest_accepted}, which was saved or found before",
                argument="iteration",
                value=iteration,
                rank=self.rank,
                hint="to go back on purpose, load() an iteration that is kept, or use another session_id",
            )
        return CheckpointContainerId.create_child(self._base, CheckpointContainerId.format_version_container(iteration))

    def _go_on(
        self,
        save: Save,
        version: CheckpointContainerId,
        tensors: list[TensorItem],
        byte_items: list[BytesItem],
    ) -> AsyncRequest:
        """Have a staged save written and committed in the background."""
        assert version.step is not None
        request = self._request(save, version.step, None)
        thread = threading.Thread(
            target=self._complete,
            args=(save, version, tensors, byte_items),
            name=f"flashpoint-local-{version.step}",
            daemon=True,
        )
        thread.start()
        self._threads = [*(each for each in self._threads if each.is_alive()), thread]
        return request

    def _complete(
        self,
        save: Save,
        version: CheckpointContainerId,
        tensors: list[TensorItem],
        byte_items: list[BytesItem],
    ) -> None:
        save.worker = threading.current_thread()
        give_way()
        try:
            self._saver.write(save, version, tensors, byte_items)
            self._log_saved(version.step, self._saver.commit(save))
        except BaseException as error:  # lost with its thread, it would leave the others waiting
            self._saver.fail(save, error)
        finally:
            del tensors
            self._await_end(save)

    def _request(self, save: Save, iteration: int, error: Exception | None) -> AsyncRequest:
        finalized = False

        def finalize() -> None:
            nonlocal finalized
            if finalized:
                raise CallOrderError("the save was finalized before", step=iteration, rank=self.rank)
            finalized = True
            self._conclude(save, iteration, error)

        ticket = self._saver.ticket(save) if error is None else None
        return AsyncRequest(BackgroundSave(save, ticket), (), [finalize])

    def _await_end(self, save: Save) -> bool:
        ended = save.finished.wait(seal_deadline_s() + collective_deadline_s())
        worker = save.worker
        if ended and worker is not None and worker is not threading.current_thread():
            worker.join(_LAST_WORDS_S)  # it has only to log and to clean up
        return ended

    def _conclude(self, save: Save, iteration: int, error: Exception | None, *, misused: bool = False) -> None:
        """Wait for the end of a save, and raise if it failed on any rank. The engine's agreement is the vote.

        Args:
            error: why it failed here. With ``misused``, that is what is raised here.
        """
        began = time.perf_counter()
        try:
            ended = self._await_end(save)
            if not (ended and save.state is SaveState.VERIFIED):
                failure = save_failed(save, iteration, error, ended, self._ranks, self._saver.stats)
                raise error if error is not None and misused else failure
            self.latest_iteration = max(self.latest_iteration, iteration)
        finally:
            _log.debug("finalize_fn took %.4fs", time.perf_counter() - began)

    def _log_saved(self, iteration: int | None, manifest: Manifest) -> None:
        path = self.local_ckpt_dir / manifest.version / manifest.objects[0].name
        _log.info("rank %d saved iteration %s to %s", self.rank, iteration, path)

    def close(self) -> None:
        """Let saves under way end, within ``FLASHPOINT_EXIT_DEADLINE_S``, have the newest one persisted, if any are to
        be, within ``FLASHPOINT_SEAL_DEADLINE_S``, and let go of the folder. Checkpoints stay.

        Idempotent. A process that just ends need not call it.
        """
        if self._closed or self._saver.owner.forked:
            return
        self._closed = True
        self.stop_watching()
        if _managers.get(self._key) is self:
            del _managers[self._key]
        self._engine.stop(seal_deadline_s())
        for save in self._under_way:
            if not save.finished.is_set():
                self._give_up(save)
        for thread in self._threads:
            thread.join(_LAST_WORDS_S)
        if any(thread.is_alive() for thread in self._threads):
            _log.warning("rank %d: a save that was given up is still being written: its memory stays mapped", self.rank)
            return
        self._engine.close()

    def _give_up(self, save: Save) -> None:
        """End a save that nobody goes on with, since the saver is closed: else its request would be waited for."""
        closed = CallOrderError("the manager was closed before the save had ended", rank=self.rank, path=self._base)
        # Not `fail`, which would give its arena to others: who writes to it does that in the end.
        save.fail(closed)
        save.finished.set()


# Of this process, by folder: two would be in each other's way.
_managers: dict[str, LocalCheckpointManager] = {}
