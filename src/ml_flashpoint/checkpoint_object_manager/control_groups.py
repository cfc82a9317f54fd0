"""How much memory the control groups of this process leave it: what a container may have.

Owns reading their files, of both versions of cgroups. Beyond a limit the kernel kills, whatever is free elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_V2 = (("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file"))
_V1 = (("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
_UNLIMITED = 1 << 60  # version 1 has a number for it, which depends on the size of pages


def memory_left(root: Path = Path("/")) -> int | None:
    """Bytes that this process may still take by the limits of its control groups; None if it has none.

    Files that are cached count as free. Those on tmpfs are none of them: the kernel counts them with shared memory.

    Args:
        root: where ``proc`` and ``sys`` are.
    """
    left = [each for group, version in _groups(root) if (each := _left_in(group, *version)) is not None]
    return min(left, default=None)


def _left_in(group: Path, limits: tuple[str, ...], usage: str, cached: tuple[str, ...]) -> int | None:
    try:
        found = [int(text) for name in limits if (text := _read(group / name)) not in ("", "max")]
        if min(found, default=_UNLIMITED) >= _UNLIMITED:
            return None
        stat = dict(line.split(maxsplit=1) for line in _read(group / "memory.stat").splitlines())
        free = sum(int(stat.get(name, 0)) for name in cached)
        return max(0, min(found) - int(_read(group / usage)) + free)
    except ValueError:  # of a kernel that writes something else
        return None


def _groups(root: Path) -> Iterator[tuple[Path, tuple[tuple[str, ...], str, tuple[str, ...]]]]:
    """The groups that this process is in and those around them, as far as they can be seen from here."""
    member: dict[str, str] = {}  # controller, "" for version 2 -> path
    for line in _read(root / "proc/self/cgroup").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if path:
            member.update(dict.fromkeys(controllers.split(","), path))
    for line in _read(root / "proc/self/mountinfo").splitlines():
        mount, _, kind = line.partition(" - ")
        fields, kinds = mount.split(), kind.split()
        if len(fields) < 5 or not kinds:
            continue
        of_v2 = kinds[0] == "cgroup2"
        path = member.get("" if of_v2 else "memory", "")
        if not path or not (of_v2 or (kinds[0] == "cgroup" and "memory" in kinds[-1].split(","))):
            continue
        top = root / fields[4].lstrip("/")
        inside = os.path.relpath(path, fields[3])
        # A container may see its own group as the top one, and a name that means something outside of it.
        group = top if inside.startswith("..") else top / inside
        while True:
            yield group, _V2 if of_v2 else _V1
            if group == top:
                break
            group = group.parent


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
