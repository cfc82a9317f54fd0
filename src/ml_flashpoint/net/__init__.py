"""Authenticated requests and replies between processes and nodes: what copies, dictionaries and barriers travel by."""
