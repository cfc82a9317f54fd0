"""What one wrapped trainer has of the engine. Owns putting it together and ending it."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ml_flashpoint.adapter.megatron.load_strategies import MLFlashpointMegatronLoadStrategy
from ml_flashpoint.adapter.megatron.save_strategies import MLFlashpointMegatronAsyncSaveStrategy
from ml_flashpoint.adapter.pytorch.memory_storage_writer import MemoryStorageWriter
from ml_flashpoint.core.engine import CheckpointEngine
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.knobs import exit_deadline_s, seal_deadline_s

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The engine of one base container, and what megatron-core needs of it. They end with the process.

    Attributes:
        grace_s: seconds at most that a trainer which ends after SIGTERM waits for saves, and for persisting.
    """

    engine: CheckpointEngine
    save_strategy: MLFlashpointMegatronAsyncSaveStrategy
    load_strategy: MLFlashpointMegatronLoadStrategy
    grace_s: float = 20.0

    @classmethod
    def make(cls, base: CheckpointContainerId, *, grace_s: float = 20.0, **options: Any) -> EngineParts:
        """Collective: put them together, with options of `CheckpointEngine`."""
        engine = CheckpointEngine(base, **options)
        # No child processes: our requests have a queue of their own, and nothing for a process to do.
        save_strategy = MLFlashpointMegatronAsyncSaveStrategy(MemoryStorageWriter(engine.saver), child=False)
        load_strategy = MLFlashpointMegatronLoadStrategy(engine.replication, engine.loader)
        parts = cls(engine, save_strategy, load_strategy, grace_s)
        atexit.register(parts.close)
        return parts

    def watch(self, optimizers: Iterable[Any]) -> bool:
        """Have what the optimizers of a trainer update copied while training goes on, and nothing else from now on.

        Returns:
            Whether there are any.
        """
        self.save_strategy.stop_watching()
        # NeMo's wrap megatron-core's, and have no hooks.
        inner = [getattr(each, "mcore_optimizer", each) for each in optimizers]
        self.save_strategy.watch(*inner)
        return bool(inner)

    def newest(self) -> Path | None:
        """Collective: the newest version that all ranks can load, in memory or persisted, fetched and verified."""
        found = self.engine.latest()
        return None if found is None else Path(str(found))

    def check_asked(self) -> None:
        """Raise if training would overwrite versions that nobody has asked about.

        Raises:
            UnaskedVersionsError: so it is, on all ranks.
        """
        self.engine.check_asked("setup() of what wrap_trainer_and_auto_resume_with_mlflashpoint has returned")

    def settle(self) -> None:
        """Give saves under way time to get their copies."""
        if not self.engine.saver.wait(exit_deadline_s()):
            _log.warning("the newest save may lack copies on other nodes")

    def end(self, *, keep: bool) -> None:
        """The planned end of training: have the last version persisted, if any are to be. Collective unless ``keep``.

        Args:
            keep: leave versions in memory.
        """
        if not keep:
            self.engine.remove_versions()
        elif self.engine.persisting is not None:
            self.engine.finish(seal_deadline_s())

    def end_within_grace(self) -> None:
        """The end after SIGTERM: have saves under way committed and copied, and the newest version persisted."""
        self.engine.finish(self.grace_s)

    def close(self) -> None:
        """Let saves under way finish, and the newest version be persisted, and end the background work. Versions stay.
        Idempotent."""
        atexit.unregister(self.close)
        self.save_strategy.stop_watching()
        self.engine.close(exit_deadline_s())
