"""Where the bytes live: arenas on tmpfs, their pool, and how much room there is."""
