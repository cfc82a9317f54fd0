"""States as tensors, a header and an archive: the content of one object of a local checkpoint.

In the archive (`state.archive`), a number stands for each tensor. The header names the tensors and their devices.

::

    {"local": 4, "wrapped": true, "tensors": [[name, device], ...], "meshes": [mesh, ...]}

A state comes back with the same values and types. Not part of a value are strides, memory shared by tensors that are
not the same, read-only flags, and attributes that somebody has set on a tensor.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from ml_flashpoint.copy import cuda
from ml_flashpoint.copy.cpu import copy_all
from ml_flashpoint.copy.dtypes import STORABLE_DTYPES
from ml_flashpoint.engine.committing import BytesItem, TensorItem
from ml_flashpoint.engine.reader import ObjectReader
from ml_flashpoint.format.errors import DamagedError, FlashpointError, InvalidArgumentError
from ml_flashpoint.local.base_state_dict import TensorAwareStateDict
from ml_flashpoint.local.basic_state_dict import BasicTensorAwareStateDict
from ml_flashpoint.local.dtensors import Meshes, MeshKey
from ml_flashpoint.local.errors import CheckpointingException
from ml_flashpoint.state.archive import (
    SafeGlobal,
    attributes_of,
    is_plain,
    load_archive,
    save_archive,
)

HEADER_KEY = "local_structure.json"
ARCHIVE_KEY = "local_state.pt"
VERSION = 4

_log = logging.getLogger(__name__)


def encode(
    state: TensorAwareStateDict, allowed: Sequence[SafeGlobal], meshes: Meshes
) -> tuple[list[TensorItem], list[BytesItem]]:
    """Take a state apart. The state is only looked at.

    Returns:
        Names and tensors to store: plain strided ones on any device, mostly the caller's own memory, with large arrays
        among them as bytes. And the header and the archive, as byte items.

    Raises:
        InvalidArgumentError: it contains itself.
        UnsafeContentError: it holds something that cannot be stored, or a type that is not allowed.
    """
    wrapped = type(state) is BasicTensorAwareStateDict and not state.is_away
    value = state.state_dict if wrapped else state  # type: ignore[attr-defined]
    paths: dict[int, str] = {}
    tensors = _Tensors(meshes)
    try:
        _find_paths(value, "", paths)
    except RecursionError:
        raise InvalidArgumentError(
            "is nested too deeply, or contains itself", argument="state_dict", value=type(state)
        ) from None
    archive = save_archive(value, "state_dict", allowed=allowed, leaves=tensors)
    items = tensors.named(paths)
    header = {
        "local": VERSION,
        "wrapped": wrapped,
        "tensors": [[name, tensors.portable(tensor.device)] for name, tensor in items],
        "meshes": list(tensors.meshes),
    }
    return items, [(HEADER_KEY, json.dumps(header).encode()), (ARCHIVE_KEY, archive)]


def _find_paths(value: Any, path: str, found: dict[int, str]) -> None:
    items: Any
    if isinstance(value, torch.Tensor):
        found.setdefault(id(value), path)
        return
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, (list, tuple, deque)):
        items = enumerate(value)
    elif is_plain(type(value)):
        items = attributes_of(value).items()
    else:
        return
    for key, each in items:
        _find_paths(each, f"{path}.{key}" if path else str(key), found)


class _Tensors:
    """Tensors of a state that is being saved; see `state.archive.Leaves`."""

    def __init__(self, meshes: Meshes) -> None:
        self._meshes = meshes
        self._stored: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []
        self._numbers: dict[int, list[int]] = {}
        self._devices: dict[torch.device, str] = {}
        self.meshes: dict[MeshKey, int] = {}

    def take(self, tensor: torch.Tensor) -> tuple[Any, ...] | None:
        """Keep a tensor, and describe it; None if it is more than its memory."""
        kind = type(tensor)
        if isinstance(tensor, DTensor):
            return self._take_sharded(tensor)
        if kind is not torch.Tensor and kind is not torch.nn.Parameter:
            return None
        flags = _flags(tensor)
        number = self._number(tensor.detach() if flags else tensor, tensor)
        if number is None:
            return None
        return (number, flags) if flags else (number,)

    def _take_sharded(self, tensor: DTensor) -> tuple[Any, ...]:
        local: Any = tensor.to_local().detach()
        if isinstance(local, AsyncCollectiveTensor):
            local = local.wait()
        number = self._number(local, tensor) if type(local) is torch.Tensor else None
        if number is None:
            raise InvalidArgumentError(
                "a DTensor of tensors of this class cannot be stored", argument="state_dict", value=type(local)
            )
        mesh = self.meshes.setdefault(self._meshes.note(tensor.device_mesh), len(self.meshes))
        return number, _flags(tensor), mesh, list(tensor.placements), tensor.shape, tensor.stride()

    def portable(self, device: torch.device) -> str:
        """Return a device as the rank that loads will have it: the current one by its kind alone."""
        if device not in self._devices:
            is_current = device.type == "cpu" or device.index is None
            with contextlib.suppress(RuntimeError, AttributeError):
                is_current = is_current or torch.get_device_module(device).current_device() == device.index
            self._devices[device] = device.type if is_current else str(device)
        return self._devices[device]

    def _number(self, plain: torch.Tensor, source: torch.Tensor) -> int | None:
        """Return the number of a tensor. Tensors that are one memory (tied weights) have the same."""
        strided = plain.layout is torch.strided and not plain.is_nested
        if not strided or plain.is_meta or plain.dtype not in STORABLE_DTYPES:
            return None
        if plain.is_conj() or plain.is_neg():
            # Its memory holds other values, and may be another tensor's.
            plain = plain.resolve_conj().resolve_neg()
        number = len(self._stored)
        earlier = self._numbers.setdefault(plain.data_ptr(), [])
        if earlier and plain.numel():
            form = _form(plain)
            number = next((each for each in earlier if _form(self._stored[each]) == form), number)
        if number == len(self._stored):
            earlier.append(number)
            self._stored.append(plain)
            self._sources.append(source)
        return number

    def give(self, number: int, *described: Any) -> torch.Tensor:
        """Return what was taken, so that an archive can be tried."""
        return self._stored[number]

    def named(self, paths: Mapping[int, str]) -> list[TensorItem]:
        """Return the tensors, with names by their places in the state."""
        items: dict[str, torch.Tensor] = {}
        for number, (tensor, source) in enumerate(zip(self._stored, self._sources, strict=True)):
            name = _printable(paths.get(id(source), f"value.{number}"))
            while name in items or name in (HEADER_KEY, ARCHIVE_KEY):
                name = f"{name}#{number}"
            items[name] = tensor
        return list(items.items())


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def _printable(name: str) -> str:
    # Beginning with an underscore is how objects name what is their own.
    if name[:2] == "__" or not name:
        name = f"value.{name}"
    return name if name.isascii() else name.encode(errors="backslashreplace").decode()


def _flags(tensor: torch.Tensor) -> int:
    return int(tensor.requires_grad) + 2 * isinstance(tensor, torch.nn.Parameter)


# ---- the way back -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Header:
    """A header of a state.

    Attributes:
        wrapped: True if the state is one of containers, in a `BasicTensorAwareStateDict`.
        tensors: the items that hold them, and their devices.
        meshes: meshes of DTensors.
    """

    wrapped: bool
    tensors: dict[str, torch.device]
    meshes: list[MeshKey]


def read_header(reader: ObjectReader) -> Header:
    """Return the header in an object of a local checkpoint.

    Raises:
        CheckpointingException: the object is another adapter's.
        DamagedError: it is none, or of another version of this package.
    """
    if HEADER_KEY not in reader.layout.by_key:
        raise CheckpointingException(
            "this was not saved by a LocalCheckpointManager",
            step=reader.manifest.step,
            path=reader.path,
            hint="load it by what has saved it, or use another folder",
        )
    try:
        described = json.loads(bytes(reader.bytes_of(HEADER_KEY)))
        version = described["local"]
        if version != VERSION:
            raise DamagedError(f"its structure has version {version!r}, known is {VERSION}", path=reader.path)
        tensors = {str(name): _device(str(device)) for name, device in described["tensors"]}
        return Header(bool(described["wrapped"]), tensors, [str(mesh) for mesh in described["meshes"]])
    except FlashpointError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, RecursionError) as error:
        raise DamagedError(
            f"its structure is not readable: {type(error).__name__}: {error}", path=reader.path
        ) from error


def _device(name: str) -> torch.device:
    device = torch.device(name)
    if device.type == "cuda" and not cuda.device_count():
        _log.warning("tensors saved from %s are loaded to the CPU: there is no such device here", name)
        return torch.device("cpu")
    return device


def read_state(
    reader: ObjectReader, header: Header, allowed: Sequence[SafeGlobal], meshes: Meshes
) -> TensorAwareStateDict:
    """Return the state, in memory of its own, with its tensors on the devices that they were on.

    Args:
        meshes: has all meshes of the header.

    Raises:
        UnsafeContentError: it needs a type that is not allowed.
        DamagedError: it makes no sense.
    """
    try:
        sources = [reader.tensor(name) for name in header.tensors]
        archive = reader.bytes_of(ARCHIVE_KEY)
    except (LookupError, TypeError, ValueError) as error:
        raise DamagedError(
            f"its structure is not readable: {type(error).__name__}: {error}", path=reader.path
        ) from error
    devices = header.tensors.values()
    copies = [torch.empty_like(source, device=device) for source, device in zip(sources, devices, strict=True)]
    copy_all(copies, sources)
    state = load_archive(
        archive,
        "state",
        path=reader.path,
        allowed=allowed,
        device_of=cuda.device_today,
        leaves=_Loaded(copies, header.meshes, meshes),
    )
    if header.wrapped:
        return BasicTensorAwareStateDict(state)
    if not isinstance(state, TensorAwareStateDict):
        raise DamagedError(f"the object holds a {type(state).__name__}, no state", path=reader.path)
    return state


class _Loaded:
    """Tensors of a state that is being loaded; see `state.archive.Leaves`."""

    def __init__(self, tensors: Sequence[torch.Tensor], keys: Sequence[MeshKey], meshes: Meshes) -> None:
        self._tensors = tensors
        self._keys = keys
        self._meshes = meshes
        self._made: dict[tuple[int, int], torch.Tensor] = {}

    def take(self, tensor: torch.Tensor) -> None:
        """Leave a tensor in the archive."""

    def give(self, number: int, flags: int = 0, *described: Any) -> torch.Tensor:
        """Return the tensor that an archive describes."""
        if not all(type(each) is int and each >= 0 for each in (number, flags, *described[:1])):
            raise ValueError(f"no tensor: {number!r}")
        plain = self._tensors[number]
        if described:
            mesh, placements, shape, stride = described
            if not all(isinstance(each, Placement) for each in placements):
                raise TypeError(f"no placements: {placements!r}")
            made = DTensor.from_local(
                plain, self._meshes[self._keys[mesh]], placements, run_check=False, shape=shape, stride=tuple(stride)
            )
            return _flagged(made, flags)
        # One memory may have been there as several tensors, of which some want a gradient.
        if (number, flags) not in self._made:
            self._made[number, flags] = _flagged(plain, flags)
        return self._made[number, flags]


def _flagged(tensor: torch.Tensor, flags: int) -> torch.Tensor:
    if flags & 2:
        return torch.nn.Parameter(tensor, bool(flags & 1))
    return tensor.detach().requires_grad_() if flags & 1 else tensor
