"""Thin layers that give each training framework the same engine; one folder a framework."""
