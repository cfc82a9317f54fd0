"""Groups of ranks, replication strategies, retention rules and recovery planning."""
