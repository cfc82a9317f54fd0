"""Where the guide imports identifiers of checkpoints from; `format.checkpoint_id_types` owns them."""

from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId, CheckpointObjectId

__all__ = ["CheckpointContainerId", "CheckpointObjectId"]
