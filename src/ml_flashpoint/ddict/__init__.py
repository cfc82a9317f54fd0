"""A distributed dictionary with checkpoints, rollback, persistence and recovery from memory."""
