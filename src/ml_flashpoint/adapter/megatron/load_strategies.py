"""`MLFlashpointMegatronLoadStrategy`: megatron-core's way out of the engine.

Each rank drives DCP's load planning by itself. By a vote, all ranks load a version or none does.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from ml_flashpoint.adapter.megatron.releases import object_types
from ml_flashpoint.adapter.megatron.translation import LoadTranslation
from ml_flashpoint.adapter.pytorch.memory_storage_reader import MemoryStorageReader
from ml_flashpoint.adapter.pytorch.saves import checked_version
from ml_flashpoint.adapter.pytorch.seed import DefaultMLFlashpointCheckpointLoader
from ml_flashpoint.engine.checkpointer import Checkpointer
from ml_flashpoint.format.errors import LoadError
from ml_flashpoint.ranks.rank_group import rank_group
from ml_flashpoint.state.archive import SafeGlobal


class MLFlashpointMegatronLoadStrategy(TorchDistLoadShardedStrategy):  # type: ignore[misc]
    """Loads versions that `MLFlashpointMegatronAsyncSaveStrategy` saved, on any number of ranks.

    Args:
        replication_manager: accepted for callers that pass it, and not needed.
        checkpoint_loader: a `Checkpointer`, or a `DefaultMLFlashpointCheckpointLoader`.
        safe_globals: types that sharded objects may be made of beside those that megatron-core allows.
    """

    def __init__(
        self,
        replication_manager: object = None,
        checkpoint_loader: Checkpointer | DefaultMLFlashpointCheckpointLoader | None = None,
        *,
        safe_globals: Sequence[SafeGlobal] = (),
    ) -> None:
        super().__init__()
        MemoryStorageReader(None, checkpoint_loader)  # refuses any other loader now
        self._loader = checkpoint_loader
        self._safe_globals = (*object_types(), *safe_globals)

    def load(
        self,
        sharded_state_dict: dict[str, Any],
        checkpoint_dir: str | os.PathLike[str],
        async_strategy: str | None = None,
    ) -> dict[str, Any]:
        """Load into the tensors of a sharded state dict. Collective.

        Args:
            sharded_state_dict: of sharded tensors and objects only.
            checkpoint_dir: what ``get_latest_complete_checkpoint()`` returned.
            async_strategy: accepted, and not needed: megatron-core 0.17 and later name their reader's package by it.

        Returns:
            The state dict with what was loaded in place of what described it.

        Raises:
            LoadError: another rank could not load. The tensors may be partly loaded.
            Exception: this rank could not, for any reason that megatron-core or the reader gives.
        """
        return rank_group().together(lambda: self._load(sharded_state_dict, checkpoint_dir), LoadError, "loading")

    def _load(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | os.PathLike[str]) -> dict[str, Any]:
        reader = self._reader(checkpoint_dir)
        self.cached_global_metadata = metadata = reader.read_metadata()
        translation = LoadTranslation(sharded_state_dict, metadata)
        planner = translation.planner
        # Every rank plans by itself: loads need nothing of each other, and so no collectives.
        planner.set_up_planner(translation.state, metadata, True)
        reader.set_up_storage_reader(metadata, True)
        plan = planner.create_local_plan()
        (plan,) = planner.create_global_plan([plan])
        reader.read_data(planner.finish_plan(plan), planner).wait()
        return translation.result()

    def load_tensors_metadata(
        self, checkpoint_dir: str | os.PathLike[str], metadata: Metadata | None = None
    ) -> dict[str, Any]:
        """Return shapes and types of the checkpoint's tensors, as sharded tensors without data, by key."""
        if metadata is None:
            metadata = self._reader(checkpoint_dir).read_metadata()
        found: dict[str, Any] = super().load_tensors_metadata(checkpoint_dir, metadata)
        return found

    def load_sharded_metadata(self, checkpoint_dir: str | os.PathLike[str]) -> dict[str, Any]:
        """Return the same, with the checkpoint's sharded objects, by unique key."""
        metadata = self._reader(checkpoint_dir).read_metadata()
        objects = {
            key: ShardedObject.empty_from_unique_key(key)
            for key, stored in metadata.state_dict_metadata.items()
            if isinstance(stored, BytesStorageMetadata)
        }
        return objects | self.load_tensors_metadata(checkpoint_dir, metadata)

    def _reader(self, checkpoint_dir: str | os.PathLike[str]) -> MemoryStorageReader:
        version = checked_version(checkpoint_dir)
        return MemoryStorageReader(version, self._loader, safe_globals=self._safe_globals)
