"""`DeepSpeedFlashpoint`: the loop's five lines for an engine of DeepSpeed.

This is a function beside the engine's ``save_checkpoint``, and no ``checkpoint_engine`` within it. That one is asked
between three barriers, after folders were made; ``load_checkpoint`` looks for files before it asks; and of the buffers,
only one rank's pass through.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from deepspeed import DeepSpeedEngine
from deepspeed.runtime.dataloader import DeepSpeedDataLoader
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ml_flashpoint.adapter.deepspeed.state import EngineState, check_engine
from ml_flashpoint.data import LoaderBatches, Through
from ml_flashpoint.flashpoint import Flashpoint
from ml_flashpoint.format.arguments import checked_callable
from ml_flashpoint.format.errors import InvalidArgumentError


class DeepSpeedFlashpoint(Flashpoint):
    """Saves an engine of DeepSpeed into memory every few steps, and restores it after a crash.

    ::

        engine, _, loader, _ = deepspeed.initialize(model=model, config=config, training_data=data)
        fp = DeepSpeedFlashpoint(engine, "/dev/shm/mlf-jobs/job-145", every_n_steps=1)
        step = fp.resume()                                  # 0 when fresh
        for epoch in range(step // steps_per_epoch, epochs):
            for batch in fp.batches(loader):
                loss = engine(batch)
                engine.backward(loss)
                engine.step()
                fp.step()                                   # counts the engine's steps
        fp.close()

    Tracked are the engine's module, optimizer (of ZeRO stages 0 to 3, each rank its partition), scheduler, scaler,
    counters and loader, and what ``track`` is given. The engine's own ``save_checkpoint`` and ``load_checkpoint``, and
    their folders, stay as they are.

    Steps are the engine's ``global_steps``. Gradients that are being accumulated are in no checkpoint.

    Args:
        engine: as ``deepspeed.initialize`` has returned it.
        base, options: see `ml_flashpoint.Flashpoint`.

    Raises:
        InvalidArgumentError: an argument is unusable, or the engine uses what is not supported.
    """

    _tracked_type = EngineState

    def __init__(self, engine: DeepSpeedEngine, base: str | os.PathLike[str], **options: Any) -> None:
        check_engine(engine)
        super().__init__(base, **options)
        self._engine: Any = engine
        self._inner: dict[int, DataLoader[Any]] = {}  # by the DeepSpeedDataLoader around it
        assert isinstance(self._tracked, EngineState)
        self._of_engine = self._tracked
        self._of_engine.attach(engine)
        parts = {
            "model": None if self._engine.zero_optimization_partition_weights() else engine.module,
            "optimizer": engine.optimizer if isinstance(engine.optimizer, Optimizer) else None,
            "scheduler": engine.lr_scheduler,
            "scaler": engine.torch_autocast_z0_gradscaler
            or getattr(engine.optimizer, "torch_autocast_gradscaler", None),
            "loader": engine.training_dataloader,
        }
        self.track(**{name: each for name, each in parts.items() if each is not None})

    def track(self, /, **named: Any) -> DeepSpeedFlashpoint:
        """Do as `Flashpoint.track`, also with a loader that the engine has made (``engine.deepspeed_io``)."""
        super().track(**{name: self._within(value) for name, value in named.items()})
        return self

    def batches(self, loader: Any, through: Through | None = None) -> LoaderBatches:
        """Do as `Flashpoint.batches`. ``loader`` may be the engine's. DeepSpeed tells its sampler no epochs, so if the
        loaded epoch has no batch left, the first loop is the next epoch."""
        found = super().batches(self._within(loader), through)
        if not isinstance(loader, DeepSpeedDataLoader):
            return found
        found = found.skipping_finished()
        return found if loader.tput_timer is None else _Timed(found, loader.tput_timer)

    def _within(self, value: Any) -> Any:
        """Return the DataLoader that a DeepSpeedDataLoader makes for each epoch; other values as they are."""
        if not isinstance(value, DeepSpeedDataLoader):
            return value
        if id(value) not in self._inner:
            self._inner[id(value)] = DataLoader(
                value.dataset,
                batch_size=value.batch_size,
                pin_memory=value.pin_memory,
                sampler=value.data_sampler,
                collate_fn=value.collate_fn,
                num_workers=value.num_local_io_workers,
                drop_last=value.dataloader_drop_last,
            )
        return self._inner[id(value)]

    def resume(self, fallback: Callable[[], object] | None = None, *, step: int | None = None) -> int:
        """Restore the newest state that all ranks can load, or that of a step. Collective.

        Args:
            fallback: called where memory has nothing, as ``lambda: engine.load_checkpoint(folder)``. Whatever it
                returns: the engine counts the steps.
            step: see `Flashpoint.resume`, also for errors.

        Returns:
            The steps of the engine; 0 if there is nothing to go on from.
        """

        fallback = checked_callable("fallback", fallback, "that loads a state into the engine")
        super().resume(None if fallback is None else partial(self._load_durable, fallback), step=step)
        if self._resumed_from is not None:
            self._of_engine.settle()
        self._loop.steps = self._engine.global_steps
        return self._loop.steps

    def _load_durable(self, load: Callable[[], object]) -> int:
        load()
        return int(self._engine.global_steps)

    def step(self) -> int:
        """Save if a save is due, and the engine has done a step since. While gradients are being accumulated, do
        nothing. Call it after ``engine.step()``. See `Flashpoint.step`."""
        done = int(self._engine.global_steps)
        if done != self._loop.steps:
            self._loop.steps = done - 1
            return super().step()
        return done

    def save(self, step: int | None = None) -> None:
        """Do as `Flashpoint.save`, under the engine's number of steps. Raises an `InvalidArgumentError` if ``step`` is
        another one, or while gradients are being accumulated."""
        engine = self._engine
        if step not in (None, engine.global_steps):
            text = f"must be the engine's global_steps, {engine.global_steps}"
            raise InvalidArgumentError(text, argument="step", value=step)
        counts_itself = engine.managed_gradient_accumulation() and engine._is_gradient_accumulation_boundary is None
        if counts_itself and engine.micro_steps % engine.gradient_accumulation_steps():
            text = "gradients are being accumulated, and are in no checkpoint"
            raise InvalidArgumentError(
                text, argument="step", value=step, hint="save when engine.global_steps has grown"
            )
        self._loop.steps = engine.global_steps
        super().save()


class _Timed(LoaderBatches):
    """Batches for which an engine's timer of throughput starts, as its own loader starts it."""

    def __init__(self, batches: LoaderBatches, timer: Any) -> None:
        self._batches, self._timer = batches, timer

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._batches)
        while True:
            self._timer.start()
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch
