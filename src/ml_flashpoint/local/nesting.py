"""Walks through nested containers without changing them.

Owns which containers count as nesting: dicts, lists, tuples, namedtuples and dataclasses, in any order. Everything
else is a leaf, tensors among them.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from types import MemberDescriptorType
from typing import Any

import torch

DICTS = (dict, OrderedDict, defaultdict)
_HOOKS = ("__getstate__", "__setstate__", "__getnewargs__", "__getnewargs_ex__")


def is_namedtuple(kind: type) -> bool:
    """Whether a type is what `collections.namedtuple` or `typing.NamedTuple` makes."""
    fields = getattr(kind, "_fields", None)
    if kind.__dictoffset__:  # may have attributes besides
        return False
    return tuple in kind.__bases__ and isinstance(fields, tuple) and all(isinstance(name, str) for name in fields)


def is_plain_object(kind: type) -> bool:
    """Whether instances are their attributes and nothing else: no container, and none of pickle's hooks."""
    inherited = all(getattr(kind, name) is getattr(object, name) for name in ("__new__", "__reduce__", "__reduce_ex__"))
    return inherited and not any(_has_hook(kind, name) for name in _HOOKS)


def _has_hook(kind: type, name: str) -> bool:
    hook = getattr(kind, name, None)
    if hook is None or hook is getattr(object, name, None):
        return False
    # Frozen dataclasses with slots get hooks of the standard library's, which do no more than is done here.
    return getattr(hook, "__module__", "") != "dataclasses"


def is_plain_dataclass(kind: type) -> bool:
    """Whether a type is a dataclass whose instances are their attributes."""
    return dataclasses.is_dataclass(kind) and is_plain_object(kind)


def slots_of(kind: type) -> dict[str, MemberDescriptorType]:
    """The slots of a type and its bases."""
    return {
        name: value
        for base in reversed(kind.__mro__)
        for name, value in vars(base).items()
        if isinstance(value, MemberDescriptorType)
    }


def attributes_of(instance: object) -> dict[str, Any]:
    """The attributes of an instance, in its dict and its slots. Properties are not asked."""
    found = dict(getattr(instance, "__dict__", {}))
    for name, slot in slots_of(type(instance)).items():
        try:
            found[name] = slot.__get__(instance)
        except AttributeError:
            continue  # never set
    return found


def new_instance(kind: type, attributes: dict[str, Any]) -> Any:
    """An instance with these attributes, made without running anything of the type's own.

    Raises:
        TypeError, AttributeError: it cannot have them.
    """
    instance: Any = object.__new__(kind)
    slots = slots_of(kind)
    for name, value in attributes.items():
        if name in slots:
            slots[name].__set__(instance, value)
        else:
            instance.__dict__[name] = value
    return instance


def map_tensors(change: Callable[[Any], Any], nest: Any, leaf: type | tuple[type, ...] = torch.Tensor) -> Any:
    """A copy of the containers of ``nest`` in which every leaf of type ``leaf`` is ``change(leaf)``.

    Other leaves are the same objects.
    """
    if isinstance(nest, leaf):
        return change(nest)
    kind = type(nest)
    if kind in DICTS:
        items = [(key, map_tensors(change, value, leaf)) for key, value in nest.items()]
        if kind is dict:
            return dict(items)
        copied: dict[Any, Any] = defaultdict(nest.default_factory) if kind is defaultdict else OrderedDict()
        copied.update(items)
        vars_of = getattr(nest, "__dict__", None)
        if vars_of:  # `_metadata` of a module's state
            copied.__dict__.update(vars_of)
        return copied
    if kind is list:
        return [map_tensors(change, each, leaf) for each in nest]
    if kind is tuple:
        return tuple([map_tensors(change, each, leaf) for each in nest])
    if kind in (int, float, str, bool, bytes, type(None)) or isinstance(nest, type):
        return nest
    if is_namedtuple(kind):
        return tuple.__new__(kind, [map_tensors(change, each, leaf) for each in nest])
    if is_plain_dataclass(kind):
        changed = {name: map_tensors(change, value, leaf) for name, value in attributes_of(nest).items()}
        return new_instance(kind, changed)
    return nest
