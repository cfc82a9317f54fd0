"""Timing in pairs: every run of a case is preceded by a memcpy of the same bytes, and the ratio is of the two.

Machines are shared and drift, so a ratio is only formed within a pair, and medians are reported.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
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
        runs: that were measured; 0 if it was skipped or failed, for the reason in ``note``.
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


def of_peer(state: str, case: str, rows: Iterator[Result]) -> Iterator[Result]:
    """Pass on a peer's rows. If the peer fails, the last row has the reason, and what the peer held is freed."""
    row: Result | None = None
    try:
        yield from rows
    except Exception as error:
        row = failed(state, case, error)
    gc.collect()  # now that no traceback holds a frame of the peer's
    if row is not None:
        yield row


def failed(state: str, case: str, error: Exception) -> Result:
    """Return the row of a peer that fails."""
    reason = str(error).strip().partition("\n")[0][:200]
    return Result(state, case, 0.0, 0.0, 0.0, None, 0, note=f"failed: {type(error).__name__}: {reason}")


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
