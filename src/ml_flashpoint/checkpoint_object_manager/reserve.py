"""Pages that a rank keeps for the manifest of its next part, on a filesystem that may be full by then.

Owns the file that holds them, beside the rank's arenas. Its size is what is wanted, and its blocks are what is kept.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ml_flashpoint.checkpoint_object_manager.arena import PAGE, round_up
from ml_flashpoint.format.errors import FlashpointError
from ml_flashpoint.format.manifest import Manifest
from ml_flashpoint.format.private_folders import open_own

RESERVE = "reserve"
_LEAST = 4 * PAGE
_BYTES_A_BLOCK = 24
_STAT_BLOCK = 512


def keep_reserve(directory: Path, manifest: Manifest | None = None) -> None:
    """Keep as many pages as there is room for, up to what is wanted. Never fails, and is cheap if nothing is missing.

    Args:
        directory: of the rank's arenas.
        manifest: one of the size that is to be expected; without, what was wanted before counts.
    """
    with contextlib.suppress(OSError, FlashpointError), open(_open(directory, os.O_CREAT), "r+b") as file:
        status = os.fstat(file.fileno())
        blocks = sum(len(record.digests) for record in manifest.objects) if manifest is not None else 0
        wanted = max(_LEAST + round_up(blocks * _BYTES_A_BLOCK), status.st_size)
        if status.st_blocks * _STAT_BLOCK >= wanted:
            return
        os.ftruncate(file.fileno(), wanted)
        for at in range(0, wanted, PAGE):  # the kernel reserves all of a range or none
            os.posix_fallocate(file.fileno(), at, PAGE)


def give_up_reserve(directory: Path) -> bool:
    """Let the pages go, and keep in mind how many there should be. Returns whether there were any."""
    with contextlib.suppress(OSError, FlashpointError), open(_open(directory), "r+b") as file:
        status = os.fstat(file.fileno())
        os.ftruncate(file.fileno(), 0)
        os.ftruncate(file.fileno(), status.st_size)
        return status.st_blocks > 0
    return False


def _open(directory: Path, flags: int = 0) -> int:
    return open_own(directory / RESERVE, os.O_RDWR | flags)
