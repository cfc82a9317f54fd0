"""The job of `tests.workers.training` on several ranks, and ranks that misbehave.

Owns what one rank does; functions are for `tests.support.forked.Team`. They return what the test compares.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ml_flashpoint import Flashpoint
from ml_flashpoint.format.errors import FlashpointError
from tests.support.forked import said
from tests.support.worker import base_path
from tests.workers import training

Report = Callable[..., None]


def undisturbed(report: Report, rank: int, kind: str, steps: int) -> dict[str, str]:
    torch.set_num_threads(1)
    return training.undisturbed(steps, kind)


def train(report: Report, rank: int, steps: int, options: dict[str, Any]) -> dict[str, Any]:
    return training.train(report, base_path(), steps, options)


class Counter:
    """Counts; refuses to be saved, or to be restored, when told to."""

    def __init__(self, fails_at: int = -1, refuses: int = -1) -> None:
        self.value = 0
        self._fails_at, self._refuses = fails_at, refuses

    def state_dict(self) -> dict[str, Any]:
        if self.value == self._fails_at:
            raise RuntimeError("cannot be saved now")
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["value"] == self._refuses:
            raise RuntimeError("cannot be restored")
        self.value = state["value"]


def count(report: Report, rank: int, steps: int, fails_at: dict[int, int], strict: bool) -> dict[str, Any]:
    """Counts and saves; rank r fails to be saved at the value of ``fails_at[r]``."""
    counter, model = Counter(fails_at.get(rank, -1)), nn.Linear(8, 8)
    raised = []
    with Flashpoint(base_path(), strict=strict, deadline_s=30) as fp:
        fp.track(counter=counter, model=model).resume()
        for _ in range(steps):
            counter.value += 1
            try:
                fp.step()
                fp.wait()
            except FlashpointError as error:
                raised.append((counter.value, type(error).__name__, str(error)))
        health = fp.health
        return {"failures": health.failures, "saves": health.saves, "error": health.last_error, "raised": raised}


def recount(report: Report, rank: int, refuses: dict[int, int]) -> tuple[int, int, tuple[str, ...]]:
    """Resumes; rank r refuses the value of ``refuses[r]``."""
    counter = Counter(refuses=refuses.get(rank, -1))
    with Flashpoint(base_path(), deadline_s=30) as fp:
        step = fp.track(counter=counter, model=nn.Linear(8, 8)).resume()
        assert fp.last_recovery is not None
        return step, counter.value, fp.last_recovery.discarded


def load_in_vain(report: Report, rank: int, culprit: int, how: str) -> list[tuple[int | None, str]]:
    """Saves, then resumes in ways that fail on one rank only; the rank that each error names, and its text."""
    with Flashpoint(base_path(), deadline_s=30, strict=True) as fp:
        fp.track(counter=Counter(), model=nn.Linear(8, 8)).save(1)
    told = []
    mine = rank == culprit
    counter = Counter(refuses=0 if mine and how == "refused" else -1)
    model = nn.Linear(9 if mine and how == "another shape" else 8, 8)
    for options in ({}, {"step": 1}, {"fallback": lambda: 0}):
        with Flashpoint(base_path(), deadline_s=30) as fp:
            try:
                fp.track(counter=counter, model=model).resume(**options)  # type: ignore[arg-type]
            except FlashpointError as error:
                told.append((error.rank, str(error)))
    return told


def grow_on_one_rank(report: Report, rank: int) -> dict[str, Any]:
    """The structure of the state changes on rank 1 only, in mid-training. Then all is restored."""

    def grow(model: nn.Module) -> None:
        if rank == 1:
            model.register_buffer("extra", torch.zeros(50_000))

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(n, n) for n in (30, 20, 40)))
    with Flashpoint(base_path(), deadline_s=30) as fp:
        fp.track(model=model)
        for step in range(1, 7):
            if step == 4:
                grow(model)
            with torch.no_grad():
                for tensor in model.state_dict().values():
                    tensor.fill_(step)
            fp.step()
            fp.wait()
        health, saved = fp.health, fp.last_saved
    fresh = nn.Sequential(*(nn.Linear(n, n) for n in (30, 20, 40)))
    grow(fresh)
    with Flashpoint(base_path(), deadline_s=30) as fp:
        found = fp.track(model=fresh).resume()
    values = sorted({float(v) for t in fresh.state_dict().values() for v in t.flatten().tolist()})
    return {"failures": health.failures, "error": health.last_error, "saved": saved, "found": found, "values": values}


def save_shards_of_groups(report: Report, rank: int) -> tuple[int, int | None, list[float]]:
    """Saves a tensor that pairs of ranks share out, as tensor parallelism beside data parallelism has it; the failures,
    and the step and this rank's shard that come back."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))["tensor"]

    def module(values: torch.Tensor) -> nn.Module:
        made = nn.Module()
        made.register_buffer("shared", distribute_tensor(values, mesh, [Shard(0)]))
        return made

    with Flashpoint(base_path(), deadline_s=30) as fp:
        fp.track(model=module(torch.arange(6.0))).save(1)
        fp.wait()
        failures = fp.health.failures
    fresh = module(torch.zeros(6))
    with Flashpoint(base_path(), deadline_s=30) as fp:
        step = fp.track(model=fresh).resume()
    return failures, step, fresh.shared.to_local().tolist()  # type: ignore[operator, union-attr]


def construct(report: Report, rank: int, options: dict[int, dict[str, Any]]) -> str:
    """Constructs a façade with arguments of this rank's own; returns the error."""

    def construct_here() -> str:
        with Flashpoint(**{"base": base_path(), "deadline_s": 30, **options.get(rank, {})}):
            return "constructed"

    return str(said(construct_here))


def fall_back(report: Report, rank: int, steps: list[int]) -> str:
    """Falls back to a step of this rank's own, which divides a number."""
    with Flashpoint(base_path(), deadline_s=30) as fp:
        try:
            return str(said(lambda: fp.track(counter=Counter()).resume(lambda: 56 // steps[rank])))
        except ZeroDivisionError as error:
            return f"ZeroDivisionError: {error}"


def go_on_alone(report: Report, rank: int, deadline_s: float) -> None:
    """Saves step after step, reporting each; without any collective of its own. Never ends."""
    counter = Counter()
    fp = Flashpoint(base_path(), deadline_s=deadline_s)
    fp.track(counter=counter, model=nn.Linear(8, 8)).resume()
    while True:
        began = time.monotonic()
        counter.value += 1
        fp.step()
        health = fp.health
        report("step", counter.value, time.monotonic() - began, health.failures, health.degraded)
        time.sleep(0.02)


def terminate_alone(report: Report, rank: int, grace_s: float, in_first_save: bool) -> None:
    """Rank 0 begins a save that rank 1 takes no part in, and gets SIGTERM; or while it waits in its first save."""
    fp = Flashpoint(base_path(), grace_s=grace_s, deadline_s=60, persist=str(base_path().parents[1] / "store"))
    fp.track(counter=Counter(), model=nn.Linear(8, 8)).resume()

    def terminate() -> None:
        report("terminating", time.monotonic())
        os.kill(os.getpid(), signal.SIGTERM)

    # Their first save ranks plan together, before `step` returns; later ones in the background.
    if not in_first_save:
        fp.step()
        assert fp.wait()
    if rank == 0:
        if in_first_save:
            threading.Timer(1.0, terminate).start()
        fp.step()
        if not in_first_save:
            terminate()
    while True:
        signal.pause()


def norms(report: Report, rank: int) -> list[list[float]]:
    """The means of batch normalizations under DDP, the second of them compiled by itself: as saved, and as restored."""
    means = []
    for value in (rank + 1.0, -1.0):
        both = [nn.BatchNorm1d(4), nn.BatchNorm1d(4)]
        for norm in both:
            nn.init.constant_(norm.running_mean, value)  # type: ignore[arg-type]
        module = nn.Sequential(nn.Linear(4, 4), both[0], torch.compile(both[1]))
        with Flashpoint(base_path(), deadline_s=30) as fp:
            # Without broadcast_buffers, DDP would not make them alike before they are saved.
            fp.track(model=nn.parallel.DistributedDataParallel(module, broadcast_buffers=False, init_sync=False))
            if not fp.resume():
                fp.save(1)
                fp.wait()
            means.append([float(norm.running_mean[0]) for norm in both])  # type: ignore[index]
    return means
