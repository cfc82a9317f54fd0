"""Who takes part in a job and what they agree on: groups of ranks, replication strategies, recovery planning."""
