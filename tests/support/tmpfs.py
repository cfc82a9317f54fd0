"""Folders for tests, in /dev/shm and for temporary files, which never outlive the run that made them.

Owns their names, which say whose they are, and the sweep of what killed runs left behind.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

SHM = Path("/dev/shm")
SMALL_TMPFS_BYTES = 4 << 20

_NAME = re.compile(r"mlf-test-(\d+)-(\d+)-.+")


def has_tmpfs() -> bool:
    """Whether /dev/shm is a tmpfs that this process may write to."""
    mounts = (mount for mount in psutil.disk_partitions(all=True) if mount.mountpoint == str(SHM))
    return any(mount.fstype == "tmpfs" for mount in mounts) and os.access(SHM, os.W_OK | os.X_OK)


def _started_ms(process: psutil.Process) -> int:
    return round(process.create_time() * 1000)


def make_folder(parent: Path = SHM) -> Path:
    """Makes a fresh folder whose name says which process it belongs to."""
    owner = psutil.Process()
    return Path(tempfile.mkdtemp(prefix=f"mlf-test-{owner.pid}-{_started_ms(owner)}-", dir=parent))


def have_temporary_files_of_ones_own() -> None:
    """Gives this process, and all that it starts, a folder for temporary files that goes when this process ends.

    Killed processes leave theirs behind. What pytest keeps for a look afterwards stays where it was, and so do Ray's
    files: the path of a socket is to be short.
    """
    before = tempfile.gettempdir()
    if _NAME.fullmatch(Path(before).name):
        return  # a worker of pytest-xdist: the folder is the controller's
    sweep(Path(before))
    folder = make_folder(Path(before))
    atexit.register(remove_folder, folder)
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", before)
    os.environ.setdefault("RAY_TMPDIR", before)


def remove_folder(folder: Path) -> None:
    """Removes a folder and all that is in it, if it is there."""
    shutil.rmtree(folder, ignore_errors=True)


def sweep(parent: Path = SHM) -> list[Path]:
    """Removes the folders of processes that are gone, and returns them. Other runs' folders stay."""
    swept = []
    for folder in parent.glob("mlf-test-*"):
        match = _NAME.fullmatch(folder.name)
        if match is not None and not _is_running(pid=int(match[1]), started_ms=int(match[2])):
            remove_folder(folder)
            swept.append(folder)
    return swept


def _is_running(pid: int, started_ms: int) -> bool:
    # The start time tells a process from a later one with the same id. It is computed from the boot time,
    # which a clock adjustment moves, hence the tolerance.
    try:
        return abs(_started_ms(psutil.Process(pid)) - started_ms) < 60_000
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


@contextlib.contextmanager
def mounted(folder: Path, size: int = SMALL_TMPFS_BYTES) -> Iterator[Path]:
    """A tmpfs of its own, of `size` bytes, at an empty folder.

    Raises:
        PermissionError: this process must not mount one.
    """
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "mlf-test", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode != 0:
        raise PermissionError(done.stderr.strip())
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
