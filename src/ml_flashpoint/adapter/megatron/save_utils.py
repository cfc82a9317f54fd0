"""`save_local_aware_megatron_checkpoint`: `dist_checkpointing.save`, with the common state on every node."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess

from ml_flashpoint.adapter.megatron.releases import AsyncRequest
from ml_flashpoint.adapter.megatron.save_strategies import MLFlashpointMegatronAsyncSaveStrategy
from ml_flashpoint.adapter.pytorch.saves import checked_version
from ml_flashpoint.format.errors import InvalidArgumentError

_CONTENT_METADATA_KEY = "content_metadata"


def save_local_aware_megatron_checkpoint(
    checkpoint: dict[str, Any],
    checkpoint_dir: str | os.PathLike[str],
    save_strategy: Any,
    async_save: bool,
    *,
    validate_access_integrity: bool = True,
    preprocess_common_before_consistancy_check: Callable[[Any], Any] | None = None,
    content_metadata: dict[str, Any] | None = None,
    files: Callable[[], Mapping[str, bytes]] = dict,
    explicit: bool = True,
) -> AsyncRequest | None:
    """Save a sharded state dict, and the common state of every node as its local rank 0 has it. Collective.

    Common state is whatever is no sharded tensor or object. It is written to ``common.pt`` of the version on every
    node, and is an item of an object there: it has digests and copies, and is back after a node was replaced.

    Args:
        checkpoint: the sharded state dict. Factories in it are applied.
        checkpoint_dir: a version's folder. It need not exist.
        save_strategy: an `MLFlashpointMegatronAsyncSaveStrategy`, or megatron-core's wrapper around one.
        async_save: return when the state may change again, with the rest still to come.
        validate_access_integrity, preprocess_common_before_consistancy_check, content_metadata: as for
            `dist_checkpointing.save`. Checking, which gathers the keys of all ranks, may be left to one save of many.
        files: makes further files for the version's folder, on one rank of each node. Their names have no directories.
        explicit: wait for memory; False: skip the save if earlier ones still take all of it.

    Returns:
        For an asynchronous save what is to be scheduled on all ranks, else None.

    Raises:
        InvalidArgumentError, InvalidNameError: ``save_strategy`` or ``checkpoint_dir`` is none.
        CheckpointingException: the state dict is not valid.
    """
    ours = _strategy_of(save_strategy)
    version = str(checked_version(checkpoint_dir))
    if content_metadata is not None:
        checkpoint[_CONTENT_METADATA_KEY] = content_metadata
    sharded, common = save_preprocess(checkpoint, validate_access_integrity, preprocess_common_before_consistancy_check)
    with ours.carrying(common, files, explicit=explicit):
        if async_save:
            request: AsyncRequest = save_strategy.async_save(sharded, version)
            return request
        save_strategy.save(sharded, version)
    return None


def _strategy_of(given: object) -> MLFlashpointMegatronAsyncSaveStrategy:
    found = given
    while not isinstance(found, MLFlashpointMegatronAsyncSaveStrategy):
        found = getattr(found, "base_strategy", None)
        if found is None:
            raise InvalidArgumentError(
                "must be an MLFlashpointMegatronAsyncSaveStrategy, or a wrapper around one",
                argument="save_strategy",
                value=given,
            )
    return found
