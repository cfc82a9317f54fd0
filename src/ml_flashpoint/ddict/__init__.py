"""A distributed dictionary with checkpoints, rollback, persistence and recovery from memory.

What is here is imported when it is first asked for: managers, and processes of groups, need none of it, nor torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ml_flashpoint.extras import require

require("ddict", "torch", "cloudpickle")

if TYPE_CHECKING:
    from ml_flashpoint.ddict.dictionary import DDict, ManagerStats
    from ml_flashpoint.ddict.errors import (
        DDictCheckpointRetiredError,
        DDictDestroyedError,
        DDictError,
        DDictFullError,
        DDictKeyError,
        DDictManagerLostError,
        DDictPersistError,
        DDictReadOnlyError,
        DDictTimeoutError,
        DDictWritesLostError,
    )
    from ml_flashpoint.ddict.persister import (
        CheckpointPersister,
        DAOSCheckpointPersister,
        FsspecCheckpointPersister,
        NULLCheckpointPersister,
        NullCheckpointPersister,
        PosixCheckpointPersister,
    )
    from ml_flashpoint.ddict.wire.keys import Unreadable

__all__ = [
    "CheckpointPersister",
    "DAOSCheckpointPersister",
    "DDict",
    "DDictCheckpointRetiredError",
    "DDictDestroyedError",
    "DDictError",
    "DDictFullError",
    "DDictKeyError",
    "DDictManagerLostError",
    "DDictPersistError",
    "DDictReadOnlyError",
    "DDictTimeoutError",
    "DDictWritesLostError",
    "FsspecCheckpointPersister",
    "ManagerStats",
    "NULLCheckpointPersister",
    "NullCheckpointPersister",
    "PosixCheckpointPersister",
    "Unreadable",
]

_MODULES = {"DDict": "dictionary", "ManagerStats": "dictionary", "Unreadable": "wire.keys"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "persister" if name.endswith("Persister") else _MODULES.get(name, "errors")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
