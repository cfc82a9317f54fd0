"""What the tests of faults share: how much they do, and what they look at."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.support.forked import Child, wait_until

SCALE = float(os.environ.get("FLASHPOINT_TEST_FAULTS", "1"))
"""How many iterations the tests of faults make, relative to the default."""
SAMPLE = SCALE if SCALE > 1 else SCALE / 2
"""The same for what comes at random: `make test` has half of the default, `make soak` all of it, many times."""


def iterations(default: int) -> range:
    """As many iterations of what comes at random as the scale makes of a default."""
    return range(max(1, round(default * SAMPLE)))


def last(child: Child, what: str) -> int:
    """The highest value that a child reported under a name, 0 if none."""
    return max((report[1] for report in child.reports if report[0] == what), default=0)


def lives(default: int) -> Iterator[tuple[int, bool]]:
    """Lives that end at random. True with every second one, which is to get something done before it ends: else a
    busy machine, or bad luck, leaves a test in which nothing was ever there to be lost."""
    return ((life, life % 2 == 1) for life in iterations(default))


def await_more(what: str, least: int, children: Sequence[Child], of_all: bool = True) -> None:
    """Wait until all of these children, or one, have reported a higher value under a name."""

    def there() -> bool:
        for child in children:
            assert child.alive, child.failure(f"it ended before it reported {what} beyond {least}")
            child.look()
        return (min if of_all else max)(last(child, what) for child in children) > least

    wait_until(there, f"{what} beyond {least}")


def files_of(base: Path) -> set[str]:
    """Every file under a base container, but for slots and locks."""
    return {str(p.relative_to(base)) for p in base.rglob("*") if p.is_file() and ".flashpoint" not in p.parts}


def part_files(base: Path, step: int, rank: int = 0) -> tuple[str, str]:
    """Object and manifest of a rank's part, below ``base``; the newest if there are several."""
    (*_, manifest) = sorted(base.glob(f"step-{step}_ckpt/rank-{rank:05d}-*.manifest"))
    return str(manifest.with_suffix(".safetensors").relative_to(base)), str(manifest.relative_to(base))
