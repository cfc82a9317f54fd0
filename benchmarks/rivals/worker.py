"""``python -m benchmarks.rivals.worker KIND LOOP SCALE ROUNDS FOLDER JSON``: measures one kind of saves in one loop.

Runs in the environment of that kind, where there may be nothing but torch and it.
"""

from __future__ import annotations

import gc
import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from time import perf_counter as now

import torch

from benchmarks.rivals.catalogue import KINDS
from benchmarks.rivals.kinds import Kind, Saves
from benchmarks.rivals.loops import Loop


@dataclass
class Measured:
    """What came of one kind in one loop. Times in seconds.

    Attributes:
        held: that each save kept the training thread, the one before being settled: in the call, and before the next
            update of the optimizer.
        alone, saving: a step's mean, by round: without saves, and with one after each.
        memcpy: of the state's bytes, by one thread, beside each save of `held`.
        nbytes: of the state. stored: bytes found of the newest checkpoint.
        version: of the package.
    """

    held: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    saving: list[float] = field(default_factory=list)
    memcpy: list[float] = field(default_factory=list)
    nbytes: int = 0
    stored: int = 0
    version: str = ""


class Run:
    """One kind in one loop."""

    def __init__(self, kind: Kind, loop: Loop, folder: Path) -> None:
        self._loop, self._held, self._saves_made = loop, 0.0, 0
        # Hooks are called in the order they were registered in: what lies between these two is the kind's own.
        loop.optimizer.register_step_pre_hook(lambda *_: self._note_began())
        self.saves: Saves = kind.make(loop, folder)
        loop.optimizer.register_step_pre_hook(lambda *_: self._note_held())
        self._began = 0.0

    def _note_began(self) -> None:
        self._began = now()

    def _note_held(self) -> None:
        self._held += now() - self._began

    def _timed(self, call: Callable[[], object]) -> None:
        self._note_began()
        call()
        self._note_held()

    def step(self) -> None:
        self._loop.step(lambda: self._timed(self.saves.before_update))

    def save(self) -> None:
        self._saves_made += 1
        self._timed(lambda: self.saves.save(self._saves_made))

    def held_by_one(self) -> float:
        """Seconds that one save keeps the thread, when nothing is left to do of the one before."""
        self.saves.settle()
        gc.collect()
        self.step()
        self._held = 0.0
        self.save()
        self.step()
        return self._held

    def round_alone(self) -> float:
        """Seconds of a step."""
        self.saves.settle()
        gc.collect()
        self.step()
        began = now()
        for _ in range(self._loop.steps):
            self.step()
        return (now() - began) / self._loop.steps

    def round_saving(self) -> float:
        """Seconds of a step and its save. One save is under way at the beginning, and one at the end."""
        self.save()
        self.step()
        began = now()
        for _ in range(self._loop.steps):
            self.save()
            self.step()
        return (now() - began) / self._loop.steps


def measured(kind: Kind, loop: Loop, rounds: int, folder: Path) -> Measured:
    """All measurements of a kind in a loop, after its warm-up."""
    folder.mkdir(parents=True, exist_ok=True)
    source = torch.ones(loop.nbytes, dtype=torch.uint8)
    target = torch.empty_like(source)
    run, found = Run(kind, loop, folder), Measured(nbytes=loop.nbytes)
    try:
        for _ in range(run.saves.warmups):
            run.save()
            run.step()
        for _ in range(1 + rounds + 2):
            began = now()
            target.copy_(source)
            found.memcpy.append(now() - began)
            found.held.append(run.held_by_one())
        del found.held[0], found.memcpy[0]
        for _ in range(rounds):
            found.alone.append(run.round_alone())
            found.saving.append(run.round_saving())
        run.saves.settle()
        found.stored = run.saves.stored()
    finally:
        run.saves.close()
    return found


def main(arguments: list[str]) -> int:
    """Measure, and write what came of it, or why nothing did."""
    name, loop, scale, rounds, folder, output = arguments
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    kind = next(kind for kind in KINDS if kind.name == name)
    try:
        made = measured(kind, Loop(loop, float(scale)), int(rounds), Path(folder))
        made.version = version(kind.package.partition("==")[0]) if kind.package else ""
        found = {"measured": asdict(made)}
    except Exception as error:
        import traceback

        traceback.print_exc()
        found = {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
    Path(output).write_text(json.dumps(found))
    return int("failed" in found)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.exit(status)
