"""`TrainerFlashpoint`: a `Flashpoint` that tracks the state of a trainer instead of objects one by one."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.strategies import (
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)

from ml_flashpoint.adapter.lightning.dictionary import REST, TrainerSlot, TrainerState
from ml_flashpoint.config import Config
from ml_flashpoint.copy.tensors import check_copies
from ml_flashpoint.engine.checkpointer import Phase
from ml_flashpoint.flashpoint import Flashpoint
from ml_flashpoint.format.errors import InvalidArgumentError, LoadError, NothingLoadableError
from ml_flashpoint.format.names import CheckpointContainerId
from ml_flashpoint.state.archive import save_archive
from ml_flashpoint.state.dictionary import Checkpoint
from ml_flashpoint.state.parameters import expected_tensors, freeze_parameters, named_parameters
from ml_flashpoint.state.random_numbers import capture_rng_state, restore_rng_state

_log = logging.getLogger(__name__)

_BESIDES = "ml_flashpoint"  # what Lightning does not save itself
_TENSORS = ("state_dict", "optimizer_states")


class TrainerFlashpoint(Flashpoint):
    """A `Flashpoint` for one trainer, whose strategy is ``sharded`` or not. See there for the options."""

    _watches_optimizers = False

    def __init__(self, base: str | os.PathLike[str], *, sharded: bool, config: Config, **options: Any) -> None:
        if not sharded:
            self._tracked_type = TrainerState
        self._allowed = tuple(config.safe_globals)
        self._rest = TrainerSlot(dict)
        self._generators: dict[str, Any] | None = None
        self._besides: dict[str, Any] = {}
        self._trainer: Trainer | None = None
        self._wanted: int | None = None
        self._brought: CheckpointContainerId | None = None
        self._hparams_left_out = False
        super().__init__(base, config=config, **options)

    def attach(self, trainer: Trainer) -> None:
        """Track a trainer whose model and optimizers are set up, or, if they are not sharded, will be."""
        if self._trainer is not None:
            return
        self._trainer = trainer
        tracked = self._tracked
        if isinstance(tracked, TrainerState):
            tracked.make = lambda: self._dictionary(trainer)
            tracked.sizes = lambda: _tensors_of(trainer)
            if self._ranks.world_size > 1:
                module = trainer.lightning_module
                tracked.parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
            return
        self._rest = TrainerSlot(lambda: self._without_tensors(trainer))
        parts: dict[str, Any] = {f"optimizer_{number}": each for number, each in enumerate(trainer.optimizers)}
        self.track(model=trainer.strategy.model, **parts | {REST: self._rest})

    def begin(self, trainer: Trainer) -> None:
        """Begin the saves of a training loop that is about to start. Collective.

        Raises:
            UnaskedVersionsError: there are versions that nobody has asked about. On all ranks.
            CapacityError: the filesystem is too small for the checkpoints to come.
        """
        self.attach(trainer)
        # With automatic optimization, forward and backward are run by an optimizer's step, and Lightning says when they
        # are through: `before_update`.
        for optimizer in trainer.optimizers:
            self._checkpointer.overlap.watch(optimizer, announced=trainer.lightning_module.automatic_optimization)
        if self._brought is None or self._checkpointer.run > 0 or self._checkpointer.phase is Phase.BETWEEN_RUNS:
            hint = "or construct the callback with discard_existing=True"
            self._checkpointer.check_usable("resume_path(trainer)", hint=hint)
        else:
            self._checkpointer.go_on_from(self._brought)
        self._checkpointer.check_room(self._tracked.expected_bytes())
        self._go_on(trainer)

    # ---- saving -------------------------------------------------------------------------------------------

    def _without_tensors(self, trainer: Trainer) -> Checkpoint:
        with _without_tensors(trainer.strategy):
            checkpoint = self._dictionary(trainer)
        return {key: value for key, value in checkpoint.items() if key not in _TENSORS}

    def _dictionary(self, trainer: Trainer) -> Checkpoint:
        checkpoint: Checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        check_copies(checkpoint.get("callbacks"), "callbacks")
        self._leave_out_hparams(checkpoint)
        fetcher, loader = trainer.fit_loop._data_fetcher, trainer.fit_loop._combined_loader
        besides: dict[str, Any] = {
            "metrics": dict(trainer._logger_connector._callback_metrics),
            "frozen": [name for name, p in named_parameters(trainer.lightning_module) if not p.requires_grad],
        }
        if isinstance(fetcher, _PrefetchDataFetcher) and loader is not None and loader._state_dicts():
            # Lightning has taken these from the loader already, whose state is after them.
            besides["fetched"] = list(fetcher.batches)
        checkpoint[_BESIDES] = besides
        return checkpoint

    def _leave_out_hparams(self, checkpoint: Checkpoint) -> None:
        """Hyperparameters may be anything. Nothing of a training is restored from them, so they cannot fail a save."""
        names = [name for name in checkpoint if name.endswith(("hyper_parameters", "hparams_name", "hparams_type"))]
        try:
            save_archive([checkpoint[name] for name in names], "hyperparameters", allowed=self._allowed)
        except Exception as why:  # of whatever kind pickling them raises
            for name in names:
                del checkpoint[name]
            if not self._hparams_left_out:
                self._hparams_left_out = True
                _log.warning("hyperparameters are left out of checkpoints in memory: %s", why)

    def save_due(self, step: int) -> None:
        """Save by the schedule. Without free memory, the save is skipped."""
        self._check(saves=True)
        self._save(step, explicit=False)
        self._report()

    # ---- loading ------------------------------------------------------------------------------------------

    def find(self, wanted: int | None, *, may_fall_back: bool) -> CheckpointContainerId | None:
        """Bring the newest version that all ranks can load here, or that of a step, for `load`. None if there is none,
        or none can be loaded and the program may go on from elsewhere. Collective. Raises as `Checkpointer.latest` and
        `Checkpointer.bring`."""
        self._wanted = wanted
        try:
            self._brought = None if wanted is None else self._checkpointer.bring(wanted)
            return self._checkpointer.latest() if wanted is None else self._brought
        except NothingLoadableError as error:
            if not may_fall_back:
                raise
            _log.error("calling the fallback; later saves will overwrite the versions in memory: %s", error)
        self._checkpointer.go_on_from(None)
        return None

    def holds(self, path: object) -> bool:
        """Return True if a path is that of a version in the base container."""
        return self._checkpointer.holds(path)

    def load(self, path: str | os.PathLike[str]) -> Checkpoint:
        """Load a version. Collective.

        Returns:
            The dictionary for Lightning to restore from. Sharded models and optimizers are loaded, and not in it.

        Raises:
            LoadError: it cannot be loaded, nor an older one; or it is not the newest.
        """
        wanted, self._wanted = self._wanted, None
        self.resume(step=wanted)
        recovery, name = self.last_recovery, CheckpointContainerId(path).name
        assert recovery is not None
        if recovery.version is None or (recovery.version != name and name not in recovery.discarded):
            raise LoadError(
                "this version cannot be loaded" if recovery.version is None else f"the newest is {recovery.version}",
                path=str(path),
                hint="pass what resume_path(trainer) returns, or None to start anew",
            )
        self._generators = capture_rng_state()
        tracked = self._tracked
        checkpoint = (tracked.rest if isinstance(tracked, TrainerState) else self._rest).take()
        assert isinstance(checkpoint, dict)
        self._besides = checkpoint.pop(_BESIDES, {})
        return checkpoint

    def _go_on(self, trainer: Trainer) -> None:
        """Restore what Lightning does not: in mid-epoch also batches that were fetched, and metrics for schedulers."""
        generators, self._generators = self._generators, None
        besides, self._besides = self._besides, {}
        if "frozen" in besides:  # which callbacks for finetuning do not restore
            freeze_parameters(trainer.lightning_module, besides["frozen"])
        if generators is None or trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            return  # at the start of an epoch, the uninterrupted run draws from the generators as the set-up has
        fetcher, fetched = trainer.fit_loop._data_fetcher, besides.get("fetched")
        if fetched and isinstance(fetcher, _PrefetchDataFetcher):
            fetcher.batches = [*fetched, *fetcher.batches]
            fetcher.done = False
        trainer._logger_connector._callback_metrics.update(besides.get("metrics", {}))
        restore_rng_state(generators)

    def end_within(self, deadline_s: float) -> None:
        """Close in a trainer that ends after SIGTERM: see `Checkpointer.finish`."""
        give_up = time.monotonic() + deadline_s
        self._checkpointer.finish(deadline_s)
        self._close(max(give_up - time.monotonic(), 0.0))


def _tensors_of(trainer: Trainer) -> list[torch.Tensor]:
    """Return tensors as large as those of model and optimizers after the first step."""
    tensors = [each for each in trainer.lightning_module.state_dict().values() if isinstance(each, torch.Tensor)]
    for optimizer in trainer.optimizers:
        tensors += expected_tensors(optimizer)
    return tensors


_SHARDED = (FSDPStrategy, ModelParallelStrategy)
_WHOLE = (DDPStrategy, SingleDeviceStrategy)
# Strategies that do any of these their own way keep a state of another form.
_OWN_WAYS = ("save_checkpoint", "load_checkpoint", "load_model_state_dict", "load_optimizer_state_dict")


def check_trainer(trainer: Trainer) -> bool:
    """Return True if each rank has a shard of model and optimizers, rather than all of them. Raises
    `InvalidArgumentError` if the strategy is not supported, or not with the callbacks."""
    strategy = trainer.strategy
    supported = next((each for each in (*_SHARDED, *_WHOLE) if isinstance(strategy, each)), None)
    if supported is None:
        names = ", ".join(each.__name__ for each in (*_WHOLE, *_SHARDED))
        raise InvalidArgumentError(f"must be one of {names}", argument="strategy", value=type(strategy))
    if own := [way for way in _OWN_WAYS if getattr(type(strategy), way) is not getattr(supported, way)]:
        raise InvalidArgumentError(
            f"has its own {', '.join(own)}, so its state is not that of {supported.__name__}",
            argument="strategy",
            value=type(strategy),
            hint="for NeMo's MegatronStrategy there is ml_flashpoint.adapter.nemo",
        )
    averaging = [each for each in trainer.callbacks if isinstance(each, WeightAveraging)]
    if averaging and supported in _SHARDED:  # which Lightning itself does not shard
        raise InvalidArgumentError(
            f"{type(averaging[0]).__name__} keeps an unsharded model, which Lightning cannot restore with "
            f"{supported.__name__}",
            argument="callbacks",
            value=averaging[0],
            hint="use DDP, or keep the averaged parameters in the LightningModule",
        )
    return supported in _SHARDED


def join_processes(strategy: Strategy) -> None:
    """Set up torch.distributed as the strategy will in `fit`, which then finds it done. Raises `InvalidArgumentError`
    if Lightning itself is to start the other processes."""
    environment = getattr(strategy, "cluster_environment", None)
    if strategy.launcher is not None and not (environment is not None and environment.creates_processes_externally):
        raise InvalidArgumentError(
            "Lightning would start the other processes in fit(), so they cannot agree on a checkpoint before",
            argument="strategy",
            value=type(strategy),
            hint="start all processes with torchrun or srun",
        )
    if isinstance(strategy, ModelParallelStrategy):
        # Its `setup_environment` wants the module, which the trainer does not have before `fit`.
        strategy._setup_distributed()
    else:
        strategy.setup_environment()


@contextlib.contextmanager
def _without_tensors(strategy: Strategy) -> Iterator[None]:
    """While Lightning makes its dictionary, have a sharded strategy gather nothing, and copy nothing to the CPU."""
    replaced: Any = strategy
    fsdp2 = isinstance(strategy, ModelParallelStrategy)
    replaced.lightning_module_state_dict = lambda: strategy.lightning_module.state_dict() if fsdp2 else {}
    replaced.optimizer_state = lambda optimizer: {}  # hooks see this on all ranks but one of an unsharded checkpoint
    try:
        yield
    finally:
        del replaced.lightning_module_state_dict, replaced.optimizer_state
