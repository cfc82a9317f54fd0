"""A process's side of a dictionary: its handles, its session, and the form of values."""
