"""Import path of the user guide for identifiers of checkpoints. `format.checkpoint_id_types` has them."""

from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId, CheckpointObjectId

__all__ = ["CheckpointContainerId", "CheckpointObjectId"]
