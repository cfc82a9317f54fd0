"""`FlashpointCheckpointIO`: Lightning's way to versions in memory, for strategies that are not sharded.

Paths elsewhere go on to the `CheckpointIO` that was there before.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO

from ml_flashpoint.adapter.lightning.dictionary import Checkpoint
from ml_flashpoint.adapter.lightning.engine import TrainerFlashpoint
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.errors import InvalidArgumentError

_log = logging.getLogger(__name__)


class FlashpointCheckpointIO(CheckpointIO):  # type: ignore[misc]
    """Saves to and loads from memory what lies in a base container, and passes everything else on.

    `FlashpointCallback` puts one around the trainer's own.

    Args:
        flashpoint: the engine. It stays open when Lightning tears this object down.
        checkpoint_io: what paths elsewhere are for; by default Lightning's own.
    """

    def __init__(self, flashpoint: TrainerFlashpoint, checkpoint_io: CheckpointIO | None = None) -> None:
        super().__init__()
        self.flashpoint = flashpoint
        self.checkpoint_io = TorchCheckpointIO() if checkpoint_io is None else checkpoint_io

    def save_checkpoint(
        self, checkpoint: Checkpoint, path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Save a dictionary. In the base container, it is staged on return and committed in the background.

        Raises:
            InvalidArgumentError: a path in the base container, and more than one rank. Lightning would save on rank 0
                only; `FlashpointCallback` is for that.
        """
        if not self.flashpoint.holds(path):
            self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        if self.flashpoint.world_size > 1:
            raise InvalidArgumentError(
                "lies in the base container, where all ranks save together, and Lightning saves on one",
                argument="path",
                value=path,
                hint="call FlashpointCallback.save(trainer) on all ranks, or choose another folder",
            )
        step = CheckpointContainerId(path).step
        assert step is not None
        self.flashpoint.save_dictionary(checkpoint, step)

    def load_checkpoint(self, path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Checkpoint:
        """Load a dictionary. Collective in the base container, where tensors are loaded into memory of the CPU.

        Raises:
            LoadError: it cannot be loaded.
        """
        if self.flashpoint.holds(path):
            return self.flashpoint.load(path)
        loaded: Checkpoint = self.checkpoint_io.load_checkpoint(path, *args, **kwargs)
        return loaded

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint, unless it lies in the base container: those go when newer ones are verified."""
        if self.flashpoint.holds(path):
            _log.warning("not removing %s: versions in memory go when newer ones are verified", path)
            return
        self.checkpoint_io.remove_checkpoint(path)

    def teardown(self) -> None:
        """Tear down what paths elsewhere are for."""
        self.checkpoint_io.teardown()
