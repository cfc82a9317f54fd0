"""``python -m benchmarks.rivals.bar``: what a save at every step costs a loop beyond the copy itself. See ``--help``.

One process and one loop, in which rounds without saves, with a thread that only copies, and with a `Flashpoint` take
turns, so that a machine that drifts does so for all of them. Steps take longer than three copies of the state.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from benchmarks import machine
from benchmarks.rivals import worker
from benchmarks.rivals.catalogue import KINDS
from benchmarks.rivals.loops import Loop
from benchmarks.rivals.worker import now

_SCALE_OF_A_GIB = 4.75
_OURS, _COPY = "ours", "copy"
_MOST_HELD, _MOST_HELD_S, _MOST_SLOWER, _LEAST_STEP = 0.02, 2.5e-3, 0.05, 3.0


@dataclass
class Taken:
    """What came of it, by round. Times in seconds.

    Attributes:
        nbytes: of the state.
        memcpy: of the state's bytes, by one thread. held: that one save kept the training thread.
        alone, copying, saving: a step's mean: without anything, with a copy by a thread, and with a save.
    """

    nbytes: int
    memcpy: list[float] = field(default_factory=list)
    held: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    copying: list[float] = field(default_factory=list)
    saving: list[float] = field(default_factory=list)

    def lines(self) -> list[str]:
        """For a person: each bar, and whether it is met by the median."""
        memcpy, held = statistics.median(self.memcpy), statistics.median(self.held)
        share = _median_of_pairs(self.held, self.memcpy)
        beyond = _median_of_pairs(self.saving, self.copying) - 1
        step = statistics.median(self.alone) / memcpy
        return [
            f"state of {self.nbytes / 2**30:.2f} GiB, memcpy {memcpy * 1e3:.1f} ms",
            f"{_met(step >= _LEAST_STEP)} a step takes {step:.2f} copies (bar: {_LEAST_STEP:.0f} at least)",
            f"{_met(share <= _MOST_HELD)} held {100 * share:.2f} % of a memcpy (bar: {100 * _MOST_HELD:.0f} %)",
            f"{_met(held <= _MOST_HELD_S)} held {held * 1e3:.2f} ms (bar: {_MOST_HELD_S * 1e3} ms, of 2 GiB)",
            f"{_met(beyond <= _MOST_SLOWER)} a step with a save x {1 + beyond:.3f} of one with a copy alone"
            f" (bar: {1 + _MOST_SLOWER}; of one without either x {_median_of_pairs(self.saving, self.alone):.3f},"
            f" the copy alone x {_median_of_pairs(self.copying, self.alone):.3f})",
        ]


def _median_of_pairs(some: Sequence[float], others: Sequence[float]) -> float:
    return statistics.median(one / other for one, other in zip(some, others, strict=True))


def _met(is_met: bool) -> str:
    return "met:   " if is_met else "missed:"


def taken(loop: Loop, rounds: int, folder: Path) -> Taken:
    """All measurements, after the warm-up of both."""
    found = Taken(loop.nbytes)
    source = torch.ones(loop.nbytes, dtype=torch.uint8)
    target = torch.empty_like(source)
    kinds = {kind.name: kind for kind in KINDS}
    runs: list[worker.Run] = []
    try:
        for name in (_COPY, _OURS):
            place = folder / name
            place.mkdir(parents=True)
            runs.append(worker.Run(kinds[name], loop, place))
            for _ in range(runs[-1].saves.warmups):
                runs[-1].save()
                runs[-1].step()
            runs[-1].saves.settle()
        copying, ours = runs
        for _ in range(1 + rounds):
            gc.collect()
            began = now()
            target.copy_(source)
            found.memcpy.append(now() - began)
            found.held.append(ours.held_by_one())
            found.alone.append(ours.round_alone())
            found.copying.append(copying.round_saving())
            copying.saves.settle()
            found.saving.append(ours.round_saving())
            ours.saves.settle()
        if ours.saves.stored() < 0.9 * loop.nbytes:
            raise RuntimeError("no whole checkpoint was found")
    finally:
        for run in runs:
            run.saves.close()
    for times in (found.memcpy, found.held, found.alone, found.copying, found.saving):
        del times[0]
    return found


def main(arguments: list[str] | None = None) -> int:
    """Measure, print what came of it, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=2.0, help="size of the state; takes six times as much memory")
    parser.add_argument("--rounds", type=int, default=7, help="of four steps, of each of the three")
    parser.add_argument("--json", type=Path, help="write all times to this file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    described = machine.described()
    folder = Path(tempfile.mkdtemp(prefix="flashpoint-bench-", dir="/dev/shm"))
    try:
        found = taken(Loop("long", options.gib * _SCALE_OF_A_GIB), options.rounds, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    described["load_at_the_end"] = machine.load()
    print("\n".join(found.lines()))
    print(described)
    if options.json:
        options.json.write_text(json.dumps({"machine": described, **asdict(found)}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
