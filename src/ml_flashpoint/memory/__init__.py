"""Memory of a node: slots, the pools that they are taken from, and the base container that they are committed in."""
