"""`AcceleratorFlashpoint`: the loop's five lines for what an `accelerate.Accelerator` has prepared."""

from __future__ import annotations

import logging
import os
from typing import Any

from accelerate import Accelerator
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from ml_flashpoint.adapter.accelerate.place import LoaderPlace, samplers_within
from ml_flashpoint.adapter.frameworks import numbered
from ml_flashpoint.data import LoaderBatches
from ml_flashpoint.flashpoint import Flashpoint
from ml_flashpoint.format.errors import InvalidArgumentError

_log = logging.getLogger(__name__)


class AcceleratorFlashpoint(Flashpoint):
    """Saves the prepared objects of an accelerator into memory every few steps, and restores them after a crash.

    ::

        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        fp = AcceleratorFlashpoint(accelerator, "/dev/shm/mlf-jobs/job-145", every_n_steps=1)
        step = fp.resume()                                  # 0 at a fresh start
        for epoch in range(step // steps_per_epoch, epochs):
            for batch in fp.batches(loader):
                with accelerator.accumulate(model):
                    ...
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                fp.step()                                   # counts the optimizer's steps
        fp.close()

    It tracks the models, optimizers, schedulers, loaders and objects of ``register_for_checkpointing`` that the
    accelerator has when this object is constructed, its scaler, its count of accumulated batches, and the objects
    passed to ``track``. Accelerate's own ``save_state`` keeps working.

    A loader resumes within its pass, without fetching earlier batches again. Random numbers that samples and collators
    draw in the main process are the same; workers (``num_workers``) draw different ones in a resumed pass. Iterable
    data is read again, without the random numbers of a prefetched batch. Workers are restarted in each pass, also with
    ``persistent_workers``.

    Args:
        accelerator: after ``prepare``.
        base, options: see `ml_flashpoint.Flashpoint`.

    Raises:
        InvalidArgumentError: an argument is unusable, or nothing was prepared, or by DeepSpeed or Megatron-LM.
    """

    def __init__(self, accelerator: Accelerator, base: str | os.PathLike[str], **options: Any) -> None:
        if not isinstance(accelerator, Accelerator):
            raise InvalidArgumentError("must be an Accelerator", argument="accelerator", value=accelerator)
        if not accelerator._models:
            hint = "call accelerator.prepare(model, ...) first"
            raise InvalidArgumentError("has no model", argument="accelerator", value=accelerator, hint=hint)
        if (kind := accelerator.distributed_type.value) in ("DEEPSPEED", "MEGATRON_LM", "XLA"):
            raise InvalidArgumentError(f"{kind} is not supported", argument="accelerator", value=accelerator)
        super().__init__(base, **options)
        self._accelerator = accelerator
        self._places = [LoaderPlace(each) for each in accelerator._dataloaders if not has_own_state(each)]
        kept = [each for each in accelerator._dataloaders if has_own_state(each)]
        for each in kept:
            _check_order(each)
        self._has_warned = False
        self.track(**numbered("model", accelerator._models))
        self.track(**numbered("optimizer", [each.optimizer for each in accelerator._optimizers]))
        self.track(**numbered("scheduler", accelerator._schedulers))
        self.track(**numbered("loader", [*self._places, *kept]))
        self.track(**numbered("registered", accelerator._custom_objects))
        if accelerator.scaler is not None:
            self.track(scaler=accelerator.scaler)
        self.track(accelerator=_Accumulated(accelerator))

    def batches(self, loader: Any, through: Any = None) -> Any:
        """Return the batches of a prepared loader, from where training goes on; see `Flashpoint.batches`."""
        for place in self._places:
            if place.loader is loader:
                if through is not None:
                    text = "cannot be used with a loader that Accelerate has prepared, which fetches ahead itself"
                    raise InvalidArgumentError(text, argument="through", value=through)
                return LoaderBatches(place)
        return super().batches(loader, through)

    def step(self) -> int:
        """Count a step of the optimizer as done, and save if a save is due. While gradients are being accumulated, do
        nothing. See `Flashpoint.step`."""
        if not self._accelerator.sync_gradients:
            return self.steps_done
        if self.steps_done and self._places and not self._has_warned:
            self._has_warned = True
            if not any(place.is_looped_over for place in self._places):
                _log.warning("nobody loops over fp.batches(loader): a restart begins an epoch anew")
        return super().step()


class _Accumulated:
    """The count of batches since gradients were last synchronized."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, int]:
        return {"step": self._accelerator.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._accelerator.step = state["step"]


def has_own_state(loader: Any) -> bool:
    """Return True if a prepared loader keeps its place itself. The methods are there in any case, and may fail."""
    return bool(getattr(loader, "use_stateful_dataloader", False))


def _check_order(loader: Any) -> None:
    """Refuse a loader with a state of its own whose order is drawn from a generator that is in nobody's state."""
    drawing = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
    if any(type(each) in drawing for each in samplers_within(loader.base_dataloader.batch_sampler)):
        text = "would come in another order after a restart"
        hint = "pass DataLoaderConfiguration(use_seedable_sampler=True)"
        raise InvalidArgumentError(text, argument="loader", value=loader, hint=hint)
