"""The device meshes of DTensors in states.

Meshes that this process knows are used again. All ranks make new ones together, since that takes process groups.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from ml_flashpoint.ranks.rank_group import RankGroup

MeshKey = str
"""A mesh as JSON text: device type, ranks, names of dimensions."""


def describe_mesh(mesh: DeviceMesh) -> MeshKey:
    """Return a mesh as text, equal for equal meshes."""
    names = list(mesh.mesh_dim_names) if mesh.mesh_dim_names else None
    return json.dumps([mesh.device_type, mesh.mesh.tolist(), names])


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
