"""How much a job needs on a filesystem, what that filesystem has, and whether it is memory.

Owns the preflight: it fails before training starts, with both numbers and the remedy, instead of in the
middle of a save. It allocates nothing.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import psutil

from ml_flashpoint.format.errors import CapacityError
from ml_flashpoint.memory.capacity import available_bytes, is_memory

_log = logging.getLogger(__name__)
_warned: set[str] = set()

OWN_VERSIONS = 2
"""Versions that a rank keeps of its own state: the newest complete one and the one being written."""


def mount_of(path: Path) -> tuple[str, str, tuple[str, ...]]:
    """The filesystem that a path is on: its mount point, its kind, its options; empty where that cannot be seen."""
    best, kind, options = "", "an unknown filesystem", ""
    text = str(path.resolve())
    for mount in psutil.disk_partitions(all=True):
        point = mount.mountpoint.rstrip("/") or "/"
        inside = text == point or text.startswith(point if point == "/" else point + "/")
        # ">=": of several mounts on one point, the last one covers the others
        if inside and len(point) >= len(best):
            best, kind, options = point, mount.fstype, mount.opts
    return best, kind, tuple(options.split(","))


def existing_parent(path: Path) -> Path:
    """The nearest ancestor of ``path`` (or itself) that exists."""
    while not path.exists():
        path = path.parent
    return path


def most_bytes(path: Path) -> int:
    """Bytes that could be stored under ``path`` if nothing else were there: no room can be made for more."""
    path = existing_parent(path)
    stats = os.statvfs(path)
    size = stats.f_blocks * stats.f_frsize
    if not is_memory(path):
        return size
    total = int(psutil.virtual_memory().total)
    return min(size or total, total)  # a tmpfs without a limit has no size


def warn_unless_memory(base: Path) -> None:
    """Log one warning a process if ``base`` is not on a memory filesystem: saves work, at disk speed."""
    if str(base) in _warned or is_memory(existing_parent(base)):
        return
    _warned.add(str(base))
    _log.warning(
        "base container %s is on %s, not tmpfs: checkpoints work but run at that filesystem's speed "
        "(use a path on /dev/shm or a tmpfs mount)",
        base,
        mount_of(existing_parent(base))[1],
    )


def needed_bytes(state_bytes: int, copies: int, kept: int = 0) -> int:
    """Bytes that a rank's checkpoints take: its own versions, and as many of each copy it holds for peers.

    Args:
        kept: versions that are kept beside the newest complete one.
    """
    return (OWN_VERSIONS + kept) * state_bytes * (1 + copies)


def preflight(
    base: Path, state_bytes: int, *, copies: int = 0, ranks_on_node: int = 1, held_bytes: int = 0, kept: int = 0
) -> None:
    """Check that ``base`` can hold what a node's ranks need.

    Args:
        base: base container of the job.
        state_bytes: bytes that one rank saves.
        copies: peers whose parts each rank holds.
        ranks_on_node: ranks that share this filesystem.
        held_bytes: bytes of arenas that are there already and will be reused.
        kept: see `needed_bytes`.

    Raises:
        CapacityError: with both numbers and the remedy.
    """
    needed = needed_bytes(state_bytes, copies, kept) * ranks_on_node
    available = available_bytes(base) + held_bytes
    if needed > available:
        beside = f", {kept} of them kept beside the newest" if kept else ""
        raise CapacityError(
            f"checkpoints of {ranks_on_node} rank(s) x {state_bytes} bytes need {needed} bytes in {base} "
            f"({OWN_VERSIONS + kept} own versions{beside}, {copies} peer cop{'y' if copies == 1 else 'ies'} of each), "
            f"but only {available} bytes are available",
            needed_bytes=needed,
            available_bytes=available,
            path=base,
            hint="enlarge the tmpfs (mount -o remount,size=...) or the container, free memory, "
            + ("keep fewer versions, or replicate less" if kept else "or replicate less"),
        )
