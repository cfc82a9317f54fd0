"""Import path of the user guide. `adapter.pytorch.seed` has the class."""

from ml_flashpoint.adapter.pytorch.seed import CheckpointObjectManager

__all__ = ["CheckpointObjectManager"]
