"""Loads a version, on each rank its own part.

Owns the steps. How ranks vote on them, and which version comes next, is `core.joint_load`'s.
"""

from __future__ import annotations

from collections.abc import Sequence

from ml_flashpoint.core.checkpoint_loader import MLFlashpointCheckpointLoader
from ml_flashpoint.core.joint_load import JointLoad
from ml_flashpoint.core.part_reader import ObjectReader
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.local.base_state_dict import TensorAwareStateDict
from ml_flashpoint.local.dtensors import Meshes
from ml_flashpoint.local.structure import Header, read_header, read_state
from ml_flashpoint.ranks.rank_group import RankGroup
from ml_flashpoint.state.archive import SafeGlobal


class PartLoader:
    """See the module. All methods are collective.

    Args:
        loader: the engine's loader.
        ranks: who votes.
        allowed: further types that a state may be made of.
        meshes: for DTensors.
    """

    def __init__(
        self, loader: MLFlashpointCheckpointLoader, ranks: RankGroup, allowed: Sequence[SafeGlobal], meshes: Meshes
    ) -> None:
        self._loader = loader
        self._ranks = ranks
        self._allowed = allowed
        self._meshes = meshes

    def load(self, version: CheckpointContainerId, joint: JointLoad) -> TensorAwareStateDict:
        """This rank's state of a version, on the devices that its tensors were on.

        Raises:
            FailedStepError: a rank cannot load its part.
        """

        def open_part() -> tuple[ObjectReader, Header]:
            manifest = self._loader.read_manifest(version, self._ranks.rank)
            reader = self._loader.open_object(version, manifest, manifest.objects[0])
            return reader, read_header(reader)

        def read_part() -> TensorAwareStateDict:
            state = read_state(reader, header, self._allowed, self._meshes)
            state.restore_tensor_device()
            reader.check_kept()
            return state

        reader, header = joint.step(version, open_part)
        self._meshes.prepare(header.meshes, self._ranks)
        return joint.step(version, read_part)
