"""`FlashpointManager`: torchtitan's checkpoint manager, which saves into memory between its own checkpoints."""

from __future__ import annotations

import dataclasses
import os
import sys
from dataclasses import dataclass, field
from typing import Annotated, Any

import tyro
from torchtitan.components.checkpointer import (
    DATALOADER,
    MODEL,
    OPTIMIZER,
    TRAIN_STATE,
    CheckpointManager,
)
from torchtitan.components.dataloader import ParallelAwareDataloader

from ml_flashpoint.adapter.frameworks import FrameworkFlashpoint, numbered
from ml_flashpoint.adapter.torchtitan.state import BareModule, LoaderPlace, Together
from ml_flashpoint.format.errors import InvalidArgumentError


class FlashpointManager(CheckpointManager):  # type: ignore[misc]
    """Saves a torchtitan job into memory every few steps, beside torchtitan's own checkpoints, and goes on from there.

    Built from its `Config`; see `attach`. Saved are the parameters and buffers of all model parts, optimizers, the
    scheduler, the trainer's state, the place in the data, and the random number generators, which torchtitan's own
    checkpoints do not have. These stay as they are: `CheckpointManager` makes them, by its own settings.

    ``load`` goes on from the newest version in memory. Only where there is none, or torchtitan's own newest checkpoint
    is of a later step, that one is loaded, or what the settings say for a job that has none. A step that is asked for
    (``load_step``) is taken from memory if it is there.

    Args:
        config, model_parts, optimizers, lr_schedulers, dataloader, states, others: as torchtitan passes them.

    Raises:
        InvalidArgumentError: a setting is unusable, or differs between ranks.
        FlashpointError: the base container cannot be used.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        """torchtitan's settings, which are for its own checkpoints except for ``enable`` and ``load_only``, and these.

        Attributes:
            base: base container of the job on each node: an absolute path, best on a tmpfs. Restarts use the same.
            every_n_steps: steps between two saves into memory.
            options: further keywords of `ml_flashpoint.Flashpoint`, ``replication`` or ``keep`` for example.
        """

        base: str = ""
        """Base container in memory: an absolute path, the same after a restart."""

        every_n_steps: int = 1
        """Steps between two saves into memory."""

        options: Annotated[dict[str, Any], tyro.conf.Suppress] = field(default_factory=dict)
        """Further keywords of ml_flashpoint.Flashpoint."""

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[Any],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        **others: Any,
    ) -> None:
        parts = {"model_parts": model_parts, "optimizers": optimizers, "lr_schedulers": lr_schedulers}
        super().__init__(config, dataloader=dataloader, states=states, **parts, **others)
        if not self.enable:
            return
        options: Any = config.options
        if not isinstance(options, dict):
            text = "must be keywords of ml_flashpoint.Flashpoint, by name"
            raise InvalidArgumentError(text, argument="options", value=options)
        self._flashpoint = FrameworkFlashpoint(config.base, every_n_steps=config.every_n_steps, **options)
        rest = {name: each for name, each in self.states.items() if name not in (MODEL, OPTIMIZER, DATALOADER)}
        self._flashpoint.track(**numbered("model", list(map(BareModule, model_parts))))
        self._flashpoint.track(**numbered("optimizer", list(optimizers)), trainer=Together(rest))
        if dataloader is not None:
            has_place = isinstance(dataloader, ParallelAwareDataloader)
            self._flashpoint.track(dataloader=LoaderPlace(dataloader) if has_place else dataloader)

    @property
    def flashpoint(self) -> FrameworkFlashpoint:
        """The `Flashpoint` that saves into memory: for its ``health``, ``scalars`` and ``wait``."""
        return self._flashpoint

    def _load(self, step: int = -1) -> bool:
        flashpoint = self._flashpoint
        own = flashpoint.agreed(self._find_load_step())
        if step != -1:
            found = step if step in {version.step for version in flashpoint.versions()} else None
        else:
            found = flashpoint.newest_step(may_fall_back=own != -1)
        if found is None or (step == -1 and own > found):
            is_loaded = bool(super()._load(own if step == -1 else step))
            flashpoint.begin_anew()
            return is_loaded

        def load_own() -> int:
            super(FlashpointManager, self)._load(own)
            return own

        if step != -1:
            flashpoint.resume(step=step)
        else:
            flashpoint.resume(load_own if own != -1 else None)
        return True

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if curr_step and not self.load_only:  # step 0 is a seed checkpoint, of a job that has not begun
            validator = getattr(self.states.get(TRAIN_STATE), "validator", None)
            if validator is not None and validator.should_validate(curr_step):
                self._save_after(validator, curr_step, last_step)
            else:
                self._save_into_memory(curr_step, last_step)
        return bool(super()._save(curr_step, last_step))

    def _save_after(self, validator: Any, step: int, is_last: bool) -> None:
        """Save once the step is validated, which draws random numbers: a resumed job does not validate it again."""
        validate = validator.validate

        def validate_and_save(*arguments: Any, **named: Any) -> None:
            validator.validate = validate
            validate(*arguments, **named)
            self._save_into_memory(step, is_last)

        validator.validate = validate_and_save

    def _save_into_memory(self, step: int, is_last: bool) -> None:
        self._flashpoint.step_to(step)
        if is_last:
            self._flashpoint.save()

    def _maybe_wait_for_staging(self) -> None:
        super()._maybe_wait_for_staging()
        self._flashpoint.before_update()

    def _close(self) -> None:
        super()._close()
        if hasattr(self, "_flashpoint"):  # torchtitan closes what could not be constructed, too
            self._flashpoint.__exit__(*sys.exc_info())

    def __del__(self) -> None:
        if getattr(self, "enable", False):  # memory is closed when the program exits, which is before
            super()._close()


def attach(config: Any, base: str | os.PathLike[str], *, every_n_steps: int = 1, **options: Any) -> Any:
    """Have the job of a torchtitan ``Trainer.Config`` save into memory every few steps.

    ::

        def llama3_8b_in_memory():
            return attach(llama3_8b(), "/dev/shm/mlf-jobs/job-145", every_n_steps=1)

    The settings for torchtitan's own checkpoints are kept, and checkpoints are enabled.

    Args:
        config: of a config registry. It is changed.
        base, every_n_steps, options: see `ml_flashpoint.Flashpoint`.

    Returns:
        The config.

    Raises:
        InvalidArgumentError: the config has another checkpoint manager than torchtitan's `CheckpointManager`.
    """
    stock: Any = getattr(config, "checkpoint", None)
    if type(stock) is not CheckpointManager.Config:
        text = "must have the settings of torchtitan's CheckpointManager as config.checkpoint"
        raise InvalidArgumentError(text, argument="config", value=stock)
    kept = {each.name: getattr(stock, each.name) for each in dataclasses.fields(stock)}
    ours = {"enable": True, "base": os.fspath(base), "every_n_steps": every_n_steps, "options": options}
    config.checkpoint = FlashpointManager.Config(**kept | ours)
    return config
