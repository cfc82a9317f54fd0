"""`flashpoint doctor`: findings on this node. No check changes anything or imports torch.

They judge by the engine's own rules: whose folders it trusts, which filesystems are memory, at which address peers
reach it.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.metadata
import os
import platform
import resource
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

import ml_flashpoint
from ml_flashpoint.cli.output import bytes_text
from ml_flashpoint.extras import DISTRIBUTION
from ml_flashpoint.format import knobs
from ml_flashpoint.format.errors import FlashpointError
from ml_flashpoint.format.files import check_folder, check_way
from ml_flashpoint.memory.capacity import (
    available_bytes,
    existing_parent,
    is_memory,
    memory_left,
    most_bytes,
)
from ml_flashpoint.net.server import reachable_host

OK, NOTE, BAD = "ok", "note", "bad"
"""Levels: as it should be; could be better, or cannot be told; a job will fail, or not be what it is for."""

_LEAST_FILES = 4096
_OLDEST_TORCH = (2, 6)
_STA_UNSYNC = 0x0040
_TIMEX_BYTES = 256  # a struct timex, and more
_TIMEX_STATUS = 40  # where its status is, on 64 bits: after an int, padding and four longs


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was examined.

    Attributes:
        check: its name, in a word or two.
        level: `OK`, `NOTE` or `BAD`.
        text: the finding.
        mend: what to do about it; empty where nothing is to be done.
    """

    check: str
    level: str
    text: str
    mend: str = ""

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Finding:
        """Return the finding of another node."""
        return cls(*(str(told[field.name]) for field in dataclasses.fields(cls)))


@dataclass(frozen=True, slots=True)
class Examined:
    """A node, or "between nodes", and its findings, in the order in which they are shown."""

    name: str
    findings: tuple[Finding, ...]


def examine(base: Path) -> tuple[Finding, ...]:
    """Return all findings on this node, for a base container that need not exist yet."""
    found: list[Finding] = []
    for check in _CHECKS:
        try:
            found += check(base)
        except Exception as error:  # of whatever kind: the others still tell something
            name = check.__name__.strip("_").replace("_", " ")
            text = f"cannot be checked: {type(error).__name__}: {error}"
            found.append(Finding(name, NOTE, text, "check it by hand: see docs/operations.md"))
    return tuple(found)


def _folder(base: Path) -> Iterator[Finding]:
    parent = existing_parent(base)
    if os.path.ismount(base):
        yield Finding("folder", BAD, f"{base} is the mount point of a filesystem", f"name a folder in it: {base}/job-1")
        return
    try:
        check_way(base)
        if parent == base:
            check_folder(base)
    except (FlashpointError, OSError) as error:
        hint = getattr(error, "hint", None) or ""
        yield Finding(
            "folder", BAD, getattr(error, "message", None) or str(error), f"{hint} ({parent})" if hint else ""
        )
        return
    if not os.access(parent, os.W_OK | os.X_OK):
        yield Finding("folder", BAD, f"user {os.geteuid()} cannot write to {parent}", f"chown {os.geteuid()} {parent}")
    else:
        yield Finding(
            "folder", OK, f"{base} {'exists' if parent == base else 'can be created'}, and is safe from other users"
        )


def _filesystem(base: Path) -> Iterator[Finding]:
    parent = existing_parent(base)
    point, kind, options = mount_of(parent)
    if not is_memory(parent):
        half = psutil.virtual_memory().total // 2 >> 30 or 1
        mend = f"mount -t tmpfs -o size={half}g,mode=1777 tmpfs /mnt/mlf-jobs, and use a folder in it"
        text = f"{base} is on {kind}, mounted at {point}: not in memory"
        yield Finding("filesystem", BAD, text, f"{mend} (see: flashpoint plan)")
        return
    size, free, limit = most_bytes(parent), available_bytes(parent), memory_left()
    text = f"{kind} at {point}: {bytes_text(size)}, {bytes_text(free)} of it free"
    if limit is not None:
        text += f"; the container may take {bytes_text(limit)} more"
    if free < size / 2:
        mend = f"look for large files: du -sh {point}/*; flashpoint plan computes the memory of a job"
        yield Finding("filesystem", NOTE, text, mend)
    else:
        yield Finding("filesystem", OK, text)
    huge = next((each.partition("=")[2] for each in options if each.startswith("huge=")), "never")
    if huge == "never":
        mend = f"mount -o remount,huge=within_size {point}"
        text = "not used on this tmpfs: first saves, and loads by a new process, are slower"
        yield Finding("huge pages", NOTE, text, mend)
    else:
        yield Finding("huge pages", OK, f"huge={huge}")
    yield _swap("noswap" in options)


def _swap(never: bool) -> Finding:
    total = psutil.swap_memory().total
    if not total or never:
        return Finding("swap", OK, "tmpfs is mounted with noswap" if total else "none")
    mend = "swapoff -a, or mount the tmpfs with noswap (Linux 6.4 or newer)"
    return Finding("swap", NOTE, f"{bytes_text(total)}: checkpoints may be written to disk when memory is short", mend)


def _limits(base: Path) -> Iterator[Finding]:
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    gpus = os.path.exists("/proc/driver/nvidia/version")
    if locked == resource.RLIM_INFINITY:
        yield Finding("locked memory", OK, "unlimited")
    elif not gpus:
        yield Finding("locked memory", OK, f"{bytes_text(locked)}; no NVIDIA GPU here, so no more is needed")
    else:
        text = f"{bytes_text(locked)}: if slots cannot be page-locked, saves go through a buffer"
        mend = "ulimit -l unlimited; LimitMEMLOCK=infinity (systemd); --ulimit memlock=-1 (Docker)"
        yield Finding("locked memory", NOTE, text, mend)
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < _LEAST_FILES:
        mend = f"ulimit -n {65536 if most == resource.RLIM_INFINITY else min(most, 65536)}"
        yield Finding("open files", NOTE, f"{files}: a large job needs many connections to peers", mend)
    else:
        yield Finding("open files", OK, "unlimited" if files == resource.RLIM_INFINITY else f"{files} a process")


def _network(base: Path) -> Iterator[Finding]:
    master = os.environ.get("MASTER_ADDR")
    host = reachable_host()
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
            probe.listen()
    except OSError as error:
        mend = "set FLASHPOINT_HOST to an address of this node that the other nodes reach"
        yield Finding("ports", BAD, f"cannot listen at {host}: {error}", mend)
        return
    low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    yield Finding("ports", OK, f"peers connect to {host}, at any port from {low} to {high}")
    yield _route(host, master)


def _route(host: str, master: str | None) -> Finding:
    """Compare the interface that peers will use with the fastest one."""
    names = [name for name, each in psutil.net_if_addrs().items() if any(a.address == host for a in each)]
    stats = psutil.net_if_stats()
    if master is None and not os.environ.get("FLASHPOINT_HOST"):
        text = f"MASTER_ADDR is not set, so the job may use another address than {host}"
        return Finding("route", NOTE, text, "start it like the job, under torchrun or srun")
    if not names or names[0] not in stats:
        return Finding("route", NOTE, f"no interface has the address {host}", "set FLASHPOINT_HOST to one that has one")
    speed = stats[names[0]].speed
    told = f"{host} is {names[0]}" + (f", {speed} Mb/s" if speed else ", of unknown speed")
    faster = {name: each.speed for name, each in stats.items() if each.isup and each.speed > speed > 0}
    if faster:
        best = max(faster, key=lambda name: faster[name])
        mend = f"set FLASHPOINT_HOST to the address of {best} on each node"
        return Finding("route", NOTE, f"{told}, and {best} is up with {faster[best]} Mb/s", mend)
    return Finding("route", OK, told)


def _clock(base: Path) -> Iterator[Finding]:
    libc = ctypes.CDLL(None, use_errno=True)
    timex = ctypes.create_string_buffer(_TIMEX_BYTES)  # modes = 0: only asks
    if libc.adjtimex(timex) < 0:
        raise OSError(ctypes.get_errno(), "adjtimex")
    if ctypes.c_int.from_buffer(timex, _TIMEX_STATUS).value & _STA_UNSYNC:
        text = "is not synchronized, so events of several nodes cannot be ordered"
        yield Finding("clock", NOTE, text, "run chrony or another NTP client on every node")
    else:
        yield Finding("clock", OK, "is synchronized")


def _versions(base: Path) -> Iterator[Finding]:
    told = f"Linux {platform.release()}, Python {platform.python_version()}, {DISTRIBUTION} {ml_flashpoint.__version__}"
    torch = _version_of("torch")
    if torch is None:
        yield Finding("versions", NOTE, f"{told}, no torch", f'pip install "{DISTRIBUTION}[pytorch]"')
    elif tuple(int(part) for part in torch.split("+")[0].split(".")[:2]) < _OLDEST_TORCH:
        yield Finding("versions", BAD, f"{told}, torch {torch}", "torch 2.6 or newer is needed")
    else:
        yield Finding("versions", OK, f"{told}, torch {torch}")


def _version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _variables(base: Path) -> Iterator[Finding]:
    bad = []
    for knob in (
        knobs.transfer_deadline_s,
        knobs.collective_deadline_s,
        knobs.recovery_deadline_s,
        knobs.seal_deadline_s,
        knobs.call_deadline_s,
        knobs.lock_deadline_s,
        knobs.exit_deadline_s,
    ):
        try:
            knob()
        except FlashpointError as error:
            bad.append(str(error))
    shown = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("FLASHPOINT_")]
    if bad:
        yield Finding("variables", BAD, "; ".join(bad), "unset them, or see docs/operations.md")
    else:
        yield Finding("variables", OK, ", ".join(shown) or "no FLASHPOINT_ variable is set")


_CHECKS: tuple[Callable[[Path], Iterator[Finding]], ...] = (
    _folder,
    _filesystem,
    _limits,
    _network,
    _clock,
    _versions,
    _variables,
)


def mount_of(path: Path) -> tuple[str, str, tuple[str, ...]]:
    """Return the mount point, kind and options of the filesystem of a path; empty where they cannot be seen."""
    best, kind, options = "", "an unknown filesystem", ""
    text = str(path.resolve())
    for mount in psutil.disk_partitions(all=True):
        point = mount.mountpoint.rstrip("/") or "/"
        inside = text == point or text.startswith(point if point == "/" else point + "/")
        if inside and len(point) >= len(best):  # of several mounts on one point, the last one covers the others
            best, kind, options = point, mount.fstype, mount.opts
    return best, kind, tuple(options.split(","))
