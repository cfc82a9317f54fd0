"""What persisting adds to a loop that saves at each step: to the time that a save holds it, and to its steps.

A version is under way to the store all the time, which is the worst case, with a limit of a tenth of what a memcpy
moves in a second. Turns with and without it alternate, so that a machine that drifts does so for both. The store is a
folder in memory: what is measured is what persisting takes from the loop, and not the store.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.loop import SETTLED, WIDTH, _Loop
from benchmarks.timing import RUNS, Memcpy, Result
from ml_flashpoint import Flashpoint

TURNS = 6
STEPS = 3 * RUNS
SHARE = 0.1


class _Side:
    """A loop of its own model, with its saves."""

    def __init__(self, folder: Path, loop: _Loop, rate: float | None) -> None:
        self.loop = loop
        store = None if rate is None else str(folder / "store")
        self.fp = Flashpoint(
            folder / "job", strict=True, persist=store, persist_every=1, persist_keep=1, persist_bytes_per_s=rate
        )
        self.fp.track(model=self.loop.model, optimizer=self.loop.optimizer).resume()
        self.steps: list[float] = []
        self.held: list[float] = []
        for _ in range(SETTLED):
            self.fp.step()
            self.loop.step()
        self.rest()

    def turn(self) -> None:
        """Some steps, each with its save."""
        for _ in range(STEPS):
            began, before = time.perf_counter(), self.fp.health.blocked_total_s
            self.fp.step()
            self.loop.step()
            self.steps.append(time.perf_counter() - began)
            self.held.append(self.fp.health.blocked_total_s - before)
        self.rest()

    def rest(self) -> None:
        """Wait until nothing is under way, so that the other side has the machine for itself."""
        assert self.fp.wait(60)
        persisting = self.fp._engine.persisting
        give_up = time.monotonic() + 60
        while persisting is not None and (persisting._task is not None or persisting._next is not None):
            assert time.monotonic() < give_up, "a version takes longer than a minute"
            time.sleep(0.01)


def results(folder: Path, scale: float) -> Iterator[Result]:
    """Rows: seconds held by a save, and of a step with its save, without persisting and with it."""
    width = max(16, int(WIDTH * scale**0.5))
    for name, batch in (("long steps", 512), ("short steps", 16)):
        memcpy = Memcpy(_Loop(batch, width).tensors())
        copy_s = statistics.median(memcpy.run() for _ in range(RUNS))
        rate = SHARE * memcpy.nbytes / copy_s
        sides = {
            "ours: saves": _Side(folder / "without", _Loop(batch, width), None),
            "ours: saves, persisting": _Side(folder / "with", _Loop(batch, width), rate),
        }
        for _ in range(TURNS):
            for side in sides.values():
                side.turn()
        persisted = sides["ours: saves, persisting"].fp.health.persisted
        plain = sides["ours: saves"]
        for kind, side in sides.items():
            for what in ("held", "steps"):
                times = getattr(side, what)
                median, before = statistics.median(times), statistics.median(getattr(plain, what))
                note = "" if side is plain else f"{100 * (median / before - 1):+.1f} %, up to step {persisted}"
                case = f"{kind}: {'held' if what == 'held' else 'step'}"
                yield Result(f"{name}, saving at each", case, median, min(times), max(times), None, len(times), note)
        for side in sides.values():
            side.fp.close()
        shutil.rmtree(folder)
