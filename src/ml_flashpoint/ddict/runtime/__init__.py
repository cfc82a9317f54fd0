"""Where managers run: child processes of the creator, or actors of Ray."""
