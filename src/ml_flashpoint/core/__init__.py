"""The engine: saving, committing, finding, recovering and loading versions."""
