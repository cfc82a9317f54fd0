"""Others' packages, called as their own documentation has it, on CPU tensors. Each is imported where it is."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from benchmarks.rivals.kinds import Saves
from benchmarks.rivals.loops import Loop
from benchmarks.rivals.stock import WAIT_S, one_rank


class LmResiliency(Saves):
    """lm-resiliency's manager, with what its optimizer hook gives it. Nothing is flushed to a disk.

    Of CPU tensors it makes the copy before it returns, into memory of the process.
    """

    def __init__(self, loop: Loop, folder: Path) -> None:
        from lm_resiliency import InMemoryCkptConfig
        from lm_resiliency.checkpointing.manager import InMemoryCheckpointManager

        super().__init__(loop, folder)
        config = InMemoryCkptConfig(
            interval=1, disk_flush_interval=0, disk_folder=str(folder / "flushed"), pin_memory=torch.cuda.is_available()
        )
        self._manager = InMemoryCheckpointManager(config)

    def save(self, step: int) -> None:
        self._manager.save(self.loop.state(), step)

    def settle(self) -> None:
        self._manager.finalize_replication(WAIT_S)

    def stored(self) -> int:
        self._manager.flush_for_restart()
        newest = max((self.folder / "flushed").rglob("*"), key=lambda path: path.stat().st_size)
        return newest.stat().st_size

    def close(self) -> None:
        self._manager.close()


class TorchCheckpointing(Saves):
    """torch-checkpointing's manager: staged on a thread, written by a process; updates wait for the copy by its lock.

    Checkpoints are folders that it does not remove; the one before the last is removed by a thread.
    """

    def __init__(self, loop: Loop, folder: Path) -> None:
        from torch_checkpointing import CheckpointManager

        super().__init__(loop, folder)
        self._manager = CheckpointManager(CheckpointManager.Config.with_async_save())
        self._written: Future[Any] | None = None
        self._remover = ThreadPoolExecutor(1)
        self._kept: list[Path] = []

    def save(self, step: int) -> None:
        target = self.folder / f"step-{step}"
        self._written = self._manager.save(str(target), self.loop.state())
        self._kept.append(target)
        while len(self._kept) > 2:  # when this save is accepted, that before it is written
            self._remover.submit(shutil.rmtree, self._kept.pop(0))

    def before_update(self) -> None:
        with self._manager.lock():
            pass

    def settle(self) -> None:
        if self._written is not None:
            self._written.result(WAIT_S)

    def stored(self) -> int:
        return sum(path.stat().st_size for path in self._kept[-1].rglob("*") if path.is_file())

    def close(self) -> None:
        self._manager.close()
        self._remover.shutdown()


class NvidiaResiliency(Saves):
    """nvidia-resiliency-ext's local checkpoints, synchronous: its asynchronous saves call CUDA."""

    warmups = 1

    def __init__(self, loop: Loop, folder: Path) -> None:
        from nvidia_resiliency_ext.checkpointing.local.base_state_dict import TensorAwareStateDict
        from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager

        super().__init__(loop, folder)
        one_rank(folder)
        # Its own class refuses CPU tensors. Of the module, since it is pickled by name.
        global CpuState
        CpuState = type("CpuState", (_CpuState, TensorAwareStateDict), {"__module__": __name__})
        self._manager = LocalCheckpointManager(folder / "local")
        self._manager.find_latest()

    def save(self, step: int) -> None:
        self._manager.save(CpuState(self.loop.state()), step)


CpuState: Any = None


class _CpuState:
    """What a state of theirs needs to have, of one whose tensors are on the CPU already."""

    def __init__(self, state: Any) -> None:
        self.state, self._taken = state, False

    def _held(self) -> Iterator[tuple[dict[Any, Any], Any]]:
        rest = [self.state]
        while rest:
            for key, value in (each := rest.pop()).items():
                if isinstance(value, dict):
                    rest.append(value)
                elif torch.is_tensor(value):
                    yield each, key

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        return (each[key] for each, key in self._held())

    @property
    def is_hollow(self) -> bool:
        return self._taken

    def pop_tensors(self) -> list[torch.Tensor]:
        self._taken = True
        return list(self.tensors)

    def insert_tensors(self, tensors: Any) -> None:
        self._taken = False

    def init_tensors(self) -> None: ...

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None: ...

    def restore_tensor_device(self, non_blocking: bool = True) -> None: ...


class MlFlashpoint(Saves):
    """The other ml-flashpoint: its writer behind `dcp.async_save`, by a process, as its guide has it."""

    def __init__(self, loop: Loop, folder: Path) -> None:
        from ml_flashpoint.adapter.pytorch.memory_storage_writer import MemoryStorageWriter
        from ml_flashpoint.checkpoint_object_manager.checkpoint_object_manager import CheckpointObjectManager
        from ml_flashpoint.core.checkpoint_id_types import CheckpointContainerId
        from ml_flashpoint.core.checkpoint_saver import DefaultMLFlashpointCheckpointSaver
        from ml_flashpoint.replication.replication_manager import ReplicationManager

        super().__init__(loop, folder)
        one_rank(folder)
        objects, replication = CheckpointObjectManager(), ReplicationManager()
        replication.initialize(objects)
        self._ids, self._base = CheckpointContainerId, CheckpointContainerId(str(folder / "job"))
        saver = DefaultMLFlashpointCheckpointSaver(
            global_rank_getter=dist.get_rank,
            local_rank_getter=dist.get_node_local_rank,
            global_barrier_func=dist.barrier,
            ckpt_obj_manager=objects,
            replication_manager=replication,
            initial_buffer_size_bytes=int(1.2 * loop.nbytes),
        )
        self._writer = MemoryStorageWriter(checkpoint_saver=saver, mp_manager=torch.multiprocessing.Manager())
        self._before: Any = None

    def save(self, step: int) -> None:
        self.settle()
        version = self._ids.create_child(self._base, self._ids.format_version_container(step))
        self._before = dcp.async_save(
            self.loop.state(),
            checkpoint_id=str(version),
            storage_writer=self._writer,
            async_checkpointer_type=dcp.state_dict_saver.AsyncCheckpointerType.PROCESS,
        )

    def settle(self) -> None:
        if self._before is not None:
            getattr(self._before, "upload_completion", self._before).result(WAIT_S)
            self._before = None

    def stored(self) -> int:
        return max(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())

    def close(self) -> None:
        self.settle()
