"""What a checkpoint is: names, object format, manifests, saving, loading and recovery planning."""
