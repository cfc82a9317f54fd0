"""`MLFlashpointCheckpointCallback`: the schedule by which a NeMo trainer saves into memory."""

from __future__ import annotations

import os
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.utilities.exceptions import SIGTERMException

from ml_flashpoint.adapter.nemo.checkpoint_io import (
    EXPLICIT,
    MLFlashpointAsyncFinalizableCheckpointIO,
    MLFlashpointCheckpointIO,
)
from ml_flashpoint.adapter.trainer_loops import Schedule, go_last, updates_by_step
from ml_flashpoint.format.arguments import checked_base, checked_bool
from ml_flashpoint.format.errors import InvalidArgumentError
from ml_flashpoint.format.knobs import seal_deadline_s
from ml_flashpoint.format.names import CheckpointContainerId


class MLFlashpointCheckpointCallback(Callback):  # type: ignore[misc]
    """Saves into memory every few steps, through a trainer that `wrap_trainer_and_auto_resume_with_mlflashpoint` has
    wrapped.

    Args:
        checkpoint_base_container: base container of the job on this node: an absolute path, best on a tmpfs. Restarts
            use the same.
        every_n_steps: steps between two saves.
        skip_every_n_steps: how often the standard checkpoint is saved, to leave those steps out; 0 leaves none out.
        enabled: False to do nothing at all, and to leave the trainer unwrapped.
        keep_mlf_checkpoint_on_train_end: False to remove all versions from memory, on all nodes, when training ends as
            planned. Saves under way end first; where the newest version is to be persisted and was not, all stay.
        overlap: with asynchronous saves, copy what optimizers update on CUDA devices while the next forward and
            backward run. What changes that by other means, between a save and the next step, has to call
            `before_update` first, or the save fails.

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
        self._schedule = Schedule(every_n_steps, skip_every_n_steps)
        self.enabled = checked_bool("enabled", enabled)
        self._keeps = checked_bool("keep_mlf_checkpoint_on_train_end", keep_mlf_checkpoint_on_train_end)
        self.overlap = checked_bool("overlap", overlap)
        self._watches = False
        self._io: MLFlashpointCheckpointIO | None = None  # while it trains

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Go behind all other callbacks."""
        if self.enabled and stage == "fit":
            go_last(trainer, self)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to save. Everything is set up and restored.

        Raises:
            InvalidArgumentError: the trainer is not wrapped with this base container; or ranks save at different steps.
            UnaskedVersionsError: it would overwrite versions that nobody has asked about.
        """
        if not self.enabled:
            return
        io = flashpoint_io_of(trainer)
        if io is None or io.engine.base != self.base:
            raise InvalidArgumentError(
                "is not the base container of this trainer's CheckpointIO",
                argument="checkpoint_base_container",
                value=str(self.base),
                hint="pass it to wrap_trainer_and_auto_resume_with_mlflashpoint first",
            )
        engine, strategy = io.engine, io.save_strategy
        engine.check_usable("setup() of what wrap_trainer_and_auto_resume_with_mlflashpoint has returned")
        engine.ranks.agree_on(every_n_steps=self._schedule.every)
        self._io, self._schedule.step = io, trainer.global_step
        strategy.stop_watching()
        self._watches = self.overlap and io.async_save
        if self._watches:  # NeMo's optimizers wrap megatron-core's, and have no hooks
            strategy.watch(*(getattr(each, "mcore_optimizer", each) for each in trainer.optimizers))
        if trainer.ckpt_path is not None and engine.holds(trainer.ckpt_path):
            _complete_saved_batch(trainer.fit_loop)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Save after a batch if a save is due."""
        if self._io is not None and self._schedule.is_due_at(trainer.global_step):
            self._save(trainer, explicit=False)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Have the newest version persisted at the planned end, if any are to be; or remove all versions."""
        io = self._end()
        if io is not None and not self._keeps:
            io.engine.remove_versions()
        elif io is not None and io.engine.config.persist is not None:
            io.engine.finish(seal_deadline_s())

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End when training fails, or a signal ends it. SIGTERM gives time, as long as its launcher does: saves in
        flight are committed and copied, and the newest version persisted."""
        io = self._end()
        if io is not None and isinstance(exception, SIGTERMException):
            io.engine.finish(io.engine.config.sigterm_grace_s or 0.0)

    def _end(self) -> MLFlashpointCheckpointIO | None:
        io, self._io = self._io, None
        if io is not None and self._watches:
            io.save_strategy.stop_watching()
        return io

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
        if self._io is not None:
            self._io.save_strategy.before_update()


def _complete_saved_batch(fit_loop: Any) -> None:
    """Count the batch after which a checkpoint was made, as Lightning does from 2.5 on. NeMo wants 2.4, where each
    resumption is one batch more to the end of the epoch and to the next validation."""
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
