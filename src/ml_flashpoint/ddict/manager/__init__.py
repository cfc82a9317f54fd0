"""A manager: its share of the keys, the memory that values take, its snapshots, and what it is asked."""
