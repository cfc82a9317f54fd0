"""`MemoryStorageWriter`: torch DCP's way into the engine, and its own stager.

Owns the translation of DCP's calls (stage, plan, write, finish) into one save of the engine. For asynchronous
saves the staged copies *are* the object: they are named once DCP has planned, not copied again. DCP does not
say, when it stages, which checkpoint this is for, and it writes on another thread or in another process; a
staged save therefore waits to be claimed by the next write that comes from elsewhere.
"""

from __future__ import annotations

import io
import logging
import os
import threading
from collections import Counter
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ml_flashpoint.adapter.pytorch.state_dict_stager import TensorLeaves, is_plain_strided, unique_names
from ml_flashpoint.adapter.pytorch.storage_data import (
    METADATA_KEY,
    METADATA_SCOPE,
    ItemPlace,
    encode_metadata,
)
from ml_flashpoint.core.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.core.checkpoint_saver import (
    DefaultMLFlashpointCheckpointSaver,
    MLFlashpointCheckpointSaver,
)
from ml_flashpoint.core.errors import FlashpointError, InvalidArgumentError, NotStagedError, SaveError
from ml_flashpoint.core.object_writer import BytesItem, TensorItem
from ml_flashpoint.core.save_ticket import SaveTicket

_log = logging.getLogger(__name__)

_Signature = list[tuple[str, torch.dtype, torch.Size]]


class _Save(threading.local):
    """What one thread is saving. DCP runs the whole of a save on one thread, and may run two at once."""

    version: CheckpointContainerId | None = None
    ticket: SaveTicket | None = None
    is_coordinator: bool = False
    use_collectives: bool = True


class MemoryStorageWriter(StorageWriter):
    """Saves DCP checkpoints into memory. Use one writer for all saves of a job: it holds the arenas.

    Args:
        checkpoint_saver: the engine's saver.
        mp_manager: accepted for callers that pass it, not needed: a saving process reports through files.
        cache_staged_state_dict: stage into arenas that stay in memory between saves (the default, and what makes
            a save one copy). Memory: two versions of what this rank saves. Off, each asynchronous save first
            clones the state, which needs no memory between saves but one more copy, and page faults, in each.

    Raises:
        InvalidArgumentError: ``checkpoint_saver`` is none.
    """

    # torch's AsyncStager protocol, which it recognises by these names: staging is done when `stage` returns.
    should_synchronize_after_execute = False
    _synchronize_after_execute = False

    def __init__(
        self,
        checkpoint_saver: MLFlashpointCheckpointSaver,
        mp_manager: Any = None,
        *,
        cache_staged_state_dict: bool = True,
    ) -> None:
        super().__init__()
        if not isinstance(checkpoint_saver, MLFlashpointCheckpointSaver):
            raise InvalidArgumentError(
                "must be an MLFlashpointCheckpointSaver", argument="checkpoint_saver", value=checkpoint_saver
            )
        self._saver = checkpoint_saver
        self._cache_staged = cache_staged_state_dict
        self._save = _Save()
        self._stager_thread: int | None = None
        # Of the structure staged last: the tensors that this rank's plan needed, None while unknown.
        self._signature: _Signature | None = None
        self._needed: frozenset[str] | None = None
        self._last_staged: tuple[SaveTicket, dict[int, str]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # To a saving process: the saver becomes one that carries the staged save.
        return {"_saver": self._saver, "_cache_staged": self._cache_staged}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["_saver"], cache_staged_state_dict=state["_cache_staged"])  # type: ignore[misc]

    @property
    def saver(self) -> MLFlashpointCheckpointSaver:
        """The engine's saver."""
        return self._saver

    @property
    def checkpoint_id(self) -> str | None:
        """The checkpoint that the calling thread is saving; torch logs it."""
        return str(self._save.version) if self._save.version is not None else None

    # ---- AsyncStager --------------------------------------------------------------------------------------

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy the tensors of a state dict into an arena; the state dict returned consists of the copies.

        Tensors that other ranks write, known from the last save of the same structure, are left out: their
        places hold tensors without data. A failure is kept and raised by the write, where DCP tells all ranks.
        """
        saver = self._saver
        if not isinstance(saver, DefaultMLFlashpointCheckpointSaver):
            raise SaveError("a writer in a saving process does not stage")
        leaves = TensorLeaves.of(state_dict)
        names = unique_names(leaves.names)
        self._stager_thread = threading.get_ident()
        self._learn_needed()
        signature = [(name, t.dtype, t.shape) for name, t in zip(names, leaves.tensors, strict=True)]
        if signature != self._signature:
            self._signature, self._needed = signature, None
        chosen = [i for i, name in enumerate(names) if self._needed is None or name in self._needed]
        ticket = saver.begin()
        copies: list[torch.Tensor] | None = None
        try:
            if self._cache_staged:
                copies = saver.stage(ticket, [(names[i], leaves.tensors[i]) for i in chosen])
        except (FlashpointError, OSError, RuntimeError) as error:
            _log.error("staging failed: %s", error)
            ticket.error = error
            chosen, copies = [], []
        if copies is None:
            # No base container is known yet: the first asynchronous save of a job clones, once.
            copies = [leaves.tensors[i].to("cpu", copy=True) for i in chosen]
        elif ticket.staged is not None:
            begins = {int(copies[at].data_ptr()) - ticket.staged.arena.address: names[i] for at, i in enumerate(chosen)}  # type: ignore[union-attr]
            self._last_staged = (ticket, begins)
        saver.offer(ticket)
        replacements = [torch.empty_like(t, device="meta") for t in leaves.tensors] if len(chosen) < len(names) else []
        if not replacements:
            replacements = list(copies)
        else:
            for at, i in enumerate(chosen):
                replacements[i] = copies[at]
        return leaves.rebuild(replacements)

    def synchronize_staging(self) -> None:
        """Nothing to wait for: :meth:`stage` returns when the copy is done."""

    def close(self) -> None:
        """Let saves under way finish and stop the background work."""
        if isinstance(self._saver, DefaultMLFlashpointCheckpointSaver):
            self._saver.close()

    def _learn_needed(self) -> None:
        if self._last_staged is not None:
            ticket, names = self._last_staged
            if ticket.used is not None:
                self._needed = frozenset(names[begin] for begin in ticket.used if begin in names)
                self._last_staged = None

    # ---- StorageWriter ------------------------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        save = self._save
        if save.ticket is not None:
            # This thread's last save was neither sealed nor failed: its plan failed on another rank.
            self._saver.fail(save.ticket, SaveError("the checkpoint failed on another rank"))
            save.ticket = None
        save.version = None if checkpoint_id is None else CheckpointContainerId(checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        try:
            return CheckpointContainerId(checkpoint_id).step is not None
        except FlashpointError:
            return False

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._save.is_coordinator = is_coordinator
        self._save.use_collectives = bool(kwargs.get("use_collectives", True))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Make this rank's object of everything in its plan; seal it, unless :meth:`finish` has something to add.

        Raises:
            FlashpointError: through DCP, on every rank. The next save is not affected.
        """
        save = self._save
        ticket = save.ticket = self._ticket()
        future: Future[list[WriteResult]] = Future()
        try:
            if save.version is None:
                raise InvalidArgumentError("DCP gave no checkpoint id", argument="checkpoint_id", value=None)
            keys = _keys(plan.items)
            tensors, byte_items = _resolve(plan, planner, keys)
            self._saver.write(ticket, save.version, tensors, byte_items)
            if not save.is_coordinator:
                self._saver.seal(ticket, labels={"door": "dcp"})
                save.ticket = None
        except BaseException as error:
            self._saver.fail(ticket, error)
            save.ticket = None
            raise
        rank = self._saver.rank
        sizes = {key: t.nbytes for key, t in tensors} | {key: len(data) for key, data in byte_items}
        future.set_result(
            [
                WriteResult(index=item.index, size_in_bytes=sizes[key], storage_data=ItemPlace(rank, key))
                for item, key in zip(plan.items, keys, strict=True)
            ]
        )
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator: seal its part, with DCP's metadata as one more object. The version is complete."""
        save = self._save
        ticket, save.ticket = save.ticket, None
        if ticket is None:
            raise SaveError("nothing was written to finish", rank=self._saver.rank)
        try:
            metadata.storage_data = {result.index: result.storage_data for part in results for result in part}
            metadata.storage_meta = self.storage_meta()
            scope = "global" if save.use_collectives else "rank"
            self._saver.seal(
                ticket,
                extra=[(METADATA_KEY, encode_metadata(metadata))],
                labels={"door": "dcp", METADATA_SCOPE: scope},
            )
        except BaseException as error:
            self._saver.fail(ticket, error)
            raise

    def _ticket(self) -> SaveTicket:
        saver = self._saver
        if not isinstance(saver, DefaultMLFlashpointCheckpointSaver):
            return saver.begin()
        if threading.get_ident() != self._stager_thread:
            claimed = saver.claim()
            if claimed is not None:
                return claimed
        return saver.begin()


def _keys(items: list[WriteItem]) -> list[str]:
    """Name of each item in the object: its FQN, with the offset where one rank writes several shards of it."""
    counts = Counter(item.index.fqn for item in items)
    return [_key(item.index) if counts[item.index.fqn] > 1 else item.index.fqn for item in items]


def _key(index: MetadataIndex) -> str:
    offset = ",".join(map(str, index.offset)) if index.offset is not None else ""
    return f"{index.fqn}@{offset}"


def _resolve(plan: SavePlan, planner: SavePlanner, keys: list[str]) -> tuple[list[TensorItem], list[BytesItem]]:
    tensors: list[TensorItem] = []
    byte_items: list[BytesItem] = []
    for item, key in zip(plan.items, keys, strict=True):
        data = planner.resolve_data(item)
        if item.type is WriteItemType.BYTE_IO:
            assert isinstance(data, io.BytesIO)
            byte_items.append((key, data.getvalue()))
            continue
        assert isinstance(data, torch.Tensor)
        data = data.detach()
        if data.is_meta:
            raise NotStagedError(
                f"tensor {item.index.fqn!r} was not staged: another rank used to write it",
                hint="the structure of the state changed on another rank; the next save stages everything",
            )
        if is_plain_strided(data):
            tensors.append((key, data))
        else:
            stream = io.BytesIO()
            torch.save(data, stream)
            byte_items.append((key, stream.getvalue()))
    return tensors, byte_items
