"""``python -m benchmarks.rivals``: our saves beside others', in two loops that save at every step. See ``--help``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
from pathlib import Path

from benchmarks import machine
from benchmarks.rivals import environments
from benchmarks.rivals.catalogue import KINDS
from benchmarks.rivals.loops import LOOPS
from benchmarks.rivals.running import Compared, results


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a line a row as it comes, write all of them as JSON, and draw them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--make", action="store_true", help="make the environments that are missing, and do no more")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--plots", type=Path, help="draw into this folder, with matplotlib")
    parser.add_argument("--scale", type=float, default=1.0, help="size of the states; 1.0 needs 2 GiB of memory")
    parser.add_argument("--rounds", type=int, default=5, help="of each kind, with saves and without, in turn")
    parser.add_argument("--only", default="", help="kinds whose names contain one of these, by commas")
    parser.add_argument("--loop", choices=LOOPS, help="this loop only")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing is left in memory
    kinds = tuple(kind for kind in KINDS if any(part in kind.name for part in options.only.split(",")))
    if options.make:
        for kind in kinds:
            if kind.package:
                print(f"{kind.name}: {environments.make(kind) or 'ready'}", flush=True)
        return 0
    described = machine.described()
    rows: list[Compared] = []
    for row in results(options.scale, options.rounds, kinds, (options.loop,) if options.loop else LOOPS):
        rows.append(row)
        print(row.line(), flush=True)
    described["load_at_the_end"] = machine.load()
    if options.json:
        taken = {"command": "make bench-peers", "machine": described, "rows": [*map(dataclasses.asdict, rows)]}
        options.json.write_text(json.dumps(taken, indent=1))
    if options.plots:
        from benchmarks.rivals import plots

        for path in plots.drawn([*map(dataclasses.asdict, rows)], options.plots):
            print(path)
    return int(any(row.note.startswith("failed") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
