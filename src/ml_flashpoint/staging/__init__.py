"""How bytes get from the training state into an arena."""
