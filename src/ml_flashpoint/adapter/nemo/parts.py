"""Parts of the engine that one wrapped trainer has."""

from __future__ import annotations

import atexit
import logging

from ml_flashpoint.adapter.megatron.load_strategies import MLFlashpointMegatronLoadStrategy
from ml_flashpoint.adapter.megatron.save_strategies import MLFlashpointMegatronAsyncSaveStrategy
from ml_flashpoint.adapter.pytorch.memory_storage_writer import MemoryStorageWriter
from ml_flashpoint.config import Config
from ml_flashpoint.engine.checkpointer import Checkpointer
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.knobs import exit_deadline_s

_log = logging.getLogger(__name__)


class EngineParts:
    """A checkpointer of one base container, with megatron-core's strategies on it. They end with the process.
    Collective to construct.

    Attributes:
        grace_s: seconds at most that a trainer which ends after SIGTERM waits for saves, and for persisting.
    """

    def __init__(self, base: CheckpointContainerId, config: Config, *, grace_s: float = 20.0) -> None:
        self.engine = Checkpointer(base, config)
        # No child processes: our requests have a queue of their own, and nothing for a process to do.
        self.save_strategy = MLFlashpointMegatronAsyncSaveStrategy(MemoryStorageWriter(self.engine), child=False)
        self.load_strategy = MLFlashpointMegatronLoadStrategy(checkpoint_loader=self.engine)
        self.grace_s = grace_s
        atexit.register(self.close)

    def settle(self) -> None:
        """Give saves in flight time to get their copies."""
        if not self.engine.wait(exit_deadline_s()):
            _log.warning("the newest save may lack copies on other nodes")

    def close(self) -> None:
        """Let saves in flight finish, and the newest version be persisted, and end the engine. Versions stay.
        Safe to call twice."""
        atexit.unregister(self.close)
        self.save_strategy.stop_watching()
        self.engine.close(exit_deadline_s())
