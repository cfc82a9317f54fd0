"""The code of the user guide's section on Megatron-LM, as it stands there, and what little must differ to run it."""

from __future__ import annotations

IMPORTS = """\
# Saving
from ml_flashpoint.adapter.pytorch.memory_storage_writer import MemoryStorageWriter
from ml_flashpoint.adapter.megatron.save_strategies import (
    MLFlashpointMegatronAsyncSaveStrategy,
)

# Loading
from ml_flashpoint.adapter.megatron.load_strategies import MLFlashpointMegatronLoadStrategy
from ml_flashpoint.checkpoint_object_manager.checkpoint_object_manager import CheckpointObjectManager
from ml_flashpoint.core.checkpoint_loader import DefaultMLFlashpointCheckpointLoader
from ml_flashpoint.replication.replication_manager import ReplicationManager

# Megatron Checkpointing
from megatron.core import dist_checkpointing as mcore_dist_checkpointing
"""

SAVE_STRATEGY = """\
# Instantiate the MemoryStorageWriter
memory_storage_writer = MemoryStorageWriter(...)

# Use it to instantiate the Save Strategy
megatron_save_strategy = MLFlashpointMegatronAsyncSaveStrategy(
    storage_writer=memory_storage_writer,
)
"""

LOAD_STRATEGY = """\
# Initialize dependencies (shared singletons)
checkpoint_object_manager = CheckpointObjectManager()
replication_manager = ReplicationManager()
replication_manager.initialize(checkpoint_object_manager)

checkpoint_loader = DefaultMLFlashpointCheckpointLoader(
    checkpoint_object_manager=checkpoint_object_manager,
    replication_manager=replication_manager,
)

# Instantiate the Load Strategy with the dependencies
mlflashpoint_load_strategy = MLFlashpointMegatronLoadStrategy(
    replication_manager=replication_manager,
    checkpoint_loader=checkpoint_loader,
)
"""

LOADING = """\
# First determine if an ML Flashpoint checkpoint is available, using the base container path you've configured
latest_saved_checkpoint_id = checkpoint_loader.get_latest_complete_checkpoint(checkpoint_base_container)

if local_checkpoint_container:
    # Given the existing load function doesn't do anything rank-specific,
    # it is suitable for us to use directly.
    state_dict = mcore_dist_checkpointing.load(
        sharded_state_dict=sharded_state_dict,
        checkpoint_dir=str(latest_saved_checkpoint_id),
        sharded_strategy=mlflashpoint_load_strategy,
        common_strategy=TorchCommonLoadStrategy(),
    )
else:
    # Load using your regular sharded strategy from your long-term storage path
    state_dict = mcore_dist_checkpointing.load(
        sharded_state_dict=sharded_state_dict,
        checkpoint_dir=str(long_term_storage_path),
        sharded_strategy=regular_megatron_load_strategy,
        common_strategy=TorchCommonLoadStrategy(),
    )
"""

# Used in the guide and not among its imports.
FURTHER_IMPORTS = """\
from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy
"""

COMMON_STRATEGY = """\
        common_strategy=TorchCommonLoadStrategy(),
"""

_PLACEHOLDER = """\
# Instantiate the MemoryStorageWriter
memory_storage_writer = MemoryStorageWriter(...)

"""


def runnable_save_strategy() -> str:
    """The save strategy, of the writer that the section on PyTorch DCP has made."""
    assert SAVE_STRATEGY.startswith(_PLACEHOLDER)
    return SAVE_STRATEGY.removeprefix(_PLACEHOLDER)


def runnable_loading() -> tuple[str, str]:
    """What loading lacks of imports, and loading: without the strategy for the common state where there is no such."""
    from megatron.core.dist_checkpointing.strategies import common

    if hasattr(common, "TorchCommonLoadStrategy"):
        return FURTHER_IMPORTS, LOADING
    assert LOADING.count(COMMON_STRATEGY) == 2
    return "", LOADING.replace(COMMON_STRATEGY, "")
