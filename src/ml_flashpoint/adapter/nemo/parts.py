"""What one wrapped trainer has of the engine. Owns putting it together and ending it."""

from __future__ import annotations

import atexit
import logging
from dataclasses import dataclass
from pathlib import Path

from ml_flashpoint.adapter.megatron.load_strategies import MLFlashpointMegatronLoadStrategy
from ml_flashpoint.adapter.megatron.save_strategies import MLFlashpointMegatronAsyncSaveStrategy
from ml_flashpoint.adapter.pytorch.memory_storage_writer import MemoryStorageWriter
from ml_flashpoint.checkpoint_object_manager.checkpoint_object_manager import CheckpointObjectManager
from ml_flashpoint.core.checkpoint_loader import DefaultMLFlashpointCheckpointLoader
from ml_flashpoint.core.checkpoint_saver import DefaultMLFlashpointCheckpointSaver
from ml_flashpoint.core.saver import unasked_versions
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.errors import FlashpointError
from ml_flashpoint.format.knobs import exit_deadline_s
from ml_flashpoint.ranks.rank_group import rank_group
from ml_flashpoint.replication.replication_manager import ReplicationManager

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The engine's parts for one base container. They end with the process."""

    base: CheckpointContainerId
    objects: CheckpointObjectManager
    replication: ReplicationManager
    saver: DefaultMLFlashpointCheckpointSaver
    loader: DefaultMLFlashpointCheckpointLoader
    save_strategy: MLFlashpointMegatronAsyncSaveStrategy
    load_strategy: MLFlashpointMegatronLoadStrategy

    @classmethod
    def make(cls, base: CheckpointContainerId, buffer_bytes: int, verify_saves: str = "sample") -> EngineParts:
        """Collective: put them together."""
        objects, replication = CheckpointObjectManager(), ReplicationManager()
        replication.initialize(objects)
        saver = DefaultMLFlashpointCheckpointSaver(
            ckpt_obj_manager=objects,
            replication_manager=replication,
            initial_buffer_size_bytes=buffer_bytes,
            verify_saves=verify_saves,
        )
        loader = DefaultMLFlashpointCheckpointLoader(objects, replication)
        # No child processes: our requests have a queue of their own, and nothing for a process to do.
        save_strategy = MLFlashpointMegatronAsyncSaveStrategy(MemoryStorageWriter(saver), child=False)
        load_strategy = MLFlashpointMegatronLoadStrategy(replication, loader)
        parts = cls(base, objects, replication, saver, loader, save_strategy, load_strategy)
        atexit.register(parts.close)
        return parts

    def holds(self, path: object) -> bool:
        """Whether a path is that of a version in the base container. Paths are compared, not their beginnings."""
        try:
            version = CheckpointContainerId(path)  # type: ignore[arg-type]
            return version.step is not None and version.parent == self.base
        except (FlashpointError, TypeError):
            return False

    def newest(self) -> Path | None:
        """Collective: the newest version that all ranks can load, fetched and verified."""
        found = self.loader.get_latest_complete_checkpoint(self.base)
        return None if found is None else Path(str(found))

    def check_asked(self) -> None:
        """Collective: raise if training would overwrite versions that nobody has asked about.

        Raises:
            UnaskedVersionsError: so it is, on all ranks.
        """
        ranks, asked = rank_group(), self.saver.is_asked(self.base)
        if not ranks.all_ok(asked):
            call = "setup() of what wrap_trainer_and_auto_resume_with_mlflashpoint has returned"
            raise unasked_versions(ranks.rank, None if asked else ranks.node, str(self.base), call=call)

    def settle(self) -> None:
        """Give saves under way time to get their copies."""
        if not self.saver.wait(exit_deadline_s()):
            _log.warning("the newest save may lack copies on other nodes")

    def close(self) -> None:
        """Let saves under way finish and end the background work. Versions stay. Idempotent."""
        atexit.unregister(self.close)
        self.saver.close(exit_deadline_s())
        self.replication.close()
        self.loader.release()
        self.objects.close()
