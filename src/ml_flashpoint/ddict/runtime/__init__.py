"""Runtimes of managers: child processes of the creator, or actors of Ray."""
