"""States as tensors, a header and an archive: the content of one object of a local checkpoint.

In the archive (`state.archive`), a number stands for each tensor. The header names the tensors and their devices, and
the meshes of DTensors, which all ranks make together before a state is loaded.

::

    {"wrapped": true, "tensors": [[name, device], ...], "meshes": [mesh, ...]}

A state comes back with the same values and types. Not part of a value are strides, memory shared by tensors that are
not the same, read-only flags, and attributes that somebody has set on a tensor.
"""

from __future__ import annotations

import contextlib
import json
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from ml_flashpoint.copy import cuda
from ml_flashpoint.copy.cpu import copy_all
from ml_flashpoint.copy.dtypes import STORABLE_DTYPES
from ml_flashpoint.engine.committing import BytesItem, TensorItem
from ml_flashpoint.engine.reader import ObjectReader
from ml_flashpoint.format.errors import DamagedError, InvalidArgumentError
from ml_flashpoint.local.basic_state_dict import BasicTensorAwareStateDict, TensorAwareStateDict, flags_of, rewrap
from ml_flashpoint.local.errors import CheckpointingException
from ml_flashpoint.ranks.rank_group import RankGroup
from ml_flashpoint.state.archive import SafeGlobal, attributes_of, is_plain, load_archive, save_archive

HEADER_KEY = "local_structure.json"
ARCHIVE_KEY = "local_state.pt"

_HINT = "list its types in safe_globals= of the manager, when saving and when loading: [{}]"

MeshKey = str
"""A mesh as JSON text, equal for equal meshes: device type, ranks, names of dimensions."""


class Meshes:
    """The meshes of DTensors that this process has seen in states, by their descriptions."""

    def __init__(self) -> None:
        self._known: dict[MeshKey, DeviceMesh] = {}

    def note(self, mesh: DeviceMesh) -> MeshKey:
        """Remember a mesh of a state that is being saved."""
        names = list(mesh.mesh_dim_names) if mesh.mesh_dim_names else None
        key = json.dumps([mesh.device_type, mesh.mesh.tolist(), names])
        self._known.setdefault(key, mesh)
        return key

    def __getitem__(self, key: MeshKey) -> DeviceMesh:
        return self._known[key]

    def prepare(self, needed: Sequence[MeshKey], ranks: RankGroup) -> None:
        """Make every mesh that any rank needs and some rank does not know, on all ranks in one order. Collective.

        A rank need not be in a mesh to take part in making it.
        """
        mine = [key for key in needed if _speaks(ranks.rank, key)]
        gathered = ranks.gather(json.dumps(mine).encode() if mine else b"")
        for key in {str(key): None for blob in gathered if blob for key in json.loads(blob)}:
            # Ranks that go on after a restart know none; ranks of one process group know the same ones, or none.
            if not ranks.all_ok(key in self._known):
                device_type, mesh, names = json.loads(key)
                mesh = torch.tensor(mesh, dtype=torch.int64, device="cpu")
                self._known[key] = DeviceMesh(device_type, mesh, mesh_dim_names=tuple(names) if names else None)


def _speaks(rank: int, key: MeshKey) -> bool:
    """Return True if a rank names a mesh to the others: the lowest one in the mesh does."""
    members = torch.tensor(json.loads(key)[1], dtype=torch.int64, device="cpu").flatten().tolist()
    return rank == min(members) or rank not in members


def encode(
    state: TensorAwareStateDict, allowed: Sequence[SafeGlobal], meshes: Meshes
) -> tuple[list[TensorItem], list[BytesItem]]:
    """Take a state apart, into names and tensors to store, mostly the caller's own memory, and byte items.

    Raises:
        InvalidArgumentError: it contains itself.
        UnsafeContentError: it holds something that cannot be stored, or a type that is not allowed.
    """
    wrapped = type(state) is BasicTensorAwareStateDict and not state.is_away
    value = state.state_dict if wrapped else state  # type: ignore[attr-defined]
    paths: dict[int, str] = {}
    tensors = _Taken(meshes)
    try:
        _find_paths(value, "", paths)
    except RecursionError:
        raise InvalidArgumentError(
            "is nested too deeply, or contains itself", argument="state_dict", value=type(state)
        ) from None
    archive = save_archive(value, "state_dict", allowed=allowed, leaves=tensors)
    items = tensors.named(paths)
    devices = [[name, _portable(tensor.device)] for name, tensor in items]
    header = {"wrapped": wrapped, "tensors": devices, "meshes": list(tensors.meshes)}
    return items, [(HEADER_KEY, json.dumps(header).encode()), (ARCHIVE_KEY, archive)]


def _find_paths(value: Any, path: str, found: dict[int, str]) -> None:
    items: Any = ()
    if isinstance(value, torch.Tensor):
        found.setdefault(id(value), path)
    elif isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, (list, tuple, deque)):
        items = enumerate(value)
    elif is_plain(type(value)):
        items = attributes_of(value).items()
    for key, each in items:
        _find_paths(each, f"{path}.{key}" if path else str(key), found)


def _portable(device: torch.device) -> str:
    """Return a device as the rank that loads will have it: the current one by its kind alone."""
    if device.index is None or device.type == "cpu":
        return device.type
    with contextlib.suppress(RuntimeError, AttributeError):
        if torch.get_device_module(device).current_device() == device.index:
            return device.type
    return str(device)


class _Taken:
    """Tensors of a state that is being saved; see `state.archive.Leaves`."""

    def __init__(self, meshes: Meshes) -> None:
        self._meshes = meshes
        self._stored: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []
        self._numbers: dict[int, list[int]] = {}  # by address
        self.meshes: dict[MeshKey, int] = {}

    def take(self, tensor: torch.Tensor) -> tuple[Any, ...] | None:
        """Keep a tensor, and describe it; None if it is more than its memory."""
        if isinstance(tensor, DTensor):
            return self._take_sharded(tensor)
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return None
        flags = flags_of(tensor)
        number = self._number(tensor.detach() if flags else tensor, tensor)
        return None if number is None else (number, flags)

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
        return number, flags_of(tensor), mesh, list(tensor.placements), tensor.shape, tensor.stride()

    def _number(self, plain: torch.Tensor, source: torch.Tensor) -> int | None:
        """Return the number of a tensor. Tensors that are one memory (tied weights) have the same."""
        strided = plain.layout is torch.strided and not plain.is_nested
        if not strided or plain.is_meta or plain.dtype not in STORABLE_DTYPES:
            return None
        if plain.is_conj() or plain.is_neg():
            # Its memory holds other values, and may be another tensor's.
            plain = plain.resolve_conj().resolve_neg()
        same_address = self._numbers.setdefault(plain.data_ptr(), [])
        for number in same_address if plain.numel() else ():
            if _form(self._stored[number]) == _form(plain):
                return number
        same_address.append(len(self._stored))
        self._stored.append(plain)
        self._sources.append(source)
        return same_address[-1]

    def give(self, number: int, *described: Any) -> torch.Tensor:
        """Return what was taken, so that an archive can be tried."""
        return self._stored[number]

    def named(self, paths: Mapping[int, str]) -> list[TensorItem]:
        """Return the tensors, with names by their places in the state."""
        items: dict[str, torch.Tensor] = {}
        for number, (tensor, source) in enumerate(zip(self._stored, self._sources, strict=True)):
            name = paths.get(id(source)) or f"value.{number}"
            if name.startswith("__"):  # which begins the names of what is the object's own
                name = f"value.{name}"
            if not name.isascii():
                name = name.encode(errors="backslashreplace").decode()
            while name in items or name in (HEADER_KEY, ARCHIVE_KEY):
                name = f"{name}#{number}"
            items[name] = tensor
        return list(items.items())


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.device


# ---- the way back -------------------------------------------------------------------------------------------------


class Header(NamedTuple):
    """A header: True if the state was in a `BasicTensorAwareStateDict`, the items that hold tensors and the devices of
    these, the meshes of DTensors."""

    wrapped: bool
    tensors: dict[str, torch.device]
    meshes: list[MeshKey]


def read_header(reader: ObjectReader) -> Header:
    """Return the header in an object of a local checkpoint.

    Raises:
        CheckpointingException: the object is another adapter's.
        DamagedError: it is none.
    """
    if HEADER_KEY not in reader.layout.by_key:
        raise CheckpointingException(
            "this was not saved by a LocalCheckpointManager",
            step=reader.manifest.save.step,
            path=reader.path,
            hint="load it by what has saved it, or use another folder",
        )
    with _readable(reader):
        described = json.loads(bytes(reader.bytes_of(HEADER_KEY)))
        tensors = {str(name): torch.device(str(device)) for name, device in described["tensors"]}
        return Header(bool(described["wrapped"]), tensors, [str(mesh) for mesh in described["meshes"]])


@contextlib.contextmanager
def _readable(reader: ObjectReader) -> Any:
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        text = f"its structure is not readable: {type(error).__name__}: {error}"
        raise DamagedError(text, path=reader.path) from error


def read_state(
    reader: ObjectReader, header: Header, allowed: Sequence[SafeGlobal], meshes: Meshes
) -> TensorAwareStateDict:
    """Return the state, in memory of its own, with its tensors on the devices that they were on, or, where there is no
    CUDA device, on the CPU.

    Args:
        meshes: has all meshes of the header.

    Raises:
        UnsafeContentError: it needs a type that is not allowed.
        DamagedError: it makes no sense.
    """
    with _readable(reader):
        sources = [reader.tensor(name) for name in header.tensors]
        archive = reader.bytes_of(ARCHIVE_KEY)
    lost = "cpu" if not cuda.device_count() else None
    devices = [lost if lost and device.type == "cuda" else device for device in header.tensors.values()]
    copies = [torch.empty_like(source, device=device) for source, device in zip(sources, devices, strict=True)]
    copy_all(copies, sources)
    state = load_archive(
        archive,
        "state",
        path=reader.path,
        allowed=allowed,
        device_of=cuda.device_today,
        leaves=_Given(copies, [meshes[key] for key in header.meshes]),
    )
    if header.wrapped:
        return BasicTensorAwareStateDict(state)
    if not isinstance(state, TensorAwareStateDict):
        raise DamagedError(f"the object holds a {type(state).__name__}, no state", path=reader.path)
    return state


class _Given:
    """Tensors of a state that is being loaded; see `state.archive.Leaves`."""

    def __init__(self, tensors: Sequence[torch.Tensor], meshes: Sequence[DeviceMesh]) -> None:
        self._tensors = tensors
        self._meshes = meshes
        self._made: dict[tuple[int, int], torch.Tensor] = {}

    def take(self, tensor: torch.Tensor) -> None:
        """Leave a tensor in the archive."""

    def give(self, number: int, flags: int, *described: Any) -> torch.Tensor:
        """Return the tensor that an archive describes."""
        if not all(type(each) is int and each >= 0 for each in (number, flags, *described[:1])):
            raise ValueError(f"no tensor: {number!r}")
        if described:
            mesh, placements, *form = described
            if not all(isinstance(each, Placement) for each in placements):
                raise TypeError(f"no placements: {placements!r}")
            return rewrap(self._tensors[number], flags, (self._meshes[mesh], placements, *form))
        # One memory may have been there as several tensors, of which some want a gradient.
        if (number, flags) not in self._made:
            self._made[number, flags] = rewrap(self._tensors[number], flags)
        return self._made[number, flags]
