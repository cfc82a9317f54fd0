"""Checkpoints in memory for loops that Hugging Face Accelerate prepares. Needs the extra ``accelerate``."""

from ml_flashpoint.extras import require

require("accelerate", "torch", "accelerate")

from ml_flashpoint.adapter.accelerate.loop import AcceleratorFlashpoint

__all__ = ["AcceleratorFlashpoint"]
