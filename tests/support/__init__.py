"""What tests share: folders in memory, and clusters of processes on one machine."""
