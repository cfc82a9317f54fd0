"""States as tensors, byte strings and a description: what one object of a local checkpoint holds.

Owns the description (JSON with a schema of its own, from which nothing is ever executed), the names of tensors in
the object, and the way back. Which types may occur is `known_types`', DTensors are `dtensors`'. Values of a kind that
the schema does not know travel as an archive of ``torch.save``, if everything in it is allowed, which is checked
when it is made and again before it is opened.

::

    {"local": 1, "root": NODE, "names": [of the tensors stored], "same": {"7": 2},     tensor 7 is tensor 2
     "devices": [[device, count], ...], "meshes": [mesh, ...], "dtensors": [{...}, ...], "bytes": [names]}

    NODE = null, true, 1.5, "text", or [tag, ...]:  t tensor, d dict, l list, u tuple, n namedtuple, o object, ...
"""

from __future__ import annotations

import base64
import enum
import io
import itertools
import json
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from ml_flashpoint.adapter.pytorch.storage_data import unsafe_globals
from ml_flashpoint.core.dtypes import is_storable
from ml_flashpoint.core.errors import InvalidArgumentError, UnsafeContentError
from ml_flashpoint.core.object_writer import BytesItem, TensorItem
from ml_flashpoint.local.base_state_dict import TensorAwareStateDict
from ml_flashpoint.local.basic_state_dict import BasicTensorAwareStateDict
from ml_flashpoint.local.dtensors import Meshes, describe_placement
from ml_flashpoint.local.known_types import KnownTypes
from ml_flashpoint.local.nesting import attributes_of, is_namedtuple

STRUCTURE_KEY = "local_structure.json"
"""Byte item that holds the description."""

VERSION = 1
_INLINE_BYTES = 1024
_MAX_INLINE_INT = 1 << 63
FACTORIES: dict[str, type] = {"dict": dict, "list": list, "set": set, "int": int, "float": float, "str": str}
"""What a defaultdict may be made with, by name."""
_STORABLE = frozenset(v for v in vars(torch).values() if isinstance(v, torch.dtype) and is_storable(v))
TORCH_VALUES = (torch.dtype, torch.layout, torch.memory_format)


@dataclass(frozen=True, slots=True)
class Encoded:
    """A state, taken apart.

    Attributes:
        tensors: names and tensors to store; plain strided ones on any device, the caller's own memory.
        byte_items: the description and large byte strings; they are copies.
    """

    tensors: list[TensorItem]
    byte_items: list[BytesItem]


def encode(state: TensorAwareStateDict, types: KnownTypes, meshes: Meshes) -> Encoded:
    """Take a state apart. The state is only looked at.

    Raises:
        UnsafeContentError: it holds a value of a type that is not allowed.
        InvalidArgumentError: it holds something that cannot be stored.
    """
    encoder = _Encoder(types, meshes)
    try:
        root = encoder.root(state)
        items = encoder.items()
        described = encoder.description(root, [name for name, _ in items])
    except RecursionError:
        raise InvalidArgumentError(
            "is nested too deeply, or contains itself", argument="state_dict", value=type(state)
        ) from None
    return Encoded(items, [(STRUCTURE_KEY, described), *encoder.blobs])


class _Encoder:
    def __init__(self, types: KnownTypes, meshes: Meshes) -> None:
        self._types = types
        self._meshes = meshes
        self._tensors: list[torch.Tensor] = []
        self._names: list[str] = []
        self._devices: list[torch.device] = []
        self._same: dict[int, int] = {}
        self._dtensors: list[dict[str, Any]] = []
        self._mesh_keys: dict[str, int] = {}
        self.blobs: list[BytesItem] = []
        self._exact: dict[type, Callable[[Any, str], Any]] = {
            torch.Tensor: self._tensor,
            torch.nn.Parameter: self._tensor,
            dict: self._dict,
            list: lambda x, path: ["l", self._nodes(x, path)],
            tuple: lambda x, path: ["u", self._nodes(x, path)],
            OrderedDict: self._ordered,
            defaultdict: self._defaultdict,
            set: lambda x, path: ["set", self._nodes(x, path)],
            frozenset: lambda x, path: ["fset", self._nodes(x, path)],
            int: lambda x, _: x if -_MAX_INLINE_INT < x < _MAX_INLINE_INT else ["i", hex(x)],
            complex: lambda x, _: ["c", x.real, x.imag],
            bytes: lambda x, path: ["b", self._bytes(x, path)],
            bytearray: lambda x, path: ["ba", self._bytes(bytes(x), path)],
            io.BytesIO: lambda x, path: ["bio", self._bytes(x.getvalue(), path), x.tell()],
            slice: lambda x, path: ["sl", self._nodes((x.start, x.stop, x.step), path)],
            range: lambda x, _: ["rg", x.start, x.stop, x.step],
            torch.Size: lambda x, _: ["sz", list(x)],
            torch.device: lambda x, _: ["dev", str(x)],
            np.ndarray: self._array,
            DTensor: self._dtensor,
        }

    def root(self, state: TensorAwareStateDict) -> Any:
        """The description of the whole state."""
        if type(state) is BasicTensorAwareStateDict and not state.is_away:
            node = ["basic", self.node(state.state_dict, "")]
        elif self._types.is_object(type(state)):
            node = self.node(state, "")
        else:
            node = self._archive(state, "")
        self._find_same()
        return node

    def node(self, value: Any, path: str) -> Any:
        """The description of a value; what it holds goes to the lists."""
        kind = type(value)
        if kind is str or kind is float or kind is bool or value is None:
            return value
        handler = self._exact.get(kind)
        if handler is not None:
            return handler(value, path)
        if isinstance(value, TORCH_VALUES):
            return ["torch", str(value).removeprefix("torch.")]
        if isinstance(value, np.generic) and value.dtype.hasobject is False:
            return ["np", value.dtype.str, self._bytes(value.tobytes(), path)]
        if isinstance(value, enum.Enum) and kind._member_map_.get(value.name or "") is value:
            return ["e", self._types.nameable(kind), value.name]
        if is_namedtuple(kind):
            return ["n", self._types.nameable(kind), self._nodes(value, path)]
        if self._types.is_object(kind):
            attributes = attributes_of(value)
            nodes = [self.node(each, _join(path, name)) for name, each in attributes.items()]
            return ["o", self._types.nameable(kind), list(attributes), nodes]
        return self._archive(value, path)

    def _nodes(self, values: Any, path: str) -> list[Any]:
        return [self.node(value, f"{path}.{i}" if path else str(i)) for i, value in enumerate(values)]

    def _dict(self, value: dict[Any, Any], path: str) -> list[Any]:
        prefix = f"{path}." if path else ""
        keys = list(value)
        nodes = [self.node(each, f"{prefix}{key}") for key, each in value.items()]
        if all(type(key) is str for key in keys):
            return ["d", keys, nodes]
        held = len(self._tensors)
        described = [self.node(key, path) for key in keys]
        if len(self._tensors) != held:
            raise InvalidArgumentError("a tensor cannot be a key of a dict", argument="state_dict", value=path)
        return ["D", described, nodes]

    def _ordered(self, value: OrderedDict[Any, Any], path: str) -> list[Any]:
        attributes = getattr(value, "__dict__", None)
        node = ["od", self._dict(value, path)]
        return [*node, self._dict(attributes, path)] if attributes else node

    def _defaultdict(self, value: defaultdict[Any, Any], path: str) -> list[Any]:
        factory = value.default_factory
        name = "" if factory is None else next((n for n, kind in FACTORIES.items() if kind is factory), None)
        if name is None:
            raise UnsafeContentError(
                f"a defaultdict with the factory {factory!r} cannot be stored [{path}]",
                hint=f"factories may be {', '.join(FACTORIES)}",
            )
        return ["dd", name, self._dict(value, path)]

    def _tensor(self, value: torch.Tensor, path: str) -> Any:
        device = value.device
        if value.layout is not torch.strided or value.dtype not in _STORABLE or device.type == "meta":
            return self._archive(value, path)
        index = len(self._tensors)
        self._names.append(path)
        self._devices.append(device)
        is_parameter = type(value) is torch.nn.Parameter
        requires_grad = value.requires_grad
        if not requires_grad and not is_parameter:
            self._tensors.append(value)
            return ["t", index]
        self._tensors.append(value.detach())
        return ["t", index, int(requires_grad) + 2 * is_parameter]

    def _dtensor(self, value: DTensor, path: str) -> list[Any]:
        local = value.to_local().detach()
        flags = int(value.requires_grad) + 2 * isinstance(value, torch.nn.Parameter)
        mesh = self._mesh_keys.setdefault(self._meshes.note(value.device_mesh), len(self._mesh_keys))
        self._dtensors.append(
            {
                "mesh": mesh,
                "placements": [describe_placement(each) for each in value.placements],
                "shape": list(value.shape),
                "stride": list(value.stride()),
                "flags": flags,
            }
        )
        place = len(self._dtensors) - 1
        return ["dt", self._tensor(local, path), place]

    def _array(self, value: Any, path: str) -> Any:
        if value.dtype.hasobject or value.dtype.names is not None:
            return self._archive(value, path)
        return ["nd", value.dtype.str, list(value.shape), self._bytes(value.tobytes(), path)]

    def _bytes(self, value: bytes, path: str) -> Any:
        if len(value) <= _INLINE_BYTES:
            return base64.b64encode(value).decode()
        self.blobs.append((f"bytes.{len(self.blobs)}.{_printable(path)}", value))
        return len(self.blobs) - 1

    def _archive(self, value: Any, path: str) -> list[Any]:
        stream = io.BytesIO()
        try:
            torch.save(value, stream)
        except Exception as error:
            raise InvalidArgumentError(
                f"cannot be stored: {type(error).__name__}: {error}", argument=path or "state_dict", value=type(value)
            ) from error
        names = unsafe_globals(stream, allowed=self._types.listed)
        if names:
            raise UnsafeContentError(
                f"{path or 'the state'} needs {', '.join(sorted(names))}, which could not be loaded",
                hint="list these types in safe_globals= of the manager, when saving and when loading",
            )
        return ["z", self._bytes(stream.getvalue(), path)]

    def items(self) -> list[TensorItem]:
        """Names and tensors, each memory once."""
        seen = {STRUCTURE_KEY, *(key for key, _ in self.blobs)}
        items: list[TensorItem] = []
        for index, (name, tensor) in enumerate(zip(self._names, self._tensors, strict=True)):
            if index in self._same:
                continue
            name = _printable(name)
            while name in seen:
                name = f"{name}#{index}"
            seen.add(name)
            items.append((name, tensor))
        return items

    def description(self, root: Any, names: list[str]) -> bytes:
        """The description, as JSON."""
        devices: list[list[Any]] = []
        for device, run in itertools.groupby(self._devices):
            devices.append(["cpu" if device.type == "cpu" else _portable(device), len(list(run))])
        described = {
            "local": VERSION,
            "root": root,
            "names": names,
            "devices": devices,
            "same": self._same,
            "meshes": list(self._mesh_keys),
            "dtensors": self._dtensors,
            "bytes": [key for key, _ in self.blobs],
        }
        return json.dumps(described, separators=(",", ":")).encode()

    def _find_same(self) -> None:
        """Tensors that are one memory (tied weights) are stored, and loaded, as one."""
        if len({tensor.data_ptr() for tensor in self._tensors}) == len(self._tensors):
            return
        first: dict[tuple[Any, ...], int] = {}
        for index, tensor in enumerate(self._tensors):
            if tensor.numel():
                identity = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
                kept = first.setdefault(identity, index)
                if kept != index:
                    self._same[index] = kept


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _printable(name: str) -> str:
    # Beginning with an underscore is how objects name what is their own.
    if name[:2] == "__" or not name:
        name = f"value.{name}"
    return name if name.isascii() else name.encode(errors="backslashreplace").decode()


def _portable(device: torch.device) -> str:
    """A device as the rank that loads will have it: the current one by its kind alone."""
    try:
        current = torch.get_device_module(device).current_device()
    except (RuntimeError, AttributeError):
        current = None
    return device.type if device.index is None or device.index == current else str(device)
