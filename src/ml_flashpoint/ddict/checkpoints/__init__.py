"""What is committed, who writes, and the snapshots that managers have of it."""
