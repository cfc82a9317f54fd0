"""The state of tracked modules and optimizers, by names of parameters: so another number of ranks can load it.

The names do not depend on how a module is wrapped, compiled or sharded. Parameters that FSDP has flattened are named,
and loaded, by torch's own functions. An optimizer that cannot be named is saved whole, by each rank for itself.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import operator
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ml_flashpoint.format.errors import LoadError
from ml_flashpoint.state.archive import PackedState, packed, plain_modes
from ml_flashpoint.state.private import ShardedTensor

_log = logging.getLogger(__name__)

AS_SAVED = "make and track models and optimizers as they were when it was saved"

_COMPILED = "_orig_mod"
"""The attribute of a compiled module in which the module itself is."""
_WRAPPERS = re.compile(rf"(?<![^.])(?:{_COMPILED}|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")
_SIMPLE = (torch.Tensor, bool, int, float, str, type(None))

_OF_PARAMETERS = ("params", "param_names")
"""Keys of a group that say whose it is, and are no hyper-parameters."""

_State = dict[str, Any]
Named = list[tuple[str, nn.Parameter]]
"""Parameters by plain names."""


def _unwrapped(module: nn.Module) -> nn.Module:
    """Return the module within DDP and compilation."""
    while True:
        if isinstance(module, DistributedDataParallel):
            module = module.module
        elif isinstance(compiled := getattr(module, _COMPILED, None), nn.Module):
            module = compiled
        else:
            return module


def _plain(name: str) -> str:
    return _WRAPPERS.sub("", name)


def _plain_names(module: nn.Module, names: Collection[str]) -> list[str]:
    """Return a module's own names of parameters or buffers without what wrappers, and DDP inside of it, add to them."""
    plain = list(map(_plain, names))
    parts = module.named_modules(remove_duplicate=False)
    inside = [_plain(f"{name}.") for name, part in parts if isinstance(part, DistributedDataParallel)]
    for prefix in reversed(inside):  # the innermost first
        own = f"{prefix}module."
        plain = [prefix + name[len(own) :] if name.startswith(own) else name for name in plain]
    return plain


def named_parameters(module: nn.Module) -> Named:
    """Return the parameters by plain names; one that is tied by the first of its names."""
    inner = _unwrapped(module)
    own = dict(inner.named_parameters())
    return list(zip(_plain_names(inner, own), own.values(), strict=True))


def freeze_parameters(module: nn.Module, names: Collection[str]) -> None:
    """Have exactly the parameters of these plain names need no gradients."""
    names = frozenset(names)
    for name, parameter in named_parameters(module):
        trained = name not in names
        if parameter.requires_grad != trained and (parameter.is_floating_point() or parameter.is_complex()):
            parameter.requires_grad_(trained)
    for part in module.modules():
        if isinstance(part, DistributedDataParallel):
            known = part._get_ddp_logging_data().get("num_parameter_tensors")  # type: ignore[no-untyped-call]
            trained_now = sum(parameter.requires_grad for parameter in part.parameters())
            if known is not None and known < trained_now:
                _log.warning(
                    "%d parameters are trained that were frozen when DistributedDataParallel was made, which does not"
                    " synchronize their gradients: freeze parameters after it is made, or make it after resume()",
                    trained_now - known,
                )


class ModuleState:
    """One tracked module: plain, compiled, or wrapped by DDP, FSDP2 or FSDP, or with DTensors for parameters."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.module = name, module
        self._names: dict[str, str] = {}  # the module's own names, by plain ones

    @functools.cached_property
    def is_flat(self) -> bool:
        """True if FSDP has flattened parameters, which only torch's own functions take apart."""
        return any(isinstance(part, FullyShardedDataParallel) for part in self.module.modules())

    def to_save(self) -> _State:
        """Return what this rank offers to save: references, not copies.

        Of buffers under DDP, those of rank 0 count, since forward broadcasts them from there.
        """
        state = self.current()
        if isinstance(self.module, DistributedDataParallel) and dist.get_rank(self.module.process_group) != 0:
            module = _unwrapped(self.module)
            for name in _plain_names(module, dict(module.named_buffers(remove_duplicate=False))):
                state.pop(name, None)
        return state

    def current(self) -> _State:
        """Return the state dict, of references; also what a checkpoint is loaded into. Extra state that is no tensor is
        packed, as it has no names."""
        with plain_modes():
            if self.is_flat:  # FSDP's own `state_dict()` gathers everything
                own = get_model_state_dict(self.module)
                names = list(map(_plain, own))
            else:
                module = _unwrapped(self.module)
                own = module.state_dict()
                names = _plain_names(module, own)
        self._names = dict(zip(names, own, strict=True))
        return {
            name: value if isinstance(value, torch.Tensor) else packed(value, f"{self.name}.{name}")
            for name, value in zip(names, own.values(), strict=True)
        }

    def load(self, state: _State) -> None:
        """Hand a loaded state dict, the one that :meth:`current` gave, to the module."""
        own = {self._names[name]: value for name, value in state.items()}
        with plain_modes():
            if own and self.is_flat:
                set_model_state_dict(self.module, own)
            elif own:
                _unwrapped(self.module).load_state_dict(own)


class OptimizerState:
    """One tracked optimizer, and the modules tracked beside it, by name, which may still grow.

    Attributes:
        lacking: names of items that the optimizer has, as a program that has just started makes it, and that the
            checkpoint of the latest :meth:`current` lacks although it has other state of their parameters.
    """

    def __init__(self, name: str, optimizer: Optimizer, modules: Mapping[str, ModuleState]) -> None:
        self.optimizer = optimizer
        self.lacking: list[str] = []
        self._name = name
        self._modules = modules
        self._is_told = False  # that it is saved whole
        # At loading: parameters by their names, and state that the optimizer starts with and the checkpoint lacks.
        self._parameters: dict[str, torch.Tensor] = {}
        self._grouped: list[list[str]] = []  # names of the parameters of each group
        self._absent: dict[str, _State] = {}
        self._root: nn.Module | None = None  # the module, if FSDP has flattened it
        # Whether this program has saved or loaded it: its own earlier versions may lack what has come since.
        self._is_under_way = False

    def to_save(self, named: Mapping[str, Named]) -> _State | None:
        """Return references to the state by names of parameters, and copies of the groups; None if the optimizer has to
        be saved whole. ``named`` are the parameters of the modules."""
        self._is_under_way = True
        (names, root), own = self._names(named), self.optimizer.state_dict()
        if names is None or not _is_table(own, len(names)):
            why = "its state is no table of tensors; if it is sharded, only as many ranks can load it"
            if names is None:
                why = "no tracked module has its parameters; track the model, too, unless something else that is"
                why += " tracked has these weights: a restart would have those that the program makes"
            if not self._is_told:
                _log.warning("optimizer %r is saved whole by each rank: %s", self._name, why)
            self._is_told = True
            return None
        if root is None:
            # torch's pytree takes tables of other types for leaves.
            state = {names[number]: dict(values) for number, values in own["state"].items()}
            groups = [{**each, "params": [names[number] for number in each["params"]]} for each in own["param_groups"]]
        elif _any_rank_has_state(root, self.optimizer):
            with _not_made(self.optimizer):
                state, groups = _by_torch(root, self.optimizer)
        else:
            return None  # torch would have it take a step
        # DCP reads an item an option. The names of parameters are a new list at each save: nothing to copy.
        options = [
            {
                key: PackedState(each) if key == "params" else packed(each, self._of_group(n, key))
                for key, each in group.items()
            }
            for n, group in enumerate(groups)
        ]
        return {"state": state, "param_groups": options}

    def _of_group(self, number: int, key: str) -> str:
        return f"{self._name}.param_groups.{number}.{key}"

    def _names(self, named: Mapping[str, Named]) -> tuple[list[str] | None, nn.Module | None]:
        """Return the names of the parameters, in the order of the groups, and the module if FSDP has flattened it. No
        names: a parameter is in no module, or in one of several that FSDP has flattened."""
        numbers = list(map(id, parameters_of(self.optimizer)))
        together: dict[int, str] = {}
        for prefix, pairs in named.items():
            module, table = self._modules[prefix], {id(parameter): name for name, parameter in pairs}
            if table.keys() >= set(numbers):
                return [table[number] for number in numbers], module.module if module.is_flat else None
            if not module.is_flat:
                together = {number: f"tracked_{prefix}.{name}" for number, name in table.items()} | together
        return [together[each] for each in numbers] if together.keys() >= set(numbers) else None, None

    def current(self, metadata: Metadata) -> _State:
        """Return what a checkpoint is loaded into. A fresh optimizer gets its state made. Raise a `LoadError` if no
        tracked module has the optimizer's parameters."""
        names, root = self._names({name: named_parameters(each.module) for name, each in self._modules.items()})
        self._root = root
        if names is None:
            raise LoadError(
                f"optimizer {self._name!r} was saved by parameter names, and no tracked module has its parameters",
                hint="track the same modules as when it was saved",
            )
        parameters = parameters_of(self.optimizer)
        if root is not None:
            if not self.optimizer.state:
                self.optimizer.zero_grad(set_to_none=True)  # with gradients there, torch does not make the state
            with _not_frozen(parameters):
                state, made = _by_torch(root, self.optimizer)
            self._grouped = [group["params"] for group in made]
            names = list(itertools.chain(*self._grouped))
        else:
            state, rest = self._made(names), iter(names)
            self._grouped = [list(itertools.islice(rest, len(g["params"]))) for g in self.optimizer.param_groups]
        self._parameters = dict(zip(names, parameters, strict=False)) if len(names) == len(parameters) else {}
        saved: dict[Any, dict[Any, object]] = {}
        options: dict[Any, _State] = {}
        for key, path in (metadata.planner_data or {}).items():
            if len(path) == 4 and path[:2] == (self._name, "state"):
                saved.setdefault(path[2], {})[path[3]] = metadata.state_dict_metadata[key]
            elif len(path) == 4 and path[:2] == (self._name, "param_groups"):
                options.setdefault(path[2], {})[path[3]] = PackedState()
        groups = [options[number] for number in sorted(options)]
        self._absent, self.lacking = {}, self._lacking_options(groups)
        present: dict[str, _State] = {}
        for name in names:
            held, entries = state.get(name, {}), saved.get(name, {})
            absent = {kind: value for kind, value in held.items() if kind not in entries}
            if entries and not self._is_under_way:
                self.lacking += [f"{self._name}.state.{name}.{kind}" for kind in absent]
            found = {kind: value for kind, value in held.items() if kind in entries}
            if root is None:
                found |= _places(found, entries, self._parameters[name])
            elif absent or not held:
                self._absent[name] = absent
            if found:
                present[name] = found
        return {"state": present, "param_groups": groups}

    def _lacking_options(self, groups: list[_State]) -> list[str]:
        """Return the names of hyper-parameters that the groups have, and saved ones lack."""
        pairs = enumerate(itertools.zip_longest(self.optimizer.param_groups, groups, fillvalue=()))
        return [self._of_group(n, key) for n, (own, its) in pairs for key in own if key not in its]

    def _made(self, names: list[str]) -> _State:
        """Return the state by names. A new optimizer makes it by a step without effect, if it takes one."""
        optimizer = self.optimizer
        if not optimizer.state:
            rates = [group.get("lr") for group in optimizer.param_groups]
            try:
                with plain_modes():
                    for parameter in parameters_of(optimizer):
                        if parameter.is_floating_point() or parameter.is_complex():
                            parameter.grad = torch.zeros_like(parameter)
                    for group, rate in zip(optimizer.param_groups, rates, strict=True):
                        if rate is not None:
                            group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
                    optimizer.step()
            except Exception as error:  # of whatever kind: it may want sparse gradients, or a closure
                optimizer.state.clear()
                _log.info("optimizer %r takes no step without gradients: %s", self._name, error)
            finally:
                optimizer.zero_grad(set_to_none=True)
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    if rate is not None:
                        group["lr"] = rate
        own = optimizer.state_dict()["state"]  # as it is saved: hooks may leave out items, or rename them
        return {name: own[number] for number, name in enumerate(names) if number in own}

    def load(self, state: _State) -> None:
        """Hand loaded state, as :meth:`current` gave it, to the optimizer. Raises a `LoadError` if parameters of one
        group come from groups with other hyper-parameters."""
        self._is_under_way = True
        loaded, groups = state["state"], state["param_groups"]
        if self._root is not None:
            self._load_flat(self._root, loaded, groups)
        else:
            with plain_modes():
                # Names take the place of numbers: groups and state only have to call a parameter the same.
                self.optimizer.load_state_dict({"state": loaded, "param_groups": self._groups(groups)})
        for name, values in loaded.items():
            if name in self._parameters:
                held = self.optimizer.state[self._parameters[name]]
                # Optimizers convert state to the parameter's dtype, which loses bits.
                held.update((key, value) for key, value in values.items() if _has_other_dtype(held.get(key), value))
        self._absent, self._parameters = {}, {}

    def _groups(self, saved: list[_State]) -> list[_State]:
        """Return the groups, with the hyper-parameters of the saved group that had their parameters, or their place."""
        group_of = {name: index for index, group in enumerate(saved) for name in group["params"]}
        groups: list[_State] = []
        for index, (group, own) in enumerate(zip(self.optimizer.param_groups, self._grouped, strict=True)):
            first, *others = dict.fromkeys(group_of[name] for name in own if name in group_of) or [index]
            if not all(_is_alike(saved[first], saved[other]) for other in others):
                raise LoadError(
                    f"group {index} of optimizer {self._name!r} has parameters of groups {first} and {others[0]} of the"
                    " saved one, which had other hyper-parameters",
                    hint=AS_SAVED,
                )
            # In the optimizer's own order: that of the items is by the rank that wrote each.
            options = {key: value for key, value in saved[first].items() if key not in _OF_PARAMETERS}
            groups.append({**group, **options, "params": own})
        return groups

    def _load_flat(self, root: nn.Module, loaded: dict[str, _State], groups: list[_State]) -> None:
        """Load parameters that FSDP has flattened. torch insists on state for all: what is lacking goes in, and out."""
        state, parameters = self.optimizer.state, self._parameters
        names = dict.fromkeys([*loaded, *self._absent, *(n for n, each in parameters.items() if each not in state)])
        filled = {name: {**self._absent.get(name, {}), **loaded.get(name, {})} for name in names}
        complete: Any = {"state": filled, "param_groups": [group for group in groups if group["params"]]}
        options, own = self._groups(groups), self.optimizer.param_groups
        self.optimizer.param_groups = [group for group in own if group["params"]]  # torch loses others, or refuses them
        try:
            with plain_modes(), _not_frozen(parameters[name] for name in filled if name in parameters):
                set_optimizer_state_dict(root, self.optimizer, complete)
        finally:
            made = iter(self.optimizer.param_groups)
            self.optimizer.param_groups = [next(made) if group["params"] else group for group in own]
        for group, saved in zip(self.optimizer.param_groups, options, strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        for name in filled.keys() & parameters.keys():
            held = self.optimizer.state[parameters[name]]
            for key in self._absent.get(name, {}):
                held.pop(key, None)
            if not held:
                del self.optimizer.state[parameters[name]]

    def load_whole(self, state: Any) -> None:
        """Hand the optimizer a state that was saved whole. Raises a `LoadError` if it lacks what is needed."""
        groups: Any = state.get("param_groups") if isinstance(state, dict) else None
        is_usual = isinstance(groups, list) and all(isinstance(group, dict) for group in groups)
        if is_usual and (lacking := self._lacking_options(groups)):
            raise LoadError(f"the checkpoint lacks {', '.join(lacking)}", hint=AS_SAVED)
        with plain_modes():
            self.optimizer.load_state_dict(state)

    def forget(self) -> None:
        """Go back to an optimizer that has not stepped: remove what :meth:`current` made."""
        self.optimizer.state.clear()


def expected_tensors(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return tensors as large as an optimizer's state, made or to be expected after the first step."""
    if optimizer.state:
        tables = (values for values in optimizer.state.values() if isinstance(values, dict))
        return [value for table in tables for value in table.values() if isinstance(value, torch.Tensor)]
    copies = 1 if optimizer.defaults.get("momentum") else 0
    if "betas" in optimizer.defaults:
        copies = 3 if optimizer.defaults.get("amsgrad") else 2
    return [each for each in parameters_of(optimizer) if each.requires_grad] * copies


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the parameters of all groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _has_other_dtype(held: object, value: object) -> bool:
    return isinstance(held, torch.Tensor) and isinstance(value, torch.Tensor) and held.dtype != value.dtype


@contextlib.contextmanager
def _not_frozen(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Have all parameters need gradients: torch neither makes nor loads the state of those without."""
    without = [p for p in parameters if not p.requires_grad and (p.is_floating_point() or p.is_complex())]
    for parameter in without:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in without:
            parameter.requires_grad_(False)


def _any_rank_has_state(root: nn.Module, optimizer: Optimizer) -> bool:
    """Return True if the optimizer has state on a rank that FSDP shares the parameters with: collective, as what then
    reads the state is. A rank has none of its own if all that it has of the parameters is frozen."""
    part = next(each for each in root.modules() if isinstance(each, FullyShardedDataParallel))
    has_state = torch.tensor([bool(optimizer.state)], dtype=torch.int64, device=part.compute_device)
    dist.all_reduce(has_state, dist.ReduceOp.MAX, group=part.process_group)
    return bool(has_state.item())


@contextlib.contextmanager
def _not_made(optimizer: Optimizer) -> Iterator[None]:
    """Have torch make no state for an optimizer without any: it makes none where there are gradients."""
    parameters = parameters_of(optimizer)
    if optimizer.state or not parameters or any(each.grad is not None for each in parameters):
        yield
        return
    parameters[0].grad = torch.zeros_like(parameters[0])
    try:
        yield
    finally:
        parameters[0].grad = None


def _by_torch(root: nn.Module, optimizer: Optimizer) -> tuple[dict[str, _State], list[_State]]:
    with plain_modes():
        state: Any = get_optimizer_state_dict(root, optimizer)
    groups = [{**group, "params": list(map(_plain, group["params"]))} for group in state["param_groups"]]
    return {_plain(name): values for name, values in state["state"].items()}, groups


def _is_table(own: Mapping[str, Any], count: int) -> bool:
    """Return True if all of a state dict has names of its own in a checkpoint, under which it comes back as it was."""
    if own.keys() != {"state", "param_groups"}:
        return False
    tables, numbers = list(own["state"].values()), list(range(count))
    if [kind for kind in set(map(type, tables)) if not issubclass(kind, dict)]:
        return False
    kinds = set(map(type, itertools.chain.from_iterable(map(operator.methodcaller("values"), tables))))
    return (
        [number for group in own["param_groups"] for number in group["params"]] == numbers
        and own["state"].keys() <= set(numbers)
        and set(map(type, itertools.chain.from_iterable(tables))) <= {str}
        and not [kind for kind in kinds if not issubclass(kind, _SIMPLE)]
    )


def _is_alike(one: _State, other: _State) -> bool:
    """Return True if two groups have the same hyper-parameters."""
    return one.keys() == other.keys() and all(
        torch.equal(value, other[key]) if isinstance(value, torch.Tensor) else value == other[key]
        for key, value in one.items()
        if key not in _OF_PARAMETERS
    )


def _places(held: _State, entries: Mapping[Any, object], parameter: torch.Tensor) -> _State:
    """Return places for state that does not fit what there is. What is sharded otherwise gets none: loading says so."""
    made: _State = {}
    for kind, entry in entries.items():
        value = held.get(kind)
        if not isinstance(entry, TensorStorageMetadata):
            if kind not in held or isinstance(value, torch.Tensor):
                made[kind] = None
            continue
        size, dtype = entry.size, entry.properties.dtype
        # A number of steps has the default dtype of the program that made it.
        fits = isinstance(value, torch.Tensor) and value.shape == size and (bool(size) or value.dtype == dtype)
        if fits or isinstance(value, (DTensor, ShardedTensor)) or entry.properties.layout is not torch.strided:
            continue
        if not isinstance(parameter, DTensor) or not size:
            # Optimizers keep numbers of steps on the CPU, and everything else on the parameter's device.
            made[kind] = torch.empty(size, dtype=dtype, device="cpu" if kind == "step" else parameter.device)
        elif size == parameter.shape:
            made[kind] = torch.empty_like(parameter.detach(), dtype=dtype)
    return made
