"""The `flashpoint` command."""
