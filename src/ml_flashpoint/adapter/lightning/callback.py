"""`FlashpointCallback`: the schedule by which a trainer's state is saved into memory, and its way back.

Saves are made at points of the training loop from which Lightning goes on exactly.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.utilities.exceptions import SIGTERMException

from ml_flashpoint.adapter.lightning.checkpoint_io import FlashpointCheckpointIO
from ml_flashpoint.adapter.lightning.engine import TrainerFlashpoint
from ml_flashpoint.adapter.lightning.strategies import check_callbacks, is_sharded, join_processes
from ml_flashpoint.adapter.trainer_loops import ends_something, updates_by_step
from ml_flashpoint.checkpointer import checked_wanted
from ml_flashpoint.config import Config, Persist
from ml_flashpoint.engine.schedule import checked_every, checked_skip, passes_multiple
from ml_flashpoint.events import announce
from ml_flashpoint.format.arguments import checked_base, checked_bool, checked_seconds
from ml_flashpoint.format.errors import InvalidArgumentError, NothingLoadableError
from ml_flashpoint.ranks.retention import Keep
from ml_flashpoint.ranks.strategies import ReplicationStrategy
from ml_flashpoint.state.archive import SafeGlobal

_log = logging.getLogger(__name__)

# Enough for a validation just before the end of an epoch; where every batch is such, saves must be made nevertheless.
_MAX_PUT_OFF = 2


class FlashpointCallback(Callback):  # type: ignore[misc]
    """Saves the state of a trainer into memory every few steps.

    ::

        trainer = Trainer(strategy="fsdp", callbacks=[FlashpointCallback("/dev/shm/mlf-jobs/job-145", 10)])
        trainer.fit(model, ckpt_path=resume_path(trainer))

    A step is one of the optimizer (``trainer.global_step``). What is saved is what Lightning's own checkpoint has,
    of every rank, and the random number generators. Saves go beside `ModelCheckpoint`; this callback moves itself
    behind all others, so that what they do at a step is in the checkpoint of that step.

    A save that is due at the last batch of an epoch, or at one that validation follows, is made at the next step that
    is neither, two steps later at most: Lightning, resumed from there, would leave out that validation and the hooks
    at the end of that epoch. If training is complete before, it is made when all of that is done, where Lightning goes
    on exactly from there; where not, training goes on from the save before.

    Args:
        base: base container of the job on this node: an absolute path, best on a tmpfs. Restarts use the same.
        every_n_steps: steps between two saves.
        skip_every_n_steps: how often the standard checkpoint is saved, to leave those steps out; 0 leaves none out.
        enabled: False to do nothing at all.
        replication, strict, safe_globals, deadline_s, discard_existing, on_world_size_change, overlap,
            keep, persist, persist_every, persist_keep, persist_bytes_per_s: see `ml_flashpoint.Flashpoint`.
        grace_s: seconds at most that a trainer which ends after SIGTERM waits for the save under way, and for the
            newest version to be persisted.

    Raises:
        InvalidArgumentError: an argument is unusable.
    """

    def __init__(
        self,
        base: str | os.PathLike[str],
        every_n_steps: int = 1,
        skip_every_n_steps: int | None = 0,
        enabled: bool = True,
        *,
        replication: ReplicationStrategy | str | None = None,
        strict: bool = False,
        safe_globals: Sequence[SafeGlobal] = (),
        deadline_s: float | None = None,
        discard_existing: bool = False,
        on_world_size_change: str = "raise",
        overlap: bool = False,
        keep: int | Keep = 1,
        persist: str | None = None,
        persist_every: int = 50,
        persist_keep: int = 3,
        persist_bytes_per_s: float | None = None,
        grace_s: float = 20.0,
    ) -> None:
        super().__init__()
        self.base = checked_base(base)
        self.every_n_steps = checked_every(every_n_steps)
        self.skip_every_n_steps = checked_skip(skip_every_n_steps)
        self.enabled = checked_bool("enabled", enabled)
        self._grace_s = checked_seconds("grace_s", grace_s)
        shared: dict[str, Any] = {
            "replication": replication,
            "keep": keep,
            "safe_globals": safe_globals,
            "overlap": overlap,
            "on_world_size_change": on_world_size_change,
            "deadline_s": deadline_s,
        }
        Config(**shared, persist=Persist.of(persist, persist_every, persist_keep, persist_bytes_per_s))  # refuses now
        self._options: dict[str, Any] = {
            **shared,
            "every_n_steps": every_n_steps,
            "persist": persist,
            "persist_every": persist_every,
            "persist_keep": persist_keep,
            "persist_bytes_per_s": persist_bytes_per_s,
            "strict": checked_bool("strict", strict),
            "discard_existing": checked_bool("discard_existing", discard_existing),
        }
        self._flashpoint: TrainerFlashpoint | None = None
        self._is_open = False
        self._step = 0
        self._put_off = 0

    @property
    def flashpoint(self) -> TrainerFlashpoint | None:
        """The `Flashpoint`: its health, the last recovery. None before the trainer's processes are set up."""
        return self._flashpoint

    # ---- life ---------------------------------------------------------------------------------------------

    def open(self, trainer: Trainer) -> TrainerFlashpoint:
        """Return the `Flashpoint`, whose way back is built into the trainer. Collective at first; processes must be
        set up.

        Raises:
            InvalidArgumentError: the strategy or a callback is not supported; says why.
            FlashpointError: the base container cannot be used.
        """
        if self._is_open:
            assert self._flashpoint is not None
            return self._flashpoint
        sharded = is_sharded(trainer.strategy)
        check_callbacks(trainer)
        flashpoint = TrainerFlashpoint(str(self.base), sharded=sharded, **self._options)
        self._flashpoint, self._is_open = flashpoint, True
        strategy = trainer.strategy
        if sharded:
            # These strategies go around the CheckpointIO.
            given = getattr(strategy.load_checkpoint, "func_before", strategy.load_checkpoint)
            strategy.load_checkpoint = _loading(flashpoint, trainer, given)
        else:
            given = strategy.checkpoint_io
            if isinstance(given, FlashpointCheckpointIO):
                given = given.checkpoint_io
            strategy.checkpoint_io = FlashpointCheckpointIO(flashpoint, given)
        return flashpoint

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Open the `Flashpoint`. The processes are set up and the model is not."""
        if not self.enabled or stage != "fit":
            return
        # Another list: Lightning is going through this one.
        trainer.callbacks = [*(each for each in trainer.callbacks if each is not self), self]
        flashpoint = self.open(trainer)
        if not is_sharded(trainer.strategy):
            flashpoint.attach(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin a run of saves. Everything is set up and restored."""
        if not self._is_open or self._flashpoint is None:
            return
        self._flashpoint.attach(trainer)
        self._flashpoint.watch(trainer)
        self._flashpoint.begin_run()
        self._flashpoint.check_capacity()
        self._flashpoint.go_on(trainer)
        self._step, self._put_off = trainer.global_step, 0

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give schedulers that follow a metric their turn, at the end of an epoch.

        In an epoch that was resumed in the middle, Lightning leaves them out, since it does not save metrics.
        """
        plateaus = [config for config in trainer.lr_scheduler_configs if config.reduce_on_plateau]
        if self._is_open and all(config.monitor in trainer.callback_metrics for config in plateaus):
            trainer.fit_loop._restarting = False  # which Lightning does a moment later

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Close when training fails, or a signal ends it."""
        if not self._is_open or self._flashpoint is None:
            return
        self._is_open = False
        if isinstance(exception, SIGTERMException):
            self._flashpoint.end_within(self._grace_s)
        else:
            self._flashpoint.__exit__(type(exception), exception, None)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let saves in flight finish, and the last version be persisted, at the end. Versions stay."""
        if self._is_open and self._flashpoint is not None:
            self._is_open = False
            self._flashpoint.close()

    # ---- saving -------------------------------------------------------------------------------------------

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save after a batch if a save is due."""
        step, before = trainer.global_step, self._step
        if not self._is_open or step == before or trainer.fast_dev_run:
            return  # gradients are being accumulated
        self._step = step
        assert self._flashpoint is not None
        due, left_out = (passes_multiple(each, before, step) for each in (self.every_n_steps, self.skip_every_n_steps))
        if not (due and not left_out) and not self._put_off:
            return
        if self._put_off < _MAX_PUT_OFF and ends_something(trainer):
            self._put_off += 1
            return
        self._put_off = 0
        self._flashpoint.save_due(step)
        if not updates_by_step(trainer):
            self._flashpoint.before_update()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the save that was put off, when training is complete, if Lightning goes on exactly from there."""
        if not self._is_open or self._flashpoint is None or not self._put_off or not _goes_on_from_the_end(trainer):
            return
        self._put_off = 0
        self.save(trainer)
        self._flashpoint.before_update()  # the module is next

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Wait for the copy in progress, after backward."""
        if self._is_open and self._flashpoint is not None:
            self._flashpoint.before_update()

    def save(self, trainer: Trainer) -> None:
        """Save now, whatever the schedule says. Collective; in the middle of training, after a step. Without free
        memory, wait for some.

        Raises:
            FlashpointError: a save has failed, and failures are to be raised (``strict``).
            InvalidArgumentError: the trainer is not training with this callback.
        """
        if not self._is_open or self._flashpoint is None:
            raise InvalidArgumentError("is not training with this callback", argument="trainer", value=trainer)
        self._flashpoint.save(trainer.global_step)


def resume_path(
    trainer: Trainer, fallback: str | os.PathLike[str] | None = None, *, step: int | None = None
) -> str | os.PathLike[str] | None:
    """Return what to go on from, for ``trainer.fit(model, ckpt_path=...)``. Collective, before `fit`.

    Args:
        trainer: has a `FlashpointCallback`.
        fallback: what to return when there is no version, in memory or persisted: a path, ``"last"`` and the like, or
            None to start anew. Not together with ``step``.
        step: the version of this step, or an error: see `Flashpoint.resume`. What is newer does not count any more once
            it is loaded.

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
    is_sharded(trainer.strategy)
    check_callbacks(trainer)
    join_processes(trainer.strategy)
    flashpoint = callback.open(trainer)
    if wanted is not None:
        return str(flashpoint.bring(wanted))
    try:
        version = flashpoint.newest()
    except NothingLoadableError as error:
        if fallback is None:
            raise
        _log.error("falling back, and what is in memory will be overwritten: %s", error)
        flashpoint.overwrite()
        return fallback
    if version is None:
        then = "training starts anew" if fallback is None else f"on from {os.fspath(fallback)}"
        announce(_log, trainer.global_rank, "no checkpoint to go on from in %s: %s", callback.base, then)
        return fallback
    return str(version)


def _goes_on_from_the_end(trainer: Trainer) -> bool:
    """Return True if a trainer that is given what this one has now, after its last epoch, begins the next one as this
    would. Not so if that epoch was ended before its last batch; if steps are limited, since Lightning then takes the
    epoch for one to be finished, and ends it again; nor with loaders that have a state, which it leaves out. With
    averages, those have taken the place of the parameters."""
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
