"""Our saves beside others', each in an environment of its own: how long they hold a loop, and how much they slow it."""
