"""Timing in pairs: every run of a case is preceded by a memcpy of the same bytes, and the ratio is of the two.

Machines are shared and drift, so a ratio is only formed within a pair, and medians are reported.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

State = dict[str, torch.Tensor]

RUNS = 5
WARMUPS = 2


@dataclass(frozen=True)
class Result:
    """One row of the table.

    Attributes:
        seconds: median. low_s, high_s: extremes.
        ratio: median of memcpy time / time; 1.0 is as fast as a memcpy. None where bytes do not matter.
        note: what else to know.
    """

    state: str
    case: str
    seconds: float
    low_s: float
    high_s: float
    ratio: float | None
    runs: int
    note: str = ""


class Memcpy:
    """A warm copy of a state's bytes between two buffers of the same shapes, by one call, single-threaded."""

    def __init__(self, state: State) -> None:
        total = sum(t.nbytes for t in state.values())
        self._from = torch.ones(total, dtype=torch.uint8)
        self._to = torch.empty_like(self._from)
        self.nbytes = total
        self.run()

    def run(self) -> float:
        """Seconds for one copy."""
        began = time.perf_counter()
        self._to.copy_(self._from)
        return time.perf_counter() - began


def measure(
    state: str,
    case: str,
    run: Callable[[int], float | None],
    memcpy: Memcpy | None,
    *,
    after: Callable[[], object] | None = None,
    note: str = "",
    runs: int = RUNS,
) -> Result:
    """Time ``run(i)``: its wall time, or what it returns if it times a part of itself.

    Args:
        after: called, untimed, after each run (to wait for background work, to delete files).
    """
    times: list[float] = []
    ratios: list[float] = []
    for i in range(WARMUPS + runs):
        gc.collect()
        reference = memcpy.run() if memcpy is not None else 0.0
        began = time.perf_counter()
        inner = run(i)
        taken = time.perf_counter() - began if inner is None else inner
        if after is not None:
            after()
        if i >= WARMUPS:
            times.append(taken)
            ratios.append(reference / taken)
    ratio = statistics.median(ratios) if memcpy is not None else None
    return Result(state, case, statistics.median(times), min(times), max(times), ratio, runs, note)
