"""The coordinator of a dictionary: what is committed, who writes, and in which epoch it is."""
