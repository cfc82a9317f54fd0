"""`MemoryStorageWriter`: torch DCP's way into the engine, and its own stager.

Owns the translation of DCP's calls (stage, plan, write, finish) into one save of the engine. For asynchronous
saves the staged copies *are* the object: they are named once DCP has planned, not copied again. DCP does not
say, when it stages, which checkpoint this is for, and it writes on another thread or in another process; the
staged state itself therefore tells who has taken it on.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future as StagingFuture
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ml_flashpoint import events
from ml_flashpoint.adapter.pytorch.metadata_format import encode_metadata
from ml_flashpoint.adapter.pytorch.omission import Omission, left_to_others, tensor_names
from ml_flashpoint.adapter.pytorch.plan_items import WrittenPlan, resolve_items, written_plan
from ml_flashpoint.adapter.pytorch.plan_rider import CompletionRider, PlanRider, listen, listen_for_completion
from ml_flashpoint.adapter.pytorch.staged_state import StagedStateDict, wait_until_over
from ml_flashpoint.adapter.pytorch.storage_data import METADATA_KEY, METADATA_SCOPE
from ml_flashpoint.adapter.pytorch.tensor_leaves import TensorLeaves
from ml_flashpoint.checkpoint_object_manager.arena_tensor import ArenaTensor
from ml_flashpoint.copy.cpu import cpu_clones
from ml_flashpoint.copy.overlap import Overlap, OverlappingDoor
from ml_flashpoint.core.background import BackgroundThread, give_way
from ml_flashpoint.core.checkpoint_saver import DefaultMLFlashpointCheckpointSaver, MLFlashpointCheckpointSaver
from ml_flashpoint.core.object_stages import BytesItem, TensorItem
from ml_flashpoint.core.save import Save
from ml_flashpoint.core.save_identity import SaveIdentity
from ml_flashpoint.format.arguments import ignored
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.errors import DivergedError, FlashpointError, InvalidArgumentError, SaveError
from ml_flashpoint.format.knobs import seal_deadline_s
from ml_flashpoint.state.archive import SafeGlobal, by_name
from ml_flashpoint.state.plan import item_keys

_log = logging.getLogger(__name__)

# What torch's own writer says; torch 2.6 has none.
_DCP_VERSION: str | None = getattr(filesystem, "CURRENT_DCP_VERSION", None)


class _Call(threading.local):
    """What one thread is saving. DCP runs the whole of a save on one thread, and may run two at once."""

    version: CheckpointContainerId | None = None
    staged: Save | None = None
    """The save whose staged state this thread has taken on to save."""
    save: Save | None = None
    """Begun and not yet committed."""
    proposals: tuple[SaveIdentity, ...] = ()
    """Of all ranks, on the coordinator."""
    trouble: Exception | None = None
    """Why the save cannot be written, as of when its plan arrived."""
    is_coordinator: bool = False
    use_collectives: bool = True
    own_tensors: frozenset[str] | None = None
    extra: tuple[BytesItem, ...] = ()
    labels: Mapping[str, str] = MappingProxyType({})
    safe_globals: tuple[SafeGlobal, ...] = ()
    save_id: str | None = None
    began: float = 0.0
    """When the save began on this thread, by the performance counter."""
    was_staged: bool = False
    """Whether what this thread has written was staged before."""


class MemoryStorageWriter(OverlappingDoor, StorageWriter):
    """Saves DCP checkpoints into memory. Use one writer for all saves of a job: it holds the arenas.

    Args:
        checkpoint_saver: the engine's saver.
        mp_manager, thread_count, mp_manager_future: accepted for callers that pass them, and ignored.
        cache_staged_state_dict: stage into arenas that stay in memory between saves (the default, and what makes
            a save one copy). Memory: two versions of what this rank saves. Off, each asynchronous save first
            clones the state, which needs no memory between saves but one more copy, and page faults, in each.
        safe_globals: further types that non-tensor items may be made of; the reader must be given the same. What it
            would refuse is refused when it is saved.
        trust_bytes: save whatever bytes the planner gives. Only for planners of readers with ``trust_bytes``.

    Raises:
        InvalidArgumentError: ``checkpoint_saver`` is none.
    """

    # torch's AsyncStager protocol, which it recognises by these names: nobody has to ask whether staging is done.
    should_synchronize_after_execute = False
    _synchronize_after_execute = False

    def __init__(
        self,
        checkpoint_saver: MLFlashpointCheckpointSaver,
        mp_manager: Any = None,
        thread_count: int | None = None,
        *,
        mp_manager_future: Any = None,
        cache_staged_state_dict: bool = True,
        safe_globals: Sequence[SafeGlobal] = (),
        trust_bytes: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(checkpoint_saver, MLFlashpointCheckpointSaver):
            raise InvalidArgumentError(
                "must be an MLFlashpointCheckpointSaver", argument="checkpoint_saver", value=checkpoint_saver
            )
        ignored(
            "MemoryStorageWriter", mp_manager=mp_manager, thread_count=thread_count, mp_manager_future=mp_manager_future
        )
        self._saver = checkpoint_saver
        self._cache_staged = cache_staged_state_dict
        self._safe_globals = by_name(safe_globals)
        self._trust_bytes = trust_bytes
        self._call = _Call()
        self._written: WrittenPlan | None = None
        # Steps that other ranks were at or past when this one was behind them. Shared: another thread saves them.
        self._passed = range(0)
        self._omission = Omission()
        self._overlap = Overlap()
        self._waiting = BackgroundThread("flashpoint-staging")
        self._stager_thread: int | None = None
        self._in_flight: tuple[Save, weakref.ref[StagedStateDict]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # To a saving process: the saver becomes one that carries the save whose state was pickled just before.
        saver: Any = self._saver
        if isinstance(saver, DefaultMLFlashpointCheckpointSaver):
            staged, self._call.staged = self._call.staged, None
            saver = saver.hand_off(staged)
        return {"saver": saver, "cache": self._cache_staged, "names": self._safe_globals, "trust": self._trust_bytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(  # type: ignore[misc]
            state["saver"],
            cache_staged_state_dict=state["cache"],
            safe_globals=state["names"],
            trust_bytes=state["trust"],
        )

    @property
    def saver(self) -> MLFlashpointCheckpointSaver:
        """The engine's saver."""
        return self._saver

    @property
    def checkpoint_id(self) -> str | None:
        """The checkpoint that the calling thread is saving; torch logs it."""
        return str(self._call.version) if self._call.version is not None else None

    # ---- AsyncStager --------------------------------------------------------------------------------------

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy the tensors of a state dict into an arena; the state dict returned consists of the copies.

        Tensors that other ranks write, known from the last save of the same structure, are left out: in their
        places are tensors without data. A failure is kept and raised by the write, where DCP tells all ranks.

        Returns:
            A state that can be saved once, by any thread, or in another process if pickled with this writer.
        """
        return self._staged(state_dict)[0]

    def stage_in_background(self, state_dict: dict[str, Any]) -> StagingFuture[dict[str, Any]]:
        """The same for who promises to change no tensor on a CUDA device before the future that is returned is done.
        Where an optimizer is watched, only what such update is copied meanwhile; else all that is there.

        Returns:
            What :meth:`stage` does, once all is copied. It raises nothing: what fails is raised by the write.
        """
        state, save = self._staged(state_dict, promised=True)
        future: StagingFuture[dict[str, Any]] = StagingFuture()
        late = save.staged.late if save.staged is not None and save.staging_error is None else None

        def settle() -> None:
            if late is not None:
                late.settle()
            future.set_result(state)

        if late is None:
            settle()
        else:
            self._waiting.run(settle)
        return future

    def _staged(self, state_dict: dict[str, Any], *, promised: bool = False) -> tuple[StagedStateDict, Save]:
        saver = self._saver
        if not isinstance(saver, DefaultMLFlashpointCheckpointSaver):
            raise SaveError("a writer in a saving process does not stage")
        self._stager_thread = threading.get_ident()
        began = time.perf_counter()
        self._overlap.before_update()
        self._await_previous()
        save = saver.begin(exchanged=True)
        leaves, needed = TensorLeaves({}), list[int]()
        copies: Sequence[ArenaTensor] = ()
        try:
            leaves = TensorLeaves(state_dict)
            if leaves.error is not None:
                raise leaves.error
            needed = self._omission.needed(leaves)
            names = leaves.names
            copies = self._copy(saver, save, [(names[i], leaves.tensors[i]) for i in needed], promised=promised)
            save.copies = copies
        except Exception as error:  # not raised here, where it would leave the other ranks waiting
            _log.error("staging failed: %s", error)
            reason = error if isinstance(error, FlashpointError) else SaveError(f"{type(error).__name__}: {error}")
            save.staging_error, needed = reason, []
        except BaseException as error:
            saver.fail(save, error)
            raise
        whole = len(needed) == len(leaves.tensors)
        replacements: Sequence[torch.Tensor] = copies
        if not whole:
            filled = [torch.empty_like(t, device="meta") for t in leaves.tensors]
            for index, staged in zip(needed, copies, strict=True):
                filled[index] = staged
            replacements = filled
        self._omission.watch(save, whole=whole)
        save.held_s = time.perf_counter() - began
        saver.offer(save)
        state = StagedStateDict(leaves.rebuild(replacements), save, self._take_on)
        self._in_flight = save, weakref.ref(state)
        return state, save

    def stage_tensors(
        self,
        save: Save,
        tensors: Sequence[TensorItem],
        *,
        base: CheckpointContainerId,
        byte_keys: Sequence[str] = (),
    ) -> Sequence[torch.Tensor]:
        """Copies of some tensors, made now, for a door that plans before it stages: see the saver's ``stage``.

        Raises:
            CapacityError: no room.
        """
        saver = self._saver
        if not isinstance(saver, DefaultMLFlashpointCheckpointSaver):
            raise SaveError("a writer in a saving process does not stage")
        return self._copy(saver, save, tensors, base=base, byte_keys=byte_keys)

    def take_on(
        self,
        save: Save,
        *,
        extra: Sequence[BytesItem] = (),
        labels: Mapping[str, str] | None = None,
        safe_globals: Sequence[SafeGlobal] = (),
    ) -> None:
        """Have the calling thread's next :meth:`write_data` complete a save that was staged and offered, after
        :meth:`reset`.

        Args:
            extra: further items for this rank's object, which DCP does not know of.
            labels: further strings for its manifest.
            safe_globals: types that may be saved beside those of the writer.
        """
        self._call.safe_globals = by_name(safe_globals)
        self._call.staged = save
        self._call.extra, self._call.labels = tuple(extra), dict(labels or {})

    def _take_on(self, save: Save) -> None:
        self._call.staged = save

    def _await_previous(self) -> None:
        """Let the asynchronous save before end: DCP's collectives of two saves on one group would be mixed up, and
        its own tutorial does not wait. Alone, a rank has no collectives."""
        previous, self._in_flight = self._in_flight, None
        if previous is None or self._saver.world_size == 1 or wait_until_over(*previous, seal_deadline_s()):
            return
        _log.error("an asynchronous save is still under way after %.0f s; going on beside it", seal_deadline_s())

    def _give_up_staged(self, error: Exception) -> None:
        """Give up the state that was staged last, if no thread has taken it on: none could be started."""
        if self._in_flight is not None and (save := self._in_flight[0]).worker is None:
            self._in_flight = None
            self._saver.fail(save, error)

    def _copy(
        self,
        saver: DefaultMLFlashpointCheckpointSaver,
        save: Save,
        tensors: Sequence[TensorItem],
        *,
        promised: bool = False,
        **how: Any,
    ) -> Sequence[ArenaTensor]:
        copies = None
        if self._cache_staged:
            late = self._overlap.begin((tensor for _, tensor in tensors), promised=promised)
            copies = saver.stage(save, tensors, late=late, **how)
        # No base container is known to the first asynchronous save of a job: it clones, once.
        return copies if copies is not None else ArenaTensor.of_copies(cpu_clones([tensor for _, tensor in tensors]))

    def synchronize_staging(self) -> None:
        """Have what this thread gives to the devices from now on wait for the copy; watched optimizers do so anyway."""
        self.before_update()

    def close(self) -> None:
        """Let saves under way finish and stop the background work."""
        self.stop_watching()
        self._waiting.close()
        if isinstance(self._saver, DefaultMLFlashpointCheckpointSaver):
            self._saver.close()

    # ---- StorageWriter ------------------------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a save on the calling thread; one that it left unfinished is given up."""
        call = self._call
        if threading.get_ident() == self._stager_thread:
            self._await_previous()
        elif self._stager_thread is not None:
            give_way()
        if call.save is not None:
            # This thread's last save was neither committed nor failed: its plan failed on another rank.
            self._saver.fail(call.save, SaveError("the checkpoint failed on another rank"))
            call.save = None
        listen(None)
        call.staged = call.own_tensors = call.trouble = None
        call.extra, call.labels, call.safe_globals, call.proposals = (), {}, (), ()
        call.save_id = str(uuid.uuid4())
        call.began = time.perf_counter()
        call.version = None if checkpoint_id is None else CheckpointContainerId(checkpoint_id)
        self._let_others_catch_up()

    def _let_others_catch_up(self) -> None:
        """Fail a save of a step that other ranks have passed, before DCP's first collective.

        Raises:
            DivergedError: once for each such step. With the first save after them all ranks are in step again.
        """
        step = None if self._call.version is None else self._call.version.step
        if step is None or step not in self._passed:
            return
        text = f"other ranks have gone on to step {self._passed[-1]} without this save"
        error = DivergedError(text, step=step, rank=self._saver.rank)
        self._passed = range(step + 1, self._passed.stop)
        self._give_up_staged(error)
        raise error

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether an id names a version of a base container."""
        return CheckpointContainerId.of_version(checkpoint_id) is not None

    def storage_meta(self) -> StorageMeta | None:
        """What DCP tells planners about this save."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self._call.save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Take note of the calling rank's role in this save, and of what other ranks send to it."""
        listen(self._note_proposal if is_coordinator else self._note_answer)
        self._call.proposals = ()
        self._call.is_coordinator = is_coordinator
        self._call.use_collectives = bool(kwargs.get("use_collectives", True))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Leave the plan as it is, but for what this rank proposes to call the save."""
        call = self._call
        call.own_tensors = tensor_names(plan)
        return replace(plan, storage_data=PlanRider(self._saver.propose(call.version, call.staged or call.save)))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: leave the plans as they are, but for what the save is called.

        Raises:
            SaveError: through DCP, on every rank: not all ranks save.
        """
        call, saver = self._call, self._saver
        listen(self._note_answer)
        if len(call.proposals) <= 1 or not call.use_collectives:
            return plans  # this rank alone saves in this call
        if len(plans) != saver.world_size:
            raise SaveError(
                f"{len(plans)} of the job's {saver.world_size} ranks save, which makes no version",
                rank=saver.rank,
                hint="save from all ranks: pass a process_group that has all of them, or none",
            )
        answer = PlanRider.answering(call.proposals)
        return [replace(plan, storage_data=answer) for plan in plans]

    def _note_proposal(self, rider: PlanRider) -> None:
        self._call.proposals = (*self._call.proposals, rider.identity)

    def _note_answer(self, rider: PlanRider) -> None:
        """Begin the save, here where all ranks arrive. What fails is raised by the write, where all ranks learn."""
        listen(None)
        call, saver = self._call, self._saver
        step = -1 if call.version is None or call.version.step is None else call.version.step
        highest = -1 if rider.diverged is None or rider.diverged.highest_step is None else rider.diverged.highest_step
        self._passed = range(step + 1, highest + 1)
        try:
            save = call.staged or call.save
            if save is None:
                save = call.save = saver.begin(exchanged=True)
                save.worker = threading.current_thread()
                # DCP keeps the plan for as long as it saves, and does not say if it gives up before the write.
                weakref.finalize(rider, _desert, save).atexit = False
            saver.adopt(save, rider.identity)
            save.complete = False  # until the coordinator says so
            call.trouble = rider.diverged
        except Exception as error:
            call.trouble = error

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Make this rank's object of everything in its plan; commit it, unless :meth:`finish` has something to add.

        Raises:
            FlashpointError: through DCP, on every rank. The next save is not affected.
        """
        listen(None)
        call = self._call
        if call.trouble is not None:
            if (begun := call.staged or call.save) is not None:
                self._saver.fail(begun, call.trouble)
            call.staged = call.save = None
            raise call.trouble
        save = call.save = self._claimed()
        save.others = left_to_others(planner, call.own_tensors, plan)
        future: Future[list[WriteResult]] = Future()
        try:
            if call.version is None:
                raise InvalidArgumentError("DCP gave no checkpoint id", argument="checkpoint_id", value=None)
            keys = known.keys if (known := self._written) is not None and known.plan is plan else item_keys(plan.items)
            tensors, byte_items = self._resolve(save, plan, planner, keys)
            self._saver.write(save, call.version, tensors, [*byte_items, *call.extra])
            if not call.is_coordinator and call.use_collectives:
                self._saver.commit(save, labels={"door": "dcp", **call.labels})
                call.save = None
                self._tell_held()
                listen_for_completion(partial(self._saver.note_complete, save))
        except BaseException as error:
            self._saver.fail(save, error)
            call.save = None
            raise
        written = self._written = written_plan(self._written, plan, keys, tensors, byte_items, self._saver.rank)
        future.set_result(written.results)
        return future

    def _resolve(
        self, save: Save, plan: SavePlan, planner: SavePlanner, keys: list[str]
    ) -> tuple[list[TensorItem], list[BytesItem]]:
        if save.staging_error is not None:
            return [], []  # what staging left undone is told by the write, better than by resolving what is not there
        allowed = (*self._safe_globals, *self._call.safe_globals)
        return resolve_items(plan, planner, keys, allowed=allowed, trust_bytes=self._trust_bytes)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator: commit its part, with DCP's metadata as one more object. The version is complete."""
        call = self._call
        save, call.save = call.save, None
        if save is None:
            raise SaveError("nothing was written to finish", rank=self._saver.rank)
        try:
            metadata.storage_data = {result.index: result.storage_data for part in results for result in part}
            metadata.storage_meta = self.storage_meta()
            if _DCP_VERSION is not None and metadata.version is None:
                metadata.version = _DCP_VERSION
            scope = "global" if call.use_collectives else "rank"
            self._saver.commit(
                save,
                extra=[(METADATA_KEY, encode_metadata(metadata, self._safe_globals))],
                labels={"door": "dcp", **call.labels, METADATA_SCOPE: scope},
            )
        except BaseException as error:
            self._saver.fail(save, error)
            raise
        self._tell_held()
        if call.use_collectives:
            # All others have committed theirs before.
            self._saver.note_complete(save)
            metadata.storage_meta = CompletionRider(**vars(metadata.storage_meta))

    def _tell_held(self) -> None:
        """Tell of a save that its caller has waited for: one that was staged before is another thread's."""
        version = self._call.version
        if version is None or self._call.was_staged:
            return
        seconds = time.perf_counter() - self._call.began
        events.emit(events.LoopHeld, self._saver, version.parent, version.step, seconds=seconds)

    def _claimed(self) -> Save:
        saver, call = self._saver, self._call
        staged, call.staged = call.staged, None
        call.was_staged = staged is not None
        if staged is not None and isinstance(saver, DefaultMLFlashpointCheckpointSaver):
            return saver.claim(staged)
        if call.save is not None:
            return call.save
        save = saver.begin(exchanged=True)
        save.worker = threading.current_thread()
        return save


def _desert(save: Save) -> None:
    # Only noted, as in `staged_state`.
    save.deserted = True
