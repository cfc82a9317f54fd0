"""The tracked objects of a rank: from named objects to one nested state, and back.

The state of what is neither module nor optimizer belongs to one rank, which gets its own back: it is packed, as one
archive an object. `resharding` decides about it on another number of ranks.

::

    model.<parameter or buffer>                     modules, sharded as they are
    optimizer.state.<parameter>.<key>, .param_groups   optimizers
    _flashpoint.rank-00003.<name>                   an archive of torch.save, for everything else
    _flashpoint.rank-00003._rng                     the random number generators
    _flashpoint.rank-00003._frozen                  names of the modules' parameters without requires_grad
"""

from __future__ import annotations

import heapq
import itertools
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ml_flashpoint.copy.cuda import device_today
from ml_flashpoint.copy.tensors import is_plain_strided
from ml_flashpoint.format.errors import InvalidArgumentError, LoadError, SaveError
from ml_flashpoint.state.archive import SafeGlobal, load_archive
from ml_flashpoint.state.modules import ModuleState, freeze_parameters, frozen_parameters
from ml_flashpoint.state.optimizers import OptimizerState
from ml_flashpoint.state.packed_state import PACKED, PackedState, copied, packed_items, rank_key
from ml_flashpoint.state.planner import Reader, check_fit
from ml_flashpoint.state.private import ShardedTensor
from ml_flashpoint.state.random_numbers import GeneratorState, RestoredRng, capture_rng_state, restore_rng_state

_log = logging.getLogger(__name__)

RNG = "_rng"
"""Name of the packed random number generators."""

FROZEN = "_frozen"
"""Name of what is packed of modules: names of frozen parameters, by module."""

Reshard = Callable[[list[Any], int, int], Any]
"""``reshard(states, rank, world_size)``: this rank's state, of those of all ranks that saved, by rank."""

_PACKED_KEY = re.compile(rf"{PACKED}\.rank-(\d{{5,}})\.(\w+)")


class Stateful(Protocol):
    """Anything that can be tracked."""

    def state_dict(self) -> Any:
        """Return the state, which later steps may change or replace."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Take the state over."""


class PlaceInData:
    """The base of what tracks the place of a loop in its data.

    Attributes:
        loader: the object that the program has tracked.
        restored: the generators as the latest load has restored them; None if there was none.
    """

    loader: Any
    restored: RestoredRng | None = None

    def forget(self) -> None:
        """Undo a `load_state_dict` that was part of a load that failed elsewhere."""


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """The places that one checkpoint is loaded into on this rank.

    Attributes:
        state: what DCP loads into.
        structured: names of the objects whose state is in it; the others' is packed.
        saved_by: number of ranks that saved it.
        source_rank: the rank whose packed states this rank takes. packed: their names.
        packed_by: names of the packed states, by the rank that saved them; only of another number of ranks.
    """

    state: dict[str, Any]
    structured: frozenset[str]
    saved_by: int
    source_rank: int
    packed: frozenset[str]
    packed_by: Mapping[int, frozenset[str]] = field(default_factory=dict)


class TrackedState:
    """The tracked objects of one rank. Belongs to the training thread.

    Attributes:
        rank, world_size: of this process.
        reshards: functions that make a rank's state on another number of ranks, by name.
        others: what is neither module nor optimizer, by name.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._modules: dict[str, nn.Module] = {}
        self._module_states: dict[str, ModuleState] = {}
        self._optimizers: dict[str, OptimizerState] = {}
        self.others: dict[str, Stateful] = {}
        self.reshards: dict[str, Reshard] = {}
        self._given: list[object] = []

    @property
    def names(self) -> tuple[str, ...]:
        """Names of everything tracked."""
        return (*self._modules, *self._optimizers, *self.others)

    def add(self, name: str, value: object, reshard: Reshard | None = None) -> None:
        """Track one more object.

        Args:
            reshard: makes a rank's state on another number of ranks.

        Raises:
            InvalidArgumentError: the name is taken or unusable, or the object has no state or another name.
        """
        if not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
            raise InvalidArgumentError(
                "a tracked name must be an identifier without a leading underscore", argument="name", value=name
            )
        if name in self.names:
            raise InvalidArgumentError("this name is tracked already", argument="name", value=name)
        given = value.loader if isinstance(value, PlaceInData) else value
        if isinstance(value, torch.Generator):
            value = GeneratorState(value)
        methods = (getattr(value, "state_dict", None), getattr(value, "load_state_dict", None))
        if isinstance(value, type) or not all(map(callable, methods)):
            raise InvalidArgumentError(
                "must have the methods state_dict and load_state_dict", argument=name, value=value
            )
        if any(given is other for other in self._given):
            raise InvalidArgumentError("this object is tracked already, under another name", argument=name, value=given)
        if reshard is not None:
            if isinstance(value, nn.Module):
                raise InvalidArgumentError("modules are resharded by themselves", argument="reshard", value=name)
            self.reshards[name] = reshard
        self._given.append(given)
        if isinstance(value, nn.Module):
            self._modules[name] = value
            self._module_states[name] = ModuleState(value)
        elif isinstance(value, Optimizer):
            self._optimizers[name] = OptimizerState(name, value, self._modules)
        else:
            self.others[name] = cast(Stateful, value)

    def is_place(self, name: str, value: Any) -> bool:
        """Return True if a state is, or has in it, a place in the data: of a loader, or of anything else to loop
        over."""
        other = self.others.get(name)
        says = getattr(other, "has_place", None)
        return isinstance(other, PlaceInData) or hasattr(type(other), "__iter__") or (says is not None and says(value))

    def how_to_decide(self, names: Iterable[str]) -> str:
        """Return a hint for states of which nobody says what becomes of them on another number of ranks."""
        functions = ", ".join(
            f"{name!r}: " + ("rest_of_epoch" if isinstance(self.others.get(name), PlaceInData) else "function")
            for name in names
        )
        dealt = " (rest_of_epoch is for a DistributedSampler)" if "rest_of_epoch" in functions else ""
        return (
            f"track(..., reshard={{{functions}}}) with what makes a rank's state of those of all ranks{dealt}, or"
            ' construct with on_world_size_change="keep"'
        )

    # ---- saving -------------------------------------------------------------------------------------------

    def to_save(self) -> dict[str, Any]:
        """Return the state: references to tensors, and packed copies of everything else.

        Raises:
            SaveError: an object could not be packed; says which.
        """
        state: dict[str, Any] = {}
        packed: dict[str, PackedState] = {}
        for name, module in self._module_states.items():
            if tensors := module.to_save():
                state[name] = tensors
        for name, optimizer in self._optimizers.items():
            if (structured := optimizer.to_save()) is not None:
                state[name] = structured
            else:
                packed[name] = self._pack(name, optimizer.optimizer.state_dict)
        for name, other in self.others.items():
            packed[name] = self._pack(name, other.state_dict)
        packed[RNG] = PackedState(capture_rng_state())
        packed[FROZEN] = PackedState({name: frozen_parameters(module) for name, module in self._modules.items()})
        return {**state, PACKED: {rank_key(self.rank): packed}}

    def _pack(self, name: str, state_dict: Callable[[], Any]) -> PackedState:
        try:
            return PackedState(copied(state_dict(), name))
        except SaveError:
            raise
        except Exception as error:
            text = f"the state of {name!r} cannot be saved: {type(error).__name__}: {error}"
            raise SaveError(text, rank=self.rank) from error

    def expected_bytes(self) -> int:
        """Return the bytes of a rank's part when training is under way. Of what is replicated, each rank saves a share;
        optimizers that have not stepped are estimated."""
        tensors = [t for m in self._module_states.values() for t in m.current().values() if isinstance(t, torch.Tensor)]
        tensors += [t for o in self._optimizers.values() for t in o.expected_tensors()]
        own, alike = 0, list[int]()
        for tensor in tensors:
            if isinstance(tensor, DTensor):
                own += tensor.to_local().nbytes
            elif isinstance(tensor, ShardedTensor):
                own += sum(shard.tensor.nbytes for shard in tensor.local_shards())
            elif is_plain_strided(tensor):
                alike.append(tensor.nbytes)
        return own + largest_share(alike, self.world_size)

    # ---- loading ------------------------------------------------------------------------------------------

    def target(self, metadata: Metadata) -> LoadTarget:
        """Return the places that a checkpoint with this metadata is loaded into.

        Raises:
            LoadError: it does not hold what is tracked.
        """
        keys = metadata.state_dict_metadata.keys()
        packed = [(int(match[1]), match[2]) for match in map(_PACKED_KEY.fullmatch, keys) if match is not None]
        saved_by = len({rank for rank, _ in packed})
        if not saved_by:
            raise LoadError("the checkpoint was not saved by a Flashpoint", rank=self.rank)
        source_rank = self.rank % saved_by
        packed_names = {name for rank, name in packed if rank == source_rank}
        structured = {key.partition(".")[0] for key in keys} - {PACKED}
        packed_by: dict[int, set[str]] = {}
        if saved_by != self.world_size:
            for rank, name in packed:
                packed_by.setdefault(rank, set()).add(name)
        current = {name: module.current() for name, module in self._module_states.items()}
        without_state = self._without_state(packed_names.union(structured, *packed_by.values()), current)
        state: dict[str, Any] = {
            name: tensors for name, tensors in current.items() if tensors and name not in without_state
        }
        lacking: list[str] = []
        for name, optimizer in self._optimizers.items():
            if name in structured:
                state[name] = optimizer.current(metadata)
                lacking += optimizer.lacking
        check_fit(state, metadata, without_state=without_state, lacking=lacking)
        wanted = frozenset(packed_names & {RNG, FROZEN, *self._optimizers, *self.others})
        by_rank = {rank: frozenset(names) for rank, names in packed_by.items()}
        return LoadTarget(state, frozenset(state), saved_by, source_rank, wanted, by_rank)

    def of_ranks(self, metadata: Metadata, ranks: Iterable[int]) -> dict[str, Any]:
        """Return the places of tensors that go with the packed states of some ranks."""
        return {}

    def whole(self, value: Any, state: Mapping[str, Any], rank: int) -> Any:
        """Return a packed state with the tensors that go with it, of what :meth:`of_ranks` gave, to be compared."""
        return value

    def unpacked(
        self, target: LoadTarget, reader: Reader, *, path: str, allowed: Sequence[SafeGlobal]
    ) -> dict[str, Any]:
        """Read the packed states of this rank, by name."""
        archives, device_of = packed_items(reader.read_items, target.source_rank, target.packed), self.device_of()
        return {
            name: load_archive(data, name, path=path, allowed=allowed, device_of=device_of)
            for name, data in archives.items()
        }

    def _without_state(self, saved: set[str], current: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Return the names of what is tracked and was not saved, or not as the same thing."""
        # A module without any parameter or buffer leaves no trace in a checkpoint.
        lacking = sorted({*self._optimizers, *self.others} - saved)
        lacking += sorted(name for name, tensors in current.items() if name not in saved and tensors)
        if extra := sorted(saved - {*self.names, RNG, FROZEN}):
            _log.warning("the checkpoint also has state of %s, which is not tracked now", ", ".join(map(repr, extra)))
        return lacking

    def apply(self, target: LoadTarget, states: Mapping[str, Any]) -> None:
        """Give every object what was loaded, also its packed state: modules, optimizers, the others in the order of
        tracking, generators. Raise what an object raises that refuses its state; others may have theirs."""
        for name, module in self._module_states.items():
            module.load(target.state.get(name, {}))
        for name, frozen in states[FROZEN].items():
            if name in self._modules:
                freeze_parameters(self._modules[name], frozen)
        for name, optimizer in self._optimizers.items():
            if name in target.structured:
                optimizer.load(target.state[name])
            else:
                optimizer.load_whole(states[name])
        for name, other in self.others.items():
            other.load_state_dict(states[name])
        restore_rng_state(states[RNG])
        restored = RestoredRng(states[RNG])
        for place in self._places():
            place.restored = restored

    def device_of(self) -> Callable[[str], torch.device]:
        """Return the function from the device that a tensor in packed state was on to the one that it is loaded to."""
        tensors = itertools.chain.from_iterable((*m.parameters(), *m.buffers()) for m in self._modules.values())
        ours = {tensor.device for tensor in tensors}
        return lambda location: device_today(location, ours)

    def fresh(self) -> list[OptimizerState | PlaceInData]:
        """Return optimizers that have not stepped, and places: what a failed load must leave as they are."""
        return [*(each for each in self._optimizers.values() if not each.optimizer.state), *self._places()]

    def _places(self) -> list[PlaceInData]:
        return [other for other in self.others.values() if isinstance(other, PlaceInData)]


def checked_reshard(
    value: Reshard | Mapping[str, Reshard] | None, named: Mapping[str, object]
) -> Mapping[str, Reshard]:
    """Return the functions for what is tracked by these names, by name, or raise an `InvalidArgumentError`."""
    if value is None:
        return {}
    by_name = value
    if callable(value):
        by_name = {name: value for name, each in named.items() if not isinstance(each, (nn.Module, Optimizer))}
    if not isinstance(by_name, Mapping) or not by_name or not all(map(callable, by_name.values())):
        raise InvalidArgumentError(
            "must be a function of all saved states, the rank and the number of ranks, or a dict of such by the names"
            " of what is tracked in the same call",
            argument="reshard",
            value=value,
        )
    if others := [name for name in by_name if name not in named]:
        raise InvalidArgumentError(f"nothing is tracked here as {others[0]!r}", argument="reshard", value=value)
    return by_name


def largest_share(sizes: Iterable[int], world_size: int) -> int:
    """Return the bytes of the rank that saves most of replicated tensors: each goes to the rank with least so far."""
    shares = [0] * world_size
    for nbytes in sizes:
        heapq.heapreplace(shares, shares[0] + nbytes)
    return max(shares)
