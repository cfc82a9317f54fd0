"""A Lightning checkpoint dictionary as something that a `Flashpoint` tracks.

Tensors are staged with one copy, everything else is packed.

::

    shared.state_dict.layer.weight          tensors that all ranks have alike: each is saved by one of them
    own.rank-00003.callbacks.Mean.total     tensors of one rank
    _flashpoint.rank-00003.lightning        everything else, with the places of tensors marked
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ml_flashpoint.copy.tensors import is_plain_strided
from ml_flashpoint.format.errors import LoadError
from ml_flashpoint.state.tracked import TrackedLoad, TrackedState, largest_share, rank_key

Checkpoint = dict[str, Any]
"""A dictionary that `Trainer.save_checkpoint` would save."""

REST = "lightning"
SHARED = "shared"
OWN = "own"

# Parts of the dictionary that strategies which are not sharded keep alike on all ranks; `current_model_state` is
# where Lightning's weight averaging puts the model's.
_ALIKE = ("state_dict.", "current_model_state.", "optimizer_states.")
_OF_MODEL = _ALIKE[:2]
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

    @staticmethod
    def has_place(state: Any) -> bool:
        """Return True if a dictionary has the places of loaders, which Lightning saves of those that have a state."""
        for key in ("loops", "fit_loop", "state_dict", "combined_loader"):
            state = state.get(key) if isinstance(state, dict) else None
        return bool(state)


class DictionaryState(TrackedState):
    """Tracks one checkpoint dictionary; nothing else needs to be added.

    Attributes:
        make: gives the dictionary to save. sizes: gives tensors as large as what will be saved of model and optimizers.
        parameters: names of the model's parameters in the dictionary. Of its buffers, rank 0's are saved, as Lightning
            does. None: there is one rank, or all ranks have the same.
        rest: the dictionary without its tensors; once loaded, with them.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)
        self.make: Callable[[], Checkpoint] = dict
        self.parameters: Collection[str] | None = None
        self.sizes: Callable[[], list[torch.Tensor]] = list
        self._marked: Any = None
        self.rest = Slot(lambda: self._marked)
        self.add(REST, self.rest)
        self.names += (SHARED, OWN)

    def how_to_decide(self, names: Iterable[str]) -> str:
        """See `TrackedState.how_to_decide`. What is a rank's own here are loops, callbacks and loaders of Lightning."""
        return (
            "start as many ranks as there were (loops, callbacks and loaders are theirs), or make the callback with"
            ' FlashpointCallback(..., on_world_size_change="keep")'
        )

    def to_save(self) -> dict[str, Any]:
        """See `TrackedState.to_save`."""
        self._marked, tensors = take_apart(self.make())
        try:
            state = super().to_save()
        finally:
            self._marked = None
        shared = {path: tensor for path, tensor in tensors.items() if path.startswith(_ALIKE)}
        own = {path: tensor for path, tensor in tensors.items() if path not in shared}
        if self.parameters is not None and self.rank != 0:
            shared = {path: tensor for path, tensor in shared.items() if self._is_parameter(path)}
        if shared:
            state[SHARED] = shared
        if own:
            state[OWN] = {rank_key(self.rank): own}
        return state

    def _is_parameter(self, path: str) -> bool:
        prefix = next((each for each in _OF_MODEL if path.startswith(each)), None)
        return prefix is None or self.parameters is None or path.removeprefix(prefix) in self.parameters

    def expected_bytes(self) -> int:
        """See `TrackedState.expected_bytes`."""
        return largest_share((tensor.nbytes for tensor in self.sizes()), self.world_size)

    def structured(self, state: Mapping[str, Any]) -> frozenset[str]:
        """See `TrackedState.structured`."""
        return frozenset({SHARED})

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
