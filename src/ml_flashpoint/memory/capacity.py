"""Bytes that this node has left: of a filesystem, of memory, and of the control groups around this process.

A tmpfs refuses at its limit. Beyond the limit of a control group the kernel refuses nothing and kills.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

_TMPFS, _RAMFS = 0x01021994, 0x858458F6
_libc = ctypes.CDLL(None)


def available_bytes(path: Path, *, root: Path = Path("/")) -> int:
    """Return the bytes that may still be taken on the filesystem of a path, which need not exist. ``root`` is the
    folder with the ``proc`` and ``sys`` of the control groups."""
    path = existing_parent(path)
    stats = os.statvfs(path)
    free = stats.f_bavail * stats.f_frsize
    if not is_memory(path):
        return free
    if stats.f_blocks == 0:  # a tmpfs without a limit has no size
        free = psutil.virtual_memory().total
    free, left = min(free, int(psutil.virtual_memory().available)), memory_left(root)
    return free if left is None else min(free, left)


def existing_parent(path: Path) -> Path:
    """Return a path, or its nearest parent that exists."""
    while not path.exists():
        path = path.parent
    return path


def most_bytes(path: Path) -> int:
    """Return the bytes that could be stored under a path if nothing else were there."""
    path = existing_parent(path)
    stats = os.statvfs(path)
    size = stats.f_blocks * stats.f_frsize
    if not is_memory(path):
        return size
    total = int(psutil.virtual_memory().total)
    return min(size or total, total)  # a tmpfs without a limit has no size


def memory_left(root: Path = Path("/")) -> int | None:
    """Return the bytes that the control groups of this process leave; None if none of them has a limit."""
    return min((left for group, files in _groups(root) if (left := _left_in(group, files)) is not None), default=None)


def is_memory(path: Path | int) -> bool:
    """Return True if a file or folder that exists, or an open file, takes the memory of the machine."""
    found = ctypes.create_string_buffer(512)  # a struct statfs, larger than any; its first field is the kind
    status = _libc.fstatfs(path, found) if isinstance(path, int) else _libc.statfs(os.fsencode(path), found)
    return status == 0 and ctypes.c_long.from_buffer(found).value & 0xFFFFFFFF in (_TMPFS, _RAMFS)


class _Files(NamedTuple):
    """Names of a control group's files, in one of the two versions of control groups."""

    limits: tuple[str, ...]
    usage: str
    cached: tuple[str, ...]


_V2 = _Files(("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file"))
_V1 = _Files(("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
_UNLIMITED = 1 << 60  # version 1 writes a number for it, which depends on the size of pages


def _left_in(group: Path, files: _Files) -> int | None:
    """Return the bytes that a group may still take; None without a limit. Cached files are free, those on tmpfs not."""
    try:
        limits = [int(text) for name in files.limits if (text := _read(group / name)) not in ("", "max")]
        if min(limits, default=_UNLIMITED) >= _UNLIMITED:
            return None
        counts = dict(line.split(maxsplit=1) for line in _read(group / "memory.stat").splitlines())
        cached = sum(int(counts.get(name, 0)) for name in files.cached)
        return max(0, min(limits) - int(_read(group / files.usage)) + cached)
    except ValueError:  # a kernel that writes something else
        return None


def _groups(root: Path) -> Iterator[tuple[Path, _Files]]:
    """Yield the groups that this process is in, and those around them, where they are mounted as everywhere."""
    mount = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if path and (not controllers or "memory" in controllers.split(",")):
            top, files = (mount / "memory", _V1) if controllers else (mount, _V2)
            names = Path(path).parts[1:]
            # A container may see its own group as the top, so the first names may only mean something outside.
            while names and not os.path.isdir(top.joinpath(*names)):
                names = names[1:]
            for count in range(len(names), -1, -1):
                yield top.joinpath(*names[:count]), files


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
