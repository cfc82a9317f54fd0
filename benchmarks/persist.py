"""What persisting adds to a loop that saves at each step: to the time that a save holds it, and to its steps.

One loop, whose `Flashpoint` persists in every other turn: so both sides have the same model, the same memory, and the
same way of copying, which two would each choose for themselves. Turns come in pairs, in changing order, and what is
compared is the two turns of a pair, so that a machine that drifts does so for both; of the pairs, the median counts.

A version is under way to the store all the time, which is the worst case, with a limit of a tenth of what a memcpy
moves in a second. The store is a folder in memory, so what it takes of a core to take in bytes is in this, too.
"""

from __future__ import annotations

import dataclasses
import shutil
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.loop import SETTLED, WIDTH, _Loop
from benchmarks.timing import RUNS, Memcpy, Result
from ml_flashpoint import Flashpoint
from ml_flashpoint.core import staging_trial

PAIRS = 7
TURN_S, LEAST_STEPS = 3.0, 6
"""A turn takes about so long, and has so many steps at least besides its first one, which does not count."""
SHARE = 0.1
_NEVER = 2**62

_Times = dict[bool, list[list[float]]]
"""Seconds by step, by turn, without persisting and with it."""


class _Loops:
    """A loop with its saves, which persists or does not."""

    def __init__(self, folder: Path, loop: _Loop, rate: float) -> None:
        self.loop = loop
        store = str(folder / "store")
        self.fp = Flashpoint(
            folder / "job", strict=True, persist=store, persist_every=1, persist_keep=1, persist_bytes_per_s=rate
        )
        self.fp.track(model=self.loop.model, optimizer=self.loop.optimizer).resume()
        self.steps: _Times = {False: [], True: []}
        self.held: _Times = {False: [], True: []}
        self.versions = 0
        self._persists(True)  # from the first one on, it has the memory for what is lent
        times = self._run(SETTLED)[0]
        self._count = max(LEAST_STEPS, round(TURN_S / statistics.median(times[-LEAST_STEPS:])))

    def turn(self, persists: bool) -> None:
        """Some steps, each with its save."""
        self._persists(persists)
        steps, held = self._run(1 + self._count)
        self.steps[persists].append(steps[1:])
        self.held[persists].append(held[1:])

    def _persists(self, persists: bool) -> None:
        persisting = self.fp._engine.persisting
        assert persisting is not None
        every = 1 if persists else _NEVER
        persisting.options = dataclasses.replace(persisting.options, persist_every=every)

    def _run(self, count: int) -> tuple[list[float], list[float]]:
        steps, held = [], []
        for _ in range(count):
            began, before, persisted = time.perf_counter(), self.fp.health.blocked_total_s, self.fp.health.persisted
            self.fp.step()
            self.loop.step()
            steps.append(time.perf_counter() - began)
            held.append(self.fp.health.blocked_total_s - before)
            self.versions += self.fp.health.persisted != persisted
        self._rest()
        return steps, held

    def _rest(self) -> None:
        """Wait until nothing is under way, so that the next turn has the machine for itself."""
        assert self.fp.wait(60)
        persisting = self.fp._engine.persisting
        assert persisting is not None
        with persisting._changed:
            idle = persisting._changed.wait_for(lambda: persisting._task is None and persisting._next is None, 60)
        assert idle, f"a version takes longer than a minute: {self.fp.health}"


def added(times: _Times) -> list[float]:
    """By how much the median step of each pair's turn is longer with persisting, as a share, sorted."""
    pairs = zip(times[False], times[True], strict=True)
    return sorted(statistics.median(with_it) / statistics.median(without) - 1 for without, with_it in pairs)


def results(folder: Path, scale: float) -> Iterator[Result]:
    """Rows: seconds held by a save, and of a step with its save, without persisting and with it."""
    every, staging_trial._EVERY = staging_trial._EVERY, _NEVER  # what is chosen at the start stays
    try:
        for name, batch in (("long steps", 512), ("short steps", 16)):
            yield from _compared(f"{name}, saving at each", folder, batch, max(16, int(WIDTH * scale**0.5)))
    finally:
        staging_trial._EVERY = every


def _compared(state: str, folder: Path, batch: int, width: int) -> Iterator[Result]:
    loop = _Loop(batch, width)
    memcpy = Memcpy(loop.tensors())
    rate = SHARE * memcpy.nbytes / statistics.median(memcpy.run() for _ in range(RUNS))
    loops = _Loops(folder, loop, rate)
    for pair in range(PAIRS):
        for persists in (False, True) if pair % 2 else (True, False):
            loops.turn(persists)
    loops.fp.close()
    shutil.rmtree(folder)
    for what, times in (("held", loops.held), ("step", loops.steps)):
        shares = added(times)
        median = statistics.median(shares)
        spread = f"{100 * shares[0]:+.1f} to {100 * shares[-1]:+.1f} in {PAIRS} pairs"
        for persists, turns in times.items():
            all_times = [each for turn in turns for each in turn]
            note = f"{100 * median:+.1f} % ({spread}), {loops.versions} versions" if persists else ""
            case = f"ours: saves, persisting: {what}" if persists else f"ours: saves: {what}"
            yield Result(
                state, case, statistics.median(all_times), min(all_times), max(all_times), None, len(all_times), note
            )
