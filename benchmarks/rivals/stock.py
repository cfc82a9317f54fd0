"""What torch itself has, and a thread that only copies: the least that saving beside the training can cost."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from benchmarks.rivals.kinds import Saves
from benchmarks.rivals.loops import Loop

WAIT_S = 120.0


class CopyAlone(Saves):
    """Copies the tensors of the state on a thread, into memory that is there, while the next step goes on."""

    def __init__(self, loop: Loop, folder: Path) -> None:
        super().__init__(loop, folder)
        self._sources = loop.tensors()
        self._targets = [torch.zeros_like(source) for source in self._sources]
        self._wanted, self._done, self._ended = threading.Event(), threading.Event(), False
        self._done.set()
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._thread.start()

    def _copy(self) -> None:
        while self._wanted.wait() and not self._ended:
            self._wanted.clear()
            for target, source in zip(self._targets, self._sources, strict=True):
                target.copy_(source)
            self._done.set()

    def save(self, step: int) -> None:
        self._done.clear()
        self._wanted.set()

    def before_update(self) -> None:
        if not self._done.wait(WAIT_S):
            raise TimeoutError("the copy did not end")

    def settle(self) -> None:
        self.before_update()

    def stored(self) -> int:
        return sum(target.nbytes for target in self._targets)

    def close(self) -> None:
        self._ended = True
        self._wanted.set()
        self._thread.join(WAIT_S)


class TorchSave(Saves):
    """`torch.save`, over the file before."""

    warmups = 1

    def save(self, step: int) -> None:
        torch.save(self.loop.state(), self.folder / "state.pt")


class AsyncSave(Saves):
    """`dcp.async_save` with the stager that keeps its memory between saves: shared, without a device to pin it for.

    It writes into two folders in turn, over the files before: so nothing is removed while the training thread waits.
    """

    by = AsyncCheckpointerType.THREAD

    def __init__(self, loop: Loop, folder: Path) -> None:
        super().__init__(loop, folder)
        one_rank(folder)
        pinned = torch.cuda.is_available()
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=pinned, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=pinned
            )
        )
        self._before: Any = None

    def save(self, step: int) -> None:
        self.settle()
        target = self.folder / str(step % 2)
        self._before = dcp.async_save(
            self.loop.state(),
            checkpoint_id=target,
            storage_writer=dcp.FileSystemWriter(target, sync_files=False),
            async_stager=self._stager,
            async_checkpointer_type=self.by,
        )

    def settle(self) -> None:
        if self._before is not None:
            getattr(self._before, "upload_completion", self._before).result(WAIT_S)
            self._before = None

    def stored(self) -> int:
        return super().stored() // 2

    def close(self) -> None:
        self.settle()
        self._stager.close()


class AsyncSaveByProcess(AsyncSave):
    """The same, written by another process."""

    by = AsyncCheckpointerType.PROCESS


def one_rank(folder: Path) -> None:
    """A process group of this process alone, for what asks for one."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("LOCAL_RANK", "0")
    if not dist.is_initialized():
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
