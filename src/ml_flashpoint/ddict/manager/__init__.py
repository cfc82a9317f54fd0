"""A manager: its share of the keys, the memory that values take, and what it is asked."""
