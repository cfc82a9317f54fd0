"""States as tensors, a header and an archive: the content of one object of a local checkpoint.

In the archive (`state.archive`), a name stands for each tensor. The header says on which devices the tensors were, and
which meshes DTensors have: all ranks make these together before a state is loaded.

::

    {"wrapped": true, "devices": {name: device, ...}, "meshes": [mesh, ...]}

Not part of a value are strides, memory shared by tensors that are not the same, and attributes set on a tensor.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from ml_flashpoint.copy import cuda
from ml_flashpoint.copy.cpu import copy_all, view_identity
from ml_flashpoint.copy.dtypes import STORABLE_DTYPES
from ml_flashpoint.copy.tensors import is_plain_strided, storable_name
from ml_flashpoint.engine.committing import BytesItem, TensorItem
from ml_flashpoint.engine.reader import ObjectReader
from ml_flashpoint.format.errors import DamagedError, InvalidArgumentError
from ml_flashpoint.local.basic_state_dict import (
    BasicTensorAwareStateDict,
    TensorAwareStateDict,
    flags_of,
    map_tensors,
    rewrap,
)
from ml_flashpoint.local.errors import CheckpointingException
from ml_flashpoint.ranks.rank_group import RankGroup
from ml_flashpoint.state.archive import SafeGlobal, load_archive, save_archive

HEADER_KEY = "local_structure.json"
ARCHIVE_KEY = "local_state.pt"

MeshKey = str
"""A mesh as JSON text, equal for equal meshes: device type, ranks, names of dimensions."""


class Meshes(dict[MeshKey, DeviceMesh]):
    """The meshes of DTensors that this process has seen in states."""

    def note(self, mesh: DeviceMesh) -> MeshKey:
        """Remember a mesh of a state that is being saved."""
        names = list(mesh.mesh_dim_names) if mesh.mesh_dim_names else None
        key = json.dumps([mesh.device_type, mesh.mesh.tolist(), names])
        self.setdefault(key, mesh)
        return key

    def prepare(self, needed: Sequence[MeshKey], ranks: RankGroup) -> None:
        """Make every mesh that any rank needs and some rank does not know, on all ranks in one order. Collective."""
        mine = [key for key in needed if ranks.rank == (members := _members(key))[0] or ranks.rank not in members]
        gathered = ranks.gather(json.dumps(mine).encode() if mine else b"")
        for key in {str(key): None for blob in gathered if blob for key in json.loads(blob)}:
            # Ranks that go on after a restart know none; ranks of one process group know the same ones, or none.
            if not ranks.all_ok(key in self):
                device_type, mesh, names = json.loads(key)
                mesh = torch.tensor(mesh, dtype=torch.int64, device="cpu")
                self[key] = DeviceMesh(device_type, mesh, mesh_dim_names=tuple(names) if names else None)


def _members(key: MeshKey) -> list[int]:
    """Return the ranks of a mesh in order. The lowest one names the mesh to the others."""
    ranks: list[int] = torch.tensor(json.loads(key)[1], dtype=torch.int64, device="cpu").flatten().tolist()
    return sorted(ranks)


def encode(
    state: TensorAwareStateDict, allowed: Sequence[SafeGlobal], meshes: Meshes
) -> tuple[list[TensorItem], list[BytesItem]]:
    """Take a state apart, into names and tensors to store, mostly the caller's own memory, and byte items. Raises an
    `InvalidArgumentError` if it contains itself, an `UnsafeContentError` if something in it cannot be stored."""
    wrapped = type(state) is BasicTensorAwareStateDict and not state.is_away
    value = state.state_dict if wrapped else state  # type: ignore[attr-defined]
    paths: dict[int, str] = {}
    map_tensors(lambda tensor, path: paths.setdefault(id(tensor), path), value)
    taken = _Taken(meshes, paths)
    archive = save_archive(value, "state_dict", allowed=allowed, leaves=taken)
    devices = {name: _portable(tensor.device) for name, tensor in taken.tensors.items()}
    header = {"wrapped": wrapped, "devices": devices, "meshes": list(taken.meshes)}
    return list(taken.tensors.items()), [(HEADER_KEY, json.dumps(header).encode()), (ARCHIVE_KEY, archive)]


def _portable(device: torch.device) -> str:
    """Return a device as the rank that loads will have it: the current one by its kind alone."""
    with contextlib.suppress(RuntimeError, AttributeError):
        if device.type == "cpu" or torch.get_device_module(device).current_device() == device.index:
            return device.type
    return str(device)


class _Taken:
    """Tensors of a state that is being saved, by name; see `state.archive.Leaves`."""

    def __init__(self, meshes: Meshes, paths: Mapping[int, str]) -> None:
        self._meshes, self._paths = meshes, paths
        self._names: dict[tuple[object, ...], str] = {}  # by memory: tied weights are one tensor
        self.tensors: dict[str, torch.Tensor] = {}
        self.meshes: dict[MeshKey, None] = {}

    def take(self, tensor: torch.Tensor) -> tuple[Any, ...] | None:
        """Keep a tensor, and describe it; None if it is more than its memory."""
        flags = flags_of(tensor)
        if not isinstance(tensor, DTensor):
            is_usual = type(tensor) in (torch.Tensor, torch.nn.Parameter)
            name = self._kept(tensor.detach() if flags else tensor, tensor) if is_usual else None
            return None if name is None else (name, flags)
        local: Any = tensor.to_local().detach()
        if isinstance(local, AsyncCollectiveTensor):
            local = local.wait()
        name = self._kept(local, tensor) if type(local) is torch.Tensor else None
        if name is None:
            text = "a DTensor of tensors of this class cannot be stored"
            raise InvalidArgumentError(text, argument="state_dict", value=type(local))
        mesh = self._meshes.note(tensor.device_mesh)
        self.meshes[mesh] = None
        return name, flags, mesh, list(tensor.placements), tensor.shape, tensor.stride()

    def _kept(self, plain: torch.Tensor, source: torch.Tensor) -> str | None:
        if not is_plain_strided(plain) or plain.is_meta or plain.dtype not in STORABLE_DTYPES:
            return None
        if plain.is_conj() or plain.is_neg():
            # Its memory holds other values, and may be another tensor's.
            plain = plain.resolve_conj().resolve_neg()
        memory = view_identity(plain)
        if plain.numel() and memory in self._names:
            return self._names[memory]
        name = storable_name(self._paths.get(id(source)) or f"value.{len(self.tensors)}")
        while name in self.tensors or name in (HEADER_KEY, ARCHIVE_KEY):
            name = f"{name}#{len(self.tensors)}"
        self._names[memory] = name
        self.tensors[name] = plain
        return name

    def give(self, name: str, *described: Any) -> torch.Tensor:
        """Return what was taken, so that an archive can be tried."""
        return self.tensors[name]


class Part(NamedTuple):
    """The content of an object; ``wrapped`` is True if the state was in a `BasicTensorAwareStateDict`."""

    path: str
    wrapped: bool
    tensors: list[tuple[str, torch.Tensor, torch.device]]
    meshes: list[MeshKey]
    archive: Any


def read_part(reader: ObjectReader) -> Part:
    """Return the content of an object of a local checkpoint. Raises a `CheckpointingException` if the object is another
    adapter's, a `DamagedError` if it makes no sense."""
    if HEADER_KEY not in reader.layout.by_key:
        text = "this was not saved by a LocalCheckpointManager: use another folder"
        raise CheckpointingException(text, step=reader.manifest.save.step, path=reader.path)
    try:
        header = json.loads(bytes(reader.bytes_of(HEADER_KEY)))
        devices = {name: torch.device(str(device)) for name, device in header["devices"].items()}
        tensors = [(name, reader.tensor(name), device) for name, device in devices.items()]
        meshes, archive = [str(mesh) for mesh in header["meshes"]], reader.bytes_of(ARCHIVE_KEY)
        return Part(reader.path, bool(header["wrapped"]), tensors, meshes, archive)
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        text = f"its structure is not readable: {type(error).__name__}: {error}"
        raise DamagedError(text, path=reader.path) from error


def read_state(part: Part, allowed: Sequence[SafeGlobal], meshes: Meshes) -> TensorAwareStateDict:
    """Return the state, in memory of its own, with its tensors on the devices that they were on, or, where there is no
    CUDA device, on the CPU. Raises an `UnsafeContentError` if it needs a type that is not allowed."""
    has_cuda, copies = bool(cuda.device_count()), dict[str, torch.Tensor]()
    for name, source, device in part.tensors:
        copies[name] = torch.empty_like(source, device="cpu" if device.type == "cuda" and not has_cuda else device)
    copy_all(list(copies.values()), [source for _, source, _ in part.tensors])
    given = _Given(copies, meshes)
    state = load_archive(
        part.archive, "state", path=part.path, allowed=allowed, device_of=cuda.device_today, leaves=given
    )
    if part.wrapped:
        return BasicTensorAwareStateDict(state)
    if not isinstance(state, TensorAwareStateDict):
        raise DamagedError(f"the object holds a {type(state).__name__}, no state", path=part.path)
    return state


class _Given:
    """Tensors of a state that is being loaded, by name; see `state.archive.Leaves`."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], meshes: Meshes) -> None:
        self._tensors, self._meshes = tensors, meshes
        self._made: dict[tuple[str, int], torch.Tensor] = {}

    def take(self, tensor: torch.Tensor) -> None:
        """Leave a tensor in the archive."""

    def give(self, name: str, flags: int, *described: Any) -> torch.Tensor:
        """Return the tensor that an archive describes."""
        if described:
            mesh, placements, shape, stride = described
            if not all(isinstance(each, Placement) for each in placements):
                raise TypeError(f"no placements: {placements!r}")
            return rewrap(self._tensors[name], flags, (self._meshes[mesh], placements, shape, stride))
        # One memory may have been there as several tensors, of which some want a gradient.
        if (name, flags) not in self._made:
            self._made[name, flags] = rewrap(self._tensors[name], flags)
        return self._made[name, flags]
