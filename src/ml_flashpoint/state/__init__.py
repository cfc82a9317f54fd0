"""The state of a training as tensors, and as an archive of everything else."""
