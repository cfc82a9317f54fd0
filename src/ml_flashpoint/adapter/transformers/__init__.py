"""Checkpoints in memory for the Trainer of Hugging Face Transformers. Needs the extra ``transformers``."""

from ml_flashpoint.extras import require

require("transformers", "torch", "accelerate", "transformers")

from ml_flashpoint.adapter.transformers.attached import attach, resume_path

__all__ = ["attach", "resume_path"]
