"""Requests, keys and the account of writes: what travels between the processes. Imports errors only."""
