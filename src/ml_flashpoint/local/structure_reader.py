"""States made again from what `structure` took apart.

Owns the reading of the description, which is trusted no further than its schema: every tag and every index is
checked, and types come from `known_types` alone. Where the bytes come from is the manager's business.
"""

from __future__ import annotations

import base64
import io
import json
import logging
import struct
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ml_flashpoint.copy import cuda
from ml_flashpoint.copy.cpu import copy_all
from ml_flashpoint.core.part_reader import ObjectReader
from ml_flashpoint.format.errors import DamagedError, FlashpointError
from ml_flashpoint.format.numpy_values import array_of, dtype_of, scalar_of
from ml_flashpoint.local.archives import unpack
from ml_flashpoint.local.base_state_dict import TensorAwareStateDict
from ml_flashpoint.local.basic_state_dict import BasicTensorAwareStateDict
from ml_flashpoint.local.dtensors import Meshes, MeshKey, rebuild
from ml_flashpoint.local.errors import CheckpointingException
from ml_flashpoint.local.known_types import KnownTypes
from ml_flashpoint.local.nesting import DICTS, is_namedtuple, new_instance
from ml_flashpoint.local.plain_values import plain_value
from ml_flashpoint.local.structure import FACTORIES, STRUCTURE_KEY, TORCH_VALUES, VERSION

_log = logging.getLogger(__name__)
_MALFORMED = (
    KeyError,
    IndexError,
    TypeError,
    ValueError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    RuntimeError,
)


@dataclass(frozen=True, slots=True)
class Description:
    """The description of a state, read and not yet followed.

    Attributes:
        root: node of the whole.
        names: items that hold tensors.
        same: tensors that share the memory of another one.
        devices: of each tensor.
        meshes: meshes of DTensors. dtensors: what is DTensor about them.
        byte_names: items that hold byte strings.
    """

    root: Any
    names: list[str]
    same: Mapping[int, int]
    devices: list[torch.device]
    meshes: list[MeshKey]
    dtensors: list[dict[str, Any]]
    byte_names: list[str]


def read_description(reader: ObjectReader) -> Description:
    """The description that an object of a local checkpoint holds.

    Raises:
        CheckpointingException: the object is another door's.
        DamagedError: it is none, or of a later version of this package.
    """
    if STRUCTURE_KEY not in reader.layout.by_key:
        raise CheckpointingException(
            "this was not saved by a LocalCheckpointManager",
            step=reader.manifest.step,
            path=reader.path,
            hint="load it by what has saved it, or use another folder",
        )
    try:
        described = json.loads(bytes(reader.bytes_of(STRUCTURE_KEY)))
        if described["local"] != VERSION:
            raise DamagedError(
                f"its structure has version {described['local']!r}, known is {VERSION}", path=reader.path
            )
        devices: list[torch.device] = []
        for name, count in described["devices"]:
            devices += [_device(str(name))] * int(count)
        return Description(
            root=described["root"],
            names=[str(name) for name in described["names"]],
            same={int(index): int(kept) for index, kept in described["same"].items()},
            devices=devices,
            meshes=[str(mesh) for mesh in described["meshes"]],
            dtensors=list(described["dtensors"]),
            byte_names=[str(name) for name in described["bytes"]],
        )
    except FlashpointError:
        raise
    except _MALFORMED as error:
        raise _unreadable(error, reader) from error


def read_state(
    reader: ObjectReader, description: Description, types: KnownTypes, meshes: Meshes
) -> TensorAwareStateDict:
    """The state, in memory of its own, with its tensors on the devices that they were on.

    Args:
        meshes: has all meshes of the description.

    Raises:
        UnsafeContentError: it needs a type that is not allowed.
        DamagedError: the description makes no sense.
    """
    try:
        decoder = _Decoder(description, _read_tensors(reader, description), reader, types, meshes)
        state = decoder.root(description.root)
    except FlashpointError:
        raise
    except _MALFORMED as error:
        raise _unreadable(error, reader) from error
    if not isinstance(state, TensorAwareStateDict):
        raise DamagedError(f"the object holds a {type(state).__name__}, no state", path=reader.path)
    return state


def _unreadable(error: BaseException, reader: ObjectReader) -> DamagedError:
    return DamagedError(f"the structure is not readable: {type(error).__name__}: {error}", path=reader.path)


def _device(name: str) -> torch.device:
    device = torch.device(name)
    if device.type == "cuda" and not cuda.device_count():
        _log.warning("tensors saved from %s are loaded to the CPU: there is no such device here", name)
        return torch.device("cpu")
    return device


def _read_tensors(reader: ObjectReader, description: Description) -> list[torch.Tensor]:
    names = iter(description.names)
    stored = [next(names) for index in range(len(description.devices)) if index not in description.same]
    sources = [reader.tensor(name) for name in stored]
    devices = [device for index, device in enumerate(description.devices) if index not in description.same]
    copies = [torch.empty_like(source, device=device) for source, device in zip(sources, devices, strict=True)]
    copy_all(copies, sources)
    remaining = iter(copies)
    tensors: list[torch.Tensor] = []
    for index in range(len(description.devices)):
        tensors.append(tensors[description.same[index]] if index in description.same else next(remaining))
    return tensors


class _Decoder:
    def __init__(
        self,
        description: Description,
        tensors: Sequence[torch.Tensor],
        reader: ObjectReader,
        types: KnownTypes,
        meshes: Meshes,
    ) -> None:
        self._description = description
        self._tensors = tensors
        self._reader = reader
        self._types = types
        self._meshes = meshes
        self._made: dict[tuple[int, int], torch.Tensor] = {}
        self._tags: dict[str, Callable[..., Any]] = {
            "t": self._tensor,
            "dt": self._dtensor,
            "d": lambda keys, nodes: dict(zip(keys, self._nodes(nodes), strict=True)),
            "D": lambda keys, nodes: dict(zip(self._nodes(keys), self._nodes(nodes), strict=True)),
            "l": self._nodes,
            "u": lambda nodes: tuple(self._nodes(nodes)),
            "od": self._ordered,
            "dd": lambda name, node: defaultdict(FACTORIES[name] if name else None, self._dict(node)),
            "set": lambda nodes: set(self._nodes(nodes)),
            "fset": lambda nodes: frozenset(self._nodes(nodes)),
            "s": lambda data: self._bytes(data).decode(errors="surrogatepass"),
            "f": lambda data: struct.unpack("<d", bytes.fromhex(data))[0],
            "i": lambda text: int(text, 16),
            "c": lambda nodes: complex(*self._nodes(nodes)),
            "v": lambda name, nodes: plain_value(name, self._nodes(nodes)),
            "b": self._bytes,
            "ba": lambda data: bytearray(self._bytes(data)),
            "bio": self._stream,
            "sl": lambda nodes: slice(*self._nodes(nodes)),
            "rg": lambda nodes: range(*self._nodes(nodes)),
            "sz": torch.Size,
            "dev": torch.device,
            "torch": _torch_value,
            "nd": lambda dtype, shape, data: array_of(self._raw(data), dtype, shape),
            "no": self._object_array,
            "np": lambda dtype, data: scalar_of(self._raw(data), dtype),
            "nps": self._numpy_string,
            "npd": dtype_of,
            "e": lambda name, member: self._types.find(name)._member_map_[member],  # type: ignore[attr-defined]
            "n": self._namedtuple,
            "o": self._object,
            "z": self._archive,
        }

    def root(self, node: Any) -> Any:
        """The whole state."""
        if isinstance(node, list) and node[0] == "basic":
            return BasicTensorAwareStateDict(self._node(node[1]))
        return self._node(node)

    def _node(self, node: Any) -> Any:
        return self._tags[node[0]](*node[1:]) if type(node) is list else _scalar(node)

    def _nodes(self, nodes: Sequence[Any]) -> list[Any]:
        return [self._node(node) for node in nodes]

    def _dict(self, node: Any) -> dict[Any, Any]:
        made = self._node(node)
        if type(made) not in DICTS:
            raise TypeError("no dict")
        return made  # type: ignore[no-any-return]

    def _ordered(self, node: Any, attributes: Any = None) -> OrderedDict[Any, Any]:
        made = OrderedDict(self._dict(node))
        if attributes is not None:
            made.__dict__.update(self._dict(attributes))
        return made

    def _tensor(self, index: int, flags: int = 0) -> torch.Tensor:
        index = _index(index)
        # One memory may have been there as several tensors, of which some want a gradient.
        key = self._description.same.get(index, index), flags
        made = self._made.get(key)
        if made is None:
            made = self._made[key] = _flagged(self._tensors[index], flags)
        return made

    def _dtensor(self, node: Any, place: int) -> torch.Tensor:
        described = self._description.dtensors[_index(place)]
        mesh = self._meshes[self._description.meshes[_index(described["mesh"])]]
        return _flagged(rebuild(self._node(node), mesh, described), described["flags"])

    def _raw(self, data: Any) -> bytes | memoryview:
        if isinstance(data, str):
            return base64.b64decode(data, validate=True)
        return self._reader.bytes_of(self._description.byte_names[_index(data)])

    def _bytes(self, data: Any) -> bytes:
        return bytes(self._raw(data))

    def _stream(self, data: Any, position: int) -> io.BytesIO:
        stream = io.BytesIO(self._bytes(data))
        stream.seek(position)
        return stream

    def _object_array(self, shape: Sequence[int], nodes: Sequence[Any]) -> Any:
        flat = np.empty(len(nodes), dtype=object)
        for place, node in enumerate(nodes):
            flat[place] = self._node(node)
        return flat.reshape(shape)

    def _numpy_string(self, node: Any) -> Any:
        value = self._node(node)
        return np.bytes_(value) if type(value) is bytes else np.str_(_checked_text(value))

    def _namedtuple(self, name: str, nodes: Sequence[Any]) -> Any:
        kind: Any = self._types.find(name)
        if not is_namedtuple(kind) or len(kind._fields) != len(nodes):
            raise TypeError(f"{name} is no namedtuple of {len(nodes)} fields")
        return tuple.__new__(kind, self._nodes(nodes))

    def _object(self, name: str, attributes: Sequence[str], nodes: Sequence[Any]) -> Any:
        kind = self._types.find(name)
        if not self._types.is_object(kind):
            raise TypeError(f"{name} is not stored by its attributes")
        return new_instance(kind, dict(zip(map(str, attributes), self._nodes(nodes), strict=True)))

    def _archive(self, data: Any, flags: int = 0) -> Any:
        made = unpack(self._bytes(data), "", self._reader.path, self._types)
        return _flagged(made, flags) if flags else made


def _scalar(value: Any) -> Any:
    if isinstance(value, dict):
        raise TypeError("no node")
    return value


def _checked_text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError("no text")
    return value


def _index(value: Any) -> int:
    # A negative one would count from the end.
    if type(value) is not int or value < 0:
        raise IndexError(f"no index: {value!r}")
    return value


def _flagged(tensor: torch.Tensor, flags: int) -> torch.Tensor:
    if flags & 2:
        return torch.nn.Parameter(tensor, bool(flags & 1))
    return tensor.detach().requires_grad_() if flags & 1 else tensor


def _torch_value(name: str) -> Any:
    value = getattr(torch, name)
    if not isinstance(value, TORCH_VALUES):
        raise TypeError(f"torch.{name} is no dtype, layout or memory format")
    return value
