"""The rows of dragonhpc's dictionary. Run by its launcher, in an interpreter that has it, NumPy and little else.

Prints a line of JSON. Arguments: bytes of the large value, small operations in a run, warm-ups, runs.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any


def main() -> None:
    """Measure, as `benchmarks.timing` does it."""
    import numpy as np
    from dragon.data.ddict import DDict  # type: ignore[import-not-found]

    nbytes, operations, warmups, runs = map(int, sys.argv[1:])
    data, array = os.urandom(1024), np.random.default_rng(0).random(nbytes // 8)
    target = np.empty_like(array)
    target[:] = array
    d = DDict(1, 1, 16 * nbytes, timeout=120)
    rows: list[dict[str, Any]] = []

    def note_times(case: str, size: int, run: Callable[[], object], *, copies: bool) -> None:
        times, ratios = [], []
        for turn in range(warmups + runs):
            began = time.perf_counter()
            if copies:
                target[:] = array
            memcpy = time.perf_counter() - began
            taken = []
            for _ in range(operations if size == 1024 else 1):
                began = time.perf_counter()
                run()
                taken.append(time.perf_counter() - began)
            if turn >= warmups:
                times.append(statistics.median(taken))
                ratios.append(memcpy / times[-1])
        note = f"dragonhpc {version('dragonhpc')}"
        rows.append({"case": case, "nbytes": size, "times": times, "ratios": ratios if copies else [], "note": note})

    note_times("dragonhpc: put", 1024, lambda: d.__setitem__("small", data), copies=False)
    note_times("dragonhpc: get", 1024, lambda: d["small"], copies=False)
    note_times("dragonhpc: put of an array", nbytes, lambda: d.__setitem__("large", array), copies=True)
    note_times("dragonhpc: get", nbytes, lambda: d["large"], copies=True)
    d.destroy()
    print(json.dumps(rows), flush=True)


if __name__ == "__main__":
    main()
