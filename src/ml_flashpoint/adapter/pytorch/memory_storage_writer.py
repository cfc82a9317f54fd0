"""`MemoryStorageWriter`: torch DCP's way into the engine, and its own stager.

Translates DCP's calls (stage, plan, write, finish) into one save. For asynchronous saves the staged copies *are* the
object: they are named once DCP has planned, not copied again.
"""

from __future__ import annotations

import io
import logging
import os
import threading
import time
import uuid
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ml_flashpoint.adapter.pytorch.metadata_format import METADATA_KEY, ItemPlace, encode_metadata
from ml_flashpoint.adapter.pytorch.saves import (
    LocalSaves,
    Omission,
    RemoteSave,
    RemoteSaves,
    StagedStateDict,
    take_read,
)
from ml_flashpoint.adapter.pytorch.seed import DefaultMLFlashpointCheckpointSaver
from ml_flashpoint.adapter.pytorch.staging import TensorLeaves
from ml_flashpoint.copy.collection import collection_paused
from ml_flashpoint.copy.overlap import LateCopy, Overlap, OverlappingDoor
from ml_flashpoint.copy.tensors import is_plain_strided, materialized
from ml_flashpoint.engine.checkpointer import Checkpointer
from ml_flashpoint.engine.committing import BytesItem, TensorItem
from ml_flashpoint.engine.save import Save
from ml_flashpoint.format.arguments import ignored
from ml_flashpoint.format.errors import InvalidArgumentError, NotStagedError, SaveError
from ml_flashpoint.format.knobs import exit_deadline_s
from ml_flashpoint.format.names import CheckpointContainerId
from ml_flashpoint.state.archive import SafeGlobal, by_name, load_archive, save_archive
from ml_flashpoint.state.plan import item_keys

_log = logging.getLogger(__name__)


class _Call(threading.local):
    """A save of DCP's, which runs the whole of it on one thread, and may run two at once."""

    def __init__(self) -> None:
        self.begin(None)

    def begin(self, checkpoint_id: str | os.PathLike[str] | None) -> None:
        """Begin anew."""
        self.id = checkpoint_id
        self.staged: Any = None  # what it reads that was staged
        self.save: Save | RemoteSave | None = None  # once begun
        self.is_coordinator = False
        self.own_tensors: frozenset[str] | None = None  # names in this rank's plan; None if it stands for a cached one
        self.save_id = str(uuid.uuid4())
        self.began = time.perf_counter()


class MemoryStorageWriter(OverlappingDoor, StorageWriter):
    """Saves DCP checkpoints into memory. Use one writer for all saves of a job.

    Args:
        checkpoint_saver: a `Checkpointer`, or a `DefaultMLFlashpointCheckpointSaver`.
        mp_manager, thread_count, mp_manager_future, cache_staged_state_dict: accepted for callers that pass them, and
            ignored: what is staged lies in a slot, which stays in memory between saves.
        safe_globals: further types that non-tensor items may be made of; the reader must be given the same. What it
            would refuse is refused when it is saved.
        trust_bytes: save whatever bytes the planner gives. Only for planners of readers with ``trust_bytes``.

    Attributes:
        saver: ``checkpoint_saver``; None in a saving process.

    Raises:
        InvalidArgumentError: ``checkpoint_saver`` is neither.
    """

    # torch's AsyncStager protocol, which it recognises by these names: nobody has to ask whether staging is done.
    should_synchronize_after_execute = False
    _synchronize_after_execute = False
    saver: Checkpointer | DefaultMLFlashpointCheckpointSaver | None = None

    def __init__(
        self,
        checkpoint_saver: Checkpointer | DefaultMLFlashpointCheckpointSaver,
        mp_manager: Any = None,
        thread_count: int | None = None,
        *,
        mp_manager_future: Any = None,
        cache_staged_state_dict: bool | None = None,
        safe_globals: Sequence[SafeGlobal] = (),
        trust_bytes: bool = False,
    ) -> None:
        super().__init__()
        unused = {"mp_manager": mp_manager, "thread_count": thread_count, "mp_manager_future": mp_manager_future}
        ignored("MemoryStorageWriter", **unused, cache_staged_state_dict=cache_staged_state_dict)
        if not isinstance(checkpoint_saver, (Checkpointer, DefaultMLFlashpointCheckpointSaver)):
            raise InvalidArgumentError(
                "must be a Checkpointer or a DefaultMLFlashpointCheckpointSaver",
                argument="checkpoint_saver",
                value=checkpoint_saver,
            )
        saver = checkpoint_saver
        if isinstance(saver, Checkpointer):
            saves = LocalSaves(saver.ranks, lambda base: saver, lambda: saver)
        else:
            saves = saver.saves
        self._set_up(saves, by_name(safe_globals), trust_bytes)
        self.saver = checkpoint_saver

    def _set_up(self, saves: LocalSaves | RemoteSaves, safe_globals: tuple[SafeGlobal, ...], trust_bytes: bool) -> None:
        self._saves = saves
        self._safe_globals = safe_globals
        self._trust_bytes = trust_bytes
        self._call = _Call()
        self._omission = Omission()
        self._overlap = Overlap()

    def __getstate__(self) -> tuple[Any, ...]:
        return self._local.sent(), self._safe_globals, self._trust_bytes

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        super().__init__()
        self._set_up(*state)

    @property
    def _local(self) -> LocalSaves:
        assert isinstance(self._saves, LocalSaves), "a writer in a saving process does not stage"
        return self._saves

    @property
    def checkpoint_id(self) -> str | None:
        """Return the checkpoint that the calling thread is saving; torch logs it."""
        return None if self._call.id is None else str(self._call.id)

    # ---- for adapters that plan before they stage -------------------------------------------------------------

    def enter(self, version: CheckpointContainerId) -> Checkpointer:
        """Return the checkpointer of a version that all ranks are about to save. Collective as `LocalSaves.enter`."""
        return self._local.enter(version)

    def late(self, tensors: Sequence[TensorItem]) -> LateCopy | None:
        """Return a late copy of those tensors that watched optimizers update, for `Checkpointer.stage`."""
        return self._overlap.begin(tensor for _, tensor in tensors)

    def items(
        self, plan: SavePlan, planner: SavePlanner, keys: list[str], *, safe_globals: Sequence[SafeGlobal] = ()
    ) -> tuple[list[TensorItem], list[BytesItem]]:
        """Return the data of a plan's items, for `Checkpointer.fill`: tensors to be stored as such, and bytes.

        Args:
            keys: names of the items. safe_globals: types that may be saved beside those of the writer.

        Raises:
            NotStagedError: a tensor has no data.
            FlashpointError: a reader would refuse an item.
        """
        allowed = (*self._safe_globals, *by_name(safe_globals))
        tensors: list[TensorItem] = []
        byte_items: list[BytesItem] = []
        for item, key in zip(plan.items, keys, strict=True):
            if item.type is WriteItemType.BYTE_IO:
                content = _bytes_of(item, planner) if self._trust_bytes else _loadable(item, planner, allowed)
                byte_items.append((key, content))
                continue
            data = planner.resolve_data(item)
            assert isinstance(data, torch.Tensor)
            data = materialized(data)
            if data.is_meta:
                raise NotStagedError(
                    f"tensor {item.index.fqn!r} has no data: it is a meta tensor, or another rank used to write it",
                    hint="give it data; or, if the structure of the state has changed on another rank, save again",
                )
            if is_plain_strided(data):
                tensors.append((key, data))
            else:
                byte_items.append((key, save_archive(data, str(item.index.fqn), allowed=allowed)))
        return tensors, byte_items

    # ---- AsyncStager --------------------------------------------------------------------------------------

    def stage(self, state_dict: dict[str, Any], *, promised: bool = False) -> StagedStateDict:
        """Copy the tensors of a state dict into a slot. Return a state of the copies that can be saved once, by any
        thread, or in another process if pickled.

        Tensors that other ranks write, known from the last save of the same structure, are left out: in their places
        are tensors without data. A failure is raised as the save begins, where DCP tells all ranks.

        Args:
            promised: the caller changes no tensor on a CUDA device before all is copied. Where an optimizer is watched,
                only what that updates is copied late; else all that is there.
        """
        began = time.perf_counter()
        self._overlap.before_update()
        staged, state = self._local.next(), dict[str, Any]()
        try:
            with collection_paused():
                leaves = TensorLeaves(state_dict, self._omission.places)
                needed, names = self._omission.needed(leaves, staged), leaves.names
                tensors = [(names[i], leaves.tensors[i]) for i in needed]
                copies = staged.copy(tensors, self._overlap.begin((each for _, each in tensors), promised=promised))
                state = leaves.rebuild(dict(zip(needed, copies, strict=True)))
        except Exception as error:  # not raised here, where it would leave the other ranks waiting
            _log.error("staging failed: %s", error)
            staged.fail(error)
        staged.held_s = time.perf_counter() - began
        return self._local.staged(staged, state)

    def synchronize_staging(self) -> None:
        """Have what this thread gives to the devices from now on wait for the copy; watched optimizers do so anyway."""
        self.before_update()

    def give_up(self) -> None:
        """Give up saves that DCP has not finished, and does nothing with any more: they failed on another rank."""
        self._local.give_up()

    def close(self) -> None:
        """Watch no optimizers any more, have saves in flight committed within ``FLASHPOINT_EXIT_DEADLINE_S``, and break
        off what saving processes write then. The checkpointer stays open. Safe to call twice."""
        self.stop_watching()
        self._local.wait(exit_deadline_s())
        self._local.close()

    # ---- StorageWriter ------------------------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a save on the calling thread."""
        self._call.begin(checkpoint_id)
        take_read()  # nothing is read for it yet

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True if an id names a version of a base container."""
        return CheckpointContainerId.of_version(checkpoint_id) is not None

    def storage_meta(self) -> StorageMeta | None:
        """Begin the save, and return what DCP tells planners about it. DCP asks once it has read the state.

        Raises:
            FlashpointError: through DCP, on every rank: it cannot begin, or staging failed.
        """
        call = self._call
        if call.save is not None:
            raise InvalidArgumentError("DCP gave no checkpoint id", argument="checkpoint_id", value=None)
        call.staged = take_read()
        call.save = self._saves.begin(call.id, call.staged)
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=call.save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Take note of the calling rank's role in this save."""
        if not kwargs.get("use_collectives", True):
            raise InvalidArgumentError("ranks save one version together", argument="use_collectives", value=False)
        self._call.is_coordinator = is_coordinator

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Leave the plan as it is."""
        if getattr(plan, "usable", True):
            tensors = (item.index.fqn for item in plan.items if item.type is not WriteItemType.BYTE_IO)
            self._call.own_tensors = frozenset(tensors)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Leave the plans as they are. Raise a `SaveError`, through DCP on every rank, if not all ranks save."""
        saves = self._saves
        if len(plans) != saves.world_size:
            raise SaveError(
                f"{len(plans)} of the job's {saves.world_size} ranks save, which makes no version",
                rank=saves.rank,
                hint="save from all ranks: pass a process_group that has all of them, or none",
            )
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Make this rank's object of everything in its plan; commit it, unless :meth:`finish` has something to add.

        Raises:
            FlashpointError: through DCP, on every rank. The next save is not affected.
        """
        call = self._call
        if call.save is None:
            raise SaveError("write_data comes before reset and storage_meta")
        # Only torch's planner is known to write each tensor under the name of its place and from itself alone.
        is_plain = type(planner) is DefaultSavePlanner and planner.flatten_state_dict
        if is_plain and call.staged is not None and call.own_tensors is not None:
            call.staged.others = call.own_tensors - {item.index.fqn for item in plan.items}
        try:
            keys = item_keys(plan.items)
            tensors, byte_items = self.items(plan, planner, keys)
            call.save.fill(tensors, byte_items)
            if not call.is_coordinator:
                self._commit(call)
        except BaseException as error:
            call.save.fail(error)
            raise
        sizes = {key: tensor.nbytes for key, tensor in tensors} | {key: len(data) for key, data in byte_items}
        future: Future[list[WriteResult]] = Future()
        future.set_result(
            [
                WriteResult(item.index, sizes[key], ItemPlace(self._saves.rank, key))
                for item, key in zip(plan.items, keys, strict=True)
            ]
        )
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator: commit its part, with DCP's metadata as one more object. The version is complete."""
        call = self._call
        if call.save is None:
            raise SaveError("nothing was written to finish", rank=self._saves.rank)
        try:
            metadata.storage_data = {result.index: result.storage_data for part in results for result in part}
            metadata.storage_meta = StorageMeta(checkpoint_id=self.checkpoint_id, save_id=call.save_id)
            self._commit(call, [(METADATA_KEY, encode_metadata(metadata, self._safe_globals))])
        except BaseException as error:
            call.save.fail(error)
            raise

    def _commit(self, call: _Call, extra: Sequence[BytesItem] = ()) -> None:
        assert call.save is not None
        assert call.id is not None
        call.save.commit(extra=extra)
        call.save.committed.result()
        if call.staged is None and isinstance(self._saves, LocalSaves):
            self._saves.note_held(CheckpointContainerId(call.id), time.perf_counter() - call.began)


def _loadable(item: WriteItem, planner: SavePlanner, allowed: tuple[SafeGlobal, ...]) -> bytes:
    """Return an item that is no tensor as an archive that a reader accepts, or the bytes that a planner makes."""
    fqn, own = str(item.index.fqn), DefaultSavePlanner
    if isinstance(planner, own) and all(
        getattr(type(planner), name) is getattr(own, name) for name in ("resolve_data", "transform_object")
    ):
        return save_archive(planner.lookup_object(item.index), fqn, allowed=allowed)
    content = _bytes_of(item, planner)
    load_archive(content, fqn, path="", allowed=allowed)
    return content


def _bytes_of(item: WriteItem, planner: SavePlanner) -> bytes:
    data = planner.resolve_data(item)
    assert isinstance(data, io.BytesIO)
    return data.getvalue()
