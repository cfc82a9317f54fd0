"""Copy, verify, open, export, persist and remove versions: each is one function from store to store."""
