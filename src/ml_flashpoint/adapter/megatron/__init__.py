"""Megatron-LM: strategies for megatron-core's `dist_checkpointing`, on the DCP writer and reader in memory."""
