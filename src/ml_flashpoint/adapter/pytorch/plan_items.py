"""The items of a DCP plan as items of an object: their names, their data, and what DCP is told of them.

Owns which tensors an object stores as such and which as archives of torch.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from ml_flashpoint.adapter.pytorch.storage_data import ItemPlace
from ml_flashpoint.adapter.pytorch.tensor_leaves import storable_name
from ml_flashpoint.copy.tensors import is_plain_strided, materialized
from ml_flashpoint.core.object_stages import BytesItem, TensorItem
from ml_flashpoint.format.errors import NotStagedError
from ml_flashpoint.unpickling.checks import refuse_unloadable
from ml_flashpoint.unpickling.safe_archive import SafeGlobal


@dataclass(frozen=True, slots=True)
class WrittenPlan:
    """What a plan came to. Its parts do not change any more.

    Attributes:
        keys: names of the items in the object, as the plan's items.
        sizes: bytes of each.
        results: what DCP was told.
    """

    plan: SavePlan
    keys: list[str]
    sizes: dict[str, int]
    results: list[WriteResult]


def item_keys(items: Sequence[WriteItem]) -> list[str]:
    """Name of each item in the object: its FQN, with the offset where one rank writes several shards of it."""
    counts = Counter(item.index.fqn for item in items)
    keys: dict[str, None] = {}
    for item in items:
        key = storable_name(item.index.fqn)
        if counts[item.index.fqn] > 1 and item.index.offset is not None:
            key = f"{key}@{','.join(map(str, item.index.offset))}"
        while key in keys:
            key += "'"
        keys[key] = None
    return list(keys)


def resolve_items(
    plan: SavePlan, planner: SavePlanner, keys: list[str], *, allowed: Iterable[SafeGlobal], trust_bytes: bool
) -> tuple[list[TensorItem], list[BytesItem]]:
    """The data of a plan's items: tensors to be stored as such, and bytes.

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
            if not trust_bytes:
                refuse_unloadable(content, f"item {item.index.fqn!r}", allowed=allowed)
            byte_items.append((key, content))
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
            stream = io.BytesIO()
            torch.save(data, stream)
            refuse_unloadable(stream.getvalue(), f"tensor {item.index.fqn!r}", allowed=allowed)
            byte_items.append((key, stream.getvalue()))
    return tensors, byte_items


def written_plan(
    known: WrittenPlan | None,
    plan: SavePlan,
    keys: list[str],
    tensors: list[TensorItem],
    byte_items: list[BytesItem],
    rank: int,
) -> WrittenPlan:
    """What a plan came to on a rank. Planners that cache plans give the same one again: so are its results, if
    ``known`` is of that one and no item has changed its size."""
    sizes = {key: tensor.nbytes for key, tensor in tensors}
    sizes.update((key, len(data)) for key, data in byte_items)
    if known is not None and known.plan is plan and known.sizes == sizes:
        return known
    results = [
        WriteResult(index=item.index, size_in_bytes=sizes[key], storage_data=ItemPlace(rank, key))
        for item, key in zip(plan.items, keys, strict=True)
    ]
    return WrittenPlan(plan, keys, sizes, results)
