"""The plan of a save: which items each rank writes, known to rank 0 as DCP's metadata.

Structures rarely change. So a rank plans only what is described otherwise than before (`local_plan`), and publishes its
plan when ranks agree on another table (`engine.replicas`). Rank 0 makes the metadata once for each table.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from ml_flashpoint.adapter.megatron.local_plan import Data, LocalPlan
from ml_flashpoint.adapter.megatron.releases import metadata_types
from ml_flashpoint.adapter.megatron.translation import save_planner
from ml_flashpoint.adapter.pytorch.metadata_format import encode_metadata
from ml_flashpoint.adapter.pytorch.storage_data import ItemPlace
from ml_flashpoint.engine.replicas import Replicas
from ml_flashpoint.format.errors import FlashpointError, SaveError, UnsafeContentError
from ml_flashpoint.state.archive import load_archive, save_archive
from ml_flashpoint.state.plan import item_keys


@dataclass(frozen=True, slots=True)
class PlannedSave:
    """A plan of one rank.

    Attributes:
        plan, keys: the items, and the name of each in the object.
        data: of each item.
        share, digest: the plan as bytes for rank 0, and their digest.
    """

    plan: SavePlan
    keys: list[str]
    data: Sequence[Data]
    share: bytes
    digest: str

    @classmethod
    def of(cls, plan: SavePlan) -> PlannedSave:
        """Return a plan without its data."""
        share = _encoded(plan)
        return cls(plan, item_keys(plan.items), (), share, hashlib.blake2b(share, digest_size=16).hexdigest())


class Plans:
    """Plans of one strategy's saves on one rank.

    Args:
        rank: this rank.

    Attributes:
        known: the last plan, without data.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._local: LocalPlan | None = None
        self.known = NOTHING
        self._metadata: tuple[str, bytes] = ("", b"")  # of a table; for the committing executor

    def plan(self, sharded_state_dict: dict[str, Any]) -> PlannedSave:
        """Plan what this rank writes of a state dict, see `translation.state_to_save`."""
        local, self._local = self._local, None
        data = None if local is None else local.data_in(sharded_state_dict)
        if local is None or data is None:
            local = LocalPlan(sharded_state_dict, coordinator=self._rank == 0)
            data = local.take_first()
        if local.plan is not self.known.plan and (self.known is NOTHING or local.plan != self.known.plan):
            self.known = PlannedSave.of(local.plan)
        self._local = local
        return replace(self.known, data=data)

    def metadata(self, replicas: Replicas, table: str, deadline_s: float) -> bytes:
        """Return DCP's metadata of the saves by a table, once all ranks have published their plans. On rank 0.

        Raises:
            DeadlineError: a rank has not. SaveError: a rank has no plan. UnsafeContentError: what a rank has published
                is none.
        """
        if self._metadata[0] != table:
            shares = replicas.collect(table, deadline_s)
            self._metadata = table, _metadata([_decoded(share, rank) for rank, share in enumerate(shares)])
        return self._metadata[1]


def _metadata(plans: list[SavePlan]) -> bytes:
    metadata: Metadata
    _, metadata = save_planner().create_global_plan(plans)
    metadata.storage_data = {
        item.index: ItemPlace(rank, key)
        for rank, plan in enumerate(plans)
        for item, key in zip(plan.items, item_keys(plan.items), strict=True)
    }
    return encode_metadata(metadata)


def _encoded(plan: SavePlan) -> bytes:
    return save_archive(plan, "plan", allowed=None)


def _decoded(data: bytes, rank: int) -> SavePlan:
    if not data:
        raise SaveError("a rank could not plan what it saves; its own log says why", rank=rank)
    try:
        plan = load_archive(data, "plan", path=f"rank {rank}", allowed=[*_PLAN_TYPES, *metadata_types()])
    except FlashpointError as error:
        raise UnsafeContentError(f"the plan that a rank sent is not acceptable: {error}", rank=rank) from error
    if not isinstance(plan, SavePlan):
        raise UnsafeContentError(f"a rank sent a {type(plan).__name__} as its plan", rank=rank)
    return plan


_PLAN_TYPES: list[Any] = [
    SavePlan,
    WriteItem,
    WriteItemType,
    TensorWriteData,
    ChunkStorageMetadata,
    TensorProperties,
    MetadataIndex,
    _MEM_FORMAT_ENCODING,
    torch.Size,
    torch.layout,
]

NOTHING = PlannedSave(SavePlan([]), [], (), b"", "nothing")
"""Stands for the plan of a rank that has none."""
