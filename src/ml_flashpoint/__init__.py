"""Memory-first checkpointing for PyTorch: the package's front door.

The names below are imported on first use, so that tools without torch (manifests, recovery planning, the command line's
help) stay quick to start.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ml_flashpoint.extras import DISTRIBUTION as DISTRIBUTION
from ml_flashpoint.extras import require

if TYPE_CHECKING:
    from ml_flashpoint.checkpointer import Checkpointer as Checkpointer
    from ml_flashpoint.config import Config as Config
    from ml_flashpoint.config import Persist as Persist
    from ml_flashpoint.data import rest_of_epoch as rest_of_epoch
    from ml_flashpoint.flashpoint import Flashpoint as Flashpoint
    from ml_flashpoint.ranks.retention import Keep as Keep
    from ml_flashpoint.tools.items import open_version as open_version

__version__ = "0.1.0"

_LAZY = {
    "Checkpointer": "ml_flashpoint.checkpointer",
    "Config": "ml_flashpoint.config",
    "Flashpoint": "ml_flashpoint.flashpoint",
    "Keep": "ml_flashpoint.ranks.retention",
    "Persist": "ml_flashpoint.config",
    "open_version": "ml_flashpoint.tools.items",
    "rest_of_epoch": "ml_flashpoint.data",
}
__all__ = ["Checkpointer", "Config", "Flashpoint", "Keep", "Persist", "__version__", "open_version", "rest_of_epoch"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        require("pytorch", "torch")
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
