"""Checkpoints in memory for engines of DeepSpeed. Needs the extra ``deepspeed``."""

from ml_flashpoint.extras import require

require("deepspeed", "torch", "deepspeed")

from ml_flashpoint.adapter.deepspeed.loop import DeepSpeedFlashpoint

__all__ = ["DeepSpeedFlashpoint"]
