"""What the tests of faults share: how much they do, and what they look at."""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.forked import Child

SCALE = float(os.environ.get("FLASHPOINT_TEST_FAULTS", "1"))
"""How many iterations the tests of faults make, relative to the default."""


def iterations(default: int) -> range:
    """As many iterations of what comes at random as the scale makes of a default."""
    return range(max(1, round(default * SCALE)))


def last(child: Child, what: str) -> int:
    """The highest value that a child reported under a name, 0 if none."""
    return max((report[1] for report in child.reports if report[0] == what), default=0)


def files_of(base: Path) -> set[str]:
    """Every file under a base container, but for slots and locks."""
    return {str(p.relative_to(base)) for p in base.rglob("*") if p.is_file() and ".flashpoint" not in p.parts}


def versions(base: Path) -> set[str]:
    """The folders of versions with any file in a base container."""
    return {name.split("/")[0] for name in files_of(base)}


def slots(root: Path) -> list[Path]:
    """The slots below a folder."""
    return sorted(root.glob("**/.flashpoint/slots/*/*"))


def part_files(base: Path, step: int, rank: int = 0) -> tuple[str, str]:
    """Object and manifest of a rank's part, below ``base``; the newest if there are several."""
    (*_, manifest) = sorted(base.glob(f"step-{step}_ckpt/rank-{rank:05d}-*.manifest"))
    return str(manifest.with_suffix(".safetensors").relative_to(base)), str(manifest.relative_to(base))
