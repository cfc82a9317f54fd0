"""What a run was taken on, so that a page can say so. Needs nothing but the standard library and torch."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

import torch


def described() -> dict[str, object]:
    """Plain values: the machine, the versions, the day, and how busy it is now."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "kernel": platform.release().partition("-")[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": os.environ.get("OMP_NUM_THREADS", ""),
        "taken": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        "load": load(),
    }


def load() -> float:
    """How many threads run or wait for a core, by the mean of a minute."""
    return round(os.getloadavg()[0], 1)


def _processor() -> str:
    """Its name, as Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return " ".join(next(names, platform.machine()).split())
