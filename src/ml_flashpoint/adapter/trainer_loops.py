"""Positions of a Lightning trainer in its loops, for the adapters of Lightning and of NeMo."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop


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
