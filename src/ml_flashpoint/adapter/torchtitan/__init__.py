"""Checkpoints in memory for torchtitan. Needs the extra ``torchtitan``."""

from ml_flashpoint.extras import require

require("torchtitan", "torch", "torchtitan")

from ml_flashpoint.adapter.torchtitan.manager import FlashpointManager, attach

__all__ = ["FlashpointManager", "attach"]
