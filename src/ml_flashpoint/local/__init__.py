"""Local checkpointing: a tensor-aware state, saved by every rank in its own node's memory, with copies in cliques.

See `local_manager`.
"""

from ml_flashpoint.extras import require

require("pytorch", "torch")

from ml_flashpoint.local.async_queue import AsyncCallsQueue, AsyncRequest
from ml_flashpoint.local.basic_state_dict import BasicTensorAwareStateDict, TensorAwareStateDict
from ml_flashpoint.local.errors import (
    BackgroundWorkerError,
    CallOrderError,
    CheckpointingException,
    CompatibilityError,
    InvalidIterationError,
    NoReplicasAvailableError,
    StaleIterationError,
    WorldSizeChangedError,
)
from ml_flashpoint.local.local_manager import CheckpointId, LocalCheckpointManager
from ml_flashpoint.local.replication import (
    CliqueReplicationStrategy,
    LazyCliqueReplicationStrategy,
    ReplicationStrategy,
    parse_group_sequence,
)

__all__ = [
    "AsyncCallsQueue",
    "AsyncRequest",
    "BackgroundWorkerError",
    "BasicTensorAwareStateDict",
    "CallOrderError",
    "CheckpointId",
    "CheckpointingException",
    "CliqueReplicationStrategy",
    "CompatibilityError",
    "InvalidIterationError",
    "LazyCliqueReplicationStrategy",
    "LocalCheckpointManager",
    "NoReplicasAvailableError",
    "ReplicationStrategy",
    "StaleIterationError",
    "TensorAwareStateDict",
    "WorldSizeChangedError",
    "parse_group_sequence",
]
