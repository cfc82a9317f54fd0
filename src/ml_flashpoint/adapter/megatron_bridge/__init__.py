"""Checkpoints in memory for Megatron-Bridge. Needs Megatron-Bridge, whose packages come with NVIDIA's containers.

Import it before anything imports megatron-core's local checkpoints: from then on these are `ml_flashpoint.local`'s.
"""

from ml_flashpoint.extras import require
from ml_flashpoint.local import compat

require("megatron", "torch", "megatron", "megatron.bridge")
compat.install()

from ml_flashpoint.adapter.megatron_bridge.checkpoint_manager import FlashpointCheckpointManager, attach

__all__ = ["FlashpointCheckpointManager", "attach"]
