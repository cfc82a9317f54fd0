"""What a GPU makes of it: floors of the machine first, then copies, saves and loads beside them, and others' saves."""
