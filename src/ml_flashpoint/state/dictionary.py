"""A nested dictionary as something that a `Flashpoint` tracks.

Tensors are staged with one copy, everything else is packed.

::

    shared.state_dict.layer.weight          tensors that all ranks have alike: each is saved by one of them
    own.rank-00003.callbacks.Mean.total     tensors of one rank
    _flashpoint.rank-00003.<title>          everything else, with the places of tensors marked
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ml_flashpoint.copy.tensors import is_plain_strided
from ml_flashpoint.format.errors import LoadError
from ml_flashpoint.state.tracked import TrackedLoad, TrackedState, largest_share, rank_key

Checkpoint = dict[str, Any]
"""A dictionary to be saved."""

SHARED = "shared"
OWN = "own"

_DICTS = (dict, OrderedDict, defaultdict)


@dataclass(frozen=True)
class Mark:
    """The place of a tensor that was taken out of a dictionary."""

    path: str
    requires_grad: bool
    is_parameter: bool


def take_apart(value: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return nested dicts, lists and tuples with a `Mark` in the place of each tensor, and the tensors by their places,
    detached and not copied. Tensors that are more than their memory (sparse, quantized) stay in place."""
    tensors: dict[str, torch.Tensor] = {}

    def walk(value: Any, path: str) -> Any:
        if isinstance(value, torch.Tensor):
            if not is_plain_strided(value) or value.is_meta:
                return value.detach()
            while path in tensors:  # "a.b" beside a["b"]
                path += "'"
            tensors[path] = value.detach()
            return Mark(path, value.requires_grad, isinstance(value, torch.nn.Parameter))
        if type(value) in _DICTS:
            made = copy.copy(value)  # with what it has beside its items, as state dicts of modules have
            for key, item in value.items():
                made[key] = walk(item, f"{path}.{key}" if path else str(key))
            return made
        if type(value) in (list, tuple):
            return type(value)([walk(item, f"{path}.{index}") for index, item in enumerate(value)])
        return value

    return walk(value, ""), tensors


def put_together(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return what `take_apart` was given. Raises `LoadError` if a tensor is missing."""
    if isinstance(value, Mark):
        if value.path not in tensors:
            raise LoadError(f"the checkpoint does not have the tensor {value.path!r}, which its dictionary refers to")
        tensor = tensors[value.path]
        if value.is_parameter:
            return torch.nn.Parameter(tensor, value.requires_grad)
        return tensor.requires_grad_() if value.requires_grad else tensor
    if type(value) in _DICTS:
        for key, item in value.items():
            value[key] = put_together(item, tensors)
        return value
    if type(value) in (list, tuple):
        return type(value)([put_together(item, tensors) for item in value])
    return value


class Slot:
    """A tracked object whose state ``make`` gives, and which keeps what is loaded."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self.loaded: Any = None

    def state_dict(self) -> Any:
        """Return the state to save."""
        return self._make()

    def load_state_dict(self, state_dict: Any) -> None:
        """Keep what was loaded."""
        self.loaded = state_dict

    def take(self) -> Any:
        """Return what was loaded, once; it is not kept."""
        loaded, self.loaded = self.loaded, None
        return loaded


class DictionaryState(TrackedState):
    """Tracks one dictionary, besides what is added.

    Attributes:
        title: name of the dictionary in checkpoints.
        make: gives the dictionary to save. sizes: gives tensors as large as what will be saved of it and is alike on
            all ranks.
        rest: the dictionary without its tensors; once loaded, with them.
    """

    title = "dictionary"
    slot: type[Slot] = Slot

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)
        self.make: Callable[[], Checkpoint] = dict
        self.sizes: Callable[[], list[torch.Tensor]] = list
        self._marked: Any = None
        self.rest = self.slot(lambda: self._marked)
        self.add(self.title, self.rest)
        self.names += (SHARED, OWN)

    def part_of(self, path: str) -> str | None:
        """Return `SHARED` if all ranks have the tensor at a path alike, `OWN` if it is this rank's, None if another
        rank's counts."""
        return OWN

    def to_save(self) -> dict[str, Any]:
        """See `TrackedState.to_save`."""
        self._marked, tensors = take_apart(self.make())
        try:
            state = super().to_save()
        finally:
            self._marked = None
        parts: dict[str | None, Checkpoint] = {SHARED: {}, OWN: {}, None: {}}
        for path, tensor in tensors.items():
            parts[self.part_of(path)][path] = tensor
        if parts[SHARED]:
            state[SHARED] = parts[SHARED]
        if parts[OWN]:
            state[OWN] = {rank_key(self.rank): parts[OWN]}
        return state

    def expected_bytes(self) -> int:
        """See `TrackedState.expected_bytes`."""
        return super().expected_bytes() + largest_share((tensor.nbytes for tensor in self.sizes()), self.world_size)

    def structured(self, state: Mapping[str, Any]) -> frozenset[str]:
        """See `TrackedState.structured`."""
        return frozenset(state) - {OWN}

    def places(self, metadata: Metadata, source_rank: int, names: set[str]) -> dict[str, Any]:
        """See `TrackedState.places`. Tensors are loaded into new ones, in memory of the CPU."""
        state = super().places(metadata, source_rank, names)
        shared = _empty(metadata, f"{SHARED}.")
        return {**state, **({SHARED: shared} if shared else {}), **self.of_ranks(metadata, [source_rank])}

    def of_ranks(self, metadata: Metadata, ranks: Iterable[int]) -> dict[str, Any]:
        """See `TrackedState.of_ranks`."""
        own = {rank_key(rank): _empty(metadata, f"{OWN}.{rank_key(rank)}.") for rank in ranks}
        own = {rank: tensors for rank, tensors in own.items() if tensors}
        return {OWN: own} if own else {}

    def whole(self, value: Any, state: Mapping[str, Any], rank: int) -> Any:
        """See `TrackedState.whole`."""
        return value, state.get(OWN, {}).get(rank_key(rank), {})

    def apply(self, target: TrackedLoad, states: Mapping[str, Any]) -> None:
        """See `TrackedState.apply`."""
        super().apply(target, states)
        own = target.state.get(OWN, {}).get(rank_key(target.source_rank), {})
        self.rest.loaded = put_together(self.rest.loaded, {**target.state.get(SHARED, {}), **own})


def _empty(metadata: Metadata, prefix: str) -> dict[str, torch.Tensor]:
    """Return new tensors for all that the checkpoint has below a name."""
    return {
        key.removeprefix(prefix): torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
        for key, entry in metadata.state_dict_metadata.items()
        if key.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }
