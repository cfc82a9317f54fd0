"""DTensors as a local shard and plain values that describe them.

Meshes that this process knows are used again. All ranks make new ones together, since that takes process groups.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard, _StridedShard

from ml_flashpoint.format.errors import InvalidArgumentError
from ml_flashpoint.ranks.rank_group import RankGroup

MeshKey = str
"""A mesh as JSON text: device type, ranks, names of dimensions."""


def describe_mesh(mesh: DeviceMesh) -> MeshKey:
    """Return a mesh as text, equal for equal meshes."""
    names = list(mesh.mesh_dim_names) if mesh.mesh_dim_names else None
    return json.dumps([mesh.device_type, mesh.mesh.tolist(), names])


def describe_placement(placement: Placement, where: str) -> list[Any]:
    """Return a placement as plain values.

    Args:
        where: the DTensor's place in the state, for errors.

    Raises:
        InvalidArgumentError: it is of a kind that is not known here.
    """
    if type(placement) is Shard:
        return ["S", placement.dim]
    if type(placement) is Replicate:
        return ["R"]
    if type(placement) is Partial:
        return ["P", placement.reduce_op]
    if type(placement) is _StridedShard:
        return ["SS", placement.dim, placement.split_factor]
    raise InvalidArgumentError("a DTensor with this placement cannot be stored", argument=where, value=placement)


def placement_of(described: Sequence[Any]) -> Placement:
    """Return the placement that `describe_placement` described."""
    match described:
        case ["S", int(dim)]:
            return Shard(dim)
        case ["R"]:
            return Replicate()
        case ["P", str(operation)]:
            return Partial(operation)
        case ["SS", int(dim), int(factor)]:
            return _StridedShard(dim, split_factor=factor)
    raise ValueError(f"no placement: {described!r}")


def rebuild(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any], shape: Sequence[int], stride: Sequence[int]
) -> DTensor:
    """Return a DTensor of this rank's shard. Nothing is communicated."""
    return DTensor.from_local(
        local,
        mesh,
        [placement_of(each) for each in placements],
        run_check=False,
        shape=torch.Size(shape),
        stride=tuple(stride),
    )


class Meshes:
    """Meshes that this process has seen in states, by their descriptions."""

    def __init__(self) -> None:
        self._known: dict[MeshKey, DeviceMesh] = {}

    def note(self, mesh: DeviceMesh) -> MeshKey:
        """Remember a mesh of a state that is being saved."""
        key = describe_mesh(mesh)
        self._known.setdefault(key, mesh)
        return key

    def __getitem__(self, key: MeshKey) -> DeviceMesh:
        return self._known[key]

    def prepare(self, needed: Sequence[MeshKey], ranks: RankGroup) -> None:
        """Make every mesh that any rank needs, on all ranks in one order. Collective.

        A rank need not be in a mesh to take part in making it. Of every mesh the lowest rank speaks.
        """
        members = {key: _members(key) for key in needed}
        mine = [key for key in needed if min(members[key]) == ranks.rank or ranks.rank not in members[key]]
        gathered = ranks.gather(json.dumps(mine).encode() if mine else b"")
        every = {str(key): None for blob in gathered if blob for key in json.loads(blob)}
        for key in every:
            # Ranks that go on after a restart know none; ranks of one process group know the same ones, or none.
            if not ranks.all_ok(key in self._known):
                device_type, mesh, names = json.loads(key)
                self._known[key] = DeviceMesh(
                    device_type,
                    torch.tensor(mesh, dtype=torch.int64, device="cpu"),
                    mesh_dim_names=tuple(names) if names else None,
                )


def _members(key: MeshKey) -> list[int]:
    ranks = torch.tensor(json.loads(key)[1], dtype=torch.int64, device="cpu").flatten().tolist()
    return [int(rank) for rank in ranks]
