"""A process's side of a dictionary: its handles, its connections, and the form of keys and values."""
