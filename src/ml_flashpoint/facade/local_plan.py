"""What one rank has to save: DCP's write items for its state, and where their data are in each state to come.

Owns when a state counts as of the same structure as the one before, so that nothing has to be planned for it, and
which values of a state are copied as tensors and which as bytes. Who writes what of it is `plan_agreement`'s.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from ml_flashpoint.adapter.pytorch.plan_items import item_keys
from ml_flashpoint.copy.cpu import view_identity
from ml_flashpoint.copy.tensors import check_storable, is_plain_strided, materialized, whole_copy
from ml_flashpoint.core.object_stages import BytesItem, TensorItem
from ml_flashpoint.core.picking import NamedTensors, elements
from ml_flashpoint.facade.plain_modes import plain_modes
from ml_flashpoint.format.errors import NotStagedError, SaveError

_IMMUTABLE = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_PLAIN_VALUES = frozenset({int, float, bool, str, bytes, type(None)})


class Leaves:
    """The values of a nested state dict, in the order of DCP's names for them: mappings and lists are gone into as
    DCP does.

    Attributes:
        values: tensors and everything else.
        kept: see `SteadyState.kept`.
        shape: how they are nested, with the keys. Equal for two states exactly if their values are in the same places.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        found: list[Any] = []
        self.values: Sequence[Any] = found
        self.kept: object = None
        self.shape: list[Any] = []
        self._go_into(state, found)

    @classmethod
    def known(cls, values: Sequence[Any], kept: object = None) -> Leaves:
        """Those of a state that is nested like the one before."""
        leaves = cls({})
        leaves.values, leaves.kept = values, kept
        return leaves

    def _go_into(self, value: Mapping[str, Any] | list[Any], values: list[Any]) -> None:
        shape = self.shape
        items: Any = value
        # With the number of values before it, the place of each container follows from those of the others.
        if isinstance(value, list):
            shape += (len(values), len(value))
        else:
            shape += (len(values), tuple(value))
            items = value.values()
        for item in items:
            kind = type(item)
            if kind in _PLAIN:
                values.append(item)
            elif kind is dict:
                self._go_into(item, values)
            elif isinstance(item, torch.Tensor):
                values.append(item)
            elif isinstance(item, Mapping) or (isinstance(item, list) and _has_inner(item)):
                self._go_into(item, values)
            else:
                values.append(item)

    def paths(self, state: Mapping[str, Any]) -> Iterator[tuple[str | int, ...]]:
        """The path of each value, as DCP gives them, for the state that this was made of."""

        def walk(value: Mapping[str, Any] | list[Any], path: tuple[str | int, ...]) -> Iterator[tuple[str | int, ...]]:
            pairs: Any = enumerate(value) if isinstance(value, list) else ((str(k), v) for k, v in value.items())
            for key, item in pairs:
                if isinstance(item, Mapping) or (isinstance(item, list) and _has_inner(item)):
                    yield from walk(item, (*path, key))
                else:
                    yield (*path, key)

        return walk(state, ())


def _has_inner(value: list[Any]) -> bool:
    """Whether DCP gives the elements of a list names of their own."""
    return not set(map(type, value)) <= _PLAIN_VALUES and any(
        isinstance(each, (torch.Tensor, Mapping)) or (isinstance(each, list) and _has_inner(each)) for each in value
    )


class Structure:
    """All of a state but its content, as far as plans depend on it.

    Args:
        leaves: of the state.
    """

    def __init__(self, leaves: Leaves) -> None:
        self._shape = leaves.shape
        self._kinds = list(map(type, leaves.values))
        found = [i for i, value in enumerate(leaves.values) if isinstance(value, torch.Tensor)]
        self._sharded = [i for i in found if type(leaves.values[i]) not in _PLAIN]
        # A ShardedTensor cannot be asked for most of what a tensor is.
        self._tensors = [i for i in found if not isinstance(leaves.values[i], ShardedTensor)]
        tensors = self._tensors_of(leaves)
        self._sizes, self._dtypes, self._layouts = _sizes(tensors), _dtypes(tensors), _layouts(tensors)
        self._shards = self._shards_of(leaves)

    def is_of(self, leaves: Leaves) -> bool:
        """Whether another state has the same structure: a plan for one is a plan for the other."""
        if leaves.shape != self._shape or list(map(type, leaves.values)) != self._kinds:
            return False
        tensors = self._tensors_of(leaves)
        try:
            same = _sizes(tensors) == self._sizes
        except RuntimeError:  # a nested tensor has none, and there was no plan for one
            return False
        same = same and _dtypes(tensors) == self._dtypes and _layouts(tensors) == self._layouts
        return same and self._shards_of(leaves) == self._shards

    def _tensors_of(self, leaves: Leaves) -> list[torch.Tensor]:
        values = leaves.values
        return [values[i] for i in self._tensors]

    def _shards_of(self, leaves: Leaves) -> list[object]:
        return [_shards(leaves.values[i]) for i in self._sharded]


def _sizes(tensors: Sequence[torch.Tensor]) -> list[torch.Size]:
    return [tensor.shape for tensor in tensors]


def _dtypes(tensors: Sequence[torch.Tensor]) -> list[torch.dtype]:
    return [tensor.dtype for tensor in tensors]


def _layouts(tensors: Sequence[torch.Tensor]) -> list[torch.layout]:
    return [tensor.layout for tensor in tensors]


def _shards(value: Any) -> object:
    """What says which part of a tensor is on this rank."""
    if isinstance(value, DTensor):
        return value._spec, value._local_tensor.shape
    if isinstance(value, ShardedTensor):
        return value.metadata(), [(shard.metadata, shard.tensor.dtype) for shard in value.local_shards()]
    return None


@dataclass(frozen=True, slots=True)
class _Source:
    """Where the data of an item are: which value of the state, and which of its local shards, if it has such."""

    value: int
    shard: int | None = None

    def tensor(self, values: Sequence[Any]) -> torch.Tensor:
        value = values[self.value]
        if type(value) in _PLAIN:
            return value  # type: ignore[no-any-return]
        if self.shard is not None:
            value = value.local_shards()[self.shard].tensor
        return materialized(value._local_tensor if isinstance(value, DTensor) else value)


class LocalPlan:
    """What a rank has to save, of states of one structure.

    Args:
        state: the first of them.
        leaves: of that state.
        coordinator: whether this rank is, to DCP's planner.

    Raises:
        SaveError: a tensor is of a kind that checkpoints have no place for.
        ValueError: two values have one name.

    Attributes:
        plan: DCP's, with all that this rank has, whoever writes it.
    """

    def __init__(self, state: Mapping[str, Any], leaves: Leaves, *, coordinator: bool) -> None:
        values = {path: index for index, path in enumerate(leaves.paths(state))}
        for path, index in values.items():
            tensor = leaves.values[index]
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, ShardedTensor):
                check_storable(tensor, ".".join(map(str, path)))
        planner = DefaultSavePlanner()
        planner.set_up_planner(dict(state), is_coordinator=coordinator)
        with plain_modes():
            self.plan: SavePlan = planner.create_local_plan()
        self.structure = Structure(leaves)
        self.sources: list[_Source] = []
        for item in self.plan.items:
            value = values[planner.mappings[item.index.fqn]]
            shard = None
            if isinstance(sharded := leaves.values[value], ShardedTensor):
                found = planner.lookup_object(item.index)
                shard = next(i for i, each in enumerate(sharded.local_shards()) if each.tensor is found)
            self.sources.append(_Source(value, shard))


@dataclass(slots=True)
class Captured:
    """What one rank writes of one state, taken out of it. Training may go on once its tensors are copied.

    Attributes:
        tensors: to be copied into an arena, each memory once, with the keys of the first items that they are of. The
            same object as of the state before only if these are the same tensors, and what they were but for their
            content: where that is, too.
        kind: the same object for two states whose tensors have the same keys, dtypes and shapes in the same order.
        whole: copies of tensors that are more than their memory, by item.
        values: copies of everything else, by item.
    """

    tensors: Sequence[TensorItem] = ()
    kind: object = None
    whole: dict[int, torch.Tensor] = field(default_factory=dict)
    values: dict[int, Any] = field(default_factory=dict)


class Share:
    """What a rank writes of its own plan, and how to take it out of states of that plan's structure.

    Args:
        local: the rank's plan.
        wanted: which of its items, by number, in order.

    Attributes:
        items: the plan's items that are written.
        keys: the name of each in the object.
        byte_keys: names of those that will be bytes, as far as that is known before they are captured.
    """

    def __init__(self, local: LocalPlan, wanted: Sequence[int]) -> None:
        self.items: list[WriteItem] = [local.plan.items[number] for number in wanted]
        self.keys = item_keys(self.items)
        named = zip(self.items, self.keys, strict=True)
        self.byte_keys = [key for item, key in named if item.type is WriteItemType.BYTE_IO]
        self._sources = [local.sources[number] for number in wanted]
        # Which of the captured tensors each item is of, and where those are; known from the first capture.
        self._of: dict[int, int] = {}
        self._taken: list[tuple[str, int, _Source | None]] = []
        self._names: list[str] = []
        self._plain: Callable[[Sequence[Any]], tuple[Any, ...]] | None = None  # takes all, if all are values themselves
        self._kept: object = None
        self._found = NamedTensors((), ())
        self._others: list[int] = []
        self._ties: list[tuple[int, int]] = []
        self._sorted = False

    def capture(self, leaves: Leaves) -> Captured:
        """Take what is to be written out of a state.

        Raises:
            NotStagedError: a tensor has no data.
            SaveError: a tensor is of a kind that checkpoints have no place for, or a value could not be copied.
        """
        values, captured = leaves.values, Captured()
        if not self._is_tied_as_before(values):
            self._sort(values)
        sources = self._sources
        captured.kind = self._taken
        if self._plain is not None:
            if leaves.kept is None or leaves.kept is not self._kept:
                self._found = NamedTensors(self._names, self._plain(values))
                self._kept = leaves.kept
            captured.tensors = self._found
            if leaves.kept is None:
                self._found = NamedTensors((), ())
        else:
            captured.tensors = [(key, (source or _Source(index)).tensor(values)) for key, index, source in self._taken]
        for number in self._others:
            item, source = self.items[number], sources[number]
            if item.type is WriteItemType.BYTE_IO:
                captured.values[number] = _copied(values[source.value], item.index.fqn)
            else:
                captured.whole[number] = whole_copy(source.tensor(values), item.index.fqn)
        return captured

    def _is_tied_as_before(self, values: Sequence[Any]) -> bool:
        """Whether the plain tensors are known, and those that were one and the same are so still."""
        sources = self._sources
        return self._sorted and all(
            view_identity(sources[a].tensor(values)) == view_identity(sources[b].tensor(values)) for a, b in self._ties
        )

    def _sort(self, values: Sequence[Any]) -> None:
        self._others, self._ties, self._sorted, self._kept = [], [], False, None
        first_of: dict[int, int] = {}
        taken: list[int] = []
        seen: dict[tuple[object, ...], int] = {}
        for number, (item, source) in enumerate(zip(self.items, self._sources, strict=True)):
            if item.type is WriteItemType.BYTE_IO:
                self._others.append(number)
                continue
            tensor = source.tensor(values)
            if tensor.is_meta:
                raise NotStagedError(f"tensor {item.index.fqn!r} has no data: it is a meta tensor", hint="give it data")
            if not is_plain_strided(tensor):
                self._others.append(number)
                continue
            first = seen.setdefault(view_identity(tensor), number) if tensor.numel() else number
            first_of[number] = first
            if first != number:
                self._ties.append((first, number))
            else:
                taken.append(number)
        self._taken = [(self.keys[number], *_way_to(self._sources[number], values)) for number in taken]
        self._names = [key for key, _, _ in self._taken]
        direct = all(source is None for _, _, source in self._taken)
        indices = [index for _, index, _ in self._taken]
        self._plain = elements(indices) if direct else None
        place = {number: index for index, number in enumerate(taken)}
        self._of = {number: place[first] for number, first in first_of.items()}
        self._sorted = True

    def named(
        self, captured: Captured, copies: Sequence[torch.Tensor], encode: Callable[[str, Any], bytes]
    ) -> tuple[list[TensorItem], list[BytesItem]]:
        """The items under their names: tensors and bytes.

        Args:
            copies: of ``captured.tensors``.
            encode: makes bytes of an item, given its FQN, that is no tensor or more than one's memory.
        """
        keys, items = self.keys, self.items
        tensors = [(keys[number], copies[index]) for number, index in self._of.items()]
        others = {**captured.values, **captured.whole}
        return tensors, [(keys[n], encode(items[n].index.fqn, others[n])) for n in sorted(others)]


def _way_to(source: _Source, values: Sequence[Any]) -> tuple[int, _Source | None]:
    """Which value a tensor is in, and how it is taken out of that if the value is not the tensor itself."""
    return source.value, None if type(values[source.value]) in _PLAIN else source


def _copied(value: Any, fqn: str) -> Any:
    """What training changes later must not show up in the checkpoint."""
    if isinstance(value, _IMMUTABLE):
        return value
    if type(value) is list and set(map(type, value)) <= _PLAIN_VALUES:
        return value.copy()  # names of all parameters of an optimizer, say
    try:
        return copy.deepcopy(value)
    except Exception as error:  # of whatever kind a value's own copying raises
        raise SaveError(f"the value {fqn!r} cannot be copied: {type(error).__name__}: {error}") from error
