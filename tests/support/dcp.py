"""The DCP door, put together as a user would, for tests in one process and for scripts on many ranks."""

from __future__ import annotations

import os
import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp

from ml_flashpoint.adapter.pytorch.memory_storage_reader import MemoryStorageReader
from ml_flashpoint.adapter.pytorch.memory_storage_writer import MemoryStorageWriter
from ml_flashpoint.adapter.pytorch.seed import (
    CheckpointObjectManager,
    DefaultMLFlashpointCheckpointLoader,
    DefaultMLFlashpointCheckpointSaver,
    ReplicationManager,
)
from ml_flashpoint.engine.checkpointer import Checkpointer
from ml_flashpoint.format.names import CheckpointContainerId
from ml_flashpoint.format.object_format import ParsedHeader, parse_header
from tests.support.tensors import assert_same, blank

try:
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
except ImportError:  # torch 2.6 knows threads only
    AsyncCheckpointerType = None  # type: ignore[assignment,misc]

RESULT_TIMEOUT_S = 60.0

# Torch says so at every save and load without a process group, which is what many tests are about.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def checkpointer(mode: str) -> dict[str, Any]:
    """How `dcp.async_save` is told to save in a ``thread`` or a ``process``."""
    if AsyncCheckpointerType is None:
        assert mode == "thread"
        return {}
    return {"async_checkpointer_type": AsyncCheckpointerType[mode.upper()]}


class Door:
    """A writer and a reader on one base container. Collective, where there are several ranks.

    Args:
        base: base container; need not exist.
        writer: arguments of the writer.
    """

    def __init__(self, base: Path, **writer: Any) -> None:
        self.base = base
        self.objects = CheckpointObjectManager()
        self.replication = ReplicationManager()
        self.replication.initialize(self.objects)
        self.saver = DefaultMLFlashpointCheckpointSaver(
            ckpt_obj_manager=self.objects, replication_manager=self.replication
        )
        self.writer = MemoryStorageWriter(self.saver, **writer)
        self.loader = DefaultMLFlashpointCheckpointLoader(self.objects, self.replication)

    def version(self, step: int) -> str:
        return str(CheckpointContainerId.create_child(self.base, CheckpointContainerId.format_version_container(step)))

    def save(self, state: dict[str, Any], step: int, **options: Any) -> Any:
        return dcp.save(state, checkpoint_id=self.version(step), storage_writer=self.writer, **options)

    def async_save(self, state: dict[str, Any], step: int, **options: Any) -> Future[Any]:
        future = dcp.async_save(state, checkpoint_id=self.version(step), storage_writer=self.writer, **options)
        return getattr(future, "upload_completion", future)  # type: ignore[no-any-return]

    def save_by(self, mode: str, state: dict[str, Any], step: int, **options: Any) -> None:
        """Save and wait: ``sync``, ``thread`` or ``process``."""
        if mode == "sync":
            self.save(state, step, **options)
            return
        self.async_save(state, step, **checkpointer(mode), **options).result(RESULT_TIMEOUT_S)

    def put(self, step: int, tensors: Any, byte_items: Any = ()) -> None:
        """Save a version by other means than DCP's."""
        save = self.saver.saves.begin(CheckpointContainerId(self.version(step)), None)
        save.fill(tensors, byte_items)
        save.commit()
        save.committed.result(RESULT_TIMEOUT_S)

    def latest(self) -> int | None:
        """The step that a recovery would go on from."""
        found = self.loader.get_latest_complete_checkpoint(self.base)
        return None if found is None else found.step

    def load(self, state: dict[str, Any], step: int, *, reader: dict[str, Any] | None = None, **options: Any) -> Any:
        """Recover, which must find ``step``, and load it into ``state``; returns ``state``."""
        found = self.loader.get_latest_complete_checkpoint(self.base)
        assert found is not None, "no version can be recovered"
        assert found.step == step, f"step {found.step} was found, not {step}"
        storage_reader = MemoryStorageReader(path=str(found), checkpoint_loader=self.loader, **(reader or {}))
        dcp.load(state, checkpoint_id=str(found), storage_reader=storage_reader, **options)
        return state

    def round_trip(self, state: dict[str, Any], step: int, mode: str = "sync", **options: Any) -> None:
        """Save, recover, and check that what is loaded is what was saved."""
        self.save_by(mode, state, step, **options)
        assert_same(self.load(blank(state), step), state)

    def settle(self) -> None:
        """Wait until what was saved is verified everywhere."""
        assert self.saver.wait(RESULT_TIMEOUT_S), "saves are still under way"

    @property
    def checkpointer(self) -> Checkpointer:
        """The base container, which a save or a recovery has opened before."""
        assert self.objects.opened is not None
        return self.objects.opened

    def slot_bytes(self, rank: int = 0) -> list[int]:
        """Sizes of the files of all slots for a rank's parts here: what its checkpoints cost in memory."""
        folders = (self.base / ".flashpoint" / "slots").glob(f"*-{rank:05d}")
        return sorted(entry.stat().st_size for folder in folders for entry in os.scandir(folder))

    def object_path(self, step: int, rank: int = 0) -> Path:
        """The newest object of a rank in a version on this node."""
        return max((self.base / f"step-{step}_ckpt").glob(f"rank-{rank:05d}-*.safetensors"))

    def header(self, step: int, rank: int = 0) -> ParsedHeader:
        """What that object says of itself, on disk."""
        data = self.object_path(step, rank).read_bytes()
        return parse_header(data, len(data))

    def close(self) -> None:
        """Finish, and let go of the base container; what was saved stays."""
        self.writer.close()
        self.objects.close()
