"""What a base container shows of its job on this node, without reading any part.

Owns the mark that a version was once complete on all ranks, which sets a job that lost its versions apart from one that
never had any; and who has saved here. The mark is set after the fact and never needed for a version to be loadable.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path

from ml_flashpoint.checkpoint_object_manager.version_files import list_versions
from ml_flashpoint.format.manifest import parse_manifest_name

PRIVATE_DIR = ".flashpoint"
RANK_NAME = re.compile(r"rank-(\d{5,8})")
_MARK = "complete"


def mark_complete(base: Path) -> None:
    """Remember that a version was complete on all ranks. A filesystem that refuses is no reason to fail anything."""
    path = base / PRIVATE_DIR / _MARK
    with contextlib.suppress(OSError):
        if not os.path.lexists(path):
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))


def forget_complete(base: Path) -> None:
    """Undo :func:`mark_complete`."""
    (base / PRIVATE_DIR / _MARK).unlink(missing_ok=True)


def was_complete(base: Path) -> bool:
    """Whether :meth:`mark_complete` was called on this node, in this run or an earlier one.

    Raises:
        OSError: that cannot be known just now.
    """
    try:
        os.lstat(base / PRIVATE_DIR / _MARK)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def holds_parts(base: Path, *, but_of: Callable[[str], bool] = lambda save_id: False) -> bool:
    """Whether there is a committed part of any version on this node. True where that cannot be known just now.

    Args:
        but_of: returns True for save ids to leave out.
    """
    try:
        for version in list_versions(base):
            with contextlib.suppress(FileNotFoundError):  # pruned meanwhile
                save_ids = [found[1] for found in map(parse_manifest_name, os.listdir(base / version)) if found]
                if not all(map(but_of, save_ids)):
                    return True
    except OSError:
        return True
    return False


def ranks_with_arenas(base: Path) -> frozenset[int]:
    """Ranks that have saved on this node, or held copies here: their arenas stay when they end.

    Raises:
        OSError: that cannot be known just now.
    """
    found = set()
    try:
        names = os.listdir(base / PRIVATE_DIR)
    except (FileNotFoundError, NotADirectoryError):
        return frozenset()
    for name in names:
        match = RANK_NAME.fullmatch(name)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if match is not None and any(each.startswith("arena-") for each in os.listdir(base / PRIVATE_DIR / name)):
                found.add(int(match[1]))
    return frozenset(found)
