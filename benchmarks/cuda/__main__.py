"""``python -m benchmarks.cuda``: see ``--help``. Needs nothing but torch and this tree."""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import shutil
import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path

import torch

from benchmarks.cuda import copies, floors, jobs
from benchmarks.cuda.report import REAL, TINY, Row, Run, Section, carried_out


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a line a row as it comes, and write all of them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, or cpu to try the benchmark itself")
    parser.add_argument("--tiny", action="store_true", help="move next to nothing")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--budget", type=float, default=180.0, help="begin no more cases after so many seconds")
    parser.add_argument("--only", default="", help="only sections whose name contains this")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.device_count():
        print("skipped: there is no CUDA device here")
        return 0
    warnings.filterwarnings("ignore")
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    folder = Path(tempfile.mkdtemp(prefix="flashpoint-bench-", dir="/dev/shm"))
    run = Run(device, TINY if options.tiny else REAL, options.budget)
    sections: dict[str, Section] = {
        "floors": floors.copies,
        "memory": partial(floors.faults_and_locks, folder=folder),
        "copies": partial(copies.both_ways, folder=folder),
        "saves": partial(jobs.saves, folder=folder),
        "training": partial(jobs.training, folder=folder),
        "peers": partial(jobs.peers, folder=folder),
    }
    rows: list[Row] = []
    try:
        for row in carried_out(run, sections, options.only):
            rows.append(row)
            print(_line(row), flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if options.json is not None:
            options.json.write_text(json.dumps({"machine": _machine(device), "rows": [*map(dataclasses.asdict, rows)]}))
    return int(any(row.note.startswith("failed") for row in rows))


def _line(row: Row) -> str:
    rate = "" if row.gb_s is None else f"{row.gb_s:8.2f} GB/s"
    part = "" if row.of_floor is None else f"{row.of_floor:5.2f} of the floor"
    return f"{row.section:9} {row.case:48} {row.seconds * 1e3:10.2f} ms {rate:13} {part} {row.note}".rstrip()


def _machine(device: torch.device) -> dict[str, object]:
    found: dict[str, object] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "device": str(device),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"name": properties.name, "memory": properties.total_memory, "cuda": torch.version.cuda}
    return found


if __name__ == "__main__":
    sys.exit(main())
