"""Saves of a job: how ranks agree on which of them is verified."""
