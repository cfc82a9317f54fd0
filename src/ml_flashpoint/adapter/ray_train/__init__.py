"""Checkpoints in memory for training functions of Ray Train. Needs the extra ``ray-train``."""

from ml_flashpoint.extras import require

require("ray-train", "torch", "ray", "pandas", "pyarrow")

from ml_flashpoint.adapter.ray_train.loop import RayTrainFlashpoint

__all__ = ["RayTrainFlashpoint"]
