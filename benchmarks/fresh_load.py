"""Loading in a process that has just started: recover, verify every block, copy into existing tensors.

Run as ``python -m benchmarks.fresh_load BASE STATE``; each run is a process of its own, as a restarted job's is.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

import torch
import torch.distributed.checkpoint as dcp

from benchmarks.states import STATES
from benchmarks.timing import Memcpy
from ml_flashpoint import Checkpointer


def load_once(base: str, name: str, scale: float) -> tuple[float, float, float]:
    """Seconds of recovery and of the load, and of a memcpy beside them."""
    target = {key: torch.ones_like(t) for key, t in STATES[name](scale).items()}
    memcpy = Memcpy(target)
    reference = statistics.median(memcpy.run() for _ in range(3))
    began = time.perf_counter()
    with Checkpointer(base) as engine:
        found = engine.latest()
        assert found is not None
        recovered = time.perf_counter()
        dcp.load(target, checkpoint_id=str(found), storage_reader=engine.reader(found))
        return recovered - began, time.perf_counter() - recovered, reference


def main() -> None:
    """Either the parent that reports medians, or (with a third argument) one run."""
    base, name, *rest = sys.argv[1:]
    if rest:
        print("\t".join(map(str, load_once(base, name, float(rest[0])))))
        return
    import os

    scale = os.environ.get("BENCH_SCALE", "1.0")
    runs = []
    for _ in range(5):
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.fresh_load", base, name, scale]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        runs.append(tuple(map(float, out.split("\t"))))
    for label, pick in (
        ("ours: fresh process, recover + verify", lambda r: r[0]),
        ("ours: fresh process, load after that", lambda r: r[1]),
        ("ours: fresh process, both", lambda r: r[0] + r[1]),
    ):
        times = [pick(r) for r in runs]
        ratio = statistics.median(r[2] / pick(r) for r in runs)
        print(f"{label}\t{statistics.median(times)}\t{min(times)}\t{max(times)}\t{ratio}")


if __name__ == "__main__":
    main()
