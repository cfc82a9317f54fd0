"""Lightning's training loop, for the adapters of Lightning and of NeMo."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop

from ml_flashpoint.format.arguments import checked_integer
from ml_flashpoint.ranks.retention import passes_multiple


class Schedule:
    """The steps at which a trainer saves.

    Args:
        every: steps between two saves. skip: steps between two that another checkpoint saves; 0 or None for none.

    Attributes:
        step: the trainer's.
    """

    def __init__(self, every: int, skip: int | None) -> None:
        self.every = checked_integer("every_n_steps", every, 1)
        self.skip = checked_integer("skip_every_n_steps", skip or 0, 0)
        self.step = 0

    def is_due_at(self, step: int) -> bool:
        """Go on to a step. Return True if a save is due there."""
        before, self.step = self.step, step
        return passes_multiple(self.every, before, step) and not passes_multiple(self.skip, before, step)


def go_last(trainer: Any, callback: Any) -> None:
    """Put a callback behind all others, so that what they do at a step is in the checkpoint of that step."""
    # Another list: Lightning is going through this one.
    trainer.callbacks = [*(each for each in trainer.callbacks if each is not callback), callback]


def ends_something(trainer: Any) -> bool:
    """Return True if the epoch ends with this batch, or validation follows it."""
    if trainer.is_last_batch:
        return True
    loop = trainer.fit_loop
    # Validation by time is left alone: clocks differ between ranks, and all must save or none.
    by_time = getattr(trainer, "_val_check_time_interval", None) is not None
    # Lightning's own answer: NeMo's loop has another, which fails until its first batch is over.
    return not by_time and bool(_TrainingEpochLoop._should_check_val_fx(loop.epoch_loop, loop._data_fetcher))


def updates_by_step(trainer: Any) -> bool:
    """Return True if nothing is due before the next step of an optimizer that may change parameters by other means, as
    weight averaging does."""
    is_done = trainer.should_stop or trainer.fit_loop.epoch_loop._is_training_done
    return not is_done and not ends_something(trainer)
