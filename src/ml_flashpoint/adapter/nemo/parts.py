"""Parts of the engine that one wrapped trainer has."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ml_flashpoint.adapter.megatron.load_strategies import MLFlashpointMegatronLoadStrategy
from ml_flashpoint.adapter.megatron.save_strategies import MLFlashpointMegatronAsyncSaveStrategy
from ml_flashpoint.adapter.pytorch.memory_storage_writer import MemoryStorageWriter
from ml_flashpoint.config import Config
from ml_flashpoint.engine.checkpointer import Checkpointer
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.knobs import exit_deadline_s, seal_deadline_s

_log = logging.getLogger(__name__)


class EngineParts:
    """A checkpointer of one base container, with megatron-core's strategies on it. They end with the process.
    Collective to construct.

    Args:
        grace_s: seconds at most that a trainer which ends after SIGTERM waits for saves, and for persisting.

    Attributes:
        engine: the checkpointer. save_strategy, load_strategy: for megatron-core.
    """

    def __init__(self, base: CheckpointContainerId, config: Config, *, grace_s: float = 20.0) -> None:
        self.engine = Checkpointer(base, config)
        # No child processes: our requests have a queue of their own, and nothing for a process to do.
        self.save_strategy = MLFlashpointMegatronAsyncSaveStrategy(MemoryStorageWriter(self.engine), child=False)
        self.load_strategy = MLFlashpointMegatronLoadStrategy(checkpoint_loader=self.engine)
        self._grace_s = grace_s
        self._found: CheckpointContainerId | None = None
        self._asked = False
        atexit.register(self.close)

    def watch(self, optimizers: Iterable[Any]) -> bool:
        """Have what the optimizers of a trainer update copied while training goes on, and nothing else from now on.

        Returns:
            True if there are any.
        """
        self.save_strategy.stop_watching()
        # NeMo's wrap megatron-core's, and have no hooks.
        inner = [getattr(each, "mcore_optimizer", each) for each in optimizers]
        self.save_strategy.watch(*inner)
        return bool(inner)

    def newest(self) -> Path | None:
        """Find the newest version that all ranks can load, in memory or persisted, and bring it here. Collective.

        Raises:
            NothingLoadableError: there are versions, and none can be loaded.
        """
        self._found = self.engine.newest()
        self._asked = True
        return None if self._found is None else Path(str(self._found))

    def overwrite(self) -> None:
        """Note that the program goes on from elsewhere, and knows of the versions here. Collective."""
        self._found, self._asked = None, True

    def go_on(self) -> None:
        """Begin the run of saves that training is about to make. Collective.

        Raises:
            UnaskedVersionsError: there are versions that nobody has asked about. On all ranks.
        """
        if self.engine.run == 0 and not self.engine.is_between_runs:  # else the next save goes on
            if not self._asked:
                self.engine.check_asked("setup() of what wrap_trainer_and_auto_resume_with_mlflashpoint has returned")
            self.engine.go_on_from(self._found)

    def settle(self) -> None:
        """Give saves in flight time to get their copies."""
        if not self.engine.wait(exit_deadline_s()):
            _log.warning("the newest save may lack copies on other nodes")

    def end(self, *, keep: bool) -> None:
        """End training as planned: have the last version persisted, if any are to be. Collective unless ``keep``.

        Args:
            keep: leave versions in memory.
        """
        if not keep:
            self.engine.remove_versions()
        elif self.engine.config.persist is not None:
            self.engine.finish(seal_deadline_s())

    def end_within_grace(self) -> None:
        """End after SIGTERM: have saves in flight committed and copied, and the newest version persisted."""
        self.engine.finish(self._grace_s)

    def close(self) -> None:
        """Let saves in flight finish, and the newest version be persisted, and end the engine. Versions stay.
        Safe to call twice."""
        atexit.unregister(self.close)
        self.save_strategy.stop_watching()
        self.engine.close(exit_deadline_s())
