"""What persisting adds to a loop that saves at each step: to the time that a save holds it, and to its steps.

Two `Flashpoint`s save the same model, each into memory of its own, and one of them persists, in every third turn. In
another turn, a thread writes as many bytes a second to a file of the same filesystem, and does nothing else: the least
that a store there costs. Turns come in rounds, in changing order, and what is compared is the turns of a round, so that
a machine that drifts does so for all; of the rounds, the median counts.

A version is under way to the store all the time, which is the worst case, with a limit of a tenth of what a memcpy
moves in a second. The store is a folder in memory, so what it takes of a core to take in bytes is in this, too.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.loop import SETTLED, WIDTH, _Loop
from benchmarks.timing import RUNS, Memcpy, Result
from ml_flashpoint import Flashpoint

ROUNDS = 7
TURN_S, LEAST_STEPS = 3.0, 6
"""A turn takes about so long, and has so many steps at least besides its first one, which does not count."""
SHARE = 0.1
ALONE, WRITING, PERSISTING = "saves", "saves, and a thread that only writes", "saves, persisting"
_NEVER = 2**62
_WRITE_BYTES = 4 << 20

_Times = dict[str, list[list[float]]]
"""Seconds by step, by turn, of each kind of turns."""


class _Loops:
    """A loop with its saves, which persists or does not."""

    def __init__(self, folder: Path, loop: _Loop, nbytes: int, rate: float) -> None:
        self.loop = loop
        self._file, self._rate = folder / "written", rate
        self._rest_s = 1.5 * nbytes / rate  # a version that is being persisted is done by then
        self._alone = Flashpoint(folder / "alone", strict=True)
        self._persisting = Flashpoint(
            folder / "persisting", strict=True, persist=str(folder / "store"), persist_every=1, persist_keep=1,
            persist_bytes_per_s=rate,
        )  # fmt: skip
        self.steps: _Times = {ALONE: [], WRITING: [], PERSISTING: []}
        self.held: _Times = {ALONE: [], WRITING: [], PERSISTING: []}
        for fp in (self._alone, self._persisting):
            fp.track(model=self.loop.model, optimizer=self.loop.optimizer).resume()
            times = self._run(fp, SETTLED)[0]
        self._count = max(LEAST_STEPS, round(TURN_S / statistics.median(times[-LEAST_STEPS:])))

    def turn(self, kind: str) -> None:
        """Some steps, each with its save."""
        fp = self._persisting if kind == PERSISTING else self._alone
        with _writing(self._file, self._rate) if kind == WRITING else contextlib.nullcontext():
            steps, held = self._run(fp, 1 + self._count)
        self.steps[kind].append(steps[1:])
        self.held[kind].append(held[1:])

    def close(self) -> None:
        """End both loops."""
        self._alone.close()
        self._persisting.close()

    def _run(self, fp: Flashpoint, count: int) -> tuple[list[float], list[float]]:
        steps, held = [], []
        for _ in range(count):
            began, before = time.perf_counter(), fp.health.blocked_total_s
            fp.step()
            self.loop.step()
            steps.append(time.perf_counter() - began)
            held.append(fp.health.blocked_total_s - before)
        assert fp.wait(60)
        if fp is self._persisting:  # the next turn has the machine for itself
            time.sleep(self._rest_s)
        return steps, held


@contextlib.contextmanager
def _writing(path: Path, rate: float) -> Iterator[None]:
    """A thread that writes so many bytes a second to a new file."""
    over, data = threading.Event(), bytes(_WRITE_BYTES)

    def write() -> None:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb", buffering=0) as file:
            due = time.monotonic()
            while not over.wait(max(0.0, due - time.monotonic())):
                file.write(data)
                due += len(data) / rate

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        path.unlink()


def added(times: _Times, kind: str) -> list[float]:
    """By how much the median step of a kind is longer than alone, as a share, for each round, sorted."""
    rounds = zip(times[ALONE], times[kind], strict=True)
    return sorted(statistics.median(with_it) / statistics.median(without) - 1 for without, with_it in rounds)


def results(folder: Path, scale: float) -> Iterator[Result]:
    """Rows: seconds held by a save, and of a step with its save, of each kind of turns."""
    for name, batch in (("long", 512), ("short", 16)):
        yield from _compared(f"persisting, {name} steps", folder, batch, max(16, int(WIDTH * scale**0.5)))


def _compared(state: str, folder: Path, batch: int, width: int) -> Iterator[Result]:
    loop = _Loop(batch, width)
    memcpy = Memcpy(loop.tensors())
    rate = SHARE * memcpy.nbytes / statistics.median(memcpy.run() for _ in range(RUNS))
    loops = _Loops(folder, loop, memcpy.nbytes, rate)
    kinds = [ALONE, WRITING, PERSISTING]
    for _ in range(ROUNDS):
        for kind in kinds:
            loops.turn(kind)
        kinds = kinds[1:] + kinds[:1]
    loops.close()
    shutil.rmtree(folder)
    for what, times in (("held", loops.held), ("step", loops.steps)):
        for kind, turns in times.items():
            shares = added(times, kind)
            share, spread = statistics.median(shares), f"{100 * shares[0]:+.1f} to {100 * shares[-1]:+.1f}"
            note = "" if kind == ALONE else f"{100 * share:+.1f} % ({spread})"
            seconds = [each for turn in turns for each in turn]
            median, low, high = statistics.median(seconds), min(seconds), max(seconds)
            yield Result(state, f"ours: {kind}: {what}", median, low, high, None, len(seconds), note)
