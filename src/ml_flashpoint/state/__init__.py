"""State as a tree of tensors, and the plan by which a rank writes it; modules, optimizers and random numbers."""
