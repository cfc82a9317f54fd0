"""Removing what a dead job has left in its base container on this node.

Owns the order, and that nobody uses it: the locks of its job and of all its ranks are held until all is gone, so a job
that starts meanwhile waits, and makes its folders anew. Only what this package has made goes, no link is followed, and
folders that hold anything else stay. Imports no torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ml_flashpoint.checkpoint_object_manager.base_marks import PRIVATE_DIR, RANK_NAME, forget_complete, holds_parts
from ml_flashpoint.checkpoint_object_manager.rank_lock import LOCK
from ml_flashpoint.checkpoint_object_manager.version_files import (
    list_versions,
    remove_version_folder,
    without_temporary,
)
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.errors import JobInUseError, ObjectNotFoundError, SaveError
from ml_flashpoint.format.lineage import remove_lineage
from ml_flashpoint.format.manifest import parse_manifest_name, parse_object_name
from ml_flashpoint.format.private_folders import check_folder, check_way, open_folder, open_own
from ml_flashpoint.memory.lock import JOB, locked_out

_ARENA: Final = "arena-"


@dataclass
class Removed:
    """What was removed.

    Attributes:
        versions: names of their folders.
        freed_bytes: memory that the files took.
        left: what stays in the base container, and the folders of versions that hold something else.
    """

    versions: list[str] = field(default_factory=list)
    freed_bytes: int = 0
    left: list[str] = field(default_factory=list)


def remove_from_base(base: Path, step: int | None = None) -> Removed:
    """Remove a base container, or the parts of one version in it with their memory.

    A node that has no part left knows of no version any more: where that is so on all nodes, the job begins anew, and
    where others have copies, they remember. A node that still has a part, be it of a save that was cut short, remembers
    that there was a complete version: it may be all that is left of one.

    Args:
        step: of that version; all of its saves go.

    Raises:
        JobInUseError: a live process has it, or a saving process whose trainer is gone.
        ObjectNotFoundError: there is no such version, or nothing of a job.
        UnsafePathError: the folder is somebody else's, or others may write to it, or to a folder on the way.
        SaveError: something cannot be removed; what was removed before is gone.
    """
    removed = Removed()
    try:
        root = check_way(base)
        if not root.is_dir():
            raise ObjectNotFoundError("there is no such folder", path=base)
        check_folder(root)
        with _locked(root) as ranks:
            found = list_versions(root)
            wanted = [each for each in found if step in (None, CheckpointContainerId.parse_version_container(each))]
            if not wanted and (step is not None or not os.path.lexists(root / PRIVATE_DIR)):
                what = "nothing of a job" if step is None else f"no version of step {step}"
                raise ObjectNotFoundError(f"there is {what} here", path=base)
            gone = set()
            for version in sorted(wanted):
                gone |= _remove_version(root / version, removed)
            if step is not None:
                _remove_arenas(ranks, gone, removed)
                if not holds_parts(root):
                    forget_complete(root)
                    remove_lineage(root / PRIVATE_DIR)
                return removed
            _remove_private(root, ranks, removed)
        with contextlib.suppress(OSError):
            os.rmdir(root)
    except OSError as error:
        raise SaveError(f"it cannot be removed: {error.strerror or error}", path=error.filename or base) from error
    with contextlib.suppress(OSError):
        removed.left = sorted(os.listdir(root))
    return removed


@contextlib.contextmanager
def _locked(root: Path) -> Iterator[list[Path]]:
    """The folders of all ranks, while no process can have one."""
    private = root / PRIVATE_DIR
    ranks: list[Path] = []
    with contextlib.ExitStack() as held:
        if os.path.lexists(private):
            os.close(open_folder(private))
            held.enter_context(locked_out(root))
            ranks = sorted(private / name for name in os.listdir(private) if RANK_NAME.fullmatch(name))
        for folder in ranks:
            os.close(open_folder(folder))
            # Once a process each: closing another descriptor of the file would let go of the lock.
            descriptor = open_own(folder / LOCK, os.O_RDWR | os.O_CREAT)
            held.callback(os.close, descriptor)
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                owner = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
                raise JobInUseError(
                    f"a live process (pid {owner or 'unknown'}) has it",
                    rank=int(folder.name.rpartition("-")[2]),
                    path=root,
                    hint="end the job first",
                ) from error
        yield ranks


def _remove_version(directory: Path, removed: Removed) -> set[int]:
    """Remove the parts of a version, manifests first; returns the inodes of the objects."""
    inodes = set()
    folder = open_folder(directory)
    try:
        names = os.listdir(folder)
        for is_of_a_part in (parse_manifest_name, parse_object_name):
            for name in names:
                if is_of_a_part(without_temporary(name)) is not None:
                    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                    if stat.S_ISDIR(status.st_mode):
                        continue  # not ours
                    inodes.add(status.st_ino)
                    os.unlink(name, dir_fd=folder)
                    _count(status, removed)
    finally:
        os.close(folder)
    remove_version_folder(directory)
    removed.versions.append(directory.name)
    if directory.exists():
        removed.left.append(directory.name)
    return inodes


def _remove_arenas(ranks: list[Path], inodes: set[int], removed: Removed) -> None:
    """Remove arenas whose last part is gone."""
    for folder in ranks:
        for name in os.listdir(folder):
            status = os.stat(folder / name, follow_symlinks=False)
            if name.startswith(_ARENA) and status.st_ino in inodes and status.st_nlink == 1:
                os.unlink(folder / name)
                _count(status, removed)


def _remove_private(root: Path, ranks: list[Path], removed: Removed) -> None:
    private = root / PRIVATE_DIR
    if not os.path.lexists(private):
        return
    # Before the locks go: a job that starts then has files of its own here.
    for name in os.listdir(private):
        if not RANK_NAME.fullmatch(name) and name != JOB:
            _unlink(private / name, removed)
    for folder in ranks:
        names = os.listdir(folder)
        # The lock last: whoever waits for it sees then that it is not the one of this name any more.
        for name in sorted(names, key=lambda name: name == LOCK):
            _unlink(folder / name, removed)
        with contextlib.suppress(OSError):  # a job that has just started has made the lock anew
            os.rmdir(folder)
    _unlink(private / JOB, removed)  # the last one, as above
    with contextlib.suppress(OSError):
        os.rmdir(private)


def _unlink(path: Path, removed: Removed) -> None:
    """Remove a file or a link. What has become of a folder there is not ours."""
    status = os.stat(path, follow_symlinks=False)
    if not stat.S_ISDIR(status.st_mode):
        os.unlink(path)
        _count(status, removed)


def _count(status: os.stat_result, removed: Removed) -> None:
    if status.st_nlink == 1:
        removed.freed_bytes += status.st_blocks * 512
