"""The user guide's code on PyTorch DCP and Megatron-LM, as it stands there, and what little must differ to run it."""

from __future__ import annotations

IMPORTS = """\
import torch
from torch import multiprocessing as torch_mp
import torch.distributed.checkpoint as dcp

from ml_flashpoint.adapter.megatron.load_strategies import MLFlashpointMegatronLoadStrategy
from ml_flashpoint.adapter.pytorch.memory_storage_writer import MemoryStorageWriter
from ml_flashpoint.checkpoint_object_manager.checkpoint_object_manager import CheckpointObjectManager
from ml_flashpoint.core.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.core.checkpoint_loader import DefaultMLFlashpointCheckpointLoader
from ml_flashpoint.core.checkpoint_saver import DefaultMLFlashpointCheckpointSaver
from ml_flashpoint.replication.replication_manager import ReplicationManager
"""

INITIALIZATION = """\
# Initialize dependencies (shared singletons)
checkpoint_object_manager = CheckpointObjectManager()
replication_manager = ReplicationManager()
replication_manager.initialize(checkpoint_object_manager)

# Instantiate the StorageWriter
memory_storage_writer = MemoryStorageWriter(
    checkpoint_saver=DefaultMLFlashpointCheckpointSaver(
        global_rank_getter=torch.distributed.get_rank,
        local_rank_getter=torch.distributed.get_node_local_rank,
        global_barrier_func=lambda: torch.distributed.barrier(),
        ckpt_obj_manager=checkpoint_object_manager,
        replication_manager=replication_manager,
        # initial_buffer_size_bytes=initial_write_buffer_size_bytes, # Optional - increase for larger checkpoint sizes per rank
    ),
    mp_manager=torch_mp.Manager(),
)

# Instantiate the CheckpointLoader and StorageReader
checkpoint_loader = DefaultMLFlashpointCheckpointLoader(
    checkpoint_object_manager=checkpoint_object_manager,
    replication_manager=replication_manager,
)
memory_storage_reader = MemoryStorageReader(
    path=checkpoint_dir,
    checkpoint_loader=checkpoint_loader,
)
"""  # noqa: E501

SAVING = """\
# Assuming base_container is the base path CheckpointContainerId used for all checkpoints for the current job, e.g. `"/tmp/mlf-checkpoints/job123"`:
curr_step_checkpoint_id = CheckpointContainerId.create_child(
    base_container, CheckpointContainerId.format_version_container(current_step)
)

# Sync save
metadata = dcp.save(state_dict,
                    checkpoint_id=str(curr_step_checkpoint_id),
                    storage_writer=memory_storage_writer)

# Async save
future = dcp.async_save(state_dict,
                        checkpoint_id=str(curr_step_checkpoint_id),
                        storage_writer=memory_storage_writer,
                        async_checkpointer_type=dcp.AsyncCheckpointerType.PROCESS)
"""  # noqa: E501

RECOVERY = """\
# First determine if an ML Flashpoint checkpoint is available, using the base container path you've configured
latest_saved_checkpoint_id = checkpoint_loader.get_latest_complete_checkpoint(checkpoint_base_container)

if latest_saved_checkpoint_id:
    dcp.load(state_dict,
             checkpoint_id=str(latest_saved_checkpoint_id),
             storage_reader=memory_storage_reader)
else:
    # Load using your regular sharded strategy from your long-term storage path
    dcp.load(state_dict,
             checkpoint_id=str(long_term_checkpoint_path),
             ...)
"""

MEGATRON_IMPORT = "from ml_flashpoint.adapter.megatron.load_strategies import MLFlashpointMegatronLoadStrategy"

# `dcp` does not export the type: it lives where it is defined.
ENUM_IMPORT = "from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType"

# Left out of the guide, where two of these are used.
READER_IMPORT = "from ml_flashpoint.adapter.pytorch.memory_storage_reader import MemoryStorageReader"


def runnable_imports() -> str:
    """The imports, without the one that needs Megatron and with those that are missing."""
    lines = IMPORTS.splitlines()
    lines.remove(MEGATRON_IMPORT)
    return "\n".join([*lines, READER_IMPORT, ENUM_IMPORT])


def runnable_saving() -> str:
    """Both ways of saving."""
    return _replaced(SAVING, "dcp.AsyncCheckpointerType.PROCESS", "AsyncCheckpointerType.PROCESS")


def runnable_recovery() -> str:
    """Recovery; the guide leaves the arguments of the other reader to the user."""
    return _replaced(RECOVERY, ",\n             ...)", ")")


def _replaced(code: str, old: str, new: str) -> str:
    assert code.count(old) == 1, old
    return code.replace(old, new)


# ---- Megatron-LM --------------------------------------------------------------------------------------------------

MEGATRON_IMPORTS = """\
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

MEGATRON_SAVE_STRATEGY = """\
# Instantiate the MemoryStorageWriter
memory_storage_writer = MemoryStorageWriter(...)

# Use it to instantiate the Save Strategy
megatron_save_strategy = MLFlashpointMegatronAsyncSaveStrategy(
    storage_writer=memory_storage_writer,
)
"""

MEGATRON_LOAD_STRATEGY = """\
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

MEGATRON_LOADING = """\
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
_FURTHER_IMPORTS = """\
from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy
"""

_COMMON_STRATEGY = """\
        common_strategy=TorchCommonLoadStrategy(),
"""

_PLACEHOLDER = """\
# Instantiate the MemoryStorageWriter
memory_storage_writer = MemoryStorageWriter(...)

"""


def runnable_megatron_save_strategy() -> str:
    """The save strategy, of the writer that the section on PyTorch DCP has made."""
    assert MEGATRON_SAVE_STRATEGY.startswith(_PLACEHOLDER)
    return MEGATRON_SAVE_STRATEGY.removeprefix(_PLACEHOLDER)


def runnable_megatron_loading() -> tuple[str, str]:
    """What loading lacks of imports, and loading: without the strategy for the common state where there is no such."""
    from megatron.core.dist_checkpointing.strategies import common

    if hasattr(common, "TorchCommonLoadStrategy"):
        return _FURTHER_IMPORTS, MEGATRON_LOADING
    assert MEGATRON_LOADING.count(_COMMON_STRATEGY) == 2
    return "", MEGATRON_LOADING.replace(_COMMON_STRATEGY, "")
