"""PyTorch Lightning: a callback that saves a trainer's state into memory, and the way to go on from there."""

from ml_flashpoint.extras import require

require("lightning", "torch", "lightning")

from ml_flashpoint.adapter.lightning.callback import FlashpointCallback, resume_path

__all__ = ["FlashpointCallback", "resume_path"]
