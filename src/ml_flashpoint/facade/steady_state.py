"""The state of tracked modules and optimizers where nothing but its content has changed since the save before.

``state_dict()`` walks a model and its optimizer in Python, and so does whoever compares what it gave: tens of
milliseconds for thousands of tensors, at every save. Owns the proof that such a walk would find the same tensors in the
same places: what the last one has found is kept, with all that it depends on, and compared in passes that run in C.
What these cannot prove, or whose class has a say in it, is walked as before.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, repeat
from operator import attrgetter, contains, is_, itemgetter, methodcaller
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from ml_flashpoint.core.picking import elements
from ml_flashpoint.facade.local_plan import Leaves, Structure
from ml_flashpoint.facade.module_state import ModuleState
from ml_flashpoint.facade.optimizer_state import OptimizerState, group_state
from ml_flashpoint.facade.tensor_guard import Guard, tensor_guard
from ml_flashpoint.staging.copy import view_identity
from ml_flashpoint.staging.state_dict_stager import is_plain_strided

_TABLES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks")
_OWN = ("state_dict", "_save_to_state_dict", "get_extra_state")
_METHODS = {name: getattr(nn.Module, name) for name in (*_OWN, "__getattribute__")}
_OPTIMIZER_STATE_DICT = Optimizer.state_dict
_OPTIMIZER_HOOKS = ("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")
_PLAIN = frozenset({torch.Tensor, nn.Parameter})
_TRAINED = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128})
_SIMPLE = frozenset({bool, int, float, str, type(None)})

_CHUNK = 256

_T = TypeVar("_T")
_Taker = Callable[[Sequence[Any]], tuple[Any, ...]]
_version = attrgetter("_version")
_attributes, _values = attrgetter("__dict__"), methodcaller("values")
_tables, _hooks = itemgetter(*_TABLES), itemgetter(*_HOOKS)


class _OtherwiseError(Exception):
    """Something is not as it was, or nobody can tell."""


_UNCLEAR = (_OtherwiseError, AttributeError, KeyError, TypeError, ValueError, RuntimeError)
"""What may come of looking at objects of which a program has made something else."""


class SteadyState:
    """What the latest walk has found, for as long as it can be proved to be so still. To be used by one thread.

    Args:
        modules, optimizers: what is tracked, by name; may grow until the first :meth:`learn`.

    Attributes:
        versions: of each of the latest :meth:`values` that is a tensor, its version counter; None for others.
        changed: whether the latest :meth:`values` has found something else than what was known, or could not tell.
    """

    def __init__(self, modules: Mapping[str, ModuleState], optimizers: Mapping[str, OptimizerState]) -> None:
        self._modules, self._optimizers = modules, optimizers
        self._known: list[_KnownModule | _KnownOptimizer] | None = None
        self._guards: list[tuple[_Taker, Guard]] = []
        self._spread: _Taker = tuple
        self._again: _Taker = tuple
        self._first: _Taker = tuple
        self._walks = 0
        self.versions: Sequence[int | None] = ()
        self.changed = False

    def values(self) -> list[Any] | None:
        """The values of all modules and optimizers, in the order in which a walk would give them; None if it has to be
        walked."""
        self.changed = False
        if self._known is None:
            return None
        try:
            values = list(chain.from_iterable([each.values() for each in self._known]))
            if not all(map(is_, self._again(values), self._first(values))):  # else the guards do not see them all
                raise _OtherwiseError
            self.versions = self._versions_of(values)
        except _UNCLEAR:  # whatever a program has made of its objects: the walk says what is wrong with them
            self._known, self.changed = None, True
            return None
        self._walks = 0
        return values

    def _versions_of(self, values: Sequence[Any]) -> Sequence[int | None]:
        versions: list[int | None] = []
        for take, is_alike in self._guards:
            tensors = take(values)
            if not is_alike(tensors):
                raise _OtherwiseError
            versions += map(_version, tensors)
        versions.append(None)
        return self._spread(versions)

    def learn(self, state: Mapping[str, Any], walked: Sequence[Any]) -> None:
        """Keep what a walk has found.

        Args:
            state: by name of module or optimizer.
            walked: the values of that, in the order of `Leaves`.
        """
        self._known = None
        self._walks += 1
        if self._walks.bit_count() != 1:  # it has changed at all of the latest saves, and will at the next
            return
        try:
            known: list[_KnownModule | _KnownOptimizer] = []
            for name, module in self._modules.items():
                known.append(_KnownModule(module, state.get(name, {})))
            for name, optimizer in self._optimizers.items():
                known.append(_KnownOptimizer(optimizer, state[name]))
            values = list(chain.from_iterable([each.values() for each in known]))
            if len(values) != len(walked) or not all(map(_is_same, values, walked)):
                return
            self._guard(values)
        except _UNCLEAR:
            return
        self._known = known

    def _guard(self, values: Sequence[Any]) -> None:
        """Keep what there is to know of the tensors among these, each of which counts once."""
        first = {id(value): index for index, value in reversed([*enumerate(values)]) if type(value) in _PLAIN}
        unique = sorted(first.values())
        takers = [elements(some) for some in _chunks(unique)]
        self._guards = [(take, tensor_guard(take(values))) for take in takers]
        ties = [(index, first[id(value)]) for index, value in enumerate(values) if type(value) in _PLAIN]
        again = [(index, one) for index, one in ties if index != one]
        self._again, self._first = elements([index for index, _ in again]), elements([one for _, one in again])
        place = {index: number for number, index in enumerate(unique)}
        of = [place[first[id(value)]] if type(value) in _PLAIN else len(unique) for value in values]
        self._spread = elements(of)
        self._versions_of(values)


class _Tables:
    """What a few modules have in their tables, and that nothing else has a say in their state dicts."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        attributes = list(map(_attributes, modules))
        self._kinds = list(map(type, modules))
        self.parameters, self.buffers, children, transient = zip(*map(_tables, attributes), strict=True)
        self._transient = [set(each) for each in transient]
        self._keys, self._lengths = _keys_of((*self.parameters, *self.buffers, *children))
        self._fixed = _values_of((*self.parameters, *children))
        self._absent = list(map(is_, _values_of(self.buffers), repeat(None)))
        self._count = sum(map(len, self.parameters))

    def values(self) -> list[Any]:
        """All parameters, then all buffers.

        Raises:
            _OtherwiseError: something is not what it was, but for buffers.
        """
        if list(map(type, self._modules)) != self._kinds:
            raise _OtherwiseError
        attributes = list(map(_attributes, self._modules))
        if any(any(map(contains, attributes, repeat(name))) for name in _OWN):
            raise _OtherwiseError
        if any(map(len, chain.from_iterable(map(_hooks, attributes)))):
            raise _OtherwiseError
        parameters, buffers, children, transient = zip(*map(_tables, attributes), strict=True)
        keys, lengths = _keys_of((*parameters, *buffers, *children))
        fixed, now = _values_of((*parameters, *children)), _values_of(buffers)
        same = lengths == self._lengths and keys == self._keys and list(transient) == self._transient
        if not same or not all(map(is_, fixed, self._fixed)) or list(map(is_, now, repeat(None))) != self._absent:
            raise _OtherwiseError
        return [*fixed[: self._count], *now]


class _KnownModule:
    """A module of which ``state_dict()`` gives no more than what is in its tables, and what was in these.

    Args:
        saved: what is saved of it.
    """

    def __init__(self, state: ModuleState, saved: Mapping[str, Any]) -> None:
        root = state.own
        if root is None:
            raise _OtherwiseError
        self._state, self._root = state, root
        modules = list(root.modules())
        self._kinds = set(map(type, modules))
        self._parts = [_Tables(some) for some in _chunks(modules)]
        places = self._places()
        self._take = elements([places[key] for key in saved])

    def _places(self) -> dict[str, int]:
        """Numbers of the values of all parts by the keys of the state dict."""
        starts: dict[int, int] = {}
        count = 0
        for table in chain.from_iterable((*part.parameters, *part.buffers) for part in self._parts):
            starts[id(table)] = count
            count += len(table)
        places: dict[str, int] = {}

        def visit(module: nn.Module, prefix: str) -> None:
            for table, without in (
                (module._parameters, frozenset[str]()),
                (module._buffers, module._non_persistent_buffers_set),
            ):
                for index, (name, value) in enumerate(table.items(), starts[id(table)]):
                    if value is not None and name not in without:
                        places[prefix + name] = index
            for name, child in module._modules.items():
                if child is not None:
                    visit(child, f"{prefix}{name}.")

        visit(self._root, "")
        return places

    def values(self) -> tuple[Any, ...]:
        """The tensors that are saved.

        Raises:
            _OtherwiseError: its state dict may have others.
        """
        if self._state.own is not self._root:
            raise _OtherwiseError
        _check_classes(self._kinds)
        return self._take(list(chain.from_iterable([part.values() for part in self._parts])))


class _KnownOptimizer:
    """An optimizer of which ``state_dict()`` gives no more than its tables, and what was in these.

    Args:
        saved: what is saved of it.
    """

    def __init__(self, state: OptimizerState, saved: Mapping[str, Any]) -> None:
        if state.names is None:
            raise _OtherwiseError
        self._optimizer, self._names = state.optimizer, state.names
        table, groups = self._optimizer.state, self._optimizer.param_groups
        self._owners = [*table, *chain.from_iterable(group["params"] for group in groups)]
        self._keys, self._lengths = _keys_of([*table.values()])
        kinds = list(map(type, _values_of([*table.values()])))
        if not set(kinds) <= _PLAIN | _SIMPLE:
            raise _OtherwiseError
        others = [index for index, kind in enumerate(kinds) if kind not in _PLAIN]  # tensors are seen to by guards
        self._others, self._kinds = elements(others), [kinds[index] for index in others]
        self._sizes = [len(group["params"]) for group in groups]
        self._groups = Structure(Leaves({"groups": saved["param_groups"]}))

    def values(self) -> list[Any]:
        """The values that are saved.

        Raises:
            _OtherwiseError: its state dict may have others.
        """
        optimizer = self._optimizer
        kind, attributes = type(optimizer), optimizer.__dict__
        own = kind.state_dict is _OPTIMIZER_STATE_DICT and kind.__getattribute__ is object.__getattribute__
        if not own or "state_dict" in attributes or any(attributes[name] for name in _OPTIMIZER_HOOKS):
            raise _OtherwiseError
        table, groups = attributes["state"], attributes["param_groups"]
        inner = list(table.values())
        if type(table) not in (dict, defaultdict) or type(groups) is not list:
            raise _OtherwiseError
        if not set(map(type, inner)) <= {dict} or not set(map(type, groups)) <= {dict}:
            raise _OtherwiseError
        owners = [*table, *chain.from_iterable(group["params"] for group in groups)]
        keys, lengths = _keys_of(inner)
        values = list(chain.from_iterable(map(_values, inner)))
        same = lengths == self._lengths and keys == self._keys
        if not same or list(map(type, self._others(values))) != self._kinds:
            raise _OtherwiseError
        if [len(group["params"]) for group in groups] != self._sizes or len(owners) != len(self._owners):
            raise _OtherwiseError
        if not all(map(is_, owners, self._owners)):
            raise _OtherwiseError
        leaves = Leaves({"groups": group_state(groups, self._names)})
        if not self._groups.is_of(leaves):
            raise _OtherwiseError
        return values + leaves.values


def _chunks(items: Sequence[_T]) -> list[Sequence[_T]]:
    """As many at a time as stay in the processor's cache from one pass to the next."""
    return [items[at : at + _CHUNK] for at in range(0, len(items), _CHUNK)]


def _check_classes(kinds: Iterable[type]) -> None:
    for kind in kinds:
        if any(getattr(kind, name, None) is not method for name, method in _METHODS.items()):
            raise _OtherwiseError
        if any(hasattr(kind, name) for name in (*_TABLES, *_HOOKS)):
            raise _OtherwiseError


def _keys_of(tables: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[int]]:
    """The keys of all, and how many each has."""
    if not set(map(type, tables)) <= {dict, OrderedDict}:
        raise _OtherwiseError
    return list(chain.from_iterable(tables)), list(map(len, tables))


def _values_of(tables: Iterable[Mapping[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(_values, tables)))


def _is_same(mine: Any, walked: Any) -> bool:
    if type(mine) in _PLAIN:
        if mine.requires_grad and mine.dtype not in _TRAINED:
            return False  # it is looked at as integers where torch cannot copy it, and a walk gives it detached
        plain = type(walked) in _PLAIN and is_plain_strided(mine) and is_plain_strided(walked)
        return plain and view_identity(mine) == view_identity(walked)
    if mine is walked:
        return True
    return type(mine) is type(walked) and (type(mine) in _SIMPLE or type(mine) is list) and mine == walked
