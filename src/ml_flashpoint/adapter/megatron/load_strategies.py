"""`MLFlashpointMegatronLoadStrategy`: megatron-core's way out of the engine.

Owns driving DCP's load planning for one rank, and the vote by which all ranks load a version or none does. Which
version is complete, its bytes and the files beside it are the loader's.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from ml_flashpoint.adapter.megatron.releases import metadata_types, object_types
from ml_flashpoint.adapter.megatron.save_strategies import version_of
from ml_flashpoint.adapter.megatron.translation import LoadTranslation
from ml_flashpoint.adapter.pytorch.memory_storage_reader import MemoryStorageReader
from ml_flashpoint.core.checkpoint_loader import MLFlashpointCheckpointLoader
from ml_flashpoint.format.errors import InvalidArgumentError, LoadError
from ml_flashpoint.ranks.rank_group import rank_group
from ml_flashpoint.replication.replication_manager import ReplicationManager
from ml_flashpoint.state.archive import SafeGlobal


class MLFlashpointMegatronLoadStrategy(TorchDistLoadShardedStrategy):  # type: ignore[misc]
    """Loads versions that `MLFlashpointMegatronAsyncSaveStrategy` saved, on any number of ranks.

    Args:
        replication_manager: the job's; the loader reaches other nodes through it.
        checkpoint_loader: the engine's loader.
        safe_globals: further types that sharded objects may be made of, as for ``torch.serialization.safe_globals``.
            Those that megatron-core allows are allowed; anything else is refused before it is unpickled.

    Raises:
        InvalidArgumentError: ``replication_manager`` or ``checkpoint_loader`` is none.
    """

    def __init__(
        self,
        replication_manager: ReplicationManager,
        checkpoint_loader: MLFlashpointCheckpointLoader,
        *,
        safe_globals: Sequence[SafeGlobal] = (),
    ) -> None:
        super().__init__()
        if not isinstance(replication_manager, ReplicationManager):
            raise InvalidArgumentError(
                "must be a ReplicationManager", argument="replication_manager", value=replication_manager
            )
        if not isinstance(checkpoint_loader, MLFlashpointCheckpointLoader):
            raise InvalidArgumentError(
                "must be an MLFlashpointCheckpointLoader", argument="checkpoint_loader", value=checkpoint_loader
            )
        self._loader = checkpoint_loader
        self._safe_globals = (*object_types(), *metadata_types(), *safe_globals)

    def load(
        self,
        sharded_state_dict: dict[str, Any],
        checkpoint_dir: str | os.PathLike[str],
        async_strategy: str | None = None,
    ) -> dict[str, Any]:
        """Collective: load into the tensors of a sharded state dict.

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
        another = LoadError(
            "another rank could not load it",
            rank=rank_group().rank,
            path=str(checkpoint_dir),
            hint="its own error says why; discard() the version on all ranks and recover an older one",
        )
        return rank_group().together(lambda: self._load(sharded_state_dict, checkpoint_dir), another)

    def _load(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | os.PathLike[str]) -> dict[str, Any]:
        reader = self._reader(checkpoint_dir)
        metadata = reader.read_metadata()
        translation = LoadTranslation(sharded_state_dict, metadata)
        planner = translation.planner
        # Every rank plans by itself: loads need nothing of each other, and so no collectives.
        planner.set_up_planner(translation.state, metadata, True)
        reader.set_up_storage_reader(metadata, True)
        plan = reader.prepare_local_plan(planner.create_local_plan())
        (plan,) = reader.prepare_global_plan(planner.create_global_plan([plan]))
        reader.read_data(planner.finish_plan(plan), planner).wait()
        self.cached_global_metadata = metadata
        return translation.result()

    def load_tensors_metadata(
        self, checkpoint_dir: str | os.PathLike[str], metadata: Metadata | None = None
    ) -> dict[str, Any]:
        """Shapes and types of the checkpoint's tensors, as sharded tensors without data, by key."""
        if metadata is None:
            metadata = self._reader(checkpoint_dir).read_metadata()
        found: dict[str, Any] = super().load_tensors_metadata(checkpoint_dir, metadata)
        return found

    def load_sharded_metadata(self, checkpoint_dir: str | os.PathLike[str]) -> dict[str, Any]:
        """The same, with the checkpoint's sharded objects, by unique key."""
        metadata = self._reader(checkpoint_dir).read_metadata()
        objects = {
            key: ShardedObject.empty_from_unique_key(key)
            for key, stored in metadata.state_dict_metadata.items()
            if isinstance(stored, BytesStorageMetadata)
        }
        return objects | self.load_tensors_metadata(checkpoint_dir, metadata)

    def _reader(self, checkpoint_dir: str | os.PathLike[str]) -> MemoryStorageReader:
        return MemoryStorageReader(
            path=version_of(checkpoint_dir), checkpoint_loader=self._loader, safe_globals=self._safe_globals
        )
