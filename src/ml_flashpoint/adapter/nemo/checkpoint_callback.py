"""`MLFlashpointCheckpointCallback`: the schedule by which a NeMo trainer saves into memory."""

from __future__ import annotations

import os
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.utilities.exceptions import SIGTERMException

from ml_flashpoint.adapter.megatron.save_strategies import MLFlashpointMegatronAsyncSaveStrategy
from ml_flashpoint.adapter.nemo.checkpoint_io import (
    EXPLICIT,
    MLFlashpointAsyncFinalizableCheckpointIO,
    MLFlashpointCheckpointIO,
)
from ml_flashpoint.adapter.trainer_loops import updates_by_step
from ml_flashpoint.engine.schedule import checked_every, checked_skip, passes_multiple
from ml_flashpoint.format.arguments import checked_base, checked_bool
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.errors import InvalidArgumentError


class MLFlashpointCheckpointCallback(Callback):  # type: ignore[misc]
    """Saves into memory every few steps, through the trainer that
    `wrap_trainer_and_auto_resume_with_mlflashpoint` has wrapped.

    Args:
        checkpoint_base_container: base container of the job on this node: an absolute path, best on a tmpfs. Restarts
            use the same.
        every_n_steps: steps between two saves.
        skip_every_n_steps: how often the standard checkpoint is saved, to leave those steps out; 0 leaves none out.
        enabled: False to do nothing at all, and to leave the trainer unwrapped.
        keep_mlf_checkpoint_on_train_end: False to remove all versions from memory, on all nodes, when training ends as
            planned. Saves under way end first; where the newest version is to be persisted and was not, all stay.
        overlap: with asynchronous saves, copy what optimizers update on CUDA devices while the next forward and
            backward run. What changes any of that by other means than a step, between a save and the next step, has to
            call :meth:`before_update` first, or the save fails. What is on the CPU is copied before a save returns.

    Raises:
        InvalidArgumentError: an argument is unusable.
    """

    def __init__(
        self,
        checkpoint_base_container: str | os.PathLike[str],
        every_n_steps: int,
        skip_every_n_steps: int | None = 0,
        enabled: bool = True,
        keep_mlf_checkpoint_on_train_end: bool = True,
        *,
        overlap: bool = False,
    ) -> None:
        super().__init__()
        self.base = checked_base(checkpoint_base_container, "checkpoint_base_container")
        self.every_n_steps = checked_every(every_n_steps)
        self.skip_every_n_steps = checked_skip(skip_every_n_steps)
        self.enabled = checked_bool("enabled", enabled)
        self._keeps = checked_bool("keep_mlf_checkpoint_on_train_end", keep_mlf_checkpoint_on_train_end)
        self.overlap = checked_bool("overlap", overlap)
        self._step = 0
        self._watches = False
        self._strategy: MLFlashpointMegatronAsyncSaveStrategy | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Go behind all other callbacks, so that what they do at a step is in the checkpoint of that step."""
        if self.enabled and stage == "fit":
            # Another list: Lightning is going through this one.
            trainer.callbacks = [*(each for each in trainer.callbacks if each is not self), self]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin a run of saves. Everything is set up and restored.

        Raises:
            InvalidArgumentError: the trainer is not wrapped, or with another base container; or ranks save at different
                steps.
            UnaskedVersionsError: it would overwrite versions that nobody has asked about.
        """
        if not self.enabled:
            return
        io = flashpoint_io_of(trainer)
        if io is None or io.parts.engine.base != self.base:
            raise InvalidArgumentError(
                "is not the base container of this trainer's CheckpointIO",
                argument="checkpoint_base_container",
                value=str(self.base),
                hint="pass it to wrap_trainer_and_auto_resume_with_mlflashpoint first",
            )
        io.parts.go_on()
        self._strategy = io.parts.save_strategy
        io.parts.engine.ranks.agree_on(every_n_steps=self.every_n_steps)
        self._step = trainer.global_step
        self._watches = self.overlap and io.async_save and io.parts.watch(trainer.optimizers)
        if trainer.ckpt_path is not None and io.parts.engine.holds(trainer.ckpt_path):
            _complete_saved_batch(trainer.fit_loop)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Save after a batch if a save is due."""
        step, before = trainer.global_step, self._step
        if not self.enabled or self._strategy is None or step == before:
            return
        self._step = step
        due, left_out = (passes_multiple(each, before, step) for each in (self.every_n_steps, self.skip_every_n_steps))
        if due and not left_out:
            self._save(trainer, explicit=False)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Have the newest version persisted at the planned end, if any are to be."""
        self._stop_watching()
        io = flashpoint_io_of(trainer) if self.enabled else None
        if io is not None:
            io.parts.end(keep=self._keeps)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End when training fails, or a signal ends it. SIGTERM gives time, as long as its launcher does."""
        self._stop_watching()
        io = flashpoint_io_of(trainer) if self.enabled else None
        if io is not None and isinstance(exception, SIGTERMException):
            io.parts.end_within_grace()

    def save(self, trainer: Any) -> None:
        """Save now, whatever the schedule says. Collective; in the middle of training, after a step."""
        self._save(trainer, explicit=True)

    def _save(self, trainer: Any, *, explicit: bool) -> None:
        name = CheckpointContainerId.format_version_container(trainer.global_step)
        path = CheckpointContainerId.create_child(self.base, name)
        # As `Trainer.save_checkpoint`, without its barrier of all ranks.
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        trainer.strategy.save_checkpoint(checkpoint, str(path), storage_options={EXPLICIT: explicit})
        if self._watches and not updates_by_step(trainer):
            self.before_update()

    def before_update(self) -> None:
        """Wait until nothing is copied any more: see ``overlap``."""
        if self._strategy is not None:
            self._strategy.before_update()

    def _stop_watching(self) -> None:
        if self._watches and self._strategy is not None:
            self._watches = False
            self._strategy.stop_watching()


def _complete_saved_batch(fit_loop: Any) -> None:
    """Count the batch after which a checkpoint was made, as an uninterrupted run did a moment later.

    Lightning does so itself from 2.5 on, and NeMo wants 2.4. There, each resumption is one batch more to the end of
    the epoch and to the next validation.
    """
    loop = fit_loop.epoch_loop
    count, epochs = loop.batch_progress, fit_loop.epoch_progress
    if hasattr(loop, "restarted_on_train_batch_end") or not loop.restarting or count.is_last_batch:
        return
    if count.total.completed == count.total.processed - 1:
        count.increment_completed()
        loop._batches_that_stepped += 1
    epochs.total.reset_on_restart()


def flashpoint_io_of(trainer: Any) -> MLFlashpointCheckpointIO | None:
    """Return the `CheckpointIO` for memory that a trainer was wrapped with; None if it was not."""
    io = trainer.strategy.checkpoint_io
    if isinstance(io, MLFlashpointAsyncFinalizableCheckpointIO):
        io = io.checkpoint_io
    return io if isinstance(io, MLFlashpointCheckpointIO) else None
