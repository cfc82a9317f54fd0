"""`RayTrainFlashpoint`: the loop's five lines inside a training function of Ray Train."""

from __future__ import annotations

import itertools
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import ray.train
from ray.train import Checkpoint
from torch.utils.data import DataLoader

from ml_flashpoint.data import LoaderBatches, Through
from ml_flashpoint.flashpoint import Flashpoint
from ml_flashpoint.format.arguments import checked_base, checked_integer
from ml_flashpoint.format.errors import InvalidArgumentError
from ml_flashpoint.format.names import validate_segment

_log = logging.getLogger(__name__)

POINTER = "flashpoint.json"
"""Name of the only file of a checkpoint that `RayTrainFlashpoint.report` reports."""


class RayTrainFlashpoint(Flashpoint):
    """Saves the state of a training function into memory every few steps, and restores it after a crash.

    ::

        def train_func():
            ...
            model = ray.train.torch.prepare_model(model)
            loader = ray.train.torch.prepare_data_loader(loader)
            with RayTrainFlashpoint(every_n_steps=1) as fp:
                fp.track(model=model, optimizer=optimizer, loader=loader)
                step = fp.resume()                              # 0 at a fresh start
                while step < steps:
                    for batch in fp.batches(loader):
                        ...
                        optimizer.step()
                        step = fp.step()
                    fp.report({"loss": loss.item()})            # or ray.train.report, as before

        TorchTrainer(train_func, run_config=RunConfig(name="job-145", failure_config=FailureConfig(max_failures=3)))

    The base container has the name of the run. Workers that Ray restarts, on the same or on other nodes, resume from
    it, and so does a later run with the same name. Construct it on all workers. Otherwise it is a `Flashpoint`.

    When Ray says that a node is about to be taken away, the next `step` saves, and waits until the copies are on other
    nodes (with ``persist``, until the version is persisted), at most until Ray's deadline.

    Args:
        root: folder of the base containers on each node: an absolute path on a tmpfs.
        ask_every_n_steps: interval in which `step` asks Ray if a node is about to be taken away. This is collective. 0:
            never ask.
        options: see `ml_flashpoint.Flashpoint`.

    Raises:
        InvalidArgumentError: an argument is invalid, or this process is not a worker of Ray Train.
        InvalidNameError: the name of the run cannot be the name of a folder.
    """

    def __init__(
        self, root: str | os.PathLike[str] = "/dev/shm/mlf-jobs", *, ask_every_n_steps: int = 10, **options: Any
    ) -> None:
        self._ask_every = checked_integer("ask_every_n_steps", ask_every_n_steps, 0)
        try:
            context = ray.train.get_context()
            name, self._is_first = context.get_experiment_name(), context.get_world_rank() == 0
        except RuntimeError as error:
            text = "must be constructed in a worker of Ray Train"
            raise InvalidArgumentError(text, argument="root", value=os.fspath(root)) from error
        self._has_saved_ahead = False
        super().__init__(Path(checked_base(root)) / validate_segment(name), **options)
        self._ranks.agree_on(ask_every_n_steps=self._ask_every)

    def track(self, /, **named: Any) -> RayTrainFlashpoint:
        """Do as `Flashpoint.track`. Of a loader that Ray Train has prepared, the one within is tracked."""
        super().track(**{name: _within(value) for name, value in named.items()})
        return self

    def batches(self, loader: DataLoader[Any], through: Through | None = None) -> LoaderBatches:
        """Do as `Flashpoint.batches`. Batches of a loader that Ray Train has prepared come to its device. If the loaded
        epoch has no batch left, and the sampler has no ``set_epoch``, the first loop is the next epoch."""
        inner = _within(loader)
        if inner is not loader:
            if through is not None:
                text = "cannot be used with a loader that Ray Train has prepared"
                raise InvalidArgumentError(text, argument="through", value=through)
            through = partial(_on_device, loader)
        found = super().batches(inner, through)
        return found if hasattr(inner.sampler, "set_epoch") else found.skipping_finished()

    def step(self) -> int:
        """Count a step as done, and save if a save is due, or Ray is about to take a node away: see
        `Flashpoint.step`."""
        done = super().step()
        if self._ask_every and done % self._ask_every == 0 and not self._has_saved_ahead:
            info = ray.train.get_preemption_info()
            if info is not None:
                self._save_ahead(info.deadline_ms)
        return done

    def _save_ahead(self, deadline_ms: int | None) -> None:
        self._has_saved_ahead = True
        left_s = self._checkpointer.deadline_s
        if deadline_ms is not None:
            left_s = min(left_s, max(deadline_ms / 1000 - time.time(), 0.0))
        _log.warning("a node is about to be taken away: saving step %d", self.steps_done)
        self.save()
        self._checkpointer.finish(left_s)

    def report(self, metrics: Mapping[str, Any], **options: Any) -> None:
        """Call ``ray.train.report`` with a checkpoint that says which step is in memory, and where. Collective.

        It is one small file, `POINTER`, and is for Ray's accounts (``get_checkpoint``, ``Result.checkpoint``). What is
        to be kept for good is given to ``ray.train.report`` itself, as ever.

        Args:
            metrics, options: see ``ray.train.report``.
        """
        if not self._is_first:
            ray.train.report(dict(metrics), **options)
            return
        with tempfile.TemporaryDirectory() as folder:
            pointer = {"step": self.steps_done, "base": str(self._checkpointer.base)}
            Path(folder, POINTER).write_text(json.dumps(pointer))
            ray.train.report(dict(metrics), Checkpoint.from_directory(folder), **options)


def _within(value: Any) -> Any:
    """Return the loader that one of ``ray.train.torch.prepare_data_loader`` wraps; other values as they are."""
    return getattr(value, "_dataloader", value) if isinstance(value, DataLoader) else value


def _on_device(loader: Any, batches: Iterable[Any]) -> Iterator[Any]:
    """Give batches as a prepared loader does: on its device, and where it has a stream for that, one ahead."""
    if loader._memcpy_stream is None:
        yield from map(loader._move_to_device, batches)
        return
    for batch, _ in itertools.pairwise(itertools.chain(map(loader._move_to_device, batches), [None])):
        loader._wait_for_batch(batch)
        yield batch
