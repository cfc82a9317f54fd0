"""States as tensors, byte strings and a description: what one object of a local checkpoint holds.

Owns the description (JSON with a schema of its own, from which nothing is ever executed), the names of tensors in
the object, and the way back. Which types may occur is `known_types`', DTensors are `dtensors`'. Values of a kind that
the schema does not know travel as an archive of ``torch.save``, if everything in it is allowed, which is checked
when it is made and again before it is opened.

::

    {"local": 2, "root": NODE, "names": [of the tensors stored], "same": {"7": 2},     tensor 7 is tensor 2
     "devices": [[device, count], ...], "meshes": [mesh, ...], "dtensors": [{...}, ...], "bytes": [names]}

    NODE = null, true, 1.5, "text", or [tag, ...]:  t tensor, d dict, l list, u tuple, n namedtuple, o object, ...

What is described here comes back with the same value and the same type; anything else is refused, with its place in
the state. Not part of a value are strides, memory shared by tensors that are not the same, read-only flags, and
attributes that somebody has set on a tensor.
"""

from __future__ import annotations

import base64
import enum
import io
import itertools
import json
import struct
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from ml_flashpoint.copy.dtypes import STORABLE_DTYPES
from ml_flashpoint.core.object_stages import BytesItem, TensorItem
from ml_flashpoint.format.errors import InvalidArgumentError, UnsafeContentError
from ml_flashpoint.format.numpy_values import describe_dtype
from ml_flashpoint.local.archives import pack
from ml_flashpoint.local.base_state_dict import TensorAwareStateDict
from ml_flashpoint.local.basic_state_dict import BasicTensorAwareStateDict
from ml_flashpoint.local.dtensors import Meshes, describe_placement
from ml_flashpoint.local.known_types import KnownTypes
from ml_flashpoint.local.nesting import attributes_of, is_namedtuple
from ml_flashpoint.local.plain_values import plain_parts

STRUCTURE_KEY = "local_structure.json"
"""Byte item that holds the description."""

VERSION = 2
MAX_DEPTH = 100
"""Levels of nesting; what is saved at the bottom of a shallow stack must be loadable on top of a deep one."""
_INLINE_BYTES = 1024
_MAX_INLINE_INT = 1 << 63
FACTORIES: dict[str, type] = {"dict": dict, "list": list, "set": set, "int": int, "float": float, "str": str}
"""What a defaultdict may be made with, by name."""
TORCH_VALUES = (torch.dtype, torch.layout, torch.memory_format, torch.qscheme)


@dataclass(frozen=True, slots=True)
class Encoded:
    """A state, taken apart.

    Attributes:
        tensors: names and tensors to store; plain strided ones on any device, mostly the caller's own memory. Large
            arrays are among them, as bytes.
        byte_items: the description and large byte strings; nobody changes them.
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
        return encoder.encoded(encoder.root(state))
    except RecursionError:
        raise InvalidArgumentError(
            "is nested too deeply, or contains itself", argument="state_dict", value=type(state)
        ) from None


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
        self._depth = 0
        self._blobs: list[tuple[str, bytes | torch.Tensor]] = []
        self._exact: dict[type, Callable[[Any, str], Any]] = {
            torch.nn.Parameter: self._tensor,
            dict: self._dict,
            list: lambda x, path: ["l", self._nodes(x, path)],
            tuple: lambda x, path: ["u", self._nodes(x, path)],
            OrderedDict: self._ordered,
            defaultdict: self._defaultdict,
            set: lambda x, path: ["set", self._nodes(x, path)],
            frozenset: lambda x, path: ["fset", self._nodes(x, path)],
            str: lambda x, _: ["s", base64.b64encode(x.encode(errors="surrogatepass")).decode()],
            float: lambda x, _: ["f", struct.pack("<d", x).hex()],
            int: lambda x, _: x if -_MAX_INLINE_INT < x < _MAX_INLINE_INT else ["i", hex(x)],
            complex: lambda x, path: ["c", self._nodes((x.real, x.imag), path)],
            bytes: lambda x, path: ["b", self._bytes(x, path)],
            bytearray: lambda x, path: ["ba", self._bytes(bytes(x), path)],
            io.BytesIO: lambda x, path: ["bio", self._bytes(x.getvalue(), path), x.tell()],
            slice: lambda x, path: ["sl", self._nodes((x.start, x.stop, x.step), path)],
            range: lambda x, path: ["rg", self._nodes((x.start, x.stop, x.step), path)],
            torch.Size: lambda x, _: ["sz", list(x)],
            torch.device: lambda x, _: ["dev", str(x)],
            np.ndarray: self._array,
            np.str_: lambda x, path: ["nps", self.node(str.__str__(x), path)],  # an array's lose trailing zeros
            np.bytes_: lambda x, path: ["nps", self.node(bytes(x), path)],
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
        if kind is torch.Tensor:  # first, since there are most of them
            return self._tensor(value, path)
        if value is None or kind is bool or (kind is str and _is_text(value)) or (kind is float and value == value):
            return value
        if self._depth == MAX_DEPTH:
            raise InvalidArgumentError(
                f"is nested deeper than {MAX_DEPTH} levels, or contains itself",
                argument=path or "state_dict",
                value=kind,
            )
        self._depth += 1
        handler = self._exact.get(kind)
        described = handler(value, path) if handler is not None else self._by_kind(value, kind, path)
        self._depth -= 1
        return described

    def _by_kind(self, value: Any, kind: type, path: str) -> Any:
        """The description of a value whose type alone does not say what to do."""
        if isinstance(value, TORCH_VALUES):
            return ["torch", self._checked(str(value).removeprefix("torch."), value, path)]
        if isinstance(value, np.dtype):
            return ["npd", self._dtype(value, path)]
        if isinstance(value, np.generic) and kind is value.dtype.type:
            return ["np", self._dtype(value.dtype, path), self._bytes(value.tobytes(), path)]
        if isinstance(value, enum.Enum) and type(value)._member_map_.get(value.name or "") is value:
            return ["e", self._types.nameable(kind, path), value.name]
        if is_namedtuple(kind):
            return ["n", self._types.nameable(kind, path), self._nodes(value, path)]
        plain = plain_parts(value)
        if plain is not None:
            name, parts = plain
            return ["v", name, self._nodes(parts, path)]
        if self._types.is_object(kind):
            attributes = attributes_of(value)
            if not all(map(_is_text, attributes)):
                raise InvalidArgumentError("has attributes whose names are no text", argument=path, value=kind)
            nodes = [self.node(each, _join(path, name)) for name, each in attributes.items()]
            return ["o", self._types.nameable(kind, path), list(attributes), nodes]
        return self._archive(value, path)

    def _nodes(self, values: Any, path: str) -> list[Any]:
        return [self.node(value, f"{path}.{i}" if path else str(i)) for i, value in enumerate(values)]

    def _checked(self, name: str, value: Any, path: str) -> str:
        if getattr(torch, name, None) is not value:
            raise InvalidArgumentError("is no value that torch names", argument=path or "state_dict", value=value)
        return name

    def _dtype(self, dtype: np.dtype[Any], path: str) -> Any:
        try:
            return describe_dtype(dtype)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(str(error), argument=path or "state_dict", value=dtype) from error

    def _dict(self, value: dict[Any, Any], path: str) -> list[Any]:
        prefix = f"{path}." if path else ""
        keys = list(value)
        nodes = [self.node(each, f"{prefix}{key}") for key, each in value.items()]
        if all(type(key) is str for key in keys) and _is_text("".join(keys)):
            return ["d", keys, nodes]
        held = len(self._tensors)
        described = [self.node(key, path) for key in keys]
        if len(self._tensors) != held:
            raise InvalidArgumentError(
                "a tensor cannot be a key of a dict", argument=path or "state_dict", value=type(value)
            )
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
                f"{path or 'the state'}: a defaultdict with the factory {factory!r} cannot be stored",
                hint=f"factories may be {', '.join(FACTORIES)}",
            )
        return ["dd", name, self._dict(value, path)]

    def _tensor(self, value: torch.Tensor, path: str) -> Any:
        device = value.device
        flags = int(value.requires_grad) + 2 * (type(value) is torch.nn.Parameter)
        strided = value.layout is torch.strided and not value.is_nested
        if not strided or value.is_meta or value.dtype not in STORABLE_DTYPES:
            # Some kinds forget in an archive whether they want a gradient.
            return [*self._archive(value.detach(), path), flags]
        plain = value.detach() if flags else value
        if plain.is_conj() or plain.is_neg():
            # Its memory holds other values, and may be another tensor's.
            plain = plain.resolve_conj().resolve_neg()
        index = len(self._tensors)
        self._names.append(path)
        self._devices.append(device)
        self._tensors.append(plain)
        return ["t", index, flags] if flags else ["t", index]

    def _dtensor(self, value: DTensor, path: str) -> list[Any]:
        local = value.to_local().detach()
        if isinstance(local, AsyncCollectiveTensor):
            local = local.wait()
        if type(local) is not torch.Tensor:
            raise InvalidArgumentError(
                "a DTensor of tensors of this class cannot be stored", argument=path, value=type(local)
            )
        flags = int(value.requires_grad) + 2 * isinstance(value, torch.nn.Parameter)
        mesh = self._mesh_keys.setdefault(self._meshes.note(value.device_mesh), len(self._mesh_keys))
        self._dtensors.append(
            {
                "mesh": mesh,
                "placements": [describe_placement(each, path) for each in value.placements],
                "shape": list(value.shape),
                "stride": list(value.stride()),
                "flags": flags,
            }
        )
        place = len(self._dtensors) - 1
        return ["dt", self._tensor(local, path), place]

    def _array(self, value: Any, path: str) -> Any:
        if value.dtype == object and value.dtype.names is None:
            return ["no", list(value.shape), self._nodes(value.flat, path)]
        dtype = self._dtype(value.dtype, path)
        if value.nbytes <= _INLINE_BYTES:
            return ["nd", dtype, list(value.shape), self._bytes(value.tobytes(), path)]
        plain = np.ascontiguousarray(value)
        if not plain.flags.writeable:  # which torch would warn of
            plain = plain.copy()
        return ["nd", dtype, list(value.shape), self._blob(torch.from_numpy(plain.reshape(-1).view(np.uint8)), path)]

    def _bytes(self, value: bytes, path: str) -> Any:
        return base64.b64encode(value).decode() if len(value) <= _INLINE_BYTES else self._blob(value, path)

    def _blob(self, value: bytes | torch.Tensor, path: str) -> int:
        self._blobs.append((f"bytes.{len(self._blobs)}.{_printable(path)}", value))
        return len(self._blobs) - 1

    def _archive(self, value: Any, path: str) -> list[Any]:
        return ["z", self._bytes(pack(value, path or "state_dict", self._types), path)]

    def encoded(self, root: Any) -> Encoded:
        """All that was found, each memory once."""
        seen = {STRUCTURE_KEY, *(key for key, _ in self._blobs)}
        tensors: list[TensorItem] = []
        for index, (name, tensor) in enumerate(zip(map(_printable, self._names), self._tensors, strict=True)):
            if index in self._same:
                continue
            while name in seen:
                name = f"{name}#{index}"
            seen.add(name)
            tensors.append((name, tensor))
        described = self._description(root, [name for name, _ in tensors])
        byte_items = [(key, data) for key, data in self._blobs if isinstance(data, bytes)]
        tensors += [(key, data) for key, data in self._blobs if isinstance(data, torch.Tensor)]
        return Encoded(tensors, [(STRUCTURE_KEY, described), *byte_items])

    def _description(self, root: Any, names: list[str]) -> bytes:
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
            "bytes": [key for key, _ in self._blobs],
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


def _is_text(value: Any) -> bool:
    """Whether JSON keeps a string as it is: it takes two surrogates for the one character that they may stand for."""
    if type(value) is not str:
        return False
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


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
