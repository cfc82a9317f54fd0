"""Local checkpointing: a tensor-aware state, saved by every rank in its own node's memory, with copies in cliques.

See `local_manager`.
"""

from ml_flashpoint.extras import require

require("pytorch", "torch")

from ml_flashpoint.local.async_queue import AsyncCallsQueue as AsyncCallsQueue
from ml_flashpoint.local.async_queue import AsyncRequest as AsyncRequest
from ml_flashpoint.local.basic_state_dict import BasicTensorAwareStateDict as BasicTensorAwareStateDict
from ml_flashpoint.local.basic_state_dict import TensorAwareStateDict as TensorAwareStateDict
from ml_flashpoint.local.errors import BackgroundWorkerError as BackgroundWorkerError
from ml_flashpoint.local.errors import CallOrderError as CallOrderError
from ml_flashpoint.local.errors import CheckpointingException as CheckpointingException
from ml_flashpoint.local.errors import CompatibilityError as CompatibilityError
from ml_flashpoint.local.errors import InvalidIterationError as InvalidIterationError
from ml_flashpoint.local.errors import NoReplicasAvailableError as NoReplicasAvailableError
from ml_flashpoint.local.errors import StaleIterationError as StaleIterationError
from ml_flashpoint.local.errors import WorldSizeChangedError as WorldSizeChangedError
from ml_flashpoint.local.local_manager import CheckpointId as CheckpointId
from ml_flashpoint.local.local_manager import LocalCheckpointManager as LocalCheckpointManager
from ml_flashpoint.local.replication import CliqueReplicationStrategy as CliqueReplicationStrategy
from ml_flashpoint.local.replication import LazyCliqueReplicationStrategy as LazyCliqueReplicationStrategy
from ml_flashpoint.local.replication import parse_group_sequence as parse_group_sequence
from ml_flashpoint.ranks.strategies import ReplicationStrategy as ReplicationStrategy
