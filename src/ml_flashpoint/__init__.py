"""Memory-first checkpointing for PyTorch: the package's front door.

Owns only what `import ml_flashpoint` gives: the version, what is imported on first use so that tools without torch
(manifests, recovery planning, the command line's help) stay quick to start, and a warning if somebody else's
distribution is there that has the same import name.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from typing import TYPE_CHECKING, Any

from ml_flashpoint.extras import DISTRIBUTION, require

if TYPE_CHECKING:
    from ml_flashpoint.adapter.pytorch.engine import Engine
    from ml_flashpoint.core.open_version import open_version
    from ml_flashpoint.facade.rest_of_epoch import rest_of_epoch
    from ml_flashpoint.flashpoint import Flashpoint
    from ml_flashpoint.ranks.retention import Keep

__version__ = "0.1.0"

__all__ = ["Engine", "Flashpoint", "Keep", "__version__", "open_version", "rest_of_epoch"]


def _others() -> list[str]:
    """Installed distributions called `ml-flashpoint`, but for ours from when it was called so.

    By the names of files, as `importlib.metadata` would double the time that an import of this package takes.
    """
    found = []
    for folder in dict.fromkeys(sys.path):
        try:
            names = os.listdir(folder or ".")
        except OSError:  # an archive, or nothing
            continue
        for name in names:
            if name.lower().startswith(("ml_flashpoint-", "ml-flashpoint-")) and name.endswith(".dist-info"):
                found.append(os.path.join(folder, name))
    return [path for path in found if not _is_ours(path)]


def _is_ours(metadata: str) -> bool:
    try:
        with open(os.path.join(metadata, "entry_points.txt"), encoding="utf-8") as stream:
            return "ml_flashpoint.cli.main" in stream.read()
    except OSError:
        return False


def _warn_of(others: list[str]) -> None:
    where = ", ".join(others)
    warnings.warn(
        f"another distribution is installed that has the import name ml_flashpoint too: {where}. Each overwrites "
        f"files of the other. Run: pip uninstall -y ml-flashpoint {DISTRIBUTION}, then install {DISTRIBUTION} again",
        RuntimeWarning,
        stacklevel=2,
    )


if _found := _others():
    _warn_of(_found)


_LAZY = {
    "Engine": "ml_flashpoint.adapter.pytorch.engine",
    "Flashpoint": "ml_flashpoint.flashpoint",
    "Keep": "ml_flashpoint.ranks.retention",
    "open_version": "ml_flashpoint.core.open_version",
    "rest_of_epoch": "ml_flashpoint.facade.rest_of_epoch",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        require("pytorch", "torch")
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
