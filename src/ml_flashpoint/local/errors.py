"""Errors of local checkpoints, on top of `format.errors`."""

from __future__ import annotations

from ml_flashpoint.format.errors import FlashpointError, InvalidArgumentError, NothingLoadableError, TopologyError


class CheckpointingException(FlashpointError):
    """A local checkpoint could not be saved, found or loaded. Raised on all ranks."""


class NoReplicasAvailableError(CheckpointingException, NothingLoadableError):
    """There are checkpoints, and none can be loaded: parts are lost or out of reach, and nobody holds copies."""


class InvalidIterationError(CheckpointingException, InvalidArgumentError):
    """An iteration is not an integer of at least 0."""


class StaleIterationError(InvalidIterationError):
    """An iteration is older than one that was saved or found before."""


class CallOrderError(CheckpointingException):
    """A method was called before or after its time."""


class WorldSizeChangedError(CheckpointingException, TopologyError):
    """Another number of ranks saved the checkpoint; local checkpoints cannot be resharded."""


class BackgroundWorkerError(CheckpointingException):
    """A background call failed, or did not end in time."""


class CompatibilityError(FlashpointError):
    """Import paths of another package cannot be taken over."""
