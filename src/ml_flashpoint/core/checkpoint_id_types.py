"""Import path of the user guide for identifiers of checkpoints. `format.names` has them."""

from ml_flashpoint.format.names import CheckpointContainerId

__all__ = ["CheckpointContainerId"]
