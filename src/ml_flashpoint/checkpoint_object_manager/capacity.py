"""How much a job needs on a filesystem, what that filesystem has, and whether it is memory.

Owns the preflight: it fails before training starts, with both numbers and the remedy, instead of in the
middle of a save. It allocates nothing.
"""

from __future__ import annotations

import ctypes
import logging
import os
from pathlib import Path

import psutil

from ml_flashpoint.checkpoint_object_manager.control_groups import memory_left
from ml_flashpoint.format.errors import CapacityError

_log = logging.getLogger(__name__)
_warned: set[str] = set()

_TMPFS, _RAMFS, _HUGETLBFS = 0x01021994, 0x858458F6, 0x958458F6
_libc = ctypes.CDLL(None)

OWN_VERSIONS = 2
"""Versions that a rank keeps of its own state: the newest complete one and the one being written."""


def is_memory(path: Path | int) -> bool:
    """Whether what is stored in a file or folder that exists, or in an open file, takes the memory of the machine."""
    return _kind_of(path) in (_TMPFS, _RAMFS)


def free_memory() -> int:
    """Bytes of memory that this process may still take: what is free of the machine and of the container."""
    free = int(psutil.virtual_memory().available)
    left = memory_left()
    return free if left is None else min(free, left)


def _kind_of(path: Path | int) -> int | None:
    """The number by which the kernel tells filesystems apart; None if it does not say."""
    found = ctypes.create_string_buffer(512)  # a struct statfs, larger than any
    status = _libc.fstatfs(path, found) if isinstance(path, int) else _libc.statfs(os.fsencode(path), found)
    return ctypes.c_long.from_buffer(found).value & 0xFFFFFFFF if status == 0 else None


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


def available_bytes(path: Path) -> int:
    """Bytes that may still be stored under ``path``: filesystem space and, on tmpfs, also free memory of the machine
    and of the container."""
    path = existing_parent(path)
    stats = os.statvfs(path)
    free = stats.f_bavail * stats.f_frsize
    return min(free, free_memory()) if is_memory(path) else free


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
    if str(base) in _warned or _kind_of(existing_parent(base)) in (_TMPFS, _RAMFS, _HUGETLBFS):
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
