"""Training with dropout from torch's own data loaders, as a user would write it, to be compared bit for bit.

Owns the loaders and the loop. `train` is the job, undisturbed without a base container; it is for tests of one process
and, on several ranks, for `tests.support.forked.Team`.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler, WeightedRandomSampler

from ml_flashpoint import Flashpoint

SAMPLES, BATCH, EPOCHS = 22, 4, 3
BATCHES = 6  # an epoch, the last one smaller


class Numbers(Dataset[torch.Tensor]):
    """Samples; knows which ones were fetched in this process.

    Args:
        augment: whether every sample gets noise from the generators of whoever fetches it.
    """

    def __init__(self, augment: bool = False) -> None:
        self.values = torch.linspace(-1, 1, SAMPLES * 6).sin().view(SAMPLES, 6)
        self.augment = augment
        self.fetched: list[int] = []

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> torch.Tensor:
        self.fetched.append(index)
        value = self.values[index]
        if self.augment:
            value = value + 0.1 * torch.randn(6) + random.random() + np.random.uniform()
        return value


class EveryOther(Sampler[int]):
    """A sampler of a user's own, which draws its order from Python's generator when it is asked for its first index."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __iter__(self) -> Iterator[int]:
        order = list(range(self._size))
        random.shuffle(order)
        yield from order

    def __len__(self) -> int:
        return self._size


class Eager(EveryOther):
    """The same, drawn when it is asked for an iterator."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self._size).tolist())


Made = tuple[DataLoader[torch.Tensor], dict[str, Any]]


def _plain(**options: Any) -> Made:
    augment = options.pop("augment", False)
    return DataLoader(Numbers(augment), batch_size=BATCH, **options), {}


def _own_generator(**options: Any) -> Made:
    generator = torch.Generator().manual_seed(9)
    return _plain(shuffle=True, generator=generator, **options)


def _shared_generator(**options: Any) -> Made:
    """Of the loader and of the model's noise; tracked by itself too."""
    generator = torch.Generator().manual_seed(9)
    return _plain(shuffle=True, generator=generator, **options)[0], {"noise": generator}


def _distributed(**options: Any) -> Made:
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    return _plain(sampler=DistributedSampler(range(SAMPLES), ranks, rank, seed=4), **options)


# Else children of a fork server would have theirs made by it.
_FORKED = {"num_workers": 2, "multiprocessing_context": "fork"}


LOADERS: dict[str, Callable[[], Made]] = {
    "in order": _plain,
    "shuffled": lambda: _plain(shuffle=True),
    "shuffled, augmented": lambda: _plain(shuffle=True, augment=True),
    "drop last": lambda: _plain(shuffle=True, drop_last=True),
    "own generator": _own_generator,
    "shared generator": _shared_generator,
    "with replacement": lambda: _plain(sampler=WeightedRandomSampler(list(range(1, SAMPLES + 1)), SAMPLES)),
    "user's sampler": lambda: _plain(sampler=EveryOther(SAMPLES)),
    "eager sampler": lambda: _plain(sampler=Eager(SAMPLES)),
    "no batches": lambda: (DataLoader(Numbers(), batch_size=None, shuffle=True), {}),
    "distributed": _distributed,
    "workers": lambda: _plain(**_FORKED, shuffle=True),
    "workers, augmented": lambda: _plain(**_FORKED, shuffle=True, augment=True),
    "workers, own generator": lambda: _own_generator(**_FORKED, augment=True),
    "workers, distributed": lambda: _distributed(**_FORKED, prefetch_factor=1, augment=True),
}


class Epochs:
    """What a user keeps of the loop: the epoch that is under way."""

    def __init__(self) -> None:
        self.now = 0

    def state_dict(self) -> dict[str, Any]:
        return {"now": self.now}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.now = state["now"]


class Crash(Exception):
    """The end of a life."""


Result = tuple[list[float], list[bytes]]


def train(kind: str, base: Path | None, crash_at: int | None = None, seed: int = 0) -> tuple[Result, list[int]]:
    """Trains for all epochs, or until a step.

    Returns:
        Losses of the steps of this life and the parameters at the end; and the samples fetched in this process.
    """
    torch.manual_seed(3)
    model: nn.Module = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.4), nn.Linear(16, 3))
    if dist.is_initialized():
        model = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    rank = dist.get_rank() if dist.is_initialized() else 0
    for reseed in (torch.manual_seed, random.seed, np.random.seed):
        reseed(100 * seed + rank)
    loader, more = LOADERS[kind]()
    epochs, losses = Epochs(), []
    fp = None
    step = 0
    if base is not None:
        fp = Flashpoint(base, handle_sigterm=False, strict=True)
        fp.track(model=model, optimizer=optimizer, loader=loader, epochs=epochs, **more)
        step = fp.resume()
    try:
        for number in range(epochs.now, EPOCHS):
            epochs.now = number
            if isinstance(loader.sampler, DistributedSampler):
                loader.sampler.set_epoch(number)
            for batch in loader if fp is None else fp.batches(loader):
                optimizer.zero_grad()
                if "noise" in more:
                    batch = batch + torch.rand(batch.shape, generator=more["noise"])
                loss = model(batch).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                step += 1
                if fp is not None:
                    fp.step()
                    fp.wait()
                if step == crash_at:
                    raise Crash
    except Crash:
        pass
    if fp is not None:
        fp.close()
    parameters = [p.detach().numpy().tobytes() for p in model.parameters()]
    return (losses, parameters), loader.dataset.fetched


def lives(report: Callable[..., None], rank: int, kind: str, crashes: list[int]) -> tuple[Result, Result]:
    """On one rank of several: the undisturbed run, and the one that crashes after these steps, put together."""
    torch.set_num_threads(1)
    undisturbed, _ = train(kind, None)
    base = Path(os.environ["FLASHPOINT_TEST_BASE"])
    losses: list[float] = []
    for life, crash_at in enumerate([*crashes, None]):
        (some, parameters), _ = train(kind, base, crash_at, seed=life)
        losses += some
    return undisturbed, (losses, parameters)
