"""`FlashpointCallback`: the schedule by which a trainer's state is saved into memory, and its way back.

Saves are made at points of the training loop from which Lightning goes on exactly.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.utilities.exceptions import SIGTERMException

from ml_flashpoint.adapter.lightning.engine import TrainerFlashpoint, check_trainer, join_processes
from ml_flashpoint.adapter.trainer_loops import Schedule, ends_something, go_last, updates_by_step
from ml_flashpoint.checkpointer import checked_wanted
from ml_flashpoint.config import Config
from ml_flashpoint.events import announce
from ml_flashpoint.format.arguments import checked_base, checked_bool, checked_seconds
from ml_flashpoint.format.errors import InvalidArgumentError

_log = logging.getLogger(__name__)

# Enough for a validation just before the end of an epoch; where every batch is such, saves must be made nevertheless.
_MAX_PUT_OFF = 2


class FlashpointCallback(Callback):  # type: ignore[misc]
    """Saves the state of a trainer into memory every few steps.

    ::

        trainer = Trainer(strategy="fsdp", callbacks=[FlashpointCallback("/dev/shm/mlf-jobs/job-145", 10)])
        trainer.fit(model, ckpt_path=resume_path(trainer))

    Steps are optimizer steps (``trainer.global_step``). A save contains everything in Lightning's own checkpoint, for
    every rank, and the random number generators.

    A save that is due at the last batch of an epoch, or at a batch before validation, is made at the next step that is
    neither, at most two steps later. (Resumed from such a batch, Lightning would skip the validation and the hooks at
    the end of the epoch.) If training ends before, the save is made at the end, if Lightning can continue from there.

    Args:
        base: base container of the job on this node: an absolute path on a tmpfs. A restart must use the same path.
        every_n_steps: steps between two saves.
        skip_every_n_steps: interval of the standard checkpoint: steps at its multiples are skipped; 0 skips none.
        enabled: False to do nothing.
        strict, discard_existing: see `Flashpoint`.
        grace_s: the longest that a trainer which ends after SIGTERM waits for saves and persisting, in seconds.
        settings: ``replication``, ``keep``, ``persist``, ``overlap`` and others: see `Config.of`.

    Attributes:
        flashpoint: the `Flashpoint`, with its health and last recovery. None before the trainer is set up.

    Raises:
        InvalidArgumentError: an argument is invalid.
    """

    def __init__(
        self,
        base: str | os.PathLike[str],
        every_n_steps: int = 1,
        skip_every_n_steps: int | None = 0,
        enabled: bool = True,
        *,
        strict: bool = False,
        discard_existing: bool = False,
        grace_s: float = 20.0,
        **settings: Any,
    ) -> None:
        super().__init__()
        self.base = checked_base(base)
        self._schedule = Schedule(every_n_steps, skip_every_n_steps)
        self.enabled = checked_bool("enabled", enabled)
        self._grace_s = checked_seconds("grace_s", grace_s)
        self._options: dict[str, Any] = {
            "every_n_steps": every_n_steps,
            "strict": checked_bool("strict", strict),
            "discard_existing": checked_bool("discard_existing", discard_existing),
            "config": Config.of(**settings, handle_sigterm=False),
        }
        self.flashpoint: TrainerFlashpoint | None = None
        self._open: TrainerFlashpoint | None = None  # the same, until it is closed
        self._put_off = 0

    # ---- life ---------------------------------------------------------------------------------------------

    def open(self, trainer: Trainer) -> TrainerFlashpoint:
        """Return the `Flashpoint`, whose way back is built into the trainer. Collective at first.

        Raises:
            InvalidArgumentError: the strategy or a callback is not supported; says why.
        """
        if self._open is not None:
            return self._open
        strategy, sharded = trainer.strategy, check_trainer(trainer)
        self.flashpoint = self._open = flashpoint = TrainerFlashpoint(str(self.base), sharded=sharded, **self._options)
        given = getattr(strategy.load_checkpoint, "func_before", strategy.load_checkpoint)
        strategy.load_checkpoint = _loading(flashpoint, trainer, given)
        return flashpoint

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Open the `Flashpoint`. The processes are set up and the model is not."""
        if self.enabled and stage == "fit":
            go_last(trainer, self)
            self.open(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin a run of saves. Everything is set up and restored."""
        if self._open is not None:
            self._open.begin(trainer)
            self._schedule.step, self._put_off = trainer.global_step, 0

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give schedulers that follow a metric their turn. In an epoch that was resumed in the middle, Lightning leaves
        them out, since it does not save metrics."""
        plateaus = [config for config in trainer.lr_scheduler_configs if config.reduce_on_plateau]
        if self._open is not None and all(config.monitor in trainer.callback_metrics for config in plateaus):
            trainer.fit_loop._restarting = False  # which Lightning does a moment later

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Close when training fails, or a signal ends it."""
        flashpoint, self._open = self._open, None
        if flashpoint is not None and isinstance(exception, SIGTERMException):
            flashpoint.end_within(self._grace_s)
        elif flashpoint is not None:
            flashpoint.__exit__(type(exception), exception, None)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let saves in flight finish, and the last version be persisted, at the end. Versions stay."""
        flashpoint, self._open = self._open, None
        if flashpoint is not None:
            flashpoint.close()

    # ---- saving -------------------------------------------------------------------------------------------

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save after a batch if a save is due."""
        step = trainer.global_step
        if self._open is None or step == self._schedule.step or trainer.fast_dev_run:
            return  # gradients are being accumulated
        if not self._schedule.is_due_at(step) and not self._put_off:
            return
        if self._put_off < _MAX_PUT_OFF and ends_something(trainer):
            self._put_off += 1
            return
        self._put_off = 0
        self._open.save_due(step)
        if not updates_by_step(trainer):
            self._open.before_update()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the save that was put off, when training is complete, if Lightning goes on exactly from there."""
        if self._open is not None and self._put_off and _goes_on_from_the_end(trainer):
            self._put_off = 0
            self.save(trainer)
            self._open.before_update()  # the module is next

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Wait for the copy in progress, after backward."""
        if self._open is not None:
            self._open.before_update()

    def save(self, trainer: Trainer) -> None:
        """Save now, whatever the schedule says; without free memory, wait for some. Collective; after a step.

        Raises:
            FlashpointError: a save has failed, and failures are to be raised (``strict``).
            InvalidArgumentError: the trainer is not training with this callback.
        """
        if self._open is None:
            raise InvalidArgumentError("is not training with this callback", argument="trainer", value=trainer)
        self._open.save(trainer.global_step)


def resume_path(
    trainer: Trainer, fallback: str | os.PathLike[str] | None = None, *, step: int | None = None
) -> str | os.PathLike[str] | None:
    """Return what to go on from, for ``trainer.fit(model, ckpt_path=...)``. Collective, before `fit`.

    Args:
        trainer: has a `FlashpointCallback`.
        fallback: what to return when there is no version: a path, ``"last"`` and the like, or None to start anew. Not
            together with ``step``.
        step: the version of this step, or an error: see `Flashpoint.resume`.

    Returns:
        The path of the newest version that all ranks can load, which has been fetched and verified; or the fallback.
        Of a version that is persisted, that is its name in the base container, where nothing need be.

    Raises:
        InvalidArgumentError: there is no such callback, or the strategy is not supported; says why.
        LoadError: there is no version of ``step``; names those that there are.
        NothingLoadableError: there are versions and none can be loaded, and no fallback.
        FlashpointError: the base container cannot be used, or ranks lost each other.
    """
    callbacks = [each for each in trainer.callbacks if isinstance(each, FlashpointCallback)]
    if len(callbacks) != 1:
        raise InvalidArgumentError(
            f"must have one FlashpointCallback, and has {len(callbacks)}", argument="trainer.callbacks", value=callbacks
        )
    (callback,) = callbacks
    wanted = checked_wanted(step, fallback)
    if not callback.enabled:
        return fallback
    check_trainer(trainer)
    join_processes(trainer.strategy)
    version = callback.open(trainer).find(wanted, may_fall_back=fallback is not None)
    if version is None:
        then = "training starts anew" if fallback is None else f"on from {os.fspath(fallback)}"
        announce(_log, trainer.global_rank, "no version in %s: %s", callback.base, then)
        return fallback
    return str(version)


def _goes_on_from_the_end(trainer: Trainer) -> bool:
    """Return True if a trainer that loads what this one has now begins the next epoch as this would. Lightning ends an
    epoch again where steps are limited, and leaves out the state of loaders. Averages have replaced the parameters."""
    loop = trainer.fit_loop
    if not trainer.is_last_batch or loop._iteration_based_training():
        return False
    has_states = loop._combined_loader is not None and bool(loop._combined_loader._state_dicts())
    return not has_states and not any(isinstance(each, WeightAveraging) for each in trainer.callbacks)


def _loading(flashpoint: TrainerFlashpoint, trainer: Trainer, given: Any) -> Any:
    @functools.wraps(given)
    def load_checkpoint(checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        if not flashpoint.holds(checkpoint_path):
            return given(checkpoint_path, *args, **kwargs)
        flashpoint.attach(trainer)
        return flashpoint.load(checkpoint_path)

    load_checkpoint.func_before = given  # type: ignore[attr-defined]
    return load_checkpoint
