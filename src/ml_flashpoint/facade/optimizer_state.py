"""The state of one tracked optimizer, by names of parameters, so that it can be resharded.

Owns the calls of torch's `get_optimizer_state_dict` and `set_optimizer_state_dict`, a shortcut around the former
(see `module_state`), and what they leave out: parameters without state, and state of another dtype than its
parameter. An optimizer that they cannot name is saved whole, by each rank for itself. State that a new optimizer does
not have yet gets its places from `optimizer_places`.
"""

from __future__ import annotations

import contextlib
import logging
import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ml_flashpoint.facade.fit import AS_SAVED
from ml_flashpoint.facade.module_state import uncompiled
from ml_flashpoint.facade.optimizer_places import add_places
from ml_flashpoint.facade.plain_modes import plain_modes
from ml_flashpoint.format.errors import LoadError

_log = logging.getLogger(__name__)

_State = dict[str, Any]


class OptimizerState:
    """One tracked optimizer. Not thread-safe.

    Args:
        name: what it is tracked as.
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
        # What was found out about these parameters in modules of these names, and holds until one of them changes.
        self._examined: list[torch.Tensor] = []
        self._modules_had: list[list[str]] = []
        self._named: list[torch.Tensor] = []
        self._root: nn.Module | None = None
        self._nameable = self._simple = False
        self._names: list[str] | None = None
        # At loading: state that the optimizer starts with and the checkpoint lacks, by parameter and key.
        self._absent: dict[str, _State] = {}
        self._parameters: dict[str, torch.Tensor] = {}
        # Whether this program has saved or loaded it: its own earlier versions may lack what has come since.
        self._is_under_way = False

    def to_save(self, names: list[list[str]]) -> _State | None:
        """The state by parameter names: references, not copies. None if it has to be saved whole.

        Args:
            names: of all that is saved of each tracked module: parameters may get other names and stay what they are.
        """
        self._is_under_way = True
        if not self.optimizer.state and type(self.optimizer).state_dict is not Optimizer.state_dict:
            return None  # what it gives cannot be compared with what torch's function gives, which would make it step
        parameters = _parameters(self.optimizer)
        # Names may go on to other parameters, and be the same ones.
        modules = self._modules.values()
        named: list[torch.Tensor] = [p for each in modules for _, p in each.named_parameters(remove_duplicate=False)]
        same = _are_same(parameters, self._examined) and _are_same(named, self._named)
        simple = _is_table(self.optimizer)  # it may become another thing after any step
        if not same or names != self._modules_had or simple != self._simple:
            self._simple = simple
            self._examine(parameters)
            self._modules_had, self._named = names, named
        if not self._nameable:
            return None
        assert self._root is not None
        if self._names is None:
            return _by_torch(self._root, self.optimizer) if self.optimizer.state else None
        return _named(self.optimizer.state_dict(), self._names)

    @property
    def names(self) -> list[str] | None:
        """Names of the parameters, in the order of the groups, if the latest :meth:`to_save` gave the optimizer's own
        ``state_dict()`` with these in the place of numbers."""
        return self._names if self._nameable else None

    def _examine(self, parameters: list[torch.Tensor]) -> None:
        self._examined, self._names = parameters, None
        self._root = _root_of(parameters, self._modules)
        self._nameable = self._simple and self._root is not None
        if not self._nameable:
            why = (
                "its state is no table of tensors" if self._root is not None else "no tracked module has its parameters"
            )
            _log.warning(
                "optimizer %r is saved whole by each rank (%s); if it is sharded, only as many ranks can load it",
                self._name,
                why,
            )
            return
        assert self._root is not None
        if _has_flat_parameters(self._root):
            return
        names = _names_of(self._root, self.optimizer)
        if not self.optimizer.state or _is_same(
            _named(self.optimizer.state_dict(), names), _by_torch(self._root, self.optimizer)
        ):
            self._names = names

    # ---- loading ------------------------------------------------------------------------------------------

    def current(self, metadata: Metadata) -> _State:
        """What a checkpoint is loaded into. A fresh optimizer gets its state made.

        Raises:
            LoadError: no tracked module has the optimizer's parameters.
        """
        parameters = _parameters(self.optimizer)
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
        keys, saved = metadata.state_dict_metadata, self._saved_with_state(metadata)
        for name, values in state["state"].items():
            kept = {k: v for k, v in values.items() if self._is_saved(f"{self._name}.state.{name}.{k}", v, keys)}
            if name in saved and not self._is_under_way:
                self.lacking += [f"{self._name}.state.{name}.{key}" for key in values if key not in kept]
            if len(kept) < len(values) or not values:
                self._absent[name] = {k: v for k, v in values.items() if k not in kept}
            if kept:
                present[name] = kept
        target = {"state": present, "param_groups": [_unshared(group) for group in state["param_groups"]]}
        if not _has_flat_parameters(root):
            add_places(self._name, target, metadata, self._parameters)
        return target

    def _by_torch_or_empty(self, root: nn.Module, parameters: list[torch.Tensor]) -> _State:
        """The state by names; empty for each parameter where a new optimizer takes no step without effect."""
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

    def _saved_with_state(self, metadata: Metadata) -> set[str | int]:
        """Names of the parameters that the checkpoint has any state of."""
        paths: Iterable[tuple[str | int, ...]] = (metadata.planner_data or {}).values()
        return {path[2] for path in paths if len(path) > 3 and path[:2] == (self._name, "state")}

    @staticmethod
    def _is_saved(key: str, value: object, keys: Mapping[str, object]) -> bool:
        return key in keys or isinstance(value, (dict, list, tuple))

    def load(self, state: _State) -> None:
        """Hand loaded state, as :meth:`current` gave it, to the optimizer.

        Raises:
            LoadError: parameters of one group come from groups with other hyper-parameters.
        """
        assert self._root is not None
        self._is_under_way = True
        if _has_flat_parameters(self._root):
            self._load_flat(state)
            return
        loaded: dict[str, _State] = state["state"]
        with plain_modes():
            # Names take the place of numbers: all that counts is that groups and state call a parameter the same.
            self.optimizer.load_state_dict({"state": loaded, "param_groups": self._groups(state["param_groups"])})
        self._keep_dtypes(loaded)
        self._absent, self._parameters = {}, {}

    def _keep_dtypes(self, loaded: Mapping[str, _State]) -> None:
        """Give state back whose bits were lost: optimizers convert it to the parameter's dtype."""
        for name, values in loaded.items():
            if name in self._parameters:
                held = self.optimizer.state[self._parameters[name]]
                for key, value in values.items():
                    if isinstance(value, torch.Tensor) and key in held and held[key].dtype != value.dtype:
                        held[key] = value

    def _groups(self, saved: list[_State]) -> list[_State]:
        """The groups that there are, with all hyper-parameters as they were saved: those of the group that had the same
        parameters, or of the one in the same place if a group has none."""
        group_of = {name: index for index, group in enumerate(saved) for name in group["params"]}
        groups: list[_State] = []
        for index, group in enumerate(group_state(self.optimizer.param_groups, list(self._parameters))):
            names = group["params"]
            first, *others = dict.fromkeys(group_of[name] for name in names if name in group_of) or [index]
            if not all(_is_alike(saved[first], saved[other]) for other in others):
                raise LoadError(
                    f"group {index} of optimizer {self._name!r} has parameters of groups {first} and {others[0]} of the"
                    " saved one, which had other hyper-parameters",
                    hint=AS_SAVED,
                )
            groups.append({**saved[first], "params": names})
        return groups

    def _load_flat(self, state: _State) -> None:
        """Load parameters that FSDP has flattened, which only torch's function knows to take apart."""
        assert self._root is not None
        loaded: dict[str, _State] = state["state"]
        # Torch insists on state for every parameter. What the checkpoint lacks goes in, and is removed again.
        without = [name for name, parameter in self._parameters.items() if parameter not in self.optimizer.state]
        names = dict.fromkeys([*loaded, *self._absent, *without])
        filled = {name: {**self._absent.get(name, {}), **loaded.get(name, {})} for name in names}
        complete: Any = {"state": filled, "param_groups": state["param_groups"]}
        with plain_modes(), _not_frozen(self._parameters[name] for name in filled if name in self._parameters):
            set_optimizer_state_dict(self._root, self.optimizer, complete)
        self._keep_dtypes(filled)
        for name in filled:
            if (parameter := self._parameters.get(name)) is None:
                continue
            held = self.optimizer.state[parameter]
            for key in self._absent.get(name, {}):
                held.pop(key, None)
            if not held:
                del self.optimizer.state[parameter]
        self._absent, self._parameters = {}, {}

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
        """Back to an optimizer that has not stepped: what :meth:`current` made goes away."""
        self.optimizer.state.clear()

    def expected_tensors(self) -> list[torch.Tensor]:
        """Tensors as large as the state, made or to be expected after the first step."""
        if self.optimizer.state:
            return [
                value
                for values in self.optimizer.state.values()
                if isinstance(values, dict)
                for value in values.values()
                if isinstance(value, torch.Tensor)
            ]
        copies = 0
        defaults = self.optimizer.defaults
        if "betas" in defaults:
            copies = 3 if defaults.get("amsgrad") else 2
        elif defaults.get("momentum"):
            copies = 1
        return [p for p in _parameters(self.optimizer) if p.requires_grad] * copies


def _has_flat_parameters(root: nn.Module) -> bool:
    return any(isinstance(module, FullyShardedDataParallel) for module in root.modules())


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@contextlib.contextmanager
def _not_frozen(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Torch neither makes nor loads the state of parameters without gradients: they may have been frozen with it."""
    frozen = [p for p in parameters if not p.requires_grad and (p.is_floating_point() or p.is_complex())]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


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
    """An optimizer that does nothing, of the parameters of another one, to be told their names.

    Args:
        of: the other one.
    """

    def __init__(self, of: Optimizer) -> None:
        super().__init__([{"params": group["params"]} for group in of.param_groups], {})
        for parameter in _parameters(of):
            self.state[parameter] = {}  # torch takes it for made, and has it take no step

    def step(self, closure: Any = None) -> Any:
        """Do nothing."""


def _names_of(root: nn.Module, optimizer: Optimizer) -> list[str]:
    """Names of an optimizer's parameters, in the order of its groups."""
    return _names_in(_by_torch(root, _Names(optimizer))) if _parameters(optimizer) else []


def _unshared(group: _State) -> _State:
    """A group with tensors of its own: groups share those that are defaults, such as a learning rate."""
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in group.items()}


def _is_alike(one: _State, other: _State) -> bool:
    """Whether two groups have the same hyper-parameters."""
    return one.keys() == other.keys() and all(
        torch.equal(value, other[key]) if isinstance(value, torch.Tensor) else value == other[key]
        for key, value in one.items()
        if key != "params"
    )


def _names_in(state: _State) -> list[str]:
    return [name for group in state["param_groups"] for name in group["params"]]


def _root_of(parameters: list[torch.Tensor], modules: Mapping[str, nn.Module]) -> nn.Module | None:
    """A module that has all these parameters: a tracked one, or several put together; None if there is none."""
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


def _are_same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


def _named(state: Mapping[str, Any], names: list[str]) -> _State:
    """What `Optimizer.state_dict()` gives, with names in the place of numbers."""
    return {
        "state": {names[number]: values for number, values in state["state"].items()},
        "param_groups": [{**group, "params": [names[i] for i in group["params"]]} for group in state["param_groups"]],
    }


def group_state(groups: list[_State], names: list[str]) -> list[_State]:
    """What a state dict with names has for these groups of parameters, which have these names in all."""
    begin, states = 0, []
    for group in groups:
        end = begin + len(group["params"])
        states.append({**{key: value for key, value in group.items() if key != "params"}, "params": names[begin:end]})
        begin = end
    return states


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
    """Whether all of the state has a name of its own in a checkpoint, under which it comes back as what it was."""
    return all(
        isinstance(key, torch.Tensor)
        and isinstance(values, dict)
        and set(map(type, values)) <= {str}
        and all(map(_is_simple, values.values()))
        for key, values in optimizer.state.items()
    ) and all(_has_named_parts(value) for group in optimizer.param_groups for value in group.values())


def _is_simple(value: object) -> bool:
    return isinstance(value, (torch.Tensor, DTensor, bool, int, float, str, type(None)))


def _has_named_parts(value: object) -> bool:
    """Whether all keys in it are strings, as they are made of any others."""
    if isinstance(value, Mapping):
        return set(map(type, value)) <= {str} and all(map(_has_named_parts, value.values()))
    return not isinstance(value, list) or all(map(_has_named_parts, value))
