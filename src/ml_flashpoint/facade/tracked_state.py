"""What a façade tracks: from named objects to one state dict for DCP, and back.

Owns the names, which object is saved how, and the packed items: the state of everything that is neither module
nor optimizer belongs to one rank, which gets its own back. Saving and loading are DCP's and the engine's; what becomes
of packed items on another number of ranks is `resharding`'s.

::

    model.<parameter or buffer>                     modules, sharded as they are
    optimizer.state.<parameter>.<key>, .param_groups   optimizers
    _flashpoint.rank-00003.<name>                   an archive of torch.save, for everything else
    _flashpoint.rank-00003._rng                     the random number generators
    _flashpoint.rank-00003._frozen                  names of the modules' parameters without requires_grad
"""

from __future__ import annotations

import contextlib
import heapq
import io
import itertools
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ml_flashpoint.copy.cuda import device_today
from ml_flashpoint.copy.tensors import held_bytes
from ml_flashpoint.core.picking import Joined
from ml_flashpoint.facade.fit import check_fit
from ml_flashpoint.facade.forgotten_weights import warn_of_weights
from ml_flashpoint.facade.loader_pass import Through
from ml_flashpoint.facade.loader_state import LoaderBatches, LoaderState
from ml_flashpoint.facade.module_state import ModuleState, freeze_parameters
from ml_flashpoint.facade.optimizer_state import OptimizerState
from ml_flashpoint.facade.packed_state import PACKED, PackedState
from ml_flashpoint.facade.plain_copy import NotPlainError, plain_copy
from ml_flashpoint.facade.rng_state import GeneratorState, RestoredRng, capture_rng_state, restore_rng_state
from ml_flashpoint.facade.steady_state import SteadyState
from ml_flashpoint.format.errors import InvalidArgumentError, LoadError, SaveError
from ml_flashpoint.unpickling.checks import cannot_be_pickled, place_of

_log = logging.getLogger(__name__)

RNG = "_rng"
"""Name of the packed random number generators."""

FROZEN = "_frozen"
"""Name of what is packed of modules: names of frozen parameters, by module."""

Reshard = Callable[[list[Any], int, int], Any]
"""``reshard(states, rank, world_size)``: this rank's state, of those of all ranks that saved, by rank."""

_PACKED_KEY = re.compile(rf"{PACKED}\.rank-(\d{{5,}})\.(\w+)")
_LARGE_PACKED = 64 << 20


class Stateful(Protocol):
    """Anything that can be tracked."""

    def state_dict(self) -> Any:
        """The state, which later steps may change or replace."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Take the state over."""


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """What one checkpoint is loaded into on this rank.

    Attributes:
        state: for ``dcp.load``.
        structured: names of the objects whose state is in it by tensors; the others' is packed.
        saved_by: number of ranks that saved it.
        source_rank: the one whose packed state this rank takes.
        packed_by: names of the packed states, by the rank that saved them; only of another number of ranks.
    """

    state: dict[str, Any]
    structured: frozenset[str]
    saved_by: int
    source_rank: int
    packed_by: Mapping[int, frozenset[str]] = field(default_factory=dict)


class TrackedState:
    """The tracked objects of one rank. Not thread-safe.

    Args:
        rank, world_size: of this process.

    Attributes:
        rank, world_size: the same.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._modules: dict[str, nn.Module] = {}
        self._module_states: dict[str, ModuleState] = {}
        self._optimizers: dict[str, OptimizerState] = {}
        self._others: dict[str, Stateful] = {}
        self._reshards: dict[str, Reshard] = {}
        self._given: list[object] = []
        self._warned_large: set[str] = set()
        self._steps = 0
        self._warned_of_weights = False
        self._steady = SteadyState(self._module_states, self._optimizers)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of everything tracked."""
        return (*self._modules, *self._optimizers, *self._others)

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
        given = value
        if isinstance(value, DataLoader):
            value = LoaderState(name, value)
        elif isinstance(value, torch.Generator):
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
            self._reshards[name] = reshard
        self._given.append(given)
        if isinstance(value, nn.Module):
            self._modules[name] = value
            self._module_states[name] = ModuleState(value)
        elif isinstance(value, Optimizer):
            self._optimizers[name] = OptimizerState(name, value, self._modules)
        else:
            self._others[name] = cast(Stateful, value)

    def reshard(self, name: str) -> Reshard | None:
        """The function that makes an object's state on another number of ranks, if there is one."""
        return self._reshards.get(name)

    def generator(self, name: str) -> GeneratorState | None:
        """The tracked generator of a name; None if it is of something else."""
        other = self._others.get(name)
        return other if isinstance(other, GeneratorState) else None

    def is_place(self, name: str, value: Any) -> bool:
        """Whether a state is, or has in it, a place in the data: of a loader, or anything else one can loop over."""
        other = self._others.get(name)
        says = getattr(other, "has_place", None)
        return isinstance(other, LoaderState) or hasattr(type(other), "__iter__") or (says is not None and says(value))

    def how_to_decide(self, names: Iterable[str]) -> str:
        """What a user can do where nobody says what becomes of these states on another number of ranks."""
        functions = ", ".join(
            f"{name!r}: " + ("rest_of_epoch" if isinstance(self._others.get(name), LoaderState) else "function")
            for name in names
        )
        dealt = " (rest_of_epoch is for a DistributedSampler)" if "rest_of_epoch" in functions else ""
        return (
            f"track(..., reshard={{{functions}}}) with what makes a rank's state of those of all ranks{dealt}, or"
            ' construct with on_world_size_change="keep"'
        )

    # ---- saving -------------------------------------------------------------------------------------------

    def to_save(self) -> dict[str, Any]:
        """The state for ``dcp.save``: references to tensors, and packed copies of everything else.

        Raises:
            SaveError: an object could not be packed; says which.
        """
        if not self._warned_of_weights:
            self._warned_of_weights = True
            self._warn_of_weights()
        state: dict[str, Any] = {}
        packed: dict[str, PackedState] = {}
        for name, module in self._module_states.items():
            if tensors := module.to_save():
                state[name] = tensors
        names = [list(tensors) for tensors in state.values()]
        for name, optimizer in self._optimizers.items():
            structured = optimizer.to_save(names)
            if structured is not None:
                state[name] = structured
            else:
                packed[name] = self._pack(name, optimizer.optimizer.state_dict)
        state[PACKED] = {rank_key(self.rank): packed | self._pack_others()}
        return state

    def _warn_of_weights(self) -> None:
        places = (LoaderState, LoaderBatches, GeneratorState)
        others = [each for each in self._others.values() if not isinstance(each, places)]
        warn_of_weights(self._modules.values(), {n: o.optimizer for n, o in self._optimizers.items()}, others)

    def _pack_others(self) -> dict[str, PackedState]:
        packed = {name: self._pack(name, other.state_dict) for name, other in self._others.items()}
        frozen = {name: module.frozen() for name, module in self._module_states.items()}
        return packed | {RNG: self._pack(RNG, capture_rng_state), FROZEN: PackedState.later(frozen)}

    def values_as_before(self) -> Sequence[Any] | None:
        """The values of :meth:`to_save`, in the order of `Leaves`, if it can be proved that they are in the same places
        and of the same kinds as those that :meth:`keep` was given last; None if not.

        Raises:
            SaveError: see :meth:`to_save`.
        """
        values = self._steady.values()
        return None if values is None else Joined([values, [*self._pack_others().values()]])

    @property
    def kept(self) -> object:
        """The same object as after the :meth:`values_as_before` before only if the tensors are the same; see
        `SteadyState.kept`."""
        return self._steady.kept

    def keep(self, state: Mapping[str, Any], values: Sequence[Any]) -> None:
        """Keep what :meth:`to_save` gave, for :meth:`values_as_before`.

        Args:
            values: of ``state``, in the order of `Leaves`.
        """
        packed = state[PACKED][rank_key(self.rank)]
        if type(self).to_save is TrackedState.to_save and packed.keys() == {*self._others, RNG, FROZEN}:
            self._steady.learn(state, values[: -len(packed)])

    @property
    def left_out(self) -> tuple[object, ...]:
        """What this rank has left to another one in the last :meth:`to_save`, but for its content."""
        return tuple(module.left_out for module in self._module_states.values())

    def _pack(self, name: str, state_dict: Callable[[], Any]) -> PackedState:
        stream, value = io.BytesIO(), None
        try:
            value = state_dict()
            with contextlib.suppress(NotPlainError):
                return PackedState.later(plain_copy(value))
            torch.save(value, stream)
        except Exception as error:
            where = place_of(value, name, cannot_be_pickled)
            raise SaveError(
                f"the state of {where!r} cannot be saved: {type(error).__name__}: {error}", rank=self.rank
            ) from error
        data = PackedState(stream.getbuffer())
        data.made_of = value
        if len(data) > _LARGE_PACKED and name not in self._warned_large:
            self._warned_large.add(name)
            _log.warning(
                "the state of %r has %d bytes and is saved by torch.save, which is slow: track modules instead",
                name,
                len(data),
            )
        return data

    def expected_bytes(self) -> int:
        """Bytes that a rank's part takes at most when training is under way: of what is replicated, each rank saves a
        share. Optimizers that have not stepped are estimated."""
        tensors = [t for m in self._module_states.values() for t in m.current().values() if isinstance(t, torch.Tensor)]
        tensors += [t for o in self._optimizers.values() for t in o.expected_tensors()]
        own = [_sharded_bytes(tensor) for tensor in tensors]
        alike = (held_bytes(tensor) for tensor, nbytes in zip(tensors, own, strict=True) if nbytes is None)
        return sum(nbytes or 0 for nbytes in own) + largest_share(alike, self.world_size)

    # ---- loading ------------------------------------------------------------------------------------------

    def target(self, metadata: Metadata) -> LoadTarget:
        """What a checkpoint with this metadata is to be loaded into.

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
        without_state = self._without_state(packed_names.union(structured, *packed_by.values()))
        state: dict[str, Any] = {}
        for name, module in self._module_states.items():
            if name not in without_state and (tensors := module.current()):
                state[name] = tensors
        lacking: list[str] = []
        for name, optimizer in self._optimizers.items():
            if name in structured:
                state[name] = optimizer.current(metadata)
                lacking += optimizer.lacking
        check_fit(state, metadata, without_state=without_state, lacking=lacking)
        wanted = packed_names & {RNG, FROZEN, *self._optimizers, *self._others}
        if wanted:
            state[PACKED] = {rank_key(source_rank): dict.fromkeys(wanted, PackedState())}
        by_rank = {rank: frozenset(names) for rank, names in packed_by.items()}
        return LoadTarget(state, frozenset(state) - {PACKED}, saved_by, source_rank, by_rank)

    def of_ranks(self, metadata: Metadata, names: Mapping[int, Collection[str]]) -> dict[str, Any]:
        """What the packed states of some ranks are loaded into, and whatever tensors go with them.

        Args:
            names: of the states, by rank.
        """
        return {PACKED: {rank_key(rank): dict.fromkeys(some, PackedState()) for rank, some in names.items()}}

    def whole(self, name: str, value: Any, state: Mapping[str, Any], rank: int) -> Any:
        """The packed state of an object with the tensors that go with it, to be compared.

        Args:
            state: from :meth:`of_ranks`, loaded.
        """
        return value

    def _without_state(self, saved: set[str]) -> list[str]:
        """Names of what is tracked and was not saved, or not as the same thing."""
        # A module without any parameter or buffer leaves no trace in a checkpoint.
        lacking = sorted({*self._optimizers, *self._others} - saved)
        lacking += sorted(
            name for name, module in self._module_states.items() if name not in saved and module.current()
        )
        if extra := sorted(saved - {*self.names, RNG, FROZEN}):
            _log.warning("the checkpoint also has state of %s, which is not tracked now", ", ".join(map(repr, extra)))
        return lacking

    def apply(self, target: LoadTarget, packed: Mapping[str, Any]) -> None:
        """Give every object what was loaded: modules, optimizers, the others in the order of tracking, generators.

        Args:
            packed: what the packed items held, by key.

        Raises:
            Exception: an object refuses its state. Others may have theirs.
        """
        prefix = f"{PACKED}.{rank_key(target.source_rank)}."
        states = {key.removeprefix(prefix): value for key, value in packed.items()}
        for name, module in self._module_states.items():
            module.load(target.state.get(name, {}))
        for name, frozen in states.get(FROZEN, {}).items():  # which older versions do not have
            if name in self._modules:
                freeze_parameters(self._modules[name], frozen)
        for name, optimizer in self._optimizers.items():
            if name in target.structured:
                optimizer.load(target.state[name])
            else:
                optimizer.load_whole(states[name])
        for name, other in self._others.items():
            other.load_state_dict(states[name])
        restore_rng_state(states[RNG])
        restored = RestoredRng(states[RNG])
        for loader in self._loaders():
            loader.restored = restored

    def device_of(self) -> Callable[[str], torch.device]:
        """Where tensors in packed state are loaded to, by the name of the device that they were on."""
        ours = self._devices()
        return lambda location: device_today(location, ours)

    def _devices(self) -> set[torch.device]:
        """The devices that the tracked modules are on."""
        tensors = itertools.chain.from_iterable((*m.parameters(), *m.buffers()) for m in self._modules.values())
        return {tensor.device for tensor in tensors}

    def fresh(self) -> list[OptimizerState | LoaderState]:
        """Optimizers that have not stepped, and loaders: what a failed load must leave as they are."""
        return [*(each for each in self._optimizers.values() if not each.optimizer.state), *self._loaders()]

    # ---- loaders ------------------------------------------------------------------------------------------

    def _loaders(self) -> list[LoaderState]:
        return [other for other in self._others.values() if isinstance(other, LoaderState)]

    def batches(self, loader: object, through: Through | None) -> LoaderBatches:
        """The batches of a tracked loader; see `Flashpoint.batches`.

        Raises:
            InvalidArgumentError: the loader is not tracked, or ``through`` cannot be called.
        """
        if through is not None and not callable(through):
            raise InvalidArgumentError(
                "must be a function that gives the batches of what it is given", argument="through", value=through
            )
        for state in self._loaders():
            if state.loader is loader:
                return LoaderBatches(state, through)
        raise InvalidArgumentError(
            "must be a DataLoader that is tracked",
            argument="loader",
            value=loader,
            hint="call track(loader=loader); what has a state and is no DataLoader is looped over as it is",
        )

    def stepped(self) -> None:
        """Take note that the program has done a step of training, or saves."""
        self._steps += 1
        loaders = self._loaders()
        for loader in loaders:
            loader.stepped()
        if self._steps == 2 and loaders and not any(loader.is_looped_over for loader in loaders):
            names = ", ".join(name for name, other in self._others.items() if isinstance(other, LoaderState))
            _log.warning(
                "nobody loops over fp.batches(...) of what is tracked as %s: a restart begins an epoch anew", names
            )


def checked_reshard(
    value: Reshard | Mapping[str, Reshard] | None, named: Mapping[str, object]
) -> Mapping[str, Reshard]:
    """The functions for what is tracked by these names, by name.

    Raises:
        InvalidArgumentError: they are none, or for something else.
    """
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


def rank_key(rank: int) -> str:
    """The key of what belongs to a rank."""
    return f"rank-{rank:05d}"


def largest_share(sizes: Iterable[int], world_size: int) -> int:
    """Bytes of the rank that saves most of some tensors that all ranks have, shared out as DCP does: each goes to the
    rank that has least so far."""
    shares = [0] * world_size
    for nbytes in sizes:
        heapq.heapreplace(shares, shares[0] + nbytes)
    return max(shares)


def _sharded_bytes(tensor: torch.Tensor) -> int | None:
    """Bytes of this rank's own part of a tensor; None if it is plain, so that all ranks have it."""
    if isinstance(tensor, DTensor):
        return int(tensor.to_local().nbytes)
    if isinstance(tensor, ShardedTensor):
        return sum(shard.tensor.nbytes for shard in tensor.local_shards())
    return None
