"""Jobs of the façade that go on with another number of ranks.

Owns what one rank does; functions are for `tests.support.forked.Team`. They return what the test compares.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from ml_flashpoint import Config, Flashpoint, rest_of_epoch
from ml_flashpoint.format.errors import FlashpointError
from tests.support.bare_trainer import bare_trainer
from tests.support.forked import said
from tests.support.loops import Stored
from tests.support.worker import base_path

Report = Callable[..., None]
EPOCHS = 2


def several(report: Report, rank: int, calls: list[tuple[str, str, Any]]) -> list[Any]:
    """What several functions of this module return, one after the other.

    Args:
        calls: the name of a function, the name of a base container of its own, and the function's other arguments.
    """
    torch.set_num_threads(1)
    folder, results = base_path().parent, []
    for function, name, args in calls:
        os.environ["FLASHPOINT_TEST_BASE"] = str(folder / name)
        results.append(globals()[function](report, rank, *args))
    return results


class Looped(Stored):
    """Something with a state that one can loop over."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Told(logging.Handler):
    """What the package logs in this process."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("ml_flashpoint").handlers = [self]

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _tracked(rank: int, states: dict[str, list[Any]], seed: int) -> dict[str, Any]:
    """A model under DDP, its optimizer, generators of ranks and of all, and what has the value of this rank."""
    torch.manual_seed(seed)
    model = DistributedDataParallel(nn.Linear(6, 3))
    for reseed in (torch.manual_seed, random.seed, np.random.seed):
        reseed(1000 * seed + rank)
    kinds = {"looped": Looped}
    return {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1),
        "noise": torch.Generator().manual_seed(1000 * seed + 500 + rank),
        "order": torch.Generator().manual_seed(seed),
        **{name: kinds.get(name, Stored)(values[rank % len(values)]) for name, values in states.items()},
    }


def _train(tracked: dict[str, Any]) -> None:
    tracked["model"](torch.ones(2, 6)).sum().backward()
    tracked["optimizer"].step()
    tracked["optimizer"].zero_grad()


def _drawn(tracked: dict[str, Any]) -> list[float]:
    """The next number of every generator."""
    own = [torch.rand((), generator=tracked[name]).item() for name in ("noise", "order")]
    return [random.random(), float(np.random.random()), torch.rand(()).item(), *own]


def save(report: Report, rank: int, states: dict[str, list[Any]], step: int = 3, change: str = "raise") -> list[float]:
    """Resumes and saves a step; what the generators give afterwards."""
    tracked = _tracked(rank, states, 1)
    with Flashpoint(base_path(), strict=True, deadline_s=60, on_world_size_change=change) as fp:
        fp.track(**tracked).resume()
        _train(tracked)
        fp.save(step)
    return _drawn(tracked)


def _summed(states: list[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
    return {"value": [[state["value"] for state in states], rank, world_size]}


def _failing(states: list[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
    if rank == world_size - 1:
        raise KeyError(f"rank {rank}")
    return states[0]


FUNCTIONS = {"summed": _summed, "failing": _failing}


def load(
    report: Report,
    rank: int,
    states: dict[str, list[Any]],
    reshard: str | dict[str, str] | None = None,
    change: str = "raise",
    falls_back: bool = False,
) -> dict[str, Any]:
    """Resumes; what was found, or the error, and what is left of the objects then."""
    told, tracked = Told(), _tracked(rank, states, 2)
    functions: Any = FUNCTIONS[reshard] if isinstance(reshard, str) else None
    if isinstance(reshard, dict):
        functions = {name: FUNCTIONS[each] for name, each in reshard.items()}
    result: dict[str, Any] = {"error": None, "step": None, "fell back": []}

    def fallback() -> int:
        result["fell back"].append(rank)
        return 0

    before = _weight(tracked)
    with Flashpoint(base_path(), deadline_s=60, on_world_size_change=change) as fp:
        own = {name: each for name, each in tracked.items() if name in states}
        fp.track(**{name: each for name, each in tracked.items() if name not in states})
        fp.track(**own, reshard=functions)
        try:
            result["step"] = fp.resume(fallback if falls_back else None)
        except FlashpointError as error:
            result["error"] = f"{type(error).__name__}: {error}"
    result["weight"], result["stepped"] = _weight(tracked), bool(tracked["optimizer"].state)
    result["touched"] = result["weight"] != before
    result["drawn"] = _drawn(tracked)
    result["values"] = {name: each.value for name, each in own.items()}
    result["told"] = [line for line in told.lines if line.startswith("saved by")]
    _train(tracked)
    result["trains"] = _weight(tracked) != result["weight"]
    return result


def _weight(tracked: dict[str, Any]) -> list[float]:
    return [float(value) for value in tracked["model"].module.weight.detach().flatten()]


# ---- loaders --------------------------------------------------------------------------------------------------


class Numbers(torch.utils.data.Dataset[int]):
    """Samples that are their own indices."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> int:
        return index


def _loader(kind: str, sampler: Any, size: int, drop_last: bool) -> DataLoader[int]:
    options: dict[str, Any] = {"batch_size": 2, "sampler": sampler, "drop_last": drop_last}
    if kind == "persistent workers":
        options |= {"num_workers": 2, "multiprocessing_context": "fork", "persistent_workers": True}
    return DataLoader(Numbers(size), **options)


def epochs(
    report: Report, rank: int, kind: str, size: int, until: int | None, drop_last: bool = False
) -> list[tuple[int, list[int]]]:
    """The documented loop, up to so many steps of this life; epoch and samples of each batch that was given."""
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sampler: DistributedSampler[int] = DistributedSampler(Numbers(size), seed=7, drop_last=drop_last)
    loader = _loader(kind, sampler, size, drop_last)
    seen: list[tuple[int, list[int]]] = []
    with Flashpoint(base_path(), strict=True, deadline_s=60) as fp:
        fp.track(model=model, optimizer=optimizer)
        fp.track(loader=loader, reshard={"loader": rest_of_epoch})
        fp.resume()
        for epoch in range(sampler.epoch, EPOCHS):
            sampler.set_epoch(epoch)
            for batch in fp.batches(loader):
                seen.append((epoch, batch.tolist()))
                optimizer.zero_grad()
                model(batch.float().mean().view(1, 1)).sum().backward()  # meets the other ranks
                optimizer.step()
                fp.step()
                fp.wait()
                if len(seen) == until:
                    return seen
    return seen


@contextlib.contextmanager
def _resuming(
    size: int, *, is_distributed: bool = True, reshard: Any = rest_of_epoch, change: str = "raise"
) -> Iterator[tuple[Flashpoint, Any]]:
    """A façade that tracks a loader, and the loader."""
    sampler = DistributedSampler(Numbers(size), seed=7) if is_distributed else None
    loader, model = _loader("plain", sampler, size, False), DistributedDataParallel(nn.Linear(1, 1))
    with Flashpoint(base_path(), deadline_s=60, on_world_size_change=change) as fp:
        fp.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))
        yield fp.track(loader=loader, reshard=reshard), loader


def undecided_loader(report: Report, rank: int, size: int, change: str) -> Any:
    """Resumes with a loader, and no function for it; the error, or the step."""
    with _resuming(size, reshard=None, change=change) as (fp, _):
        return said(fp.resume)


def other_loader(report: Report, rank: int, size: int, is_distributed: bool) -> Any:
    """Resumes with `rest_of_epoch` and a loader that it is not for, or that was not."""
    with _resuming(size, is_distributed=is_distributed) as (fp, loader):
        if found := said(fp.resume):
            return found
        for _ in zip(range(2), fp.batches(loader), strict=False):
            fp.step()
            fp.wait()
        return 0


def other_epoch(report: Report, rank: int, size: int, begin: bool = False) -> Any:
    """Resumes in the midst of an epoch and sets another one; the error. With ``begin``, it saves once more before."""
    with _resuming(size) as (fp, loader):
        fp.resume()
        if begin:
            iter(fp.batches(loader))
            fp.save()
            return ""
        loader.sampler.set_epoch(1)
        return said(lambda: f"given {list(fp.batches(loader))}")


# ---- Lightning ------------------------------------------------------------------------------------------------


def dictionary(
    report: Report, rank: int, own: list[float], change: str = "raise", place: list[dict[str, int]] | None = None
) -> Any:
    """Saves a dictionary of Lightning if there is none; else what was loaded as this rank's own, or the error."""
    from ml_flashpoint.adapter.lightning.engine import TrainerFlashpoint

    checkpoint = {
        "state_dict": {"weight": torch.arange(50.0)},
        "callbacks": {"mean": {"total": torch.tensor(own[rank % len(own)])}},
        "loops": {"done": 4, "fit_loop": {"state_dict": {"combined_loader": place}}},
    }
    options: Any = {"deadline_s": 60, "on_world_size_change": change, "sigterm_grace_s": None}
    with TrainerFlashpoint(str(base_path()), sharded=False, config=Config(**options), strict=True) as flashpoint:
        flashpoint.attach(bare_trainer(lambda: dict(checkpoint)))
        path = flashpoint.find(None, may_fall_back=False)
        if path is None:
            flashpoint.save(4)
            assert flashpoint.wait(60)
            return None
        loaded = said(lambda: flashpoint.load(str(path)))
        if isinstance(loaded, str):
            return loaded
        assert torch.equal(loaded["state_dict"]["weight"], torch.arange(50.0))
        return loaded["loops"]["done"], loaded["callbacks"]["mean"]["total"].item()
