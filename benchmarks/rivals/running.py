"""Runs each kind in a process and an environment of its own, and makes rows of what it measured."""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import supervised
from benchmarks.rivals import environments
from benchmarks.rivals.catalogue import KINDS
from benchmarks.rivals.kinds import Kind
from benchmarks.rivals.loops import LOOPS
from benchmarks.timing import Result

ROOT = environments.ROOT
ONE_S = 480.0
"""Seconds that one kind may take in one loop."""


@dataclass(frozen=True)
class Compared(Result):
    """The row of one kind in one loop: `seconds` are those that one save holds the training thread.

    Attributes:
        label, package: of the kind.
        leaves: what is there after a save.
        slowdown: a step's time when each is followed by a save, × that without saves: median, low and high of pairs.
        alone_s: of a step without saves. memcpy_s: of a memcpy of the state.
        nbytes: of the state. stored: bytes of the newest checkpoint, as found.
    """

    label: str = ""
    package: str = ""
    leaves: str = ""
    slowdown: tuple[float, float, float] = (0.0, 0.0, 0.0)
    alone_s: float = 0.0
    memcpy_s: float = 0.0
    nbytes: int = 0
    stored: int = 0

    def line(self) -> str:
        """For a person that waits."""
        if not self.runs:
            return f"{self.state:20} {self.label:44} {self.note}"
        median, low, high = self.slowdown
        return (
            f"{self.state:20} {self.label:44} held {self.seconds * 1e3:8.2f} ms"
            f" ({1 / (self.ratio or 1):6.3f} memcpy)  step of {self.alone_s * 1e3:6.1f} ms x {median:.3f}"
            f" ({low:.3f} to {high:.3f}) {self.note}"
        )


def results(
    scale: float, rounds: int = 5, kinds: tuple[Kind, ...] = KINDS, loops: tuple[str, ...] = LOOPS
) -> Iterator[Compared]:
    """The rows of all kinds, one after the other, in one loop and then in the other."""
    for loop in loops:
        for kind in kinds:
            python, reason = environments.python_of(kind)
            if python is None:
                measured: dict[str, Any] = {"left_out": f"skipped: {reason}"}
            else:
                measured = _in_its_process(python, [kind.name, loop, str(scale), str(rounds)], kind.is_ours)
            yield _row(kind, f"rivals, {loop} steps", measured)


def _in_its_process(python: Path, what: list[str], is_ours: bool) -> dict[str, Any]:
    """What `benchmarks.rivals.worker` has found, or why it has not."""
    folder = Path(tempfile.mkdtemp(prefix="flashpoint-bench-", dir=supervised.folder() or supervised.MEMORY))
    output, log = folder / "measured.json", folder / "log"
    path = [str(ROOT), *([str(ROOT / "src")] if is_ours else [])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
    command = [str(python), "-W", "ignore", "-m", "benchmarks.rivals.worker", *what, str(folder / "state"), str(output)]
    try:
        with log.open("w") as lines:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=lines,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                process.wait(ONE_S)
            except subprocess.TimeoutExpired:
                return {"left_out": f"failed: it did not end in {ONE_S:.0f} s"}
            finally:
                with suppress(ProcessLookupError):  # what it has left running
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        found: dict[str, Any] = json.loads(output.read_text()) if output.exists() else {}
        if "measured" in found:
            return dict(found["measured"])
        print(log.read_text()[-2000:], file=sys.stderr)
        return {"left_out": f"failed: {found.get('failed', f'it ended with {process.returncode}')}"}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _row(kind: Kind, state: str, measured: dict[str, Any]) -> Compared:
    """Medians and extremes. Ratios are formed in pairs, of what was measured one after the other."""
    label = f"{kind.label} {measured.get('version', '')}".strip()
    about = {"label": label, "package": kind.package, "leaves": kind.leaves}
    if "left_out" in measured:
        return Compared(state, kind.name, 0.0, 0.0, 0.0, None, 0, measured["left_out"], **about)
    held, slow = measured["held"], [s / a for s, a in zip(measured["saving"], measured["alone"], strict=True)]
    whole = measured["stored"] >= 0.9 * measured["nbytes"]
    return Compared(
        state,
        kind.name,
        statistics.median(held),
        min(held),
        max(held),
        statistics.median(m / h for m, h in zip(measured["memcpy"], held, strict=True)),
        len(held),
        "" if whole else "failed: no whole checkpoint was found",
        slowdown=(statistics.median(slow), min(slow), max(slow)),
        alone_s=statistics.median(measured["alone"]),
        memcpy_s=statistics.median(measured["memcpy"]),
        nbytes=measured["nbytes"],
        stored=measured["stored"],
        **about,
    )
