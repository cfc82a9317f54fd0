"""Speed of saving, loading and copying, as ratios to a warm memcpy of the same bytes in the same run."""
