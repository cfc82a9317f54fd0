"""Import path of the user guide. `adapter.pytorch.seed` has the class."""

from ml_flashpoint.adapter.pytorch.seed import DefaultMLFlashpointCheckpointLoader

__all__ = ["DefaultMLFlashpointCheckpointLoader"]
