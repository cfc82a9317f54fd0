"""Loads a version on all ranks, each its own part, or on none.

Owns the votes by which one rank's failure is everybody's. Which failures an older version may not have is said by
`format.failure_kinds`; which version to load is the manager's decision.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable

from ml_flashpoint.core.checkpoint_loader import MLFlashpointCheckpointLoader
from ml_flashpoint.core.part_reader import ObjectReader
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.errors import FlashpointError
from ml_flashpoint.format.failure_kinds import may_older_be_loadable
from ml_flashpoint.local.base_state_dict import TensorAwareStateDict
from ml_flashpoint.local.dtensors import Meshes
from ml_flashpoint.local.errors import CheckpointingException
from ml_flashpoint.local.known_types import KnownTypes
from ml_flashpoint.local.structure_reader import Description, read_description, read_state
from ml_flashpoint.ranks.rank_group import RankGroup

_log = logging.getLogger(__name__)


class PartLoader:
    """See the module. All methods are collective.

    Args:
        loader: the engine's loader.
        ranks: who votes.
        types: what a state may be made of.
        meshes: for DTensors.
    """

    def __init__(
        self, loader: MLFlashpointCheckpointLoader, ranks: RankGroup, types: KnownTypes, meshes: Meshes
    ) -> None:
        self._loader = loader
        self._ranks = ranks
        self._types = types
        self._meshes = meshes

    def load(self, version: CheckpointContainerId) -> TensorAwareStateDict | None:
        """This rank's state of a version, on the devices that its tensors were on; None, on all ranks, if some rank
        cannot read its part.

        Raises:
            UnsafeContentError: the state needs a type that is not allowed here.
            CheckpointingException: another rank cannot load it, for a reason that an older version would share.
        """
        opened: tuple[ObjectReader, Description] | None = None
        state: TensorAwareStateDict | None = None

        def open_part() -> None:
            nonlocal opened
            manifest = self._loader.read_manifest(version, self._ranks.rank)
            reader = self._loader.open_object(version, manifest, manifest.objects[0])
            opened = reader, read_description(reader)

        def read_part() -> None:
            nonlocal state
            assert opened is not None
            reader, description = opened
            state = read_state(reader, description, self._types, self._meshes)
            state.restore_tensor_device()
            reader.check_kept()

        try:
            if not self._all_do(open_part, version):
                return None
            assert opened is not None
            self._meshes.prepare(opened[1].meshes, self._ranks)
            return state if self._all_do(read_part, version) else None
        finally:
            self._loader.release()

    def _all_do(self, work: Callable[[], None], version: CheckpointContainerId) -> bool:
        """Do something on all ranks. Returns whether all could, or raises if another version would not help."""
        error: Exception | None = None
        blob = b""
        try:
            work()
        except Exception as caught:
            error = caught
            text = str(caught) if isinstance(caught, FlashpointError) else f"{type(caught).__name__}: {caught}"
            blob = json.dumps([may_older_be_loadable(caught), text]).encode()
        failures = {rank: json.loads(report) for rank, report in enumerate(self._ranks.gather(blob)) if report}
        if not failures:
            return True
        for rank, (passed_over, text) in failures.items():
            if not passed_over:
                if isinstance(error, FlashpointError) and rank == self._ranks.rank:
                    raise error
                raise CheckpointingException(
                    f"rank {rank} cannot load the checkpoint: {text}", step=version.step, rank=self._ranks.rank
                ) from error
        rank, (_, text) = next(iter(failures.items()))
        _log.error("iteration %s cannot be loaded by rank %d, trying an older one: %s", version.step, rank, text)
        return False
