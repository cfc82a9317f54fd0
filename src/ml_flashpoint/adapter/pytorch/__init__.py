"""PyTorch Distributed Checkpoint (DCP): a storage writer and a storage reader in memory."""
