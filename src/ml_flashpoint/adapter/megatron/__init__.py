"""Megatron-LM: strategies for megatron-core's `dist_checkpointing`, on the DCP writer and reader in memory."""

from ml_flashpoint.extras import require

require("megatron", "torch", "megatron")
