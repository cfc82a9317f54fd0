"""Memory-first checkpointing for PyTorch: the package's front door.

Owns only what `import ml_flashpoint` gives: the version and the façade, which is imported on first use so
that tools without torch (manifests, recovery planning, the command line's help) stay quick to start.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ml_flashpoint.flashpoint import Flashpoint

__version__ = "0.1.0"

__all__ = ["Flashpoint", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "Flashpoint":
        return importlib.import_module("ml_flashpoint.flashpoint").Flashpoint
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
