"""The state of one tracked optimizer, by names of parameters, so that another number of ranks can load it.

``get_optimizer_state_dict`` of torch defines the names. As for modules, the optimizer's own ``state_dict()`` is used,
with names in the place of numbers, wherever that was seen to be the same. Torch's function leaves out parameters
without state, and loses state of another dtype than its parameter; this module keeps both. An optimizer that torch
cannot name is saved whole, by each rank for itself.
"""

from __future__ import annotations

import contextlib
import logging
import operator
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ml_flashpoint.format.errors import LoadError
from ml_flashpoint.state.fit import AS_SAVED
from ml_flashpoint.state.modules import uncompiled
from ml_flashpoint.state.plain_modes import plain_modes
from ml_flashpoint.state.private import ShardedTensor, set_element

_log = logging.getLogger(__name__)

_State = dict[str, Any]
_NOTHING = object()
_PLAIN = frozenset({torch.Tensor, nn.Parameter, int, float, str})
_PARTS = {"state", "param_groups"}
"""All that torch's function knows of what an optimizer's state dict has."""
_SIMPLE = (torch.Tensor, bool, int, float, str, type(None))


class OptimizerState:
    """One tracked optimizer.

    Args:
        name: of the optimizer in the checkpoint.
        modules: the modules tracked beside it, by name. May still grow.

    Attributes:
        lacking: names of items that the optimizer has, as a program that has just started makes it, and that the
            checkpoint of the latest :meth:`current` lacks although it has other state of their parameters.
    """

    def __init__(self, name: str, optimizer: Optimizer, modules: Mapping[str, nn.Module]) -> None:
        self.optimizer = optimizer
        self.lacking: list[str] = []
        self._name = name
        self._modules = modules
        # What the names were found for, and what was found.
        self._named_for: tuple[list[torch.Tensor], list[list[str]], bool] = [], [], False
        self._root: nn.Module | None = None
        self._nameable = False
        self._names: list[str] | None = None
        # At loading: state that the optimizer starts with and the checkpoint lacks, and parameters, by their names.
        self._absent: dict[str, _State] = {}
        self._parameters: dict[str, torch.Tensor] = {}
        # Whether this program has saved or loaded it: its own earlier versions may lack what has come since.
        self._is_under_way = False

    def to_save(self, names: list[list[str]]) -> _State | None:
        """Return the state by parameter names: references, not copies. None if it has to be saved whole.

        Args:
            names: of all that is saved of each tracked module: parameters may get other names and stay what they are.
        """
        self._is_under_way = True
        optimizer = self.optimizer
        if not optimizer.state and type(optimizer).state_dict is not Optimizer.state_dict:
            return None  # what it gives cannot be compared with what torch's function gives, which would make it step
        # Names may go on to other parameters, and be the same ones.
        named = (module.named_parameters(remove_duplicate=False) for module in self._modules.values())
        parameters = [*parameters_of(optimizer), *(parameter for _, parameter in chain.from_iterable(named))]
        own = optimizer.state_dict()
        simple = own.keys() <= _PARTS and _is_table(optimizer)  # it may become another thing after any step
        before, *others = self._named_for
        is_as_before = len(before) == len(parameters) and all(map(operator.is_, before, parameters))
        if not is_as_before or others != [names, simple]:
            self._examine(simple)
            self._named_for = parameters, names, simple
        if not self._nameable:
            return None
        assert self._root is not None
        if self._names is None:
            return _by_torch(self._root, optimizer) if optimizer.state else None
        return _named(own, self._names)

    def _examine(self, simple: bool) -> None:
        self._names = None
        root = self._root = _root_of(parameters_of(self.optimizer), self._modules)
        self._nameable = simple and root is not None
        if root is None or not simple:
            why = "its state is no table of tensors" if root is not None else "no tracked module has its parameters"
            _log.warning(
                "optimizer %r is saved whole by each rank (%s); if it is sharded, only as many ranks can load it",
                self._name,
                why,
            )
        elif not _has_flat_parameters(root):
            names = _names_of(root, self.optimizer)
            own = _named(self.optimizer.state_dict(), names)
            if not self.optimizer.state or _is_same(own, _by_torch(root, self.optimizer)):
                self._names = names

    # ---- loading ------------------------------------------------------------------------------------------

    def current(self, metadata: Metadata) -> _State:
        """Return what a checkpoint is loaded into. A fresh optimizer gets its state made.

        Raises:
            LoadError: no tracked module has the optimizer's parameters.
        """
        parameters = parameters_of(self.optimizer)
        root = self._root = _root_of(parameters, self._modules)
        if root is None:
            raise LoadError(
                f"optimizer {self._name!r} was saved by parameter names, and no tracked module has its parameters",
                hint="track the same modules as when it was saved",
            )
        state = self._by_torch_or_empty(root, parameters)
        names = _names_in(state)
        self._parameters = dict(zip(names, parameters, strict=False)) if len(names) == len(parameters) else {}
        self._absent, self.lacking = {}, []
        present: dict[str, _State] = {}
        keys = metadata.state_dict_metadata
        paths: Iterable[tuple[str | int, ...]] = (metadata.planner_data or {}).values()
        with_state = {path[2] for path in paths if len(path) > 3 and path[:2] == (self._name, "state")}
        for name, values in state["state"].items():
            prefix = f"{self._name}.state.{name}"
            kept = {k: v for k, v in values.items() if f"{prefix}.{k}" in keys or isinstance(v, (dict, list, tuple))}
            if name in with_state and not self._is_under_way:
                self.lacking += [f"{prefix}.{key}" for key in values if key not in kept]
            if len(kept) < len(values) or not values:
                self._absent[name] = {k: v for k, v in values.items() if k not in kept}
            if kept:
                present[name] = kept
        target = {"state": present, "param_groups": [_unshared(group) for group in state["param_groups"]]}
        if not _has_flat_parameters(root):
            _add_places(self._name, target, metadata, self._parameters)
        return target

    def _by_torch_or_empty(self, root: nn.Module, parameters: list[torch.Tensor]) -> _State:
        """Return the state by names; empty for each parameter where a new optimizer takes no step without effect."""
        optimizer, fresh = self.optimizer, not self.optimizer.state
        rates = [group.get("lr") for group in optimizer.param_groups]
        if fresh:
            # Torch makes the state by a step without effect, which it does not dare to while there are gradients.
            optimizer.zero_grad(set_to_none=True)
        try:
            with _not_frozen(parameters):
                return _by_torch(root, optimizer)
        except Exception as error:  # of whatever kind: it may want sparse gradients, or a closure
            if not fresh or _has_flat_parameters(root):
                raise
            _log.info("optimizer %r takes no step without gradients: %s", self._name, error)
        optimizer.zero_grad(set_to_none=True)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = rate
        optimizer.state.clear()
        for parameter in parameters:
            optimizer.state[parameter] = {}  # torch takes it for made, now and when it is loaded
        return _by_torch(root, optimizer)

    def load(self, state: _State) -> None:
        """Hand loaded state, as :meth:`current` gave it, to the optimizer.

        Raises:
            LoadError: parameters of one group come from groups with other hyper-parameters.
        """
        assert self._root is not None
        self._is_under_way = True
        loaded: dict[str, _State] = state["state"]
        if _has_flat_parameters(self._root):
            loaded = self._load_flat(self._root, state)
        else:
            with plain_modes():
                # Names take the place of numbers: groups and state only have to call a parameter the same.
                self.optimizer.load_state_dict({"state": loaded, "param_groups": self._groups(state["param_groups"])})
        for name, values in loaded.items():
            if name in self._parameters:
                held = self.optimizer.state[self._parameters[name]]
                # Optimizers convert state to the parameter's dtype, which loses bits.
                held.update((key, value) for key, value in values.items() if _has_other_dtype(held.get(key), value))
                for key in self._absent.get(name, {}) if _has_flat_parameters(self._root) else ():
                    held.pop(key, None)
                if not held:
                    del self.optimizer.state[self._parameters[name]]
        self._absent, self._parameters = {}, {}

    def _groups(self, saved: list[_State]) -> list[_State]:
        """Return the groups that there are, with all hyper-parameters as they were saved: those of the group that had
        the same parameters, or of the one in the same place if a group has none."""
        group_of = {name: index for index, group in enumerate(saved) for name in group["params"]}
        names = list(self._parameters)
        groups: list[_State] = []
        for index, group in enumerate(self.optimizer.param_groups):
            own, names = names[: len(group["params"])], names[len(group["params"]) :]
            first, *others = dict.fromkeys(group_of[name] for name in own if name in group_of) or [index]
            if not all(_is_alike(saved[first], saved[other]) for other in others):
                raise LoadError(
                    f"group {index} of optimizer {self._name!r} has parameters of groups {first} and {others[0]} of the"
                    " saved one, which had other hyper-parameters",
                    hint=AS_SAVED,
                )
            groups.append({**saved[first], "params": own})
        return groups

    def _load_flat(self, root: nn.Module, state: _State) -> dict[str, _State]:
        """Load parameters that FSDP has flattened, which only torch's function takes apart. Return what was handed to
        it:
        torch insists on state for every parameter, so what the checkpoint lacks goes in, and is removed again."""
        loaded: dict[str, _State] = state["state"]
        without = [name for name, parameter in self._parameters.items() if parameter not in self.optimizer.state]
        names = dict.fromkeys([*loaded, *self._absent, *without])
        filled = {name: {**self._absent.get(name, {}), **loaded.get(name, {})} for name in names}
        complete: Any = {"state": filled, "param_groups": state["param_groups"]}
        with plain_modes(), _not_frozen(self._parameters[name] for name in filled if name in self._parameters):
            set_optimizer_state_dict(root, self.optimizer, complete)
        return filled

    def load_whole(self, state: Any) -> None:
        """Hand the optimizer a state that was saved whole.

        Raises:
            LoadError: it was another optimizer's, and lacks what this one needs.
        """
        groups = state.get("param_groups") if isinstance(state, dict) else None
        if isinstance(groups, list) and all(isinstance(group, dict) for group in groups):
            lacking = [
                f"{self._name}.param_groups.{index}.{key}"
                for index, (own, saved) in enumerate(zip(self.optimizer.param_groups, groups, strict=False))
                for key in own
                if key not in saved
            ]
            if lacking:
                raise LoadError(f"the checkpoint lacks {', '.join(lacking)}", hint=AS_SAVED)
        with plain_modes():
            self.optimizer.load_state_dict(state)

    def forget(self) -> None:
        """Go back to an optimizer that has not stepped: remove what :meth:`current` made."""
        self.optimizer.state.clear()

    def expected_tensors(self) -> list[torch.Tensor]:
        """Return tensors as large as the state, made or to be expected after the first step."""
        if self.optimizer.state:
            tables = (values for values in self.optimizer.state.values() if isinstance(values, dict))
            return [value for table in tables for value in table.values() if isinstance(value, torch.Tensor)]
        defaults = self.optimizer.defaults
        copies = 1 if defaults.get("momentum") else 0
        if "betas" in defaults:
            copies = 3 if defaults.get("amsgrad") else 2
        return [each for each in parameters_of(self.optimizer) if each.requires_grad] * copies


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the parameters of all groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _has_flat_parameters(root: nn.Module) -> bool:
    return any(isinstance(module, FullyShardedDataParallel) for module in root.modules())


def _has_other_dtype(held: object, value: object) -> bool:
    return isinstance(held, torch.Tensor) and isinstance(value, torch.Tensor) and held.dtype != value.dtype


@contextlib.contextmanager
def _not_frozen(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Have all parameters need gradients: torch neither makes nor loads the state of those without."""
    frozen = [p for p in parameters if not p.requires_grad and (p.is_floating_point() or p.is_complex())]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


# ---- names ----------------------------------------------------------------------------------------------------


def _by_torch(root: nn.Module, optimizer: Optimizer) -> _State:
    with plain_modes():
        state: Any = get_optimizer_state_dict(root, optimizer)
    return {
        "state": {uncompiled(name): values for name, values in state["state"].items()},
        "param_groups": [
            {**group, "params": [uncompiled(name) for name in group["params"]]} for group in state["param_groups"]
        ],
    }


class _Names(Optimizer):
    """An optimizer that does nothing, of the parameters of another one, by which torch tells their names."""

    def __init__(self, of: Optimizer) -> None:
        super().__init__([{"params": group["params"]} for group in of.param_groups], {})
        for parameter in parameters_of(of):
            self.state[parameter] = {}  # torch takes it for made, and has it take no step

    def step(self, closure: Any = None) -> Any:
        """Do nothing."""


def _names_of(root: nn.Module, optimizer: Optimizer) -> list[str]:
    """Return the names of an optimizer's parameters, in the order of its groups."""
    return _names_in(_by_torch(root, _Names(optimizer))) if parameters_of(optimizer) else []


def _names_in(state: _State) -> list[str]:
    return [name for group in state["param_groups"] for name in group["params"]]


def _named(state: Mapping[str, Any], names: list[str]) -> _State:
    """Return what `Optimizer.state_dict()` gives, with names in the place of numbers."""
    return {
        "state": {names[number]: values for number, values in state["state"].items()},
        "param_groups": [{**group, "params": [names[i] for i in group["params"]]} for group in state["param_groups"]],
    }


def _root_of(parameters: list[torch.Tensor], modules: Mapping[str, nn.Module]) -> nn.Module | None:
    """Return a module that has all these parameters: a tracked one, or several put together; None if there is none."""
    wanted = {id(parameter) for parameter in parameters}
    owned = {name: wanted & {id(p) for p in module.parameters()} for name, module in modules.items()}
    for name, module in modules.items():
        if owned[name] == wanted:
            return module
    together = nn.Module()
    for name, module in modules.items():
        if owned[name] & wanted:
            together.add_module(f"tracked_{name}", module)
            wanted -= owned[name]
    return together if not wanted else None


def _is_same(own: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    return (
        own["param_groups"] == theirs["param_groups"]
        and own["state"].keys() == theirs["state"].keys()
        and all(
            values.keys() == theirs["state"][name].keys()
            and all(value is theirs["state"][name][key] for key, value in values.items())
            for name, values in own["state"].items()
        )
    )


def _is_table(optimizer: Optimizer) -> bool:
    """Return True if all of the state has a name of its own in a checkpoint, under which it comes back as it was."""
    tables = list(optimizer.state.values())
    if not all(issubclass(kind, dict) for kind in set(map(type, tables))):
        return False
    kinds = set(map(type, chain.from_iterable(map(operator.methodcaller("values"), tables))))
    return (
        all(issubclass(kind, torch.Tensor) for kind in set(map(type, optimizer.state)))
        and set(map(type, chain.from_iterable(tables))) <= {str}
        and all(issubclass(kind, _SIMPLE) for kind in kinds)
        and all(map(_has_named_parts, chain.from_iterable(group.values() for group in optimizer.param_groups)))
    )


def _has_named_parts(value: object) -> bool:
    """Return True if all keys in a value are strings, as DCP makes them of any others."""
    if isinstance(value, Mapping):
        return set(map(type, value)) <= {str} and all(map(_has_named_parts, value.values()))
    if not isinstance(value, list):
        return True
    return set(map(type, value)) <= _PLAIN or all(map(_has_named_parts, value))


def _unshared(group: _State) -> _State:
    """Return a group with tensors of its own: groups share those that are defaults, such as a learning rate."""
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in group.items()}


def _is_alike(one: _State, other: _State) -> bool:
    """Return True if two groups have the same hyper-parameters."""
    return one.keys() == other.keys() and all(
        torch.equal(value, other[key]) if isinstance(value, torch.Tensor) else value == other[key]
        for key, value in one.items()
        if key != "params"
    )


# ---- places for what a checkpoint has, and a new optimizer does not have yet -----------------------------------


def _add_places(name: str, state: _State, metadata: Metadata, parameters: Mapping[str, torch.Tensor]) -> None:
    """Give a state a place for all that a checkpoint has of it: DCP loads into what there is, and a new optimizer only
    has what its first step makes. What is sharded otherwise than its parameter gets no place, nor do parameters and
    groups that there are not: loading says so.

    Args:
        state: its dictionaries are changed, and what they have of the optimizer is not.
        parameters: of the optimizer, by the names in the state.
    """
    paths: Mapping[str, tuple[str | int, ...]] = metadata.planner_data or {}
    for key, entry in metadata.state_dict_metadata.items():
        path = paths.get(key, ())
        match path:
            case (own, "state", str(parameter), str(kind)) if own == name and parameter in parameters:
                value = state["state"].get(parameter, {}).get(kind, _NOTHING)
                place = _place(value, kind, entry, parameters[parameter])
                if place is not _NOTHING:
                    state["state"].setdefault(parameter, {})[kind] = place
            case (own, "param_groups", int(group), *_) if own == name and 0 <= group < len(state["param_groups"]):
                place = _place(_found(state, path[1:]), path[-1], entry, None)
                if place is not _NOTHING and _has_room(state, path[1:]):
                    set_element(state, path[1:], place)


def _place(value: object, kind: str | int, entry: object, parameter: torch.Tensor | None) -> object:
    """Return what to load an item into, if that is another thing than what is there; else `_NOTHING`."""
    is_tensor = isinstance(entry, TensorStorageMetadata)
    if value is not _NOTHING and isinstance(value, torch.Tensor) is is_tensor and _fits(value, entry):
        return _NOTHING
    if not isinstance(entry, TensorStorageMetadata):
        return None
    dtype, is_element = entry.properties.dtype, not entry.size
    if entry.properties.layout is not torch.strided:
        return _NOTHING
    if isinstance(parameter, DTensor) and not is_element:
        return torch.empty_like(parameter.detach(), dtype=dtype) if entry.size == parameter.shape else _NOTHING
    # Optimizers keep numbers of steps on the CPU, and everything else on the parameter's device.
    device = "cpu" if parameter is None or kind == "step" else parameter.device
    return torch.empty(entry.size, dtype=dtype, device=device)


def _fits(value: object, entry: object) -> bool:
    """Return True if a value of the right kind can be loaded into. Elements also need the dtype that was saved: a
    number of steps has the default dtype of the program that made it."""
    if not isinstance(entry, TensorStorageMetadata) or isinstance(value, (DTensor, ShardedTensor)):
        return True
    assert isinstance(value, torch.Tensor)
    return value.shape == entry.size and (bool(entry.size) or value.dtype == entry.properties.dtype)


def _found(state: Any, path: tuple[str | int, ...]) -> object:
    for part in path:
        try:
            state = state[part]
        except (LookupError, TypeError):
            return _NOTHING
    return state


def _has_room(state: Any, path: tuple[str | int, ...]) -> bool:
    """Return True if everything on the way is a container, or not there."""
    containers = (_found(state, path[:end]) for end in range(len(path)))
    kinds = (dict if isinstance(part, str) else list for part in path)
    return all(each is _NOTHING or isinstance(each, kind) for each, kind in zip(containers, kinds, strict=True))
