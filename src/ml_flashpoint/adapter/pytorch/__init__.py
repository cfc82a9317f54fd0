"""PyTorch Distributed Checkpoint (DCP): a storage writer and a storage reader in memory."""

from ml_flashpoint.extras import require

require("pytorch", "torch")
