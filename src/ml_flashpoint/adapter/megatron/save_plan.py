"""The plan of a save: which items each rank writes, known to rank 0 as DCP's metadata.

Structures rarely change. So a rank plans only what is described otherwise than before, and publishes its plan when
ranks agree on another table (`engine.replicas`). Rank 0 makes the metadata once for each table.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType

from ml_flashpoint.adapter.megatron.translation import flattened_shapes, objects_to_save, save_planner, state_to_save
from ml_flashpoint.adapter.pytorch.metadata_format import merged_metadata, metadata_of_share
from ml_flashpoint.copy.cpu import view_identity
from ml_flashpoint.copy.tensors import is_plain_strided
from ml_flashpoint.engine.replicas import Replicas
from ml_flashpoint.state.plan import item_keys

Data: TypeAlias = "torch.Tensor | io.BytesIO"

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_LASTING = frozenset({bool, int, str, type(None), tuple, slice, torch.dtype, torch.Size})
"""Types of fields that stay what they are for as long as they are equal to what they were: nothing is set in them."""


def _fields(kind: type) -> Callable[[Any], tuple[Any, ...]]:
    return attrgetter(*(field.name for field in dataclasses.fields(kind) if field.name != "data"))


_TENSOR_FIELDS, _OBJECT_FIELDS = _fields(ShardedTensor), _fields(ShardedObject)
_data = attrgetter("data")
_of_data = attrgetter("dtype", "shape", "layout", "device")


@dataclass(frozen=True, eq=False, slots=True)
class LocalPlan:
    """The plan of one rank for state dicts of one description. No tensor is kept.

    Attributes:
        plan, keys: the items that this rank writes, and the name of each in the object.
        share, digest: the plan as metadata for rank 0, and its digest.
        described: what it is for; None if nobody can tell.
        sources: by item, the number of the value that its data is of, and the shape; None for an object.
    """

    plan: SavePlan
    keys: list[str]
    share: bytes
    digest: str
    described: list[object] | None = None
    sources: Sequence[tuple[int, torch.Size] | None] = ()

    def data_in(self, sharded_state_dict: dict[str, Any]) -> list[Data] | None:
        """Return the data of the plan's items in another state dict; None if this plan may not be the one for it."""
        values = list(nested_values(sharded_state_dict))
        if self.described is None or _described(values) != self.described:
            return None
        objects = objects_to_save([each for each in values if type(each) is ShardedObject])
        found: list[Data] = []
        for item, source in zip(self.plan.items, self.sources, strict=True):
            if source is None:
                found.append(objects[item.index.fqn])
                continue
            data = values[source[0]].data
            found.append(data if data.shape == source[1] else data.detach().view(source[1]))
        return found


NOTHING = LocalPlan(SavePlan([]), [], b"", "nothing")
"""Stands for the plan of a rank that has none."""


class Plans:
    """Plans of one strategy's saves on one rank. ``known`` is the last one."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.known = NOTHING
        self._metadata: tuple[str, bytes] = ("", b"")  # of a table; for the committing executor

    def plan(self, sharded_state_dict: dict[str, Any]) -> tuple[LocalPlan, list[Data]]:
        """Return what this rank writes of a state dict, see `translation.state_to_save`, and the data of its items."""
        data = self.known.data_in(sharded_state_dict)
        if data is None:
            self.known, data = self._planned(sharded_state_dict)
        return self.known, data

    def _planned(self, sharded_state_dict: dict[str, Any]) -> tuple[LocalPlan, list[Data]]:
        values = list(nested_values(sharded_state_dict))
        # megatron-core gives some tensors a further axis.
        described, given = _described(values), list(map(_data, values))
        planner = save_planner()
        planner.set_up_planner(state_to_save(sharded_state_dict), is_coordinator=self._rank == 0)
        plan = planner.create_local_plan()
        data: list[Data] = [planner.resolve_data(item) for item in plan.items]
        sources = None if described is None else _sources(plan, values, given, data)
        described = None if sources is None else described
        if self.known is not NOTHING and plan == self.known.plan:
            return replace(self.known, described=described, sources=sources or ()), data
        keys = item_keys(plan.items)
        share = metadata_of_share(plan.items, keys, flattened_shapes(plan), self._rank)
        digest = hashlib.blake2b(share, digest_size=16).hexdigest()
        return LocalPlan(plan, keys, share, digest, described, sources or ()), data

    def metadata(self, replicas: Replicas, table: str, deadline_s: float) -> bytes:
        """Return DCP's metadata of the saves by a table, on rank 0. Raises `DeadlineError` if a rank has published no
        plan, or as `merged_metadata`."""
        if self._metadata[0] != table:
            self._metadata = table, merged_metadata(replicas.collect(table, deadline_s))
        return self._metadata[1]


def _sources(
    plan: SavePlan, values: Sequence[Any], given: Sequence[Any], data: Sequence[Data]
) -> list[tuple[int, torch.Size] | None] | None:
    """Return which of the values, whose data is ``given``, each item is of: `LocalPlan`. None if that is not clear."""
    numbers = {id(each.data): number for number, each in enumerate(values) if type(each) is ShardedTensor}
    sources: list[tuple[int, torch.Size] | None] = []
    for item, each in zip(plan.items, data, strict=True):
        if item.type is WriteItemType.BYTE_IO:
            sources.append(None)
            continue
        number = numbers.get(id(each))
        if number is None or not isinstance(each, torch.Tensor) or not is_plain_strided(each):
            return None
        if view_identity(given[number].detach().view(each.shape)) != view_identity(each):
            return None
        sources.append((number, each.shape))
    return sources


def _described(values: Sequence[Any]) -> list[object] | None:
    """Return all of what values are but their content, as far as plans depend on it; None if nobody can tell."""
    tensors = [each for each in values if type(each) is ShardedTensor]
    objects = [each for each in values if type(each) is ShardedObject]
    data = list(map(_data, tensors))
    if len(tensors) + len(objects) != len(values) or not set(map(type, data)) <= _PLAIN:
        return None
    fields = [*map(_TENSOR_FIELDS, tensors), *map(_OBJECT_FIELDS, objects)]
    if not set(map(type, chain.from_iterable(fields))) <= _LASTING:
        return None
    try:
        return [list(map(type, values)), fields, list(map(_of_data, data)), list(map(torch.Tensor.is_pinned, data))]
    except RuntimeError:  # a nested tensor has no shape
        return None
