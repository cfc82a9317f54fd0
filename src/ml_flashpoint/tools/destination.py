"""Files and folders that a tool makes: they appear under their names whole, and durable, or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from ml_flashpoint.format.errors import SaveError
from ml_flashpoint.format.files import sync_directory
from ml_flashpoint.format.private_folders import check_unplanted


def make_whole(target: Path, what: str, make: Callable[[Path], Path]) -> Path:
    """Make a file or folder.

    Args:
        target: its path. The folders above are made if need be.
        what: it is, for errors.
        make: is given an empty, hidden folder, and returns the path in there of what it made, which is durable.

    Raises:
        SaveError: it cannot be written, or is there already.
        UnsafePathError: somebody else has planted something on the way.
    """
    hidden = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        if os.path.lexists(target):
            raise SaveError(f"{what} is there already", path=target, hint="remove it first")
        check_unplanted(target.parent)
        target.parent.mkdir(parents=True, exist_ok=True)
        check_unplanted(target.parent)  # nobody else can be there first any more
        hidden.mkdir(mode=0o700)
        try:
            os.rename(make(hidden), target)
            sync_directory(target.parent)
        finally:
            shutil.rmtree(hidden, ignore_errors=True)
    except (OSError, RuntimeError) as error:
        cause = error.__context__ if isinstance(error, RuntimeError) else error  # torch's archives raise one after it
        if not isinstance(cause, OSError):
            raise
        raise SaveError(f"{what} cannot be written: {cause.strerror or cause}", path=target) from error
    return target
