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

from ml_flashpoint.adapter.pytorch.storage_data import ItemPlace
from ml_flashpoint.copy.tensors import is_plain_strided, materialized
from ml_flashpoint.engine.committing import BytesItem, TensorItem
from ml_flashpoint.format.errors import NotStagedError
from ml_flashpoint.state.archive import SafeGlobal, load_archive, save_archive


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
        if item.type is WriteItemType.BYTE_IO:
            content = _bytes_of(item, planner) if trust_bytes else _loadable(item, planner, allowed)
            byte_items.append((key, content))
            continue
        data = planner.resolve_data(item)
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
            byte_items.append((key, save_archive(data, str(item.index.fqn), allowed=allowed)))
    return tensors, byte_items


def _loadable(item: WriteItem, planner: SavePlanner, allowed: tuple[SafeGlobal, ...]) -> bytes:
    """Return an item that is no tensor as an archive that a reader accepts, or the bytes that a planner makes."""
    fqn, own = str(item.index.fqn), DefaultSavePlanner
    if isinstance(planner, own) and all(
        getattr(type(planner), name) is getattr(own, name) for name in ("resolve_data", "transform_object")
    ):
        return save_archive(planner.lookup_object(item.index), fqn, allowed=allowed)
    content = _bytes_of(item, planner)
    load_archive(content, fqn, path="", allowed=allowed)
    return content


def _bytes_of(item: WriteItem, planner: SavePlanner) -> bytes:
    data = planner.resolve_data(item)
    assert isinstance(data, io.BytesIO)
    return data.getvalue()


def results_of(
    plan: SavePlan, keys: list[str], tensors: list[TensorItem], byte_items: list[BytesItem], rank: int
) -> list[WriteResult]:
    """Return the results of a plan's items, as a rank wrote them."""
    sizes = {key: tensor.nbytes for key, tensor in tensors} | {key: len(data) for key, data in byte_items}
    return [
        WriteResult(index=item.index, size_in_bytes=sizes[key], storage_data=ItemPlace(rank, key))
        for item, key in zip(plan.items, keys, strict=True)
    ]
