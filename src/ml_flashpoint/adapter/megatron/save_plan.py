"""The plan of a save: which items each rank writes, known to rank 0 as DCP's metadata.

Owns the exchange of plans between ranks. Structures rarely change, so a rank plans only what is described otherwise
than before (`local_plan`), and sends its plan only when it is another one; what the metadata are then is kept, too, as
bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
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
from ml_flashpoint.format.errors import FlashpointError, SaveError, UnsafeContentError
from ml_flashpoint.ranks.rank_group import RankGroup
from ml_flashpoint.state.archive import load_archive, save_archive
from ml_flashpoint.state.plan import item_keys

_log = logging.getLogger(__name__)

_PLAN, _FAILURE = b"p", b"f"
_MAX_SHOWN = 500


@dataclass(frozen=True, slots=True)
class PlannedSave:
    """What one rank writes.

    Attributes:
        plan, keys: the items, and the name of each in the object.
        data: of each item.
        metadata: DCP's metadata of the whole save as bytes, on rank 0.
    """

    plan: SavePlan
    keys: list[str]
    data: Sequence[Data]
    metadata: bytes | None


class PlanExchange:
    """Plans the saves of one strategy.

    A rank that sent its plan does not know whether rank 0 has it. If rank 0 has not, it fails the next save, which
    tells all ranks to send theirs again.

    Args:
        group: the ranks of the job.
    """

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._local: LocalPlan | None = None
        self._own: SavePlan | None = None
        self._keys: list[str] = []
        self._plans: list[SavePlan | None] = [None] * group.world_size
        self._metadata: bytes | None = None
        self._missed = False

    def plan(self, sharded_state_dict: dict[str, Any], failure: BaseException | None) -> PlannedSave:
        """Collective: plan a save.

        Args:
            sharded_state_dict: what this rank saves, see `translation.state_to_save`.
            failure: why this rank cannot save; so all ranks learn of it.

        Raises:
            SaveError: a rank cannot save; which one, and why.
            FlashpointError: a rank is gone.
        """
        message, plan, data = b"", None, list[Data]()
        if self._missed:
            failure = failure or SaveError("not all plans of the last save have come: they are sent again")
        if failure is None:
            try:
                plan, data = self._plan(sharded_state_dict)
                if self._own is None or (plan is not self._own and plan != self._own):
                    message = _PLAN + _encoded(plan)
            except Exception as error:  # of whatever kind: the other ranks wait for what this one says
                failure = error
        if failure is not None:
            message = _FAILURE + f"{type(failure).__name__}: {failure}".encode()[:_MAX_SHOWN]
        known, self._own = self._own, None  # if the exchange breaks off, others may not have what was sent
        gathered, self._missed = self._gathered(message), False
        if message[:1] == _PLAN:
            known, self._keys = plan, item_keys(plan.items) if plan is not None else []
        self._own = known
        if gathered[0][:1] == _FAILURE:
            self._own = None
        elif self._group.rank == 0:
            self._take_note(gathered)
        for rank, each in enumerate(gathered):
            if each[:1] == _FAILURE:
                raise SaveError(f"it failed before it was staged: {each[1:].decode(errors='replace')}", rank=rank)
        assert known is not None
        metadata = self._encoded_metadata() if self._group.rank == 0 else None
        return PlannedSave(known, self._keys, data, metadata)

    def _plan(self, sharded_state_dict: dict[str, Any]) -> tuple[SavePlan, list[Data]]:
        """This rank's own plan, and the data of its items."""
        local, self._local = self._local, None
        data = None if local is None else local.data_in(sharded_state_dict)
        if local is None or data is None:
            local = LocalPlan(sharded_state_dict, coordinator=self._group.rank == 0)
            data = local.take_first()
        self._local = local
        return local.plan, data

    def _gathered(self, message: bytes) -> list[bytes]:
        try:
            return self._group.gather(message)
        except BaseException:
            self._missed = self._group.rank == 0
            raise

    def _take_note(self, gathered: list[bytes]) -> None:
        try:
            for rank, message in enumerate(gathered):
                if message[:1] == _PLAN:
                    self._metadata = None
                    self._plans[rank] = self._own if rank == 0 else _decoded(message[1:], rank)
        except BaseException:
            self._missed = True
            raise

    def _encoded_metadata(self) -> bytes:
        if self._metadata is None:
            plans = [plan for plan in self._plans if plan is not None]
            if len(plans) < len(self._plans):
                raise SaveError("the plan of a rank is missing", rank=self._plans.index(None))
            metadata: Metadata
            _, metadata = save_planner().create_global_plan(plans)
            metadata.storage_data = {
                item.index: ItemPlace(rank, key)
                for rank, plan in enumerate(plans)
                for item, key in zip(plan.items, item_keys(plan.items), strict=True)
            }
            self._metadata = encode_metadata(metadata)
        return self._metadata


def _encoded(plan: SavePlan) -> bytes:
    return save_archive(plan, "plan", allowed=None)


def _decoded(data: bytes, rank: int) -> SavePlan:
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
