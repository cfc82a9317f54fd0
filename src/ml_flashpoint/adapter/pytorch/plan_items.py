"""The items of a DCP plan as items of an object: their data, and the results that DCP is given.

Plain strided tensors are stored as such, others as archives of torch.
"""

from __future__ import annotations

import io
from collections.abc import Iterable

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from ml_flashpoint.adapter.pytorch.metadata_format import ItemPlace
from ml_flashpoint.copy.tensors import is_plain_strided, materialized
from ml_flashpoint.engine.committing import BytesItem, TensorItem
from ml_flashpoint.format.errors import NotStagedError, UnsafeContentError
from ml_flashpoint.state.archive import SafeGlobal, refuse_unloadable, save_archive


def resolve_items(
    plan: SavePlan, planner: SavePlanner, keys: list[str], *, allowed: Iterable[SafeGlobal], trust_bytes: bool
) -> tuple[list[TensorItem], list[BytesItem]]:
    """Return the data of a plan's items: tensors to be stored as such, and bytes.

    Args:
        keys: names of the items, as the plan's.
        allowed: types that bytes may be made of beside those that a reader always accepts.
        trust_bytes: take whatever bytes the planner gives.

    Raises:
        NotStagedError: a tensor has no data.
        FlashpointError: a reader would refuse an item.
    """
    tensors: list[TensorItem] = []
    byte_items: list[BytesItem] = []
    allowed = tuple(allowed)
    for item, key in zip(plan.items, keys, strict=True):
        data = planner.resolve_data(item)
        if item.type is WriteItemType.BYTE_IO:
            assert isinstance(data, io.BytesIO)
            content = data.getvalue()
            byte_items.append((key, content if trust_bytes else _loadable(content, item, planner, allowed)))
            continue
        assert isinstance(data, torch.Tensor)
        data = materialized(data)
        if data.is_meta:
            raise NotStagedError(
                f"tensor {item.index.fqn!r} has no data: it is a meta tensor, or another rank used to write it",
                hint="give it data; or, if the structure of the state has changed on another rank, save again",
            )
        if is_plain_strided(data):
            tensors.append((key, data))
        else:
            byte_items.append((key, save_archive(data, str(item.index.fqn), allowed=allowed, hint=_HINT)))
    return tensors, byte_items


def _loadable(content: bytes, item: WriteItem, planner: SavePlanner, allowed: tuple[SafeGlobal, ...]) -> bytes:
    """Return what a planner pickled, or an archive of the same value if it is of kinds that only archives can hold."""
    try:
        refuse_unloadable(content, f"item {item.index.fqn!r}", allowed=allowed)
    except UnsafeContentError:
        own = DefaultSavePlanner
        if not isinstance(planner, own) or any(
            getattr(type(planner), name) is not getattr(own, name) for name in ("resolve_data", "transform_object")
        ):
            raise
        return save_archive(planner.lookup_object(item.index), str(item.index.fqn), allowed=allowed, hint=_HINT)
    return content


_HINT = "keep plain values in it, or pass safe_globals=[{}] to writer and reader if you trust that"


def results_of(
    plan: SavePlan, keys: list[str], tensors: list[TensorItem], byte_items: list[BytesItem], rank: int
) -> list[WriteResult]:
    """Return the results of a plan's items, as a rank wrote them."""
    sizes = {key: tensor.nbytes for key, tensor in tensors} | {key: len(data) for key, data in byte_items}
    return [
        WriteResult(index=item.index, size_in_bytes=sizes[key], storage_data=ItemPlace(rank, key))
        for item, key in zip(plan.items, keys, strict=True)
    ]
