"""The state of tracked modules and optimizers where nothing but its content has changed since the save before.

``state_dict()`` walks a model and its optimizer in Python, and so does whoever compares what it gave: tens of
milliseconds for thousands of tensors, at every save. Owns the proof that such a walk would find the same tensors in the
same places: what the last one has found is kept, with all that it depends on, and compared in passes that run in C.
What these cannot prove, or whose class has a say in it, is walked as before. Dictionaries in which nothing was set
meanwhile are not even looked into.
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

from ml_flashpoint.copy.cpu import view_identity
from ml_flashpoint.copy.tensors import is_plain_strided
from ml_flashpoint.core.picking import Joined, elements
from ml_flashpoint.facade.dict_versions import versions_of
from ml_flashpoint.facade.local_plan import Leaves, Structure
from ml_flashpoint.facade.module_state import ModuleState
from ml_flashpoint.facade.optimizer_state import OptimizerState, group_state
from ml_flashpoint.facade.tensor_guard import Guard, tensor_guard

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
_LITTLE, _LITTLE_EACH = 2 << 30, 64 << 10
"""Bytes of the tensors that are kept from one save to the next, in all and in the mean. Longer than the program needs
them: those that it has replaced meanwhile stay, and so does the memory of those that it has given other memory."""

_T = TypeVar("_T")
_Taker = Callable[[Sequence[Any]], tuple[Any, ...]]
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
        kept: the same object as after the :meth:`values` before only if the tensors are the same ones, and what they
            were but for their content: where that is, too. None if nobody can tell.
    """

    def __init__(self, modules: Mapping[str, ModuleState], optimizers: Mapping[str, OptimizerState]) -> None:
        self._modules, self._optimizers = modules, optimizers
        self._known: list[_KnownModule | _KnownOptimizer] | None = None
        self._guards: list[tuple[_Taker, Guard]] = []
        self._again: _Taker = tuple
        self._first: _Taker = tuple
        self._walks = 0
        self._is_little = False
        self._fixed: list[Sequence[Any]] = []
        self._taken: list[tuple[Any, ...]] = []
        self._addresses: list[list[int]] = []
        self.kept: object = None

    def values(self) -> Sequence[Any] | None:
        """The values of all modules and optimizers, in the order in which a walk would give them; None if it has to be
        walked."""
        if self._known is None:
            return None
        try:
            values, taken = self._find(self._known)
            self._check(taken)
        except _UNCLEAR:  # whatever a program has made of its objects: the walk says what is wrong with them
            self._forget()
            return None
        self._walks = 0
        return values

    def _find(self, known: Sequence[_KnownModule | _KnownOptimizer]) -> tuple[Sequence[Any], list[tuple[Any, ...]]]:
        """The values, and the tensors among them for each guard."""
        loose = [each.loose() for each in known]
        if self.kept is not None and all(each.is_untouched() for each in known):
            return Joined([*chain.from_iterable(zip(self._fixed, loose, strict=True))]), self._taken
        fixed = [each.fixed(watch=self._is_little) for each in known]
        values = _in_turn(fixed, loose)
        if not all(map(is_, self._again(values), self._first(values))):  # else the guards do not see them all
            raise _OtherwiseError
        taken = [take(values) for take, _ in self._guards]
        if self._is_little:
            same = all(map(is_, chain.from_iterable(taken), chain.from_iterable(self._taken)))
            self._fixed, self._taken = fixed, taken
            self.kept = self.kept if same and self.kept is not None else object()
        return values, taken

    def _forget(self) -> None:
        self._known, self.kept, self._fixed, self._taken, self._addresses = None, None, [], [], []

    def _check(self, taken: Sequence[Sequence[Any]]) -> None:
        """Have the guards, and everything else that looks at each tensor, look at as many at once as stay in the
        processor's cache."""
        addresses: list[list[int]] = []
        for tensors, (_, is_alike) in zip(taken, self._guards, strict=True):
            if not is_alike(tensors):
                raise _OtherwiseError
            if self.kept is not None:
                addresses.append(list(map(torch.Tensor.data_ptr, tensors)))
        if self.kept is not None and addresses != self._addresses:
            self.kept, self._addresses = object(), addresses

    def learn(self, state: Mapping[str, Any], walked: Sequence[Any]) -> None:
        """Keep what a walk has found.

        Args:
            state: by name of module or optimizer.
            walked: the values of that, in the order of `Leaves`.
        """
        self._forget()
        self._walks += 1
        if self._walks.bit_count() != 1:  # it has changed at all of the latest saves, and will at the next
            return
        try:
            known: list[_KnownModule | _KnownOptimizer] = []
            for name, module in self._modules.items():
                known.append(_KnownModule(module, state.get(name, {})))
            for name, optimizer in self._optimizers.items():
                known.append(_KnownOptimizer(optimizer, state[name]))
            values = _in_turn([each.fixed(watch=False) for each in known], [each.loose() for each in known])
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
        taken = [take(values) for take in takers]
        self._check(taken)
        nbytes = sum(tensor.nbytes for tensor in chain.from_iterable(taken))
        on_cpu = all(tensor.device.type == "cpu" for tensor in chain.from_iterable(taken))
        self._is_little = on_cpu and nbytes <= min(_LITTLE, _LITTLE_EACH * len(unique))


class _Untouched:
    """Dictionaries that have just been looked into.

    Args:
        known: they follow from these, as long as nothing is set in them.
        tables: the dictionaries that count, these included.
    """

    def __init__(self, known: Sequence[Any], tables: Sequence[Any]) -> None:
        self._known, self._tables = known, tables
        self._versions = versions_of(tables)

    def are_so(self, known: Sequence[Any]) -> bool:
        """Whether nothing was set in them since."""
        if self._versions is None or len(known) != len(self._known) or not all(map(is_, known, self._known)):
            return False
        return versions_of(self._tables) == self._versions


class _Tables:
    """What a few modules have in their tables, and that nothing else has a say in their state dicts."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        attributes = list(map(_attributes, modules))
        self._kinds = list(map(type, modules))
        self.parameters, self.buffers, children, self._sets = zip(*map(_tables, attributes), strict=True)
        self._transient = [set(each) for each in self._sets]
        self._keys, self._lengths = _keys_of((*self.parameters, *self.buffers, *children))
        self._fixed = _values_of((*self.parameters, *children))
        self._absent = list(map(is_, _values_of(self.buffers), repeat(None)))
        self._count = sum(map(len, self.parameters))
        self._seen = _Untouched((), ())

    def are_untouched(self) -> bool:
        """Whether nothing can be other than what the latest :meth:`values` has found."""
        if list(map(type, self._modules)) != self._kinds or not self._seen.are_so(
            list(map(_attributes, self._modules))
        ):
            return False
        return list(self._sets) == self._transient

    def values(self, *, watch: bool) -> list[Any]:
        """All parameters, then all buffers.

        Args:
            watch: keep what :meth:`are_untouched` needs.

        Raises:
            _OtherwiseError: something is not what it was, but for buffers.
        """
        if list(map(type, self._modules)) != self._kinds:
            raise _OtherwiseError
        attributes = list(map(_attributes, self._modules))
        if any(any(map(contains, attributes, repeat(name))) for name in _OWN):
            raise _OtherwiseError
        hooks = list(chain.from_iterable(map(_hooks, attributes)))
        parameters, buffers, children, transient = zip(*map(_tables, attributes), strict=True)
        tables = (*parameters, *buffers, *children)
        # In an OrderedDict, things can change places without being set.
        self._sets, self._seen = transient, _Untouched((), ())
        if watch and set(map(type, tables)) <= {dict}:
            self._seen = _Untouched(attributes, (*attributes, *tables, *hooks))
        if any(map(len, hooks)):
            raise _OtherwiseError
        keys, lengths = _keys_of(tables)
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

    def loose(self) -> Sequence[Any]:
        """What may be another value at each save: nothing.

        Raises:
            _OtherwiseError: its classes may have a say.
        """
        if self._state.own is not self._root:
            raise _OtherwiseError
        _check_classes(self._kinds)
        return ()

    def is_untouched(self) -> bool:
        """Whether :meth:`fixed` would give what it gave last."""
        return all(part.are_untouched() for part in self._parts)

    def fixed(self, *, watch: bool) -> tuple[Any, ...]:
        """The tensors that are saved.

        Args:
            watch: keep what :meth:`is_untouched` needs.

        Raises:
            _OtherwiseError: its state dict may have others.
        """
        return self._take(list(chain.from_iterable([part.values(watch=watch) for part in self._parts])))


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
        self._owners = [*table]
        self._parameters = list(chain.from_iterable(group["params"] for group in groups))
        self._keys, self._lengths = _keys_of([*table.values()])
        kinds = list(map(type, _values_of([*table.values()])))
        if not set(kinds) <= _PLAIN | _SIMPLE:
            raise _OtherwiseError
        others = [index for index, kind in enumerate(kinds) if kind not in _PLAIN]  # tensors are seen to by guards
        self._others, self._kinds = elements(others), [kinds[index] for index in others]
        self._sizes = [len(group["params"]) for group in groups]
        leaves = Leaves({"groups": saved["param_groups"]})
        self._groups = Structure(leaves)
        loose = [index for index, value in enumerate(leaves.values) if isinstance(value, torch.Tensor)]
        self._loose_tensors, self._had = elements(loose), list[Any]()
        self._seen = _Untouched((), ())

    def loose(self) -> Sequence[Any]:
        """What its groups have, such as the learning rate.

        Raises:
            _OtherwiseError: its state dict may have something else.
        """
        optimizer = self._optimizer
        kind, attributes = type(optimizer), optimizer.__dict__
        own = kind.state_dict is _OPTIMIZER_STATE_DICT and kind.__getattribute__ is object.__getattribute__
        if not own or "state_dict" in attributes or any(attributes[name] for name in _OPTIMIZER_HOOKS):
            raise _OtherwiseError
        groups = attributes["param_groups"]
        if type(groups) is not list or not set(map(type, groups)) <= {dict}:
            raise _OtherwiseError
        if [len(group["params"]) for group in groups] != self._sizes:
            raise _OtherwiseError
        if not all(map(is_, chain.from_iterable(group["params"] for group in groups), self._parameters)):
            raise _OtherwiseError
        leaves = Leaves({"groups": group_state(groups, self._names)})
        if not self._groups.is_of(leaves):
            raise _OtherwiseError
        had, self._had = self._had, list(self._loose_tensors(leaves.values))
        if len(had) != len(self._had) or not all(map(is_, had, self._had)):
            self._seen = _Untouched((), ())  # a learning rate, say, that the program makes anew for each step
        return leaves.values

    def is_untouched(self) -> bool:
        """Whether :meth:`fixed` would give what it gave last, and the tensors of the latest :meth:`loose` are those of
        the one before."""
        return self._seen.are_so([self._optimizer.__dict__["state"]])

    def fixed(self, *, watch: bool) -> Sequence[Any]:
        """The values that its state has.

        Args:
            watch: keep what :meth:`is_untouched` needs, which keeps what the program may have replaced.

        Raises:
            _OtherwiseError: its state dict may have others.
        """
        table = self._optimizer.__dict__["state"]
        inner = list(table.values())
        if type(table) not in (dict, defaultdict) or not set(map(type, inner)) <= {dict}:
            raise _OtherwiseError
        self._seen = _Untouched([table], [table, *inner]) if watch else _Untouched((), ())
        keys, lengths = _keys_of(inner)
        values = list(chain.from_iterable(map(_values, inner)))
        same = lengths == self._lengths and keys == self._keys and len(table) == len(self._owners)
        if not same or list(map(type, self._others(values))) != self._kinds:
            raise _OtherwiseError
        if not all(map(is_, table, self._owners)):
            raise _OtherwiseError
        return values


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


def _in_turn(fixed: Sequence[Sequence[Any]], loose: Sequence[Sequence[Any]]) -> list[Any]:
    """All values, those of each object together."""
    return list(chain.from_iterable(chain.from_iterable(zip(fixed, loose, strict=True))))
