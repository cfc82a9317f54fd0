"""The tracked objects of a rank: from named objects to one nested state, and back.

The state of what is neither module nor optimizer belongs to one rank, which gets its own back: it is packed, as one
archive an object. `resharding` decides about it on another number of ranks.

::

    model.<parameter or buffer>                     modules, sharded as they are
    optimizer.state.<parameter>.<key>               optimizers
    optimizer.param_groups.<group>.<option>         an archive of torch.save; of params, names of parameters
    _flashpoint.rank-00003.<name>                   an archive, for everything else
    _flashpoint.rank-00003._rng                     the random number generators
    _flashpoint.rank-00003._frozen                  names of the modules' parameters without requires_grad
"""

from __future__ import annotations

import heapq
import io
import itertools
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.optim import Optimizer

from ml_flashpoint.copy.cuda import device_today
from ml_flashpoint.copy.tensors import is_plain_strided
from ml_flashpoint.format.errors import InvalidArgumentError, LoadError, SaveError, text_of
from ml_flashpoint.state.archive import PackedState, SafeGlobal, load_archive, plain_modes
from ml_flashpoint.state.parameters import (
    AS_SAVED,
    ModuleState,
    OptimizerState,
    expected_tensors,
    freeze_parameters,
    named_parameters,
)
from ml_flashpoint.state.private import ShardedTensor, flatten_state_dict, set_element
from ml_flashpoint.state.random_numbers import GeneratorState, RestoredRng, capture_rng_state, restore_rng_state

_log = logging.getLogger(__name__)

PACKED, RNG, FROZEN = "_flashpoint", "_rng", "_frozen"
"""Keys of packed items; no tracked name starts like them."""

Reshard = Callable[[list[Any], int, int], Any]
"""``reshard(states, rank, world_size)``: this rank's state, of those of all ranks that saved, by rank."""

_PACKED_KEY = re.compile(rf"{PACKED}\.rank-(\d{{5,}})\.(\w+)")


def rank_key(rank: int) -> str:
    """Return the key of what belongs to a rank."""
    return f"rank-{rank:05d}"


class Stateful(Protocol):
    """Anything that can be tracked."""

    def state_dict(self) -> Any:
        """Return the state, which later steps may change or replace."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Take the state over."""


class PlaceInData:
    """The base of what tracks the place of a loop in its data."""

    loader: Any  # that the program has tracked
    restored: RestoredRng | None = None  # the generators as the latest load has restored them

    def forget(self) -> None:
        """Undo a `load_state_dict` that was part of a load that failed elsewhere."""


class Reader(Protocol):
    """A reader of one version: DCP's, and for items that are no tensors."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy everything in a plan into the planner's tensors."""

    def read_items(self, names: Iterable[str]) -> dict[str, bytes]:
        """Return items that are no tensors as they are, by name."""


def packed_items(reader: Reader, rank: int, names: Iterable[str]) -> dict[str, bytes]:
    """Return the packed items of a rank, by the names of the tracked objects."""
    keys = {name: f"{PACKED}.{rank_key(rank)}.{name}" for name in names}
    found = reader.read_items(keys.values())
    return {name: found[key] for name, key in keys.items()}


class TrackedLoad(DefaultLoadPlanner):
    """The load of one checkpoint on this rank: of everything that was saved of the tracked objects, or of nothing.

    Making one reads the packed states of this rank, and touches nothing.

    Args:
        path: of the version, for errors.
        allowed: further types that may be loaded, see `Flashpoint`.

    Attributes:
        state: what DCP loads into.
        structured: names of the objects whose state is in it, and nowhere else; the others' is packed.
        left: tensors of these objects that would stay behind.
        saved_by: number of ranks that saved it.
        source_rank: the rank whose packed states this rank takes. states: these, by name.
        packed_by: names of the packed states, by the rank that saved them; only of another number of ranks.
        read: makes a value of the bytes and the name of an item.
        touched: True once tensors may have been written to.

    Raises:
        LoadError: the checkpoint does not hold what is tracked.
    """

    def __init__(
        self, tracked: TrackedState, metadata: Metadata, reader: Reader, *, path: str, allowed: Sequence[SafeGlobal]
    ) -> None:
        super().__init__()
        names_by: dict[int, set[str]] = {}
        for match in filter(None, map(_PACKED_KEY.fullmatch, metadata.state_dict_metadata)):
            names_by.setdefault(int(match[1]), set()).add(match[2])
        if not names_by:
            raise LoadError("the checkpoint was not saved by a Flashpoint", rank=tracked.rank)
        self.saved_by, self.source_rank = len(names_by), tracked.rank % len(names_by)
        self.packed_by = names_by if self.saved_by != tracked.world_size else {}
        self.read = partial(load_archive, path=path, allowed=allowed, device_of=tracked.device_of())
        own = names_by.get(self.source_rank, set())
        saved = own.union(*self.packed_by.values())
        self.state = tracked.places(metadata, self.source_rank, saved)
        self.structured = tracked.structured(self.state)
        items = packed_items(reader, self.source_rank, own & {RNG, FROZEN, *tracked.names})
        self.states = {name: self.read(data, name) for name, data in items.items()}
        self.touched = False
        with plain_modes():
            self.set_up_planner(self.state, metadata, is_coordinator=False)
            self._plan = self.create_local_plan()
        self.left = _unplaced(metadata, self.structured, {item.dest_index.fqn for item in self._plan.items})

    def check_left(self, left: Collection[str]) -> None:
        """Raise a `LoadError` if something stays behind on all ranks."""
        if left:
            raise LoadError(f"the checkpoint has {', '.join(sorted(left))}, for which there is no place", hint=AS_SAVED)

    def load(self, reader: Reader) -> None:
        """Load what was planned."""
        self.touched = True
        with plain_modes():
            reader.read_data(self.finish_plan(self._plan), self).wait()

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load an item that is no tensor."""
        fqn = read_item.dest_index.fqn
        set_element(self.original_state_dict, self.mappings[fqn], self.read(value.getbuffer(), fqn))


class TrackedState:
    """The tracked objects of one rank. Belongs to the training thread.

    Attributes:
        names: of everything tracked.
        reshards: functions that make a rank's state on another number of ranks, by name.
        others: what is neither module nor optimizer, by name.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.names: tuple[str, ...] = ()
        self._key = rank_key(rank)
        self._modules: dict[str, ModuleState] = {}
        self._optimizers: dict[str, OptimizerState] = {}
        self.others: dict[str, Stateful] = {}
        self.reshards: dict[str, Reshard] = {}
        self._given: list[object] = []

    def add(self, name: str, value: object, reshard: Reshard | None = None) -> None:
        """Track one more object. Raises an `InvalidArgumentError` if the name is taken or unusable, or the object has
        no state or another name."""
        if not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
            text = "a tracked name must be an identifier without a leading underscore"
            raise InvalidArgumentError(text, argument="name", value=name)
        if name in self.names:
            raise InvalidArgumentError("this name is tracked already", argument="name", value=name)
        given = value.loader if isinstance(value, PlaceInData) else value
        if isinstance(value, torch.Generator):
            value = GeneratorState(value)
        methods = (getattr(value, "state_dict", None), getattr(value, "load_state_dict", None))
        if isinstance(value, type) or not all(map(callable, methods)):
            text = "must have the methods state_dict and load_state_dict"
            raise InvalidArgumentError(text, argument=name, value=value)
        if any(given is other for other in self._given):
            raise InvalidArgumentError("this object is tracked already, under another name", argument=name, value=given)
        if reshard is not None:
            if isinstance(value, nn.Module):
                raise InvalidArgumentError("modules are resharded by themselves", argument="reshard", value=name)
            self.reshards[name] = reshard
        self._given.append(given)
        self.names += (name,)
        if isinstance(value, nn.Module):
            self._modules[name] = ModuleState(name, value)
        elif isinstance(value, Optimizer):
            self._optimizers[name] = OptimizerState(name, value, self._modules)
        else:
            self.others[name] = cast(Stateful, value)

    def is_place(self, name: str, value: Any) -> bool:
        """Return True if a state is, or has in it, a place in the data: of whatever a program loops over."""
        other = self.others.get(name)
        says = getattr(other, "has_place", None)
        return isinstance(other, PlaceInData) or hasattr(type(other), "__iter__") or (says is not None and says(value))

    def how_to_decide(self, names: Iterable[str]) -> str:
        """Return a hint for states of which nobody says what becomes of them on another number of ranks."""
        is_place = {name: isinstance(self.others.get(name), PlaceInData) for name in names}
        functions = ", ".join(f"{name!r}: {'rest_of_epoch' if each else 'function'}" for name, each in is_place.items())
        return (
            f"track(..., reshard={{{functions}}}) with what makes a rank's state of those of all ranks, or construct"
            ' with on_world_size_change="keep"'
        )

    # ---- saving -------------------------------------------------------------------------------------------

    def to_save(self) -> dict[str, Any]:
        """Return the state: references to tensors and to what other objects return, and packed copies of the rest.
        Raises a `SaveError` that names the object which has no state to return."""
        state: dict[str, Any] = {name: tensors for name, each in self._modules.items() if (tensors := each.to_save())}
        named = {name: named_parameters(each.module) for name, each in self._modules.items()}
        whole: dict[str, Any] = {}
        for name, optimizer in self._optimizers.items():
            if (structured := optimizer.to_save(named)) is not None:
                state[name] = structured
            else:
                whole[name] = optimizer.optimizer
        own: dict[str, PackedState] = {}
        for name, other in {**whole, **self.others}.items():
            try:
                own[name] = PackedState(other.state_dict(), name, is_live=True)
            except SaveError:
                raise
            except Exception as error:  # of whatever kind a program raises
                raise SaveError(f"the state of {name!r} cannot be saved: {text_of(error)}", rank=self.rank) from error
        own[RNG] = PackedState(capture_rng_state(), RNG)
        frozen = {name: [n for n, parameter in pairs if not parameter.requires_grad] for name, pairs in named.items()}
        own[FROZEN] = PackedState(frozen, FROZEN)
        return {**state, PACKED: {self._key: own}}

    def expected_bytes(self) -> int:
        """Return the bytes of a rank's part when training is under way. Of what is replicated, each rank saves a share;
        optimizers that have not stepped are estimated."""
        tensors = [t for m in self._modules.values() for t in m.current().values() if isinstance(t, torch.Tensor)]
        tensors += [tensor for each in self._optimizers.values() for tensor in expected_tensors(each.optimizer)]
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

    def structured(self, state: Mapping[str, Any]) -> frozenset[str]:
        """Return the names in a state of :meth:`places` of which every item needs a place on some rank."""
        return frozenset(state)

    def places(self, metadata: Metadata, source_rank: int, names: set[str]) -> dict[str, Any]:
        """Return the nested state that DCP loads into, where ``names`` are of all packed states. Raises a `LoadError`
        with all that does not fit."""
        entries = metadata.state_dict_metadata
        structured = {key.partition(".")[0] for key in entries} - {PACKED}
        current = {name: module.current() for name, module in self._modules.items()}
        # A module without any parameter or buffer leaves no trace in a checkpoint.
        saved = names | structured
        without_state = sorted({*self._optimizers, *self.others} - saved)
        without_state += sorted(name for name, tensors in current.items() if name not in saved and tensors)
        if extra := sorted(saved - {*self.names, RNG, FROZEN}):
            _log.warning("the checkpoint also has state of %s, which is not tracked now", ", ".join(map(repr, extra)))
        state: dict[str, Any] = {name: own for name, own in current.items() if own and name not in without_state}
        lacking: list[str] = []
        for name, optimizer in self._optimizers.items():
            if name in structured:
                state[name] = optimizer.current(metadata)
                lacking += optimizer.lacking
        flat, _ = flatten_state_dict(dict(state))
        missing = [*(key for key in flat if key not in entries), *lacking]
        others = [text for key in flat if key in entries and (text := _difference(key, flat[key], entries[key]))]
        if without_state or missing or others:
            # What the checkpoint has too much is no difference by itself: another rank may have the place for it.
            unexpected = _unplaced(metadata, state, flat)
            told = [f"the checkpoint has no state of {', '.join(map(repr, without_state))}"] if without_state else []
            told += [f"the checkpoint lacks {', '.join(missing)}"] if missing else []
            told += [f"the checkpoint has {', '.join(unexpected)}, for which there is no place"] if unexpected else []
            raise LoadError("; ".join([*told, *others]), hint=AS_SAVED)
        return state

    def of_ranks(self, metadata: Metadata, ranks: Iterable[int]) -> dict[str, Any]:
        """Return the places of tensors that go with the packed states of some ranks."""
        return {}

    def whole(self, value: Any, state: Mapping[str, Any], rank: int) -> Any:
        """Return a packed state with the tensors that go with it, of what :meth:`of_ranks` gave, to be compared."""
        return value

    def apply(self, target: TrackedLoad, states: Mapping[str, Any]) -> None:
        """Give every object what was loaded, also its packed state: modules, optimizers, the others in the order of
        tracking, generators. Raise what an object raises that refuses its state; others may have theirs."""
        for name, module in self._modules.items():
            module.load(target.state.get(name, {}))
        for name, names in states[FROZEN].items():
            if name in self._modules:
                freeze_parameters(self._modules[name].module, names)
        for name, optimizer in self._optimizers.items():
            if name in target.structured:
                optimizer.load(target.state[name])
            else:
                optimizer.load_whole(states[name])
        for name, other in self.others.items():
            other.load_state_dict(states[name])
        restore_rng_state(states[RNG])
        restored = RestoredRng(states[RNG])
        for place in self._places_in_data():
            place.restored = restored

    def device_of(self) -> Callable[[str], torch.device]:
        """Return the function from the device that a tensor in packed state was on to the one that it is loaded to."""
        modules = (each.module for each in self._modules.values())
        tensors = itertools.chain.from_iterable((*m.parameters(), *m.buffers()) for m in modules)
        return partial(device_today, ours={tensor.device for tensor in tensors})

    def fresh(self) -> list[OptimizerState | PlaceInData]:
        """Return optimizers that have not stepped, and places: what a failed load must leave as they are."""
        return [*(each for each in self._optimizers.values() if not each.optimizer.state), *self._places_in_data()]

    def _places_in_data(self) -> list[PlaceInData]:
        return [other for other in self.others.values() if isinstance(other, PlaceInData)]


def _unplaced(metadata: Metadata, structured: Collection[str], wanted: Collection[str]) -> list[str]:
    """Return the names of items of these objects, other than the wanted ones, that hold anything."""
    return [
        key
        for key, entry in metadata.state_dict_metadata.items()
        if key not in wanted
        and key.partition(".")[0] in structured
        and not (isinstance(entry, TensorStorageMetadata) and entry.size.numel() == 0)
    ]


def _difference(key: str, value: object, entry: object) -> str | None:
    if not isinstance(entry, TensorStorageMetadata):
        return f"{key} is a tensor, and was none when it was saved" if isinstance(value, torch.Tensor) else None
    if not isinstance(value, torch.Tensor):
        return f"{key} is no tensor, and was one when it was saved"
    now, then = tuple(value.size()), tuple(entry.size)
    return None if now == then else f"{key} has the shape {now}, and had {then} when it was saved"


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
        text = "must be a function of all saved states, the rank and the number of ranks, or a dict of such by the"
        text += " names of what is tracked in the same call"
        raise InvalidArgumentError(text, argument="reshard", value=value)
    if others := [name for name in by_name if name not in named]:
        raise InvalidArgumentError(f"nothing is tracked here as {others[0]!r}", argument="reshard", value=value)
    return by_name


def largest_share(sizes: Iterable[int], world_size: int) -> int:
    """Return the bytes of the rank that saves most of replicated tensors: each goes to the rank with least so far."""
    shares = [0] * world_size
    for nbytes in sizes:
        heapq.heapreplace(shares, shares[0] + nbytes)
    return max(shares)
