"""A training loop that saves at each step: how long it is held, and how much slower it is than without saves.

Two loops over one model, with steps that take longer than a copy of the state and steps that are shorter, and one over
a model of many small tensors. Runs of the kinds of saves take turns, so that a machine that drifts does so for all of
them.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from benchmarks.timing import RUNS, WARMUPS, Memcpy, Result, failed
from ml_flashpoint import Flashpoint

Save = Callable[[int], object]
Kind = tuple[Save, Callable[[], float], Callable[[], None]]
"""The function that saves, that which tells how many seconds it has held the loop so far, and that which ends it."""
Kinds = dict[str, Kind]

ROUNDS = 4
WIDTH = 1536
SMALL_TENSORS = 20_000
"""Parameters and state of the optimizer, of a model in which the number of tensors is what a save costs."""
SETTLED = 12
"""Saves after which a `Flashpoint` has measured what is best."""


class _Loop:
    """A model of so many layers, with AdamW."""

    def __init__(self, batch: int, width: int, layers: int = 8) -> None:
        self.model = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.batch = torch.randn(batch, width)
        self.step()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def tensors(self) -> dict[str, torch.Tensor]:
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return {str(number): tensor for number, tensor in enumerate([*self.model.parameters(), *moments])}


def _flashpoint(loop: _Loop, folder: Path, *, overlap: bool) -> Kind:
    fp = Flashpoint(folder, strict=True, overlap=overlap)
    fp.track(model=loop.model, optimizer=loop.optimizer).resume()
    for _ in range(SETTLED if overlap else 0):
        fp.step()
        loop.step()

    def end() -> None:
        fp.close()

    return lambda step: fp.step(), lambda: fp.health.blocked_total_s, end


def _peer(save: Save) -> Kind:
    held = 0.0

    def timed(step: int) -> None:
        nonlocal held
        began = time.perf_counter()
        save(step)
        held += time.perf_counter() - began

    return timed, lambda: held, lambda: None


def _async_save(loop: _Loop, folder: Path) -> Save:
    """`dcp.async_save`, which keeps nothing but the newest, with the stager that keeps its memory between saves."""
    stager = DefaultStager(StagingOptions(False, True, False, False))  # in shared memory, without a device
    before: list[Any] = []

    def save(step: int) -> None:
        for future in before:
            getattr(future, "upload_completion", future).result()
        before.clear()
        shutil.rmtree(folder, ignore_errors=True)
        before.append(state_dict_saver.async_save(loop.state(), checkpoint_id=folder, async_stager=stager))

    return save


def _ours(loop: _Loop, folder: Path) -> Kinds:
    return {
        "no saves": (lambda step: None, lambda: 0.0, lambda: None),
        "ours: Flashpoint": _flashpoint(loop, folder / "overlapped", overlap=True),
        "ours: Flashpoint, overlap=False": _flashpoint(loop, folder / "blocking", overlap=False),
    }


def _kinds(loop: _Loop, folder: Path) -> Kinds:
    return {
        **_ours(loop, folder),
        "dcp.async_save, torch's cached stager": _peer(_async_save(loop, folder / "dcp")),
        "torch.save": _peer(lambda step: torch.save(loop.state(), folder / "state.pt")),
    }


def results(folder: Path, scale: float) -> Iterator[Result]:
    """Rows: seconds held by a save, and of a step with its save."""
    width = max(16, int(WIDTH * scale**0.5))
    yield from _compared("long steps", lambda: _Loop(512, width), folder, _kinds)
    yield from _compared("short steps", lambda: _Loop(16, width), folder, _kinds)
    yield from _compared(f"{SMALL_TENSORS:,} tensors", lambda: _Loop(64, 64, SMALL_TENSORS // 8), folder, _ours)


def _compared(
    name: str, make: Callable[[], _Loop], folder: Path, kinds_of: Callable[[_Loop, Path], Kinds]
) -> Iterator[Result]:
    folder.mkdir(parents=True, exist_ok=True)
    loop = make()
    memcpy = Memcpy(loop.tensors())
    kinds = kinds_of(loop, folder)
    steps: dict[str, list[float]] = {kind: [] for kind in kinds}
    held: dict[str, list[float]] = {kind: [] for kind in kinds}
    state = f"{name}, saving at each"
    for turn in range(ROUNDS):
        for kind in list(kinds):
            try:
                _turn(turn, loop, kinds[kind], steps[kind], held[kind])
            except Exception as error:
                if kind.startswith("ours"):
                    raise
                yield failed(state, f"{kind}: step", error)
                yield failed(state, f"{kind}: held", error)
                del kinds[kind], steps[kind], held[kind]
    copies = statistics.median(memcpy.run() for _ in range(RUNS))
    for _, _, end in kinds.values():
        end()
    shutil.rmtree(folder)
    yield from _rows(state, steps, held, copies)


def _turn(turn: int, loop: _Loop, kind: Kind, steps: list[float], held: list[float]) -> None:
    save, held_s, _ = kind
    for run in range(WARMUPS + RUNS):
        began, before = time.perf_counter(), held_s()
        save(turn * (WARMUPS + RUNS) + run + 1)
        loop.step()
        if run >= WARMUPS:
            steps.append(time.perf_counter() - began)
            held.append(held_s() - before)


def _rows(state: str, steps: dict[str, list[float]], held: dict[str, list[float]], memcpy_s: float) -> Iterator[Result]:
    plain = statistics.median(steps["no saves"])
    for kind, times in steps.items():
        median, count = statistics.median(times), len(times)
        note = f"x {median / plain:.3f} of a step without"
        yield Result(state, f"{kind}: step", median, min(times), max(times), None, count, note)
        if kind != "no saves":
            median = statistics.median(held[kind])
            ratio = memcpy_s / median if median else None
            note = f"{100 * median / memcpy_s:.1f} % of a memcpy"
            yield Result(state, f"{kind}: held", median, min(held[kind]), max(held[kind]), ratio, count, note)
