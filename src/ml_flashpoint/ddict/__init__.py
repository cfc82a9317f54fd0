"""A distributed dictionary with checkpoints, rollback, persistence and recovery from memory."""

from ml_flashpoint.extras import require

require("ddict", "torch", "cloudpickle")

from ml_flashpoint.ddict.checkpoint_persister import CheckpointPersister, NullCheckpointPersister
from ml_flashpoint.ddict.ddict import DDict
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
from ml_flashpoint.ddict.persistence import (
    DAOSCheckpointPersister,
    FsspecCheckpointPersister,
    PosixCheckpointPersister,
)
from ml_flashpoint.ddict.stats import ManagerStats

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
    "NullCheckpointPersister",
    "PosixCheckpointPersister",
]
