"""DCP's plan of what one rank saves of a sharded state dict, and the places of its items' data.

Nothing is translated or planned for a state dict that is described like the one before.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType

from ml_flashpoint.adapter.megatron.translation import objects_to_save, save_planner, state_to_save
from ml_flashpoint.copy.cpu import view_identity
from ml_flashpoint.copy.tensors import is_plain_strided

Data: TypeAlias = "torch.Tensor | io.BytesIO"

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_LASTING = frozenset({bool, int, str, type(None), tuple, slice, torch.dtype, torch.Size})
"""Types of fields that stay what they are for as long as they are equal to what they were: nothing is set in them."""


def _fields(kind: type) -> Callable[[Any], tuple[Any, ...]]:
    return attrgetter(*(field.name for field in dataclasses.fields(kind) if field.name != "data"))


_TENSOR_FIELDS, _OBJECT_FIELDS = _fields(ShardedTensor), _fields(ShardedObject)
_data = attrgetter("data")
_of_data = attrgetter("dtype", "shape", "layout", "device")


class LocalPlan:
    """A plan for state dicts of one description.

    Args:
        sharded_state_dict: the first of them, of sharded tensors and objects only; see `state_to_save`.
        coordinator: True if this rank is, to DCP's planner.

    Raises:
        SaveError: megatron-core could not load it.

    Attributes:
        plan: DCP's, of what this rank writes.
    """

    def __init__(self, sharded_state_dict: dict[str, Any], *, coordinator: bool) -> None:
        values = list(nested_values(sharded_state_dict))
        known, given = _described(values), list(map(_data, values))
        planner = save_planner()
        planner.set_up_planner(state_to_save(sharded_state_dict), is_coordinator=coordinator)
        self.plan: SavePlan = planner.create_local_plan()
        self._first: list[Data] | None = [planner.resolve_data(item) for item in self.plan.items]
        self._sources: list[tuple[int, torch.Size] | None] = []
        # Nothing but a description is kept, and only of what can be told from it.
        self._known = known if known is not None and self._find(values, given, self._first) else None

    def take_first(self) -> list[Data]:
        """Return the data of the plan's items in the state dict that this was made of; once."""
        first, self._first = self._first, None
        assert first is not None
        return first

    def data_in(self, sharded_state_dict: dict[str, Any]) -> list[Data] | None:
        """Return the data of the plan's items in another state dict; None if this plan may not be the one for it."""
        if self._known is None:
            return None
        values = list(nested_values(sharded_state_dict))
        if _described(values) != self._known:
            return None
        objects = objects_to_save([each for each in values if type(each) is ShardedObject])
        found: list[Data] = []
        for item, source in zip(self.plan.items, self._sources, strict=True):
            if source is None:
                found.append(objects[item.index.fqn])
                continue
            data = values[source[0]].data
            found.append(data if data.shape == source[1] else data.detach().view(source[1]))
        return found

    def _find(self, values: Sequence[Any], given: Sequence[Any], data: Sequence[Data]) -> bool:
        """Find out which of the values each item is of. Returns whether that is clear.

        Args:
            given: the data of the values before megatron-core has changed them: it gives some a further axis.
            data: of the items.
        """
        numbers = {id(each.data): number for number, each in enumerate(values) if type(each) is ShardedTensor}
        for item, each in zip(self.plan.items, data, strict=True):
            if item.type is WriteItemType.BYTE_IO:
                self._sources.append(None)
                continue
            number = numbers.get(id(each))
            if number is None or not isinstance(each, torch.Tensor) or not is_plain_strided(each):
                return False
            if view_identity(given[number].detach().view(each.shape)) != view_identity(each):
                return False
            self._sources.append((number, each.shape))
        return True


def _described(values: Sequence[Any]) -> list[object] | None:
    """Return all of what values are but their content, as far as plans depend on it; None if nobody can tell."""
    kinds = list(map(type, values))
    tensors = [each for each in values if type(each) is ShardedTensor]
    objects = [each for each in values if type(each) is ShardedObject]
    if len(tensors) + len(objects) != len(values):
        return None
    data = list(map(_data, tensors))
    if not set(map(type, data)) <= _PLAIN:
        return None
    fields = [*map(_TENSOR_FIELDS, tensors), *map(_OBJECT_FIELDS, objects)]
    if not set(map(type, chain.from_iterable(fields))) <= _LASTING:
        return None
    try:
        return [kinds, fields, list(map(_of_data, data)), list(map(torch.Tensor.is_pinned, data))]
    except RuntimeError:  # a nested tensor has no shape
        return None
