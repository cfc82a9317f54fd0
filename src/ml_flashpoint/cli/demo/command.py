"""`flashpoint demo`: plays the story, shows it, judges it.

Owns the exit code, and that nothing is left behind however it ends.
"""

from __future__ import annotations

import importlib.util
import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from ml_flashpoint.cli import output
from ml_flashpoint.cli.demo.display import Display, LiveDisplay
from ml_flashpoint.cli.demo.nodes import make_root, remove_root, sweep_roots
from ml_flashpoint.cli.demo.record import RunRecord, summary
from ml_flashpoint.cli.demo.story import NODES, RANKS_PER_NODE, DemoError, Run, plan_faults
from ml_flashpoint.cli.demo.verdict import FINAL_CLAIM, Check, judge

FAILED = 1
INTERRUPTED = 130


def run_demo(*, steps: int, seed: int, as_json: bool = False, keep: bool = False) -> int:
    """Play the demo; returns the exit code of the command: 0 only if every claim holds.

    Args:
        steps: steps of each run, at least `story.MIN_STEPS`.
        seed: for the weights, the data, and when and where faults strike.
        as_json: print the result as JSON on standard output, and the progress on standard error.
        keep: leave the folders of both runs behind, with the output of their processes.
    """
    if importlib.util.find_spec("torch") is None:
        print("flashpoint demo needs torch: pip install torch", file=sys.stderr)
        return output.USAGE
    sweep_roots()
    console = output.console(stderr=as_json)
    make_display = LiveDisplay if output.is_terminal(stderr=as_json) else Display
    began = time.monotonic()
    runs: list[RunRecord] = []
    checks: list[Check] = []
    error: DemoError | None = None
    try:
        with _terminating(), _root(keep=keep) as root, make_display(console, steps) as display:
            try:
                for name, faults in (("fault-free", []), ("faulted", plan_faults(steps, seed))):
                    folder = root / name
                    folder.mkdir()
                    runs.append(Run(name, folder, steps=steps, seed=seed, faults=faults, display=display).play())
                checks = judge(*runs, ranks_per_node=RANKS_PER_NODE)
            except DemoError as caught:
                error = caught
                checks = [Check(FINAL_CLAIM, "the demo did not get to its end")]
            seconds = time.monotonic() - began
            display.result([summary(run) for run in runs], checks)
            if keep:
                display.say(f"kept in {root}; try: flashpoint ls {root}/faulted/node-{NODES}/job")
    except KeyboardInterrupt:
        print("flashpoint demo: interrupted; its processes and folders are gone", file=sys.stderr)
        return INTERRUPTED
    if error is not None:
        print(f"flashpoint demo: {error}", file=sys.stderr)
    ok = bool(checks) and all(check.ok for check in checks)
    if as_json:
        print(json.dumps(_to_json(runs, checks, ok=ok, error=error, seconds=seconds, steps=steps, seed=seed), indent=2))
    return output.OK if ok else FAILED


def _to_json(
    runs: list[RunRecord],
    checks: list[Check],
    *,
    ok: bool,
    error: DemoError | None,
    seconds: float,
    steps: int,
    seed: int,
) -> dict[str, Any]:
    return {
        "ok": ok,
        "error": None if error is None else str(error),
        "steps": steps,
        "seed": seed,
        "wall_s": round(seconds, 2),
        "runs": [summary(run) for run in runs],
        "checks": [{"claim": check.claim, "ok": check.ok, "why_not": check.why_not} for check in checks],
    }


@contextmanager
def _root(*, keep: bool) -> Iterator[Path]:
    root = make_root(keep=keep)
    try:
        yield root
    finally:
        if not keep:
            remove_root(root)


@contextmanager
def _terminating() -> Iterator[None]:
    """Has SIGTERM and SIGHUP end the demo like Ctrl-C, cleaning up on the way."""

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    previous = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
