"""State as a tree of tensors and an archive, and the plan by which a rank writes it."""
