"""The rows of a run, how they are timed, and how long it may go on."""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Iterator

import torch


@dataclasses.dataclass(frozen=True)
class Size:
    """How much is moved.

    Attributes:
        large, small: number of tensors and bytes of each. floor: bytes of a copy that is a floor.
        layers, width, tokens: of the GPT whose steps are timed. steps: how many, in each of its runs.
    """

    large: tuple[int, int]
    small: tuple[int, int]
    floor: int
    layers: int
    width: int
    tokens: int
    steps: int


REAL = Size((128, 94 << 20), (20_000, 64 << 10), 2 << 30, 24, 1024, 32_768, 12)
TINY = Size((3, 1 << 20), (200, 4 << 10), 4 << 20, 1, 32, 64, 2)


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        seconds: median of ``runs``; low and high are the extremes.
        gb_s: decimal gigabytes a second. of_floor: that, as a part of what the same copy at its best reaches.
        note: what else to know; why it was left out, if ``runs`` is 0.
    """

    section: str
    case: str
    nbytes: int = 0
    seconds: float = 0.0
    low: float = 0.0
    high: float = 0.0
    runs: int = 0
    gb_s: float | None = None
    of_floor: float | None = None
    note: str = ""


class Run:
    """What all sections need.

    Args:
        device: what is measured; the CPU to try the benchmark itself.
        size: how much is moved.
        budget_s: seconds after which no more cases are begun.
    """

    def __init__(self, device: torch.device, size: Size, budget_s: float) -> None:
        self.device = device
        self.size = size
        self.rates: dict[str, float] = {}
        self._ends = time.monotonic() + budget_s

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def left_s(self) -> float:
        return self._ends - time.monotonic()

    def sync(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def release(self) -> None:
        """Give back what the last section held."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()

    def timed(self, run: Callable[[], object]) -> float:
        """Seconds of one run, from when the device is idle to when it is idle again."""
        self.sync()
        began = time.perf_counter()
        run()
        self.sync()
        return time.perf_counter() - began

    def measure(
        self,
        section: str,
        case: str,
        run: Callable[[], object],
        nbytes: int = 0,
        *,
        floor: str = "",
        runs: int = 5,
        warmups: int = 1,
        note: str = "",
    ) -> Row:
        """Time ``run()``: its wall time, or the seconds that it returns as a float.

        Args:
            floor: the case whose rate this one's is compared with.
        """
        times = []
        for turn in range(warmups + runs):
            returned: list[object] = []
            taken = self.timed(lambda kept=returned: kept.append(run()))  # type: ignore[misc]
            if turn >= warmups:
                times.append(returned[0] if isinstance(returned[0], float) else taken)
        return self.row(section, case, times, nbytes, floor=floor, note=note)

    def row(
        self, section: str, case: str, times: list[float], nbytes: int = 0, *, floor: str = "", note: str = ""
    ) -> Row:
        """The row of some times."""
        seconds = statistics.median(times)
        rate = nbytes / seconds / 1e9 if nbytes else None
        if rate is not None:
            self.rates[case] = rate
        part = rate / self.rates[floor] if rate is not None and floor in self.rates else None
        return Row(section, case, nbytes, seconds, min(times), max(times), len(times), rate, part, note)


Section = Callable[[Run], Iterator[Row]]


def carried_out(run: Run, sections: dict[str, Section], only: str = "") -> Iterator[Row]:
    """The rows of all sections. One that fails, or that there is no time for, says so in its place."""
    for name, section in sections.items():
        if only and only not in name:
            continue
        if run.left_s <= 0:
            yield Row(name, "all", note="left out: no time was left")
            continue
        try:
            for row in section(run):
                yield row
                if run.left_s <= 0:
                    yield Row(name, "the rest", note="left out: no time was left")
                    break
        except Exception as error:
            yield Row(name, "the rest", note=f"failed: {type(error).__name__}: {error}")
        run.release()
