"""The state of a rank as torch's pytree, and the plan by which the rank writes it (R6).

A save calls ``state_dict()``, flattens the result, and compares the leaves with those of the save before. Names cost
ten times as much as leaves, so they are made only where the structure differs.

`Offer` is everything that a rank has, and `Share` the part of it that the rank writes (`replicas` divides). `Plan` says
how the share is taken out of a state. As long as nothing but content changes, successive saves have the same `Plan`
object, and every cache below depends on that identity.
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from ml_flashpoint.copy.cpu import view_identity
from ml_flashpoint.copy.tensors import check_storable, is_plain_strided, materialized, storable_name, whole_copy
from ml_flashpoint.format.errors import NotStagedError
from ml_flashpoint.state.archive import PackedState, packed, plain_modes
from ml_flashpoint.state.private import SequenceKey, ShardedTensor, tree_flatten, tree_flatten_with_path
from ml_flashpoint.state.replicas import Replica

Path = tuple[str | int, ...]
"""Keys of mappings as text, and places in lists: the way to a value, as DCP has it."""

_PLAIN = {torch.Tensor, torch.nn.Parameter}
_aspects = attrgetter("shape", "dtype", "layout")


def elements(numbers: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Return a function that takes these elements out of a sequence, without a step of Python for each."""
    if len(numbers) > 1:
        return itemgetter(*numbers)
    return lambda values: tuple(values[number] for number in numbers)


class Tree:
    """A nested state, flattened.

    Attributes:
        state: dictionaries and lists of tensors and other values.
        leaves: these.
        spec: the containers and their keys; equal for two states if their leaves are in the same places.
    """

    def __init__(self, state: Mapping[str, Any], is_leaf: Callable[[Any], bool] | None = None) -> None:
        self.state = state
        self._is_leaf = is_leaf
        self.leaves, self.spec = tree_flatten(state, is_leaf)

    @functools.cached_property
    def structure(self) -> object:
        """Everything but content: keys, kinds, shapes, dtypes and shards. Equal for states that have the same plan."""
        try:
            return self.spec, _tensors_of(self)
        except RuntimeError:  # a nested tensor has no shape, and no plan
            return object()

    def places(self) -> dict[Path, int]:
        """Return the number of each leaf by its path."""
        found, _ = tree_flatten_with_path(self.state, self._is_leaf)
        paths = (
            [each.idx if isinstance(each, SequenceKey) else str(getattr(each, "key", each)) for each in keys]
            for keys, _ in found
        )
        return {tuple(path): number for number, path in enumerate(paths)}


def _tensors_of(tree: Tree) -> tuple[list[Any], ...]:
    """Return the numbers, kinds, shapes, dtypes, layouts and shards of the tensors in a state."""
    numbers = [number for number, leaf in enumerate(tree.leaves) if isinstance(leaf, torch.Tensor)]
    tensors = [tree.leaves[number] for number in numbers]
    kinds, shards = list(map(type, tensors)), list[Any]()
    if not set(kinds) <= _PLAIN:
        shards = [(each._spec, each._local_tensor.shape) for each in tensors if isinstance(each, DTensor)]
        for value in (each for each in tensors if isinstance(each, ShardedTensor)):
            shards.append((value.metadata(), [(each.metadata, each.tensor.dtype) for each in value.local_shards()]))
        tensors = [each for each in tensors if not isinstance(each, ShardedTensor)]  # which has no layout to ask for
    return numbers, kinds, list(map(_aspects, tensors)), shards


@dataclass(frozen=True, slots=True)
class _Source:
    """The place of an item's value in each state: the number of a leaf, and of the local shard, if any."""

    leaf: int
    shard: int | None = None

    def tensor(self, tree: Tree) -> torch.Tensor:
        value: Any = tree.leaves[self.leaf]
        if type(value) in _PLAIN:
            return value  # type: ignore[no-any-return]
        if self.shard is not None:
            value = value.local_shards()[self.shard].tensor
        return materialized(value._local_tensor if isinstance(value, DTensor) else value)


class Offer:
    """Everything that a rank has to save, in states of the structure of ``tree``.

    Args:
        own: second part of the names of what belongs to this rank alone.

    Attributes:
        plan: DCP's plan of all items, whichever rank writes them.
        replicas: items that other ranks may have, too, by number: all but this rank's shards and its own state.

    Raises:
        SaveError: checkpoints have no place for a tensor of such a kind.
    """

    def __init__(self, tree: Tree, *, rank: int = 0, ranks: int = 1, own: str = "") -> None:
        planner = DefaultSavePlanner()
        planner.set_up_planner(dict(tree.state), is_coordinator=rank == 0)
        for name, value in planner.state_dict.items():
            if isinstance(value, torch.Tensor) and not isinstance(value, ShardedTensor):
                check_storable(value, name)
        with plain_modes():
            self.plan: SavePlan = planner.create_local_plan()
        self.structure = tree.structure
        self.sources: list[_Source] = []
        self.replicas: dict[int, Replica] = {}
        places = tree.places()
        for item in self.plan.items:
            leaf, shard = places[planner.mappings[item.index.fqn]], None
            value = tree.leaves[leaf]
            if isinstance(value, ShardedTensor):
                found = planner.lookup_object(item.index)
                shard = next(i for i, each in enumerate(value.local_shards()) if each.tensor is found)
            self.sources.append(_Source(leaf, shard))
            if not _is_own(item, value, ranks, own):
                self.replicas[len(self.sources) - 1] = Replica(_name(item), _nbytes(item) or 1)

    @functools.cached_property
    def digests(self) -> tuple[str, str]:
        """Digests of the replicated items, equal on ranks that have the same, and of the whole plan."""
        described = list(map(_described, self.plan.items))
        return _digest([described[number] for number in self.replicas]), _digest(described)

    def written(self, names: Collection[str]) -> list[int]:
        """Return the numbers of the items that this rank writes: its own, and replicated ones of these names."""
        of_others = {number for number, replica in self.replicas.items() if replica.name not in names}
        return [number for number in range(len(self.plan.items)) if number not in of_others]


def _is_own(item: WriteItem, value: Any, ranks: int, own: str) -> bool:
    """Return True if no other rank can have an item."""
    if isinstance(value, DTensor):  # of shards without elements, several ranks have the same one
        shards_only = not any(each.is_replicate() or each.is_partial() for each in value.placements)
        return shards_only and value.device_mesh.size() == ranks and _nbytes(item) > 0
    return isinstance(value, ShardedTensor) or item.index.fqn.split(".", 2)[1:2] == [own]


def _name(item: WriteItem) -> str:
    """Return the name of an item that other ranks may have, too: its index as DCP has it."""
    offset = item.index.offset
    return item.index.fqn if not offset or not any(offset) else f"{item.index.fqn}\0{','.join(map(str, offset))}"


def _nbytes(item: WriteItem) -> int:
    """Return the bytes of a tensor, or of this rank's shard of it; of anything else, 0."""
    data = item.tensor_data
    return 0 if data is None or data.chunk is None else data.chunk.sizes.numel() * data.properties.dtype.itemsize


def _described(item: WriteItem) -> tuple[object, ...]:
    """Return everything that metadata has of an item."""
    index, data = item.index, item.tensor_data
    if data is None or data.chunk is None:
        return index.fqn, item.type.value
    chunk, its = data.chunk, data.properties
    described = (str(its.dtype), str(its.layout), its.requires_grad, its.pin_memory)
    return index.fqn, tuple(chunk.offsets), tuple(chunk.sizes), tuple(data.size), described


def _digest(described: object) -> str:
    return hashlib.blake2b(repr(described).encode(), digest_size=16).hexdigest()


def item_keys(items: Sequence[WriteItem]) -> list[str]:
    """Return the name of each item in the object: its FQN, with the offset where a rank writes several shards of it."""
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


@dataclass(frozen=True)
class Plan:
    """The way to take a share out of a state.

    Attributes:
        names: of the tensors that are copied, each memory once, in the order in which they are copied.
        sources: of these tensors.
        numbers: which of these tensors each item is, by the number of the item.
        others: numbers of the items that are written as bytes.
        ties: pairs of numbers of items that are one and the same tensor.
    """

    names: tuple[str, ...]
    sources: tuple[_Source, ...]
    numbers: Mapping[int, int]
    others: tuple[int, ...]
    ties: tuple[tuple[int, int], ...]

    @functools.cached_property
    def _take(self) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
        return elements([source.leaf for source in self.sources])

    def tensors(self, tree: Tree) -> Sequence[torch.Tensor]:
        """Return the tensors that are copied of a state."""
        found = self._take(tree.leaves)
        return found if set(map(type, found)) <= _PLAIN else [source.tensor(tree) for source in self.sources]


@dataclass(slots=True)
class Captured:
    """The data that one rank writes of one state. Training may go on once the tensors and the values are copied.

    Attributes:
        tensors: to be copied, under the names of the plan.
        values: by item, copies of what is written as bytes, and its name for errors; see `Share.copy_values`.
    """

    plan: Plan
    tensors: Sequence[tuple[str, torch.Tensor]]
    values: dict[int, tuple[Any, str]] = field(default_factory=dict)


class Share:
    """The items of an offer that one rank writes.

    Attributes:
        keys: the name of each item in the object. byte_keys: of those that are no tensors.
    """

    def __init__(self, offer: Offer, wanted: Sequence[int]) -> None:
        self.items: list[WriteItem] = [offer.plan.items[number] for number in wanted]
        self.keys = item_keys(self.items)
        named = zip(self.items, self.keys, strict=True)
        self.byte_keys = [key for item, key in named if item.type is WriteItemType.BYTE_IO]
        self._sources = [offer.sources[number] for number in wanted]
        self._plan: Plan | None = None
        self._addresses: list[int] = []

    def capture(self, tree: Tree) -> Captured:
        """Take what is written out of a state, by reference. Raises a `NotStagedError` if a tensor has no data."""
        plan, sources = self._plan, self._sources
        tensors: Sequence[torch.Tensor] = () if plan is None else plan.tensors(tree)
        if plan is not None:
            moved = list(map(torch.Tensor.data_ptr, tensors)) != self._addresses
            ties = [(sources[one].tensor(tree), sources[other].tensor(tree)) for one, other in plan.ties]
            untied = [pair for pair in ties if view_identity(pair[0]) != view_identity(pair[1])]
        if plan is None or moved or untied:  # tensors may have become tied, or tied ones no longer be
            anew = self._sorted(tree)
            plan = plan if plan == anew else anew
            tensors = plan.tensors(tree)
            self._plan, self._addresses = plan, list(map(torch.Tensor.data_ptr, tensors))
        return Captured(plan, list(zip(plan.names, tensors, strict=True)))

    def copy_values(self, captured: Captured, tree: Tree) -> None:
        """Copy what is written as bytes. They may be large: a save that gets no slot must not come here. Raises a
        `SaveError` that names what cannot be copied."""
        for number in captured.plan.others:
            item, source = self.items[number], self._sources[number]
            fqn, value = item.index.fqn, tree.leaves[source.leaf]
            if isinstance(value, PackedState):
                value = packed(value.value, value.name) if value.is_live else value
                fqn, value = value.name, value.value
            elif item.type is not WriteItemType.BYTE_IO:
                value = whole_copy(source.tensor(tree), fqn)
            captured.values[number] = value, fqn

    def _sorted(self, tree: Tree) -> Plan:
        """Sort the items: tensors that are copied, or that another item is, and bytes."""
        first_of: dict[int, int] = {}
        seen: dict[tuple[object, ...], int] = {}
        taken, others, ties = list[int](), list[int](), list[tuple[int, int]]()
        for number, (item, source) in enumerate(zip(self.items, self._sources, strict=True)):
            if item.type is WriteItemType.BYTE_IO:
                others.append(number)
                continue
            tensor = source.tensor(tree)
            if tensor.is_meta:
                raise NotStagedError(f"tensor {item.index.fqn!r} has no data: it is a meta tensor", hint="give it data")
            if not is_plain_strided(tensor):
                others.append(number)
                continue
            first = first_of[number] = seen.setdefault(view_identity(tensor), number) if tensor.numel() else number
            if first != number:
                ties.append((first, number))
            else:
                taken.append(number)
        place = {number: index for index, number in enumerate(taken)}
        return Plan(
            tuple(self.keys[number] for number in taken),
            tuple(self._sources[number] for number in taken),
            {number: place[first] for number, first in first_of.items()},
            tuple(others),
            tuple(ties),
        )

    def named(
        self, captured: Captured, copies: Sequence[torch.Tensor], encode: Callable[[Any, str], bytes]
    ) -> tuple[list[tuple[str, torch.Tensor]], list[tuple[str, bytes]]]:
        """Return the items under their names: tensors, which ``copies`` are of, and what ``encode`` makes of values."""
        tensors = [(self.keys[number], copies[index]) for number, index in captured.plan.numbers.items()]
        return tensors, [(self.keys[number], encode(*value)) for number, value in captured.values.items()]
